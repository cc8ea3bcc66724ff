"""Bad input gets one clear `InputError` that names the value and what would be right, before any weights are loaded."""

import functools
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import datasets
import huggingface_hub
import pytest
import tiny
import torch
import transformers
from accelerate.state import AcceleratorState
from transformers import BloomConfig, GPT2LMHeadModel, GPT2Model

import ppo
import rloo
import sft
import tasks
import train_reward
import utils
from benchmarks.same import shard_on_a_cpu

pytestmark = pytest.mark.usefixtures("accelerator")  # start_accelerator then finds one CPU process


def refuses(call, *words: str) -> str:
    """That `call` raises an `InputError`, a `ValueError`, whose text holds all the words; its text."""
    with pytest.raises(utils.InputError) as caught:
        call()
    assert isinstance(caught.value, ValueError)
    for word in words:
        assert str(word) in str(caught.value), f"{word!r} is not in: {caught.value}"
    return str(caught.value)


@pytest.fixture
def reward_folder(task: tasks.Task, tmp_path: Path) -> str:
    """A reward model of the task's vocabulary."""
    return tiny.write_reward(tmp_path / "reward")


@pytest.fixture
def scripts(task: tasks.Task, reward_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Arguments with which each script would run on the tiny task."""
    monkeypatch.chdir(tmp_path)
    return {
        "ppo": (ppo.main, tiny.make_args(task, reward_model=reward_folder)),
        "rloo": (rloo.main, tiny.make_args(task, rloo, reward_model=reward_folder)),
        "train_reward": (
            train_reward.main,
            train_reward.Args(task=task, num_labels=12, batch_size=4, normalize_samples=4, rollout_batch_size=4),
        ),
        "sft": (sft.main, sft.Args(task=task, num_heldout=4, batch_size=2, block_size=10)),
    }


def with_task(args, **changes):
    """`args` with another task."""
    return replace(args, task=replace(args.task, **changes))


# ------------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("batch_size", "minibatches", "processes", "right"), [(10, 4, 1, 12), (500, 8, 64, 512), (7, 1, 2, 8)]
)
def test_a_ppo_batch_that_does_not_divide_names_sizes_and_the_next_right_one(batch_size, minibatches, processes, right):
    args = tiny.make_args(batch_size=batch_size, num_minibatches=minibatches)
    refuses(lambda: ppo.check(args, processes), f"batch_size={batch_size}", processes, minibatches, f"use {right}")
    ppo.check(replace(args, batch_size=right), processes)


def test_other_sizes_that_do_not_divide():
    args = train_reward.Args(task=tiny.make_task(), num_labels=12, batch_size=4, rollout_batch_size=6)
    refuses(lambda: ppo.check(tiny.make_args(batch_size=40, kl_horizon=8), 1), "kl_horizon=8", "batch_size=40", "P11")
    ppo.check(tiny.make_args(batch_size=40, kl_horizon=9), 1)
    ppo.check(tiny.make_args(batch_size=40, kl_horizon=8, kl_target=None), 1)
    refuses(lambda: train_reward.check(args, 3), "batch_size=4", 3)
    refuses(lambda: train_reward.check(args, 4), "rollout_batch_size=6", 4)
    refuses(lambda: train_reward.check(replace(args, num_labels=13), 1), "num_labels=13", "use 12")
    refuses(lambda: sft.check(sft.Args(task=tiny.make_task(), batch_size=5), 2), "batch_size=5", "use 6")
    train_reward.check(args, 2)


# What every number may be, by hand: a field that is new has to be put here. `nan` and `inf` are never right.
COUNT = {0, -3}
POSITIVE = {0.0, -0.2}
NOT_NEGATIVE = {-1e-9, -1.0}
SHARE = {-0.1, 1.5, 3.0}
WRONG = {  # field → values outside its bounds
    "seed": {-1},
    **dict.fromkeys(("query_length", "response_length", "num_queries", "num_labels", "normalize_samples"), COUNT),
    **dict.fromkeys(("total_episodes", "batch_size", "num_minibatches", "num_ppo_epochs", "num_epochs"), COUNT),
    **dict.fromkeys(("micro_batch_tokens", "rollout_batch_size", "block_size", "num_heldout"), COUNT),
    **dict.fromkeys(("kl_horizon", "eval_every", "eval_queries", "save_every"), COUNT),
    **dict.fromkeys(("temperature", "adam_eps", "kl_target", "max_grad_norm", "save_minutes"), POSITIVE),
    **dict.fromkeys(("cliprange", "cliprange_value", "clip_score", "max_kl"), POSITIVE),
    **dict.fromkeys(("samples_per_prompt", "min_response_length"), COUNT),
    **dict.fromkeys(("warmup_updates", "value_warmup_updates"), {-1}),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), {-0.1, 1.0}),
    "top_p": {0.0, -0.5, 1.001},
    **dict.fromkeys(("lr", "kl_coef", "vf_coef", "weight_decay"), NOT_NEGATIVE),
    **dict.fromkeys(("gamma", "lam", "warmup"), SHARE),
    "truncate_after": {-1},
    "rloo_k": {1, 0, -4},
    "missing_eos_penalty": set(),
}
ALLOWED = {  # the ends of the bounds that belong to them
    "seed": 0,
    "truncate_after": 0,
    "rloo_k": 2,
    "missing_eos_penalty": -1e6,
    **dict.fromkeys(("kl_target", "save_every", "save_minutes", "clip_score", "max_kl")),
    **dict.fromkeys(("lr", "kl_coef", "vf_coef", "weight_decay", "gamma", "lam", "warmup", "adam_beta1"), 0.0),
    **dict.fromkeys(("warmup_updates", "value_warmup_updates"), 0),
    **dict.fromkeys(("samples_per_prompt", "min_response_length", "top_p"), 1),
}
SCRIPTS = {"ppo": ppo, "rloo": rloo, "train_reward": train_reward, "sft": sft}


def numeric_fields(cls: type) -> dict[str, type]:
    """Field → int or float, of `Args` or `Task`."""
    hints = [(name, (hint, *get_args(hint))) for name, hint in get_type_hints(cls).items()]
    return {name: kind for name, parts in hints for kind in (int, float) if kind in parts}


OF_TASK = numeric_fields(tasks.Task)
NUMBERS = [(script, name) for script, m in SCRIPTS.items() for name in numeric_fields(m.Args) | OF_TASK]


def set_number(args, name: str, value: float | None):
    """`args` with another value of a field of its own or of its task."""
    if name in OF_TASK:
        return with_task(args, **{name: value})
    return replace(args, **{name: value})


@pytest.fixture
def nothing_loads(no_weights, monkeypatch):
    """Neither weights nor rows nor a tokenizer."""

    def refuse(*args, **kwargs):
        raise AssertionError("something was loaded before the numbers were checked")

    for name in ("load_rows", "load_tokenizer", "load_queries"):
        monkeypatch.setattr(utils, name, refuse)


@pytest.mark.parametrize(("script", "name"), NUMBERS)
def test_a_number_outside_its_bounds_is_refused_by_name_before_anything_loads(script, name, scripts, nothing_loads):
    main, args = scripts[script]
    kind = (numeric_fields(SCRIPTS[script].Args) | OF_TASK)[name]
    never = {math.nan, math.inf, -math.inf} if kind is float else set()
    for value in WRONG[name] | never:
        text = refuses(lambda value=value: main(set_number(args, name, value)))
        assert text.startswith(f"{name}={value} has to be "), text
    if name in ALLOWED and not (script == "sft" and name == "lr"):  # nothing would be learned
        tasks.check_bounds(set_number(args, name, ALLOWED[name]))


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("ppo", ["--lr", "-1e-5"]),
        ("ppo", ["--gamma", "3"]),
        ("ppo", ["--kl_coef", "nan"]),
        ("ppo", ["--seed", "-1"]),
        ("ppo", ["--cliprange", "-0.2"]),
        ("ppo", ["--lam", "2"]),
        ("ppo", ["--vf_coef", "inf"]),
        ("rloo", ["--rloo_k", "1"]),
        ("rloo", ["--kl-target", "0"]),
        ("train_reward", ["--adam_eps", "0"]),
        ("sft", ["--warmup", "1.5"]),
        ("sft", ["--temperature", "0"]),
    ],
)
def test_a_flag_outside_its_bounds_is_refused_by_name(script, flags, nothing_loads, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *flags])
    module = SCRIPTS[script]
    with pytest.raises(SystemExit) as stop:
        tasks.cli(module.main, lambda: tasks.parse_args(module.Args, module.PRESETS))
    assert stop.value.code == 2 and not list(tmp_path.iterdir())
    error = capsys.readouterr().err
    name = flags[0][2:].replace("-", "_")
    assert error.startswith(f"{script}.py: error: {name}=") and error.count("\n") == 1


@pytest.mark.parametrize("script", SCRIPTS)
def test_truncation_has_to_start_inside_the_response(script, scripts, nothing_loads):
    main, args = scripts[script]
    for after in (5, 9):  # of responses of 5 tokens
        refuses(lambda after=after: main(with_task(args, truncate_after=after)), f"truncate_after={after}", 4)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_response_can_be_no_longer_than_it_is_and_without_its_end_has_no_least_length(script, scripts, nothing_loads):
    main, args = scripts[script]
    refuses(
        lambda: main(with_task(args, min_response_length=6)), "min_response_length=6", "at most 5", "response_length"
    )
    wanted = dict(min_response_length=2, truncate_token=None)
    refuses(lambda: main(with_task(args, **wanted)), "min_response_length=2", "at most 1", "no truncate_token")


@pytest.mark.parametrize("script", ["ppo", "rloo"])
@pytest.mark.parametrize(
    ("name", "known"), [("kl_estimator", "k1, k2, k3"), ("lr_schedule", "linear, constant, cosine")]
)
def test_a_choice_that_there_is_not_is_refused_by_name(script, name, known, scripts, nothing_loads):
    main, args = scripts[script]
    refuses(lambda: main(replace(args, **{name: "k4"})), f"{name}='k4' has to be one of {known}")


# ------------------------------------------------------------- what each script refuses before it loads any weights


def test_the_scripts_would_run_but_for_the_mistakes_below(scripts):
    """What the next tests stand on: the untouched arguments give no error."""
    for main, args in scripts.values():
        main(args)


MISTAKES = {  # changes of the task → what the error names
    "response beyond the model": (dict(response_length=60, truncate_after=2), ("68", "64")),
    "query beyond the model": (dict(query_length=100), ("64",)),
    "no such model folder": (dict(base_model="./nowhere"), ("./nowhere", "--base_model")),
    "no such query file": (dict(query_dataset="nowhere.txt"), ("nowhere.txt",)),
    "no such column": (dict(query_column="story"), ("'story'", "text")),
    "stop text of two tokens": (dict(truncate_token=". ."), ("truncate_token", "exactly one")),
    "start text of two tokens": (dict(start_text=". ."), ("start_text", "exactly one")),
    "no passage with the start": (dict(start_text="!"), ("start_text", "'!'")),
    "no passage with the end": (dict(end_text="!"), ("end_text", "'!'")),
    "temperature": (dict(temperature=0.0), ("temperature=0.0",)),
    "gold_fn without a function": (dict(gold_fn="nothing"), ("nothing", "module:function")),
}
SFT_READS = (
    "no such model folder",
    "no such query file",
    "no such column",
    "temperature",
    "gold_fn without a function",
)
PAIRS = [(script, mistake) for script in ("ppo", "rloo", "train_reward") for mistake in MISTAKES] + [
    ("sft", m) for m in SFT_READS
]


@pytest.mark.parametrize(("script", "mistake"), PAIRS)
def test_a_task_that_cannot_work_is_refused_before_any_weights(script, mistake, scripts, no_weights):
    changes, words = MISTAKES[mistake]
    main, args = scripts[script]
    refuses(lambda: main(with_task(args, **changes)), *words)


def test_blocks_longer_than_the_model_reads_are_refused_before_any_weights(scripts, no_weights):
    main, args = scripts["sft"]
    refuses(lambda: main(replace(args, block_size=65)), "65", "64")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.txt", ""),
        ("blank.txt", "\n   \n\n\t\n"),
        ("empty.jsonl", ""),
        ("blank.jsonl", '{"text": "  "}\n{"text": null}\n'),
    ],
)
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_empty_or_blank_query_source_is_refused_before_any_weights(
    script, name, content, scripts, no_weights, tmp_path
):
    (tmp_path / name).write_text(content)
    main, args = scripts[script]
    refuses(lambda: main(with_task(args, query_dataset=str(tmp_path / name))), "--query_dataset", tmp_path / name)


def test_texts_that_fill_no_batch_are_refused_by_sft(scripts, no_weights, tmp_path):
    (tmp_path / "few.txt").write_text("Anna saw a cat.\n" * 3)
    main, args = scripts["sft"]
    refuses(lambda: main(with_task(args, query_dataset=str(tmp_path / "few.txt"))), "few.txt", "num_heldout=4", 6)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_model_without_position_ids_is_refused_before_any_weights(script, scripts, no_weights):
    main, args = scripts[script]
    (Path(args.task.base_model) / "generation_config.json").unlink(missing_ok=True)
    BloomConfig(vocab_size=tiny.WORDS, hidden_size=32, n_layer=2, n_head=2).save_pretrained(args.task.base_model)
    refuses(lambda: main(args), "position_ids", "bloom", args.task.base_model)


def test_a_model_folder_with_weights_in_another_format_is_not_replaced_by_random_weights(tmp_path):
    """Only a folder without any weights starts from scratch; a pickle is not unpickled, and not ignored either."""
    folder = tiny.write_model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    torch.save(tiny.make_lm(vocab=tiny.WORDS).state_dict(), folder / "pytorch_model.bin")
    refuses(lambda: utils.load_lm(str(folder)), folder, "safetensors")


def test_a_classifier_is_no_base_model(tmp_path):
    """Its language-model head would be random, and the policy's another than the reference's."""
    config = tiny.config("llama")
    config.num_labels = 1
    classifier = transformers.AutoModelForSequenceClassification.from_config(config)
    classifier.save_pretrained(tmp_path / "classifier")
    refuses(lambda: utils.load_lm(str(tmp_path / "classifier")), "--base_model", "lm_head.weight")
    tiny.make_lm("llama").save_pretrained(tmp_path / "lm")
    assert torch.equal(utils.load_lm(str(tmp_path / "lm")).lm_head.weight, tiny.make_lm("llama").lm_head.weight)


def test_a_missing_reward_model_names_the_command_that_makes_it(scripts, no_weights, tmp_path):
    main, args = scripts["ppo"]
    refuses(
        lambda: main(replace(args, reward_model=None)),
        "models/synthetic/train_reward",
        "python train_reward.py --task synthetic",
    )
    (tmp_path / "empty").mkdir()
    refuses(lambda: main(replace(args, reward_model=str(tmp_path / "empty"))), tmp_path / "empty", "train_reward.py")


def test_a_missing_sft_model_names_the_command_that_makes_it(scripts, no_weights):
    for name in ("ppo", "train_reward"):
        main, args = scripts[name]
        refuses(
            lambda main=main, args=args: main(with_task(args, base_model="models/synthetic/nowhere")),
            "models/synthetic/nowhere",
            "python sft.py --task synthetic",
        )


# ------------------------------------------------------------------------------------------------------------ labels


def change(rows: list, **values) -> list:
    """The second row with other values."""
    return [rows[0], rows[1] | values, *rows[2:]]


LABELS = {  # name → (what becomes of 16 good rows, what the error names)
    "empty array": (lambda rows: [], ()),
    "no best": (lambda rows: [{k: v for k, v in row.items() if k != "best"} for row in rows], ("best",)),
    "no query": (lambda rows: [{k: v for k, v in row.items() if k != "query"} for row in rows], ("query",)),
    "one candidate": (lambda rows: [{k: row[k] for k in ("query", "sample0", "best")} for row in rows], ("sample1",)),
    "no candidates": (lambda rows: [{k: row[k] for k in ("query", "best")} for row in rows], ("sample0",)),
    "a row without a candidate": (
        lambda rows: [rows[0], {k: v for k, v in rows[1].items() if k != "sample2"}, *rows[2:]],
        ("row 1", "sample2"),
    ),
    "short query": (lambda rows: change(rows, query=[1, 2]), ("row 1", "query", "2 ids", "8")),
    "long candidate": (lambda rows: change(rows, sample3=[1] * 6), ("row 1", "sample3", "6 ids", "5")),
    "best too high": (lambda rows: change(rows, best=4), ("row 1", "best=4", "3")),
    "best negative": (lambda rows: change(rows, best=-1), ("row 1", "best=-1", "0")),
    "best missing": (lambda rows: change(rows, best=None), ("row 1", "best")),
    "best between": (lambda rows: change(rows, best=1.5), ("row 1", "best=1.5")),
    "best in words": (lambda rows: [row | {"best": "first"} for row in rows], ("best", "first")),
    "id beyond the vocabulary": (
        lambda rows: change(rows, sample1=[1, 2, 1001, 4, 5]),
        ("row 1", "sample1", 1001, 999),
    ),
    "negative id": (lambda rows: change(rows, query=[1, 2, 3, 4, 5, 6, 7, -8]), ("row 1", "query", -8)),
    "null id": (lambda rows: change(rows, sample0=[1, 2, None, 4, 5]), ("row 1", "sample0")),
    "fractional id": (lambda rows: change(rows, sample0=[1, 2, 3.5, 4, 5]), ("row 1", "sample0")),
    "texts for ids": (lambda rows: [row | {"query": "Anna saw"} for row in rows], ("row 0", "query")),
    "a number for ids": (lambda rows: [row | {"sample0": 7} for row in rows], ("row 0", "sample0")),
}


@pytest.mark.parametrize("name", LABELS)
def test_malformed_labels_are_refused_with_row_and_value(name, tmp_path):
    make, words = LABELS[name]
    task = tiny.make_task(label_dataset=str(tmp_path / "labels.json"))
    Path(task.label_dataset).write_text(json.dumps(make(tiny.label_rows(16, 8, 5))))
    refuses(lambda: train_reward.load_labels(task, None, 1000), "--label_dataset", task.label_dataset, *words)


@pytest.mark.parametrize("content", ["", "[", "not json at all", '[{"query": [1, 2'])
def test_label_files_that_are_not_json_are_refused(content, tmp_path):
    task = tiny.make_task(label_dataset=str(tmp_path / "labels.json"))
    Path(task.label_dataset).write_text(content)
    refuses(lambda: train_reward.load_labels(task, None, 1000), "--label_dataset", task.label_dataset)


def test_labels_are_checked_before_any_weights(scripts, no_weights):
    main, args = scripts["train_reward"]
    refuses(lambda: main(replace(args, num_labels=20)), "16 labels", "num_labels=20", "--num_labels 16")
    Path(args.task.label_dataset).write_text("[]")
    refuses(lambda: main(args), "--label_dataset")
    refuses(lambda: main(with_task(args, label_dataset="nowhere.json")), "nowhere.json")


# --------------------------------------------------------------------------------------------------------- functions


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("no_colon", ("no_colon", "module:function")),
        ("nowhere.py:f", ("nowhere.py",)),
        ("no_such_module_:f", ("no_such_module_",)),
        ("math:no_such_function", ("math", "no_such_function")),
        ("math:pi", ("math", "pi")),
        ("mine.py:g", ("mine.py", "g")),
        ("", ()),
        ("no.such.package:f", ("no.such.package",)),
    ],
)
def test_a_bad_function_spec_is_refused(spec, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def f(queries, responses):\n    return [1.0] * len(queries)\n")
    refuses(lambda: utils.load_function(spec), *words)
    assert utils.load_function("mine.py:f")(["a"], ["b"]) == [1.0]


WITH_A_DATACLASS = """
from __future__ import annotations
from dataclasses import dataclass
from pathlib import Path

@dataclass
class Weights:
    length: float = 2.0

with Path("loaded").open("a") as file:
    file.write("once\\n")

def f(queries, responses):
    return [Weights().length] * len(queries)
"""


def test_a_function_of_a_file_with_a_dataclass_loads_once(tmp_path, monkeypatch):
    """A judge that loads a model at its top must not do so for every use."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge.py").write_text(WITH_A_DATACLASS)
    assert [utils.load_function("judge.py:f")(["a"], ["b"]) for _ in range(3)] == [[2.0]] * 3
    assert (tmp_path / "loaded").read_text() == "once\n"


def test_a_bad_reward_fn_is_refused_before_any_weights(scripts, no_weights):
    for name in ("ppo", "rloo"):
        main, args = scripts[name]
        refuses(lambda main=main, args=args: main(replace(args, reward_fn="nowhere.py:f")), "nowhere.py")


RETURNS = {
    "too few": "[1.0]",
    "too many": "[1.0] * 9",
    "nested": "[[1.0]] * len(queries)",
    "nan": "[float('nan')] * len(queries)",
    "infinite": "[1.0, float('inf')] + [0.0] * (len(queries) - 2)",
    "none": "None",
    "texts": "['good'] * len(queries)",
}


@pytest.mark.parametrize("name", RETURNS)
def test_a_reward_fn_that_returns_no_finite_float_for_each_response_is_refused(name, task, tmp_path):
    (tmp_path / "mine.py").write_text(f"def f(queries, responses):\n    return {RETURNS[name]}\n")
    args = tiny.make_args(task, reward_fn=f"{tmp_path}/mine.py:f")
    tokenizer, _, pad_id = utils.load_tokenizer(task, 5)
    reward = utils.load_reward(args, tokenizer, pad_id, torch.device("cpu"))
    tokens = torch.full((4, 3), 14)
    refuses(lambda: reward(tokens, tokens), "mine.py:f", "4 responses")


def test_a_good_reward_fn_reads_texts_and_may_return_any_sequence(task, tmp_path):
    lines = (
        "import numpy",
        "def f(queries, responses):",
        "    return numpy.array([len(q + 100 * r) for q, r in zip(queries, responses)])",
    )
    (tmp_path / "mine.py").write_text("\n".join(lines))
    tokenizer, _, pad_id = utils.load_tokenizer(task, 5)
    reward = utils.load_reward(
        tiny.make_args(task, reward_fn=f"{tmp_path}/mine.py:f"), tokenizer, pad_id, torch.device("cpu")
    )
    queries = utils.pad_rows([tokenizer.encode("Anna saw"), tokenizer.encode("A")], 8, pad_id)
    assert reward(queries, utils.pad_rows([tokenizer.encode("."), tokenizer.encode(" ..")], 4, pad_id)).tolist() == [
        108,
        301,
    ]


# ------------------------------------------------------------------------------------------------------------ memory


PARAMETERS = dict(d=32, layers=2, positions=64)  # of tiny.config(): GPT-2, the head tied to the embedding


def by_hand(vocab: int, head: int = 0) -> int:
    """Parameters of the tiny GPT-2: embeddings, blocks (weights and biases), last norm."""
    d, layers, positions = PARAMETERS.values()
    block = (d * 3 * d + 3 * d) + (d * d + d) + (d * 4 * d + 4 * d) + (4 * d * d + d) + 4 * d
    return vocab * d + positions * d + layers * block + 2 * d + head


POLICY = by_hand(tiny.WORDS)
REWARD = by_hand(tiny.WORDS, head=32 + 1 + 2)  # a weight of each width, bias; gain and bias of R3
NEEDED = {  # bytes before any activation: weights 4, gradients 4, Adam 8, a frozen model 4
    "ppo": (4 + 4 + 8 + 4) * POLICY + 4 * REWARD,
    "rloo": (4 + 4 + 8 + 4) * POLICY + 4 * REWARD,
    "train_reward": (4 + 4 + 8) * REWARD,
    "sft": (4 + 4 + 8) * POLICY,
}


@pytest.fixture
def gpu(monkeypatch, no_weights):
    """A CUDA device of `gpu.total_memory` bytes that is not there; what gets past the check stops at the data."""
    card, refused = SimpleNamespace(total_memory=0), utils.check_memory

    def check_memory(config, each, what, device, *args):
        refused(config, each, what, torch.device("cuda"), *args)

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(utils, "check_memory", check_memory)
    return card


@pytest.mark.parametrize("script", NEEDED)
def test_a_run_whose_weights_cannot_fit_is_refused_with_all_sizes_before_any_weights(script, scripts, gpu):
    """A byte less than weights, gradients, Adam's moments and frozen models together is too little; as many pass."""
    main, args = scripts[script]
    gpu.total_memory = NEEDED[script] - 1
    words = ("GiB", "cuda", "smaller", "16 bytes" if script in ("train_reward", "sft") else "20 bytes")
    text = refuses(lambda: main(args), *words)
    assert ("reward model" in text) == (script != "sft")
    gpu.total_memory = NEEDED[script]
    with pytest.raises(AssertionError, match="weights were loaded"):
        main(args)


@pytest.mark.parametrize("script", ["ppo", "rloo"])
def test_memory_counts_the_reward_model_only_where_one_is_loaded(script, scripts, gpu, tmp_path):
    main, args = scripts[script]
    (tmp_path / "mine.py").write_text("def f(q, r):\n    return [0.0] * len(q)\ndef g(q, r, s):\n    return s\n")
    gpu.total_memory = 20 * POLICY
    with pytest.raises(AssertionError, match="weights were loaded"):
        main(replace(args, reward_fn="mine.py:f"))
    refuses(
        lambda: main(replace(args, reward_fn="mine.py:g")), "reward model", "4 bytes"
    )  # it reads the model's scores


def test_memory_of_the_policy_that_samples_for_a_smaller_reward_model(scripts, gpu, tmp_path):
    """X13: 4 bytes of the policy are more than 16 of the reward model."""
    main, args = scripts["train_reward"]
    large = tiny.config(vocab=tiny.WORDS)
    large.n_layer = 20
    large.save_pretrained(tmp_path / "large")
    tiny.write_tokenizer(tmp_path / "large")
    gpu.total_memory = 16 * REWARD
    refuses(lambda: main(replace(args, policy_model=str(tmp_path / "large"))), "policy that samples", "4 bytes")


def test_memory_of_shards_is_a_share_and_the_whole_policy_while_it_samples(gpu, monkeypatch):
    """FSDP2 on 8 processes: 20 / 8 + 4 bytes of each parameter instead of 20."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("WORLD_SIZE", "8")
    device, config = torch.device("cuda"), tiny.config(vocab=tiny.WORDS)
    gpu.total_memory = 6.5 * POLICY
    utils.check_memory(config, 20, "policy", device)
    gpu.total_memory -= 1
    refuses(lambda: utils.check_memory(config, 20, "policy", device), "6.5 bytes (policy)")


# ----------------------------------------------------------------------------------------------------------- the hub


@pytest.fixture
def unreachable_hub(monkeypatch, tmp_path):
    """A hub that refuses connections, and an empty cache."""
    cache = str(tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", cache)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", Path(cache))
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")
    for name in ("TRANSFORMERS_CACHE", "HF_HUB_CACHE"):
        for module in ("transformers.utils.hub",):
            monkeypatch.setattr(f"{module}.{name}", cache, raising=False)


SOURCES = {
    "abisee/cnn_dailymail:3.0.0": (
        "hf download abisee/cnn_dailymail --repo-type dataset --local-dir cnn_dailymail",
        "--query_dataset cnn_dailymail",
    ),
    "SamuelYang/bookcorpus": (
        "hf download SamuelYang/bookcorpus --repo-type dataset --local-dir bookcorpus",
        "--query_dataset bookcorpus",
    ),
    "vwxyzjn/lm-human-preferences:sentiment/offline_5k.json": (
        "hf download vwxyzjn/lm-human-preferences sentiment/offline_5k.json --repo-type dataset "
        "--local-dir lm-human-preferences",
        "--query_dataset lm-human-preferences/sentiment/offline_5k.json",
    ),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_data_set_that_cannot_be_reached_names_the_next_command_at_once(source, unreachable_hub):
    begin = time.perf_counter()
    refuses(lambda: utils.load_rows(source, "--query_dataset"), source, *SOURCES[source])
    assert time.perf_counter() - begin < 5


def test_a_model_that_cannot_be_reached_names_the_next_command_at_once(unreachable_hub, no_weights):
    begin = time.perf_counter()
    task = tiny.make_task(base_model="gpt2")
    refuses(lambda: utils.load_tokenizer(task, 5), "gpt2", "hf download gpt2 --local-dir gpt2", "--base_model gpt2")
    assert time.perf_counter() - begin < 5


def test_a_model_whose_weights_are_not_in_the_cache_names_the_next_command_too(unreachable_hub, tmp_path):
    """A cache with a model's configuration and no weights, as an interrupted download leaves it."""
    commit, cached = "0" * 40, tmp_path / "cache" / "models--gpt2"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    tiny.config().save_pretrained(cached / "snapshots" / commit)
    utils.go_offline_if_unreachable()
    assert utils.AutoConfig.from_pretrained("gpt2", cache_dir=tmp_path / "cache").vocab_size == tiny.VOCAB
    refuses(lambda: utils.load_lm("gpt2", tiny.config()), "gpt2", "hf download gpt2 --local-dir gpt2")


# ------------------------------------------------------------------------- models whose forward is not what it seems


@pytest.mark.parametrize("script", [ppo, rloo], ids=["ppo", "rloo"])
def test_a_policy_whose_logprobs_are_not_its_models_is_refused_at_start(script, task, tmp_path, monkeypatch):
    """A model that does something behind its head which nobody knows of, and one that does not heed positions."""
    monkeypatch.chdir(tmp_path)
    forward, base_forward = GPT2LMHeadModel.forward, GPT2Model.forward

    @functools.wraps(forward)
    def scaled(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        out.logits = 2 * out.logits
        return out

    @functools.wraps(base_forward)
    def unplaced(self, *args, position_ids=None, **kwargs):
        return base_forward(self, *args, **kwargs)

    args = tiny.make_args(task, script, reward_fn="math:f", eval_queries=4)
    monkeypatch.setattr(utils, "load_function", lambda spec: lambda queries, responses: [0.0] * len(queries))
    monkeypatch.setattr(script, "load_function", utils.load_function)
    monkeypatch.setattr("records.load_function", utils.load_function)
    for kind, broken in ((GPT2LMHeadModel, scaled), (GPT2Model, unplaced)):
        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward", broken)
            refuses(lambda: script.main(args), "nats off", "gpt2's own forward")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("kind", (*tiny.KINDS, "gemma2"))
def test_the_policys_logprobs_are_its_models_for_every_kind(kind, accelerator):
    """Gemma 2 has a soft cap behind its head."""
    for script in (ppo, rloo):
        policy = tiny.make_policy(kind, script=script)
        utils.check_policy(policy, tiny.make_contexts([5], 8), 0.7, accelerator)
        utils.check_policy(policy, tiny.make_contexts([60], 60), 0.7, accelerator)  # of the model's 64 positions


# -------------------------------------------------------------------- what a launcher may set up and must not be set up


@pytest.fixture
def launcher(monkeypatch):
    """A function that starts the accelerator as a launcher with this environment would."""

    def start(args=None, **env):
        AcceleratorState._reset_state(True)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        return utils.start_accelerator(args or tiny.make_args())

    yield start
    AcceleratorState._reset_state(True)
    torch.set_float32_matmul_precision("highest")


LAUNCHED = {  # environment → what the error names
    ("ACCELERATE_MIXED_PRECISION", "fp16"): ("fp16", "--mixed_precision bf16"),
    ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4"): ("gradient_accumulation_steps=4", "--micro_batch_tokens"),
    ("ACCELERATE_USE_DEEPSPEED", "true"): ("DeepSpeed", "accelerate launch --config_file configs/ddp.yaml"),
    ("ACCELERATE_USE_FSDP", "true"): ("FSDP was asked for and NO came up", "configs/fsdp2.yaml"),
    ("FSDP_OFFLOAD_PARAMS", "true"): ("FSDP_OFFLOAD_PARAMS", "accelerate launch --config_file configs/ddp.yaml"),
    ("FSDP_ACTIVATION_CHECKPOINTING", "true"): (
        "--gradient_checkpointing",
        "accelerate launch --config_file configs/ddp.yaml",
    ),
    ("ACCELERATE_USE_MEGATRON_LM", "true"): ("Megatron", "accelerate launch --config_file configs/ddp.yaml"),
}


@pytest.mark.parametrize("env", LAUNCHED)
def test_what_would_silently_change_the_mathematics_is_refused_by_name(env, launcher):
    refuses(lambda: launcher(**dict([env])), *LAUNCHED[env])


def test_fsdp_1_is_refused_with_what_works(launcher, monkeypatch):
    shard_on_a_cpu(monkeypatch.setattr)
    refuses(lambda: launcher(ACCELERATE_USE_FSDP="true", FSDP_VERSION="1"), "FSDP 1 came up", "--fsdp_version 2")


def test_fsdp_that_keeps_weights_whole_is_refused(launcher, monkeypatch):
    shard_on_a_cpu(monkeypatch.setattr)
    env = dict(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    refuses(lambda: launcher(**env, FSDP_RESHARD_AFTER_FORWARD="false"), "fsdp_reshard_after_forward", "true")
    assert launcher(**env, FSDP_RESHARD_AFTER_FORWARD="true").is_fsdp2


def test_fsdp_moves_the_weights_that_a_compiled_step_would_find_again(launcher, monkeypatch):
    shard_on_a_cpu(monkeypatch.setattr)
    env = dict(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    refuses(lambda: launcher(tiny.make_args(compile=True), **env), "--compile", "leave it off")
    assert launcher(tiny.make_args(), **env).is_fsdp2


def test_bf16_and_fp32_are_started_and_tf32_is_a_flag(launcher):
    for precision in ("no", "bf16"):
        assert launcher(ACCELERATE_MIXED_PRECISION=precision).mixed_precision == precision
        assert torch.get_float32_matmul_precision() == "highest"
    launcher(tiny.make_args(tf32=True))
    assert torch.get_float32_matmul_precision() == "high"


# ------------------------------------------------------------------------------------------------ the command line


def test_an_unknown_task_is_refused_with_the_names_of_those_there_are():
    for argv in (["--task", "sentimental"], ["--task=sentimental"]):
        refuses(
            lambda argv=argv: tasks.parse_args(ppo.Args, ppo.PRESETS, argv),
            "sentimental",
            "sentiment",
            "cnndm",
            "synthetic",
        )
    refuses(lambda: tasks.parse_args(ppo.Args, ppo.PRESETS, ["--task"]), "task")


def test_cli_prints_one_line_and_exits_with_2_for_bad_input_only(capsys, monkeypatch):
    def main(args):
        raise utils.InputError("batch_size=7 is odd")

    monkeypatch.setattr(sys, "argv", ["/somewhere/ppo.py"])
    with pytest.raises(SystemExit) as stop:
        tasks.cli(main, lambda: None)
    assert stop.value.code == 2
    assert capsys.readouterr().err == "ppo.py: error: batch_size=7 is odd\n"

    def interrupted(args):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stop:
        tasks.cli(interrupted, lambda: None)
    assert stop.value.code == 130 and "Traceback" not in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):  # a bug keeps its traceback
        tasks.cli(lambda args: 1 / 0, lambda: None)


ONE_FAILS = """
import utils, tasks, torch
def main(args):
    accelerator = utils.Accelerator()
    if accelerator.process_index == 1:
        raise tasks.InputError("labels.json is not on this machine")
    utils.all_sum(torch.ones(1))
tasks.cli(main, lambda: None)
"""


@pytest.mark.parametrize(("rank", "seconds", "where"), [("0", 0, ""), ("1", 2, " (process 1)")])
def test_the_main_process_speaks_at_once_and_the_others_two_seconds_later(rank, seconds, where, monkeypatch, capsys):
    """Where all fail alike, the launcher ends the others meanwhile."""
    slept = []
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "argv", ["ppo.py"])
    monkeypatch.setattr(tasks.time, "sleep", slept.append)

    def main(args: None):
        raise tasks.InputError("no labels")

    with pytest.raises(SystemExit) as stop:
        tasks.cli(main, lambda: None)
    assert (stop.value.code, slept) == (2, [seconds])
    assert capsys.readouterr().err == f"ppo.py: error{where}: no labels\n"


def test_bad_input_of_another_process_is_printed_with_its_number_and_ends_all(tmp_path):
    (tmp_path / "one.py").write_text(ONE_FAILS)
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(utils.ROOT), "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "one.py"]
    begin = time.monotonic()
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0 and time.monotonic() - begin < 60
    assert "one.py: error (process 1): labels.json is not on this machine" in done.stderr


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["ppo.py", "--task", "synthetic", "--batch-size", "10", "--num_minibatches", "4"],
            ("batch_size=10", "use 12"),
        ),
        (["train_reward.py", "--task", "sentimental"], ("sentimental", "descriptiveness")),
    ],
)
def test_from_the_command_line_bad_input_is_exit_code_2_without_a_traceback(argv, words, tmp_path):
    script, *flags = argv
    command = [sys.executable, str(utils.ROOT / script), *flags]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(utils.ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"{script}: error: ") and done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr + done.stdout
    for word in words:
        assert word in done.stderr
    assert not list(tmp_path.iterdir())  # nothing was begun
