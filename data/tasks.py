"""The tasks: which texts a run reads and which responses it writes.

Add your own to `TASKS`, for `--task NAME` of all scripts. Every field is also a flag, for one run.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

DATA = Path(__file__).parent
SYNTHETIC, ARITHMETIC = DATA / "synthetic", DATA / "arithmetic"
OPENAI = "vwxyzjn/lm-human-preferences"  # its labels of 2019


@dataclass(frozen=True, kw_only=True, config={"allow_inf_nan": False})
class Task:
    """What a run reads and writes, the same for all scripts.

    A data source is a file (.jsonl .json .txt .csv .parquet), or a name on the Hugging Face hub:
    `name`, `name:file` or `name:configuration`, perhaps with `@split`.
    """

    task: str
    """name of the task; selects the defaults of all flags"""
    base_model: str
    """initial policy and reference: hub name or folder"""

    # Queries
    query_dataset: str
    """data source of the queries"""
    query_column: str
    """its column with texts"""
    query_length: PositiveInt
    """tokens; longer texts are cut, in EOS tasks skipped; shorter ones are padded"""
    query_prefix: str = ""
    """text before each query; the reward model does not see it"""
    query_suffix: str = ""
    """text after each query; the reward model does not see it"""
    start_text: str | None = None
    """one token; queries start after its first occurrence"""
    end_text: str | None = None
    """queries end after its last occurrence at the end of a word"""
    keep_last_line: bool = False
    """cut long queries before their last line, such as TL;DR:"""
    clean_fn: str | None = None
    """module:function or path.py:function that cleans a text before tokenization"""
    num_queries: PositiveInt = 2**20
    """maximum number of rows; larger datasets are subsampled"""

    # Responses
    response_length: PositiveInt
    """tokens sampled per response; the maximum in EOS tasks"""
    temperature: PositiveFloat
    """of sampling; ppo.py and rloo.py also divide logits by it in training"""
    truncate_token: str | None
    """one token; the reward model sees responses only up to it"""
    truncate_after: NonNegativeInt = 0
    """position from which truncate_token counts"""
    unfinished_score: float = -1.0
    """score of responses without truncate_token, in place of the reward model's"""
    eos_task: bool = False
    """responses end at truncate_token or another end of the model; the rest is masked everywhere"""
    one_end: bool = False
    """in EOS tasks, only truncate_token is an end"""
    response_column: str | None = None
    """column of reference responses for sft.py"""

    # Labels, rewards
    label_dataset: str | None
    """data source of the human preferences; None: the task has none"""
    label_tokenizer: str | None = None
    """tokenizer of the labels' token ids: hub name or folder; None: base_model's"""
    reward_fn: str | None = None
    """module:function or path.py:function instead of a reward model; docs/ppo.md"""
    gold_fn: str | None = None
    """module:function or path.py:function for the true score; only logged"""


BOOKS = Task(
    task="sentiment",
    base_model="gpt2",
    query_dataset="SamuelYang/bookcorpus",
    query_column="text",
    query_length=64,
    response_length=24,
    temperature=0.7,
    truncate_token=".",
    truncate_after=16,
    label_dataset=f"{OPENAI}:sentiment/offline_5k.json",
    label_tokenizer="gpt2",
)
SUMMARIES = replace(
    BOOKS,
    query_length=500,
    query_suffix="\n\nTL;DR:",
    response_length=75,
    truncate_token="\n",
    truncate_after=55,
)
STORIES = replace(BOOKS, label_tokenizer=None, gold_fn=f"{SYNTHETIC / 'judge.py'}:gold_score")
ENDS_AT_EOS: dict[str, Any] = dict(truncate_token="<|endoftext|>", truncate_after=0, eos_task=True)
# Answers are checked (data/answers.py): 1 if right, 0 if wrong or without an end. No labels.
VERIFIABLE = replace(
    BOOKS, temperature=1.0, unfinished_score=0.0, label_dataset=None, label_tokenizer=None
)
STEPS = 'Let\'s think step by step and output the final answer after "####".'  # as in verl

TASKS = {
    "synthetic": replace(
        STORIES,
        base_model="models/synthetic/sft",
        query_dataset=str(SYNTHETIC / "stories.txt"),
        label_dataset=str(SYNTHETIC / "labels.json"),
    ),
    "synthetic_eos": replace(
        STORIES,
        base_model="models/synthetic_eos/sft",
        query_dataset=str(SYNTHETIC / "stories_eos.jsonl"),
        query_column="prompt",
        query_length=32,
        response_length=40,
        response_column="completion",
        label_dataset=str(SYNTHETIC / "pairs_eos.jsonl"),
        **ENDS_AT_EOS,
    ),
    "sentiment": BOOKS,
    "descriptiveness": replace(BOOKS, label_dataset=f"{OPENAI}:descriptiveness/offline_5k.json"),
    "cnndm": replace(
        SUMMARIES,
        query_dataset="abisee/cnn_dailymail:3.0.0",
        query_column="article",
        query_prefix="Article:\n\n",
        end_text=".",
        clean_fn=f"{DATA / 'clean.py'}:clean_article",
        temperature=0.5,
        label_dataset=f"{OPENAI}:cnndm/online_45k.json",
    ),
    "tldr_2019": replace(
        SUMMARIES,
        query_dataset="dim/tldr_17_50k",
        query_column="content",
        clean_fn=f"{DATA / 'clean.py'}:clean_post",
        label_dataset=f"{OPENAI}:tldr/online_45k.json",
    ),
    "tldr": replace(
        BOOKS,
        base_model="models/tldr/sft",
        query_dataset="trl-lib/tldr",
        query_column="prompt",
        query_length=512,
        keep_last_line=True,
        response_length=53,
        response_column="completion",
        label_dataset="trl-lib/tldr-preference",
        label_tokenizer=None,
        **ENDS_AT_EOS,
    ),
    "arithmetic": replace(
        VERIFIABLE,
        base_model="models/arithmetic/sft",
        query_dataset=str(ARITHMETIC / "problems.jsonl"),
        query_column="prompt",
        query_length=10,
        response_length=20,
        reward_fn="data.answers:exact_match",
        **ENDS_AT_EOS,
    ),
    "gsm8k": replace(
        VERIFIABLE,
        base_model="Qwen/Qwen2.5-0.5B-Instruct",
        query_dataset="openai/gsm8k:main",
        query_column="question",
        query_length=256,
        query_prefix="<|im_start|>user\n",
        query_suffix=f" {STEPS}<|im_end|>\n<|im_start|>assistant\n",
        response_length=256,
        response_column="answer",
        reward_fn="data.answers:gsm8k",
        **ENDS_AT_EOS | dict(truncate_token="<|im_end|>"),
    ),
}
TASKS = {name: replace(task, task=name) for name, task in TASKS.items()}
