"""Bad input is refused by one sentence that names the value, before any weights are loaded."""

import errno
import functools
import json
import os
import runpy
import shutil
import subprocess
import sys
import time
import typing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import pytest
import safetensors.torch
import tiny
import torch
import transformers
from accelerate.state import AcceleratorState
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, GPT2Model

import ppo
import rloo
import sft
import train_reward
import utils
from data import tasks
from machinery import cli, distributed, models, rewards, sources
from machinery.artifacts import ROOT
from machinery.cli import InputError, RunError
from machinery.functions import load_function
from machinery.rewards import RewardConfig, load_reward, load_reward_model

pytestmark = pytest.mark.usefixtures("accelerator")
SCRIPTS = {"ppo": ppo, "rloo": rloo, "train_reward": train_reward, "sft": sft}


def refuses(call, *words, error: type = InputError) -> str:
    """Assert that `call` raises an error whose message has all `words`; return the message."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert [word for word in words if str(word) not in message] == [], message
    return message


@pytest.fixture
def start(task: tasks.Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that runs a script on tiny files, with other values of its flags."""
    monkeypatch.chdir(tmp_path)
    reward_model = tiny.write_reward(tmp_path / "reward")
    small = dict(batch_size=4, normalize_samples=4, rollout_batch_size=4)
    args = {
        "ppo": tiny.make_args(task, reward_model=reward_model),
        "rloo": tiny.make_args(task, rloo, reward_model=reward_model),
        "train_reward": train_reward.Args(task=task, num_labels=12, **small),
        "sft": sft.Args(task=task, num_heldout=4, batch_size=2, block_size=10),
    }

    def start(script: str, **changes) -> None:
        of_task = {name: changes.pop(name) for name in list(changes) if hasattr(task, name)}
        SCRIPTS[script].main(replace(args[script], task=replace(task, **of_task), **changes))

    start.task = task
    return start


# ------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    ("script", "processes", "changes", "words"),
    [
        (ppo, 1, dict(batch_size=10, num_minibatches=4), ("batch_size=10", "use 12")),
        (ppo, 64, dict(batch_size=500, num_minibatches=8), ("batch_size=500", "512", "use 512")),
        (rloo, 2, dict(batch_size=30, num_minibatches=3), ("batch_size=30", "use 48")),  # 2 · 3 · 4
        (sft, 2, dict(batch_size=5), ("batch_size=5", "use 6")),
        (train_reward, 2, dict(batch_size=3), ("batch_size=3", "use 4")),
        (train_reward, 4, dict(rollout_batch_size=6), ("rollout_batch_size=6", "use 8")),
        (train_reward, 1, dict(num_labels=13), ("num_labels=13", "use 16")),
    ],
)
def test_a_size_that_does_not_divide_names_itself_and_the_next_one_that_works(
    script, processes, changes, words
):
    small = dict(num_labels=12, batch_size=4) if script is train_reward else {}
    args = script.Args(task=tiny.make_task(), **small | changes)
    message = refuses(lambda: script.check(args, processes), *words)
    name, right = words[0].split("=")[0], int(message.split()[-1])
    script.check(replace(args, **{name: right}), processes)


MAY_BE_0 = {"seed", "truncate_after", "num_heldout", "lr", "kl_coef", "vf_coef", "weight_decay"}
MAY_BE_0 |= {"gamma", "lam", "warmup", "resid_dropout"}
OTHER_BOUNDS = dict(rloo_k=1, normalize_samples=1, block_size=3, gamma=1.01, lam=1.01, warmup=1.01)
OTHER_BOUNDS |= {"resid_dropout": 1.01}
OTHER_BOUNDS |= {"missing_eos_penalty": float("-inf")}  # any other number is right


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_number_has_its_bounds(script):
    """What is outside is refused by name: nan, infinity, negative numbers, 0 for most fields."""
    module, task = SCRIPTS[script], tiny.make_task()
    may_be_0 = MAY_BE_0 - ({"lr", "num_heldout"} if script == "sft" else set())
    for cls, default in ((tasks.Task, task), (module.Args, module.Args(task=task))):
        for name, hint in typing.get_type_hints(cls).items():
            kinds = {hint, *typing.get_args(hint)} & {int, float}
            wrong = [float("nan"), float("inf")] if float in kinds else []
            if kinds and name != "missing_eos_penalty":
                wrong += [-1, -1e-9 if float in kinds else -1, *[0] * (name not in may_be_0)]
            if name in OTHER_BOUNDS:
                wrong.append(OTHER_BOUNDS[name])
            if name in may_be_0:
                replace(default, **{name: 0})
            for value in wrong:
                with pytest.raises(ValidationError, match=rf"\n{name}\n"):
                    replace(default, **{name: value})


# --------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("ppo.py --lr -1e-5", ("lr", "-1e-05")),
        ("ppo.py --kl-coef nan", ("kl_coef", "nan")),
        ("ppo.py --gamma two", ("--gamma", "two")),
        ("rloo.py --rloo_k=1", ("rloo_k", "input_value=1")),
        ("rloo.py --kl_estimator k4", ("--kl-estimator", "k4", "k1", "k3")),
        ("sft.py --temperature 0", ("temperature",)),
        ("train_reward.py --no_such_flag 3", ("--no_such_flag",)),
        ("ppo.py --batch-size 10 --num_minibatches=4", ("batch_size=10", "use 12")),
        ("train_reward.py --task sentimental", ("sentimental", "descriptiveness")),
        ("sft.py --task=sentimental", ("sentimental", "synthetic")),
    ],
)
def test_bad_flags_are_one_line_or_box_on_stderr_and_exit_code_2(
    command, words, tmp_path, monkeypatch, capsys
):
    """Of the scripts as a command line runs them. Nothing is created."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", command.split())
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
    out, error = capsys.readouterr()
    assert stop.value.code == 2 and not out and not list(tmp_path.iterdir())
    is_line = error.startswith(f"{sys.argv[0]}: error: ")
    assert error.count("\n" if is_line else "For full helptext") == 1
    assert [word for word in words if word not in error] == []


def test_exit_codes_tell_bad_input_from_failed_runs_and_bugs(monkeypatch, capsys):
    """2: bad input; 1: the run failed; 130: Ctrl-C. A bug keeps its traceback."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/ppo.py"])
    monkeypatch.delenv("RANK", raising=False)

    def run(error: BaseException) -> None:
        def main(args):
            raise error

        cli.run(main, ppo.Args, ppo.PRESETS)

    for error, code in (
        (InputError("bad"), 2),
        (RunError("loss"), 1),
        (OSError(errno.ENOSPC, "full"), 1),
        (KeyboardInterrupt(), 130),
    ):
        with pytest.raises(SystemExit) as stop:
            run(error)
        assert stop.value.code == code
        message = capsys.readouterr().err
        assert message.startswith("ppo.py: error: ") and message.count("\n") == 1
        assert str(error) in message
    for bug in (ZeroDivisionError(), ValueError("a bug"), FileNotFoundError("a bug")):
        with pytest.raises(type(bug)):
            run(bug)


@pytest.mark.parametrize(("rank", "seconds", "where"), [("0", [], ""), ("1", [2], " (process 1)")])
def test_the_first_process_prints_at_once_and_others_later_with_their_number(
    rank, seconds, where, monkeypatch, capsys
):
    """If all processes fail alike, the launcher ends the others before they print."""
    slept = []
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "argv", ["ppo.py"])
    monkeypatch.setattr(cli.time, "sleep", slept.append)
    with pytest.raises(SystemExit):
        cli.fail("no labels", 2)
    assert slept == seconds
    assert capsys.readouterr().err == f"ppo.py: error{where}: no labels\n"


ONE_FAILS = """
import ppo, utils, torch
from machinery import cli, distributed
def main(args):
    accelerator = distributed.start(args)
    if accelerator.process_index == 1:
        raise cli.InputError("labels.json is not on this machine")
    utils.all_sum(torch.ones(1))
cli.run(main, ppo.Args, ppo.PRESETS)
"""


@pytest.mark.slow
def test_bad_input_of_another_process_ends_all(tmp_path):
    (tmp_path / "one.py").write_text(ONE_FAILS)
    env = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", "one.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert "one.py: error (process 1): labels.json is not on this machine" in done.stderr


# ------------------------------------------------------------------- refused before weights are loaded


def test_the_scripts_run_without_the_mistakes_below(start):
    for script in SCRIPTS:
        start(script)


ALL, RL, SCORED = tuple(SCRIPTS), ("ppo", "rloo"), ("ppo", "rloo", "train_reward")
EMPTY = {
    "empty.txt": "",
    "blank.txt": "\n   \n\n\t\n",
    "empty.jsonl": "",
    "blank.jsonl": '{"text": "  "}\n{"text": null}\n',
}
CLEAN = tasks.TASKS["tldr_2019"].clean_fn
MISTAKES = [  # scripts, flags, words of the error
    (SCORED, dict(response_length=60), ("68 tokens", "64", "gpt2")),
    (SCORED, dict(query_length=100), ("query_length=100", "64")),
    (ALL, dict(base_model="./nowhere"), ("--base_model", "./nowhere")),
    (ALL, dict(base_model="file.txt"), ("--base_model", "file.txt is a file")),
    (ALL, dict(base_model="models/x/sft"), ("models/x/sft", "python sft.py --task x")),
    (ALL, dict(query_dataset="nowhere.txt"), ("--query_dataset", "nowhere.txt")),
    *((ALL, dict(query_dataset=name), ("--query_dataset", name)) for name in EMPTY),
    (ALL, dict(query_column="story"), ("--query_dataset", "'story'", "text")),
    (ALL, dict(clean_fn="broken.py:f"), ("broken.py:f", "JSONDecodeError")),
    (ALL, dict(clean_fn="good.py:number"), ("good.py:number", "is not a text")),
    (ALL, dict(truncate_token=". ."), ("--truncate_token", "one token")),
    (ALL, dict(eos_task=True, truncate_token=None), ("eos_task", "truncate_token")),
    (SCORED, dict(start_text=". ."), ("--start_text", "one token")),
    (SCORED, dict(start_text="!"), ("start_text='!'",)),
    (SCORED, dict(end_text="!"), ("end_text='!'",)),
    (ALL, dict(resume="file.txt"), ("--resume file.txt",)),
    (ALL, dict(resume="reward"), ("--resume reward",)),
    (RL, dict(gold_fn="no_colon"), ("no_colon", "module:function")),
    (RL, dict(reward_fn="nowhere.py:f"), ("nowhere.py",)),
    (RL, dict(reward_model=None), ("models/synthetic/train_reward", "python train_reward.py")),
    (RL, dict(reward_model="task"), ("no reward model in task", "python train_reward.py")),
    (RL, dict(eval_queries=1000), ("1000",)),
    (("sft",), dict(block_size=65), ("65", "64")),
    (("sft",), dict(block_size=64, response_length=50), ("66", "64")),  # 64 / 4 + 50
    (("sft",), dict(query_dataset="few.txt"), ("few.txt", "num_heldout=4", "6")),
    (("sft",), dict(query_dataset="twice.txt"), ("holding out 4 of 60", "leaves 0", "2")),
    (("sft",), dict(response_column="answer"), ("--query_dataset", "'answer'", "text")),
    (("train_reward",), dict(label_dataset="nowhere.json"), ("--label_dataset", "nowhere.json")),
    (("train_reward",), dict(label_dataset="empty.jsonl"), ("--label_dataset", "empty.jsonl")),
    (("train_reward",), dict(label_dataset="long.json"), ("--label_dataset", "70 tokens", "64")),
    (("train_reward",), dict(num_labels=20), ("16", "num_labels=20")),
    (("train_reward",), dict(policy_model="reward"), ("--policy_model", "reward")),
]


@pytest.mark.parametrize(
    ("script", "flags", "words"),
    [(script, flags, words) for names, flags, words in MISTAKES for script in names],
    ids=[f"{s}-{'-'.join(map(str, f.items()))}" for names, f, _ in MISTAKES for s in names],
)
def test_bad_input_is_refused_before_any_weights(script, flags, words, start, no_weights, tmp_path):
    for name, content in EMPTY.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "file.txt").write_text("Anna saw a cat.\n")
    (tmp_path / "few.txt").write_text("Anna saw a cat.\n" * 3)
    (tmp_path / "twice.txt").write_text("Anna saw a cat.\n" * 120)  # equal blocks
    (tmp_path / "good.py").write_text("def number(text):\n    return 1\n")
    (tmp_path / "broken.py").write_text("import json\njson.loads('{')\n")
    row = dict(query=[1] * 60, sample0=[1] * 10, sample1=[2], best=0)
    (tmp_path / "long.json").write_text(json.dumps([row] * 12))
    refuses(lambda: start(script, **flags), *words)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_missing_optional_package_is_named_before_any_weights(
    script, start, no_weights, monkeypatch
):
    monkeypatch.setitem(sys.modules, "ftfy", None)  # as if it was not installed
    load_function.cache_clear()
    refuses(lambda: start(script, clean_fn=CLEAN), "ftfy", "clean_post")


# ------------------------------------------------------------------------------------------- models

QWEN = dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8)
QWEN |= dict(linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2)
QWEN |= dict(moe_intermediate_size=16, shared_expert_intermediate_size=16)
SETTINGS = {
    "phimoe": dict(num_local_experts=4, router_jitter_noise=0.5, input_jitter_noise=0.5),
    "gpt_neo": dict(window_size=4),  # columns of a static cache
    "qwen3_next": dict(QWEN, layer_types=["linear_attention", "full_attention"]),
    "lfm2": dict(layer_types=["conv", "full_attention"]),  # a state that padding changes
    "bert": {},  # sees later tokens
}


def check(kind: str) -> None:
    """Check a random model, made as `load_lm` makes it."""
    if kind in SETTINGS:
        config = tiny.make_other_lm(kind, **SETTINGS[kind]).config
    else:
        config = tiny.config(kind, dropout=0.5)
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(models.disable_dropout(config))
    models.check_model(lm, "model", "--base_model")


@pytest.mark.parametrize("kind", (*tiny.KINDS, "gemma2", "phimoe"))
def test_check_model_accepts_models_that_give_one_result_in_all_ways(kind):
    """Also with dropout, a soft cap, and noise of the router in the config (P4)."""
    check(kind)


@pytest.mark.parametrize("kind", ["gpt_neo", "qwen3_next", "lfm2", "bert"])
def test_check_model_refuses_architectures_by_name(kind):
    refuses(lambda: check(kind), "--base_model model", kind, "GPT-2")


ROPE = dict(type="longrope", short_factor=[1.0] * 4, long_factor=[4.0] * 4)
WINDOWS = {  # of 10 tokens; GPT-Neo's is that of local attention, Phi 3's where LongRoPE changes
    "gpt_neo": dict(window_size=10, vocab_size=tiny.WORDS, eos_token_id=0),
    "phi3": dict(
        original_max_position_embeddings=10,
        rope_scaling=ROPE,
        vocab_size=tiny.WORDS,
        eos_token_id=0,
    ),
}


@pytest.mark.parametrize("kind", WINDOWS)
def test_a_window_is_found_whatever_its_name_if_the_run_has_longer_texts(kind, start, tmp_path):
    """Each script compares at the length of its own texts: 13 tokens, or the labels'."""
    lm = tiny.make_other_lm(kind, **WINDOWS[kind])
    lm.save_pretrained(tmp_path / "model")
    folder = str(tiny.write_tokenizer(tmp_path / "model"))
    models.load_lm(folder)
    for script in SCRIPTS:
        refuses(lambda s=script: start(s, base_model=folder), "--base_model", kind, "nats")
    policy = dict(base_model=start.task.base_model, policy_model=folder)
    refuses(lambda: start("train_reward", **policy), "--policy_model", kind, "nats")


@pytest.mark.parametrize("kind", WINDOWS)
def test_a_reward_model_whose_scores_depend_on_other_texts_is_refused(kind, start, tmp_path):
    """At the length of query and response, not at that of a short probe."""
    config = tiny.make_other_lm(kind, **WINDOWS[kind]).config
    torch.manual_seed(0)
    model = train_reward.RewardModel(RewardConfig(config, tiny.WORDS))
    model.save_pretrained(tmp_path / "other")
    folder = str(tiny.write_tokenizer(tmp_path / "other"))
    for script in RL:
        refuses(lambda s=script: start(s, reward_model=folder), "--reward_model", kind, "texts")
    rewards.check_reward_model(model, folder, 6)


def test_check_model_refuses_a_backbone_that_is_packed_wrongly(monkeypatch):
    def packed(backbone):
        return lambda *inputs, prompt_length: models.run_plain(backbone, *inputs) * 1.1

    monkeypatch.setattr(models, "Packed", packed)
    refuses(lambda: check("gpt2"), "gpt2", "with padding")


def test_check_model_refuses_randomness_that_is_left_in_training_mode(monkeypatch):
    """Of PhiMoE's router without P4, and of an unknown kind: the gradient would be of another loss."""
    with monkeypatch.context() as patch:
        patch.setattr(models, "disable_dropout", lambda config: config)
        refuses(lambda: check("phimoe"), "phimoe", "in training mode")
    forward = GPT2Model.forward

    def noisy(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.last_hidden_state += self.training * torch.randn(output.last_hidden_state.shape)
        return output

    monkeypatch.setattr(GPT2Model, "forward", noisy)
    refuses(lambda: check("gpt2"), "gpt2", "in training mode")


@pytest.mark.parametrize("script", RL)
@pytest.mark.parametrize("mistake", ["head", "positions"])
def test_a_model_that_computes_something_unknown_is_refused_at_start(
    mistake, script, start, tmp_path, monkeypatch
):
    """Something after the head that `compute_logits` does not know; positions that are ignored."""
    kind = GPT2LMHeadModel if mistake == "head" else GPT2Model
    forward = kind.forward

    @functools.wraps(forward)  # `check_config` reads the signature
    def changed(self, *args, position_ids=None, **kwargs):
        if mistake == "positions":
            return forward(self, *args, **kwargs)
        output = forward(self, *args, position_ids=position_ids, **kwargs)
        output.logits = 2 * output.logits
        return output

    monkeypatch.setattr(kind, "forward", changed)
    words = ("--base_model", "nats") if mistake == "head" else ("--reward_model", "texts")
    refuses(lambda: start(script), "gpt2", *words)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transformers.Gemma3Config(), ("gemma3", "text-only")),
        (transformers.LlavaConfig(), ("llava", "text-only")),
        (transformers.BloomConfig(), ("bloom", "position_ids")),
        (transformers.MambaConfig(), ("mamba", "position_ids")),
        (transformers.T5Config(), ("t5", "position_ids")),
        (transformers.OPTConfig(hidden_size=32, word_embed_proj_dim=16), ("=16", "=32")),
        (tiny.config(vocab=500), (tiny.WORDS, 500, "embeddings")),
    ],
    ids=["gemma3", "llava", "bloom", "mamba", "t5", "opt_350m", "larger_tokenizer"],
)
def test_a_config_that_cannot_be_used_is_refused_before_any_weights(
    config, words, start, no_weights
):
    folder = start.task.base_model
    (Path(folder) / "generation_config.json").unlink(missing_ok=True)
    config.save_pretrained(folder)
    for script in SCRIPTS:
        refuses(lambda script=script: start(script), "--base_model", folder, *words)


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "qwen2", "llama"])
def test_a_model_without_tokenizer_files_says_so(kind, start, no_weights, tmp_path):
    """transformers makes up a tokenizer of one or two tokens for it, or of none."""
    tiny.make_lm(kind).save_pretrained(tmp_path / "bare")
    for script in SCRIPTS:
        message = refuses(lambda s=script: start(s, base_model=str(tmp_path / "bare")), "/bare")
        assert "tokenizer" in message


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 548105171\n"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model-00002-of-00005.safetensors", lambda old: old[:-50], ("damaged",)),
        ("model-00002-of-00005.safetensors", lambda old: b"", ("damaged",)),
        ("model-00002-of-00005.safetensors", lambda old: LFS.encode(), ("git lfs pull",)),
        ("model-00002-of-00005.safetensors", None, ()),
        ("config.json", lambda old: old[:9], ()),
    ],
    ids=["truncated", "empty", "git_lfs", "missing", "config"],
)
def test_a_broken_file_of_a_model_is_named(name, content, words, tmp_path):
    """One of several files of weights, as large models have them."""
    tiny.make_lm(vocab=tiny.WORDS).save_pretrained(tmp_path, max_shard_size="40KB")
    path = tmp_path / name
    old = path.read_bytes()
    path.unlink()
    if content:
        path.write_bytes(content(old))
    refuses(lambda: models.load_lm(str(tmp_path)), "--base_model", tmp_path, name, *words)


def test_weights_that_are_missing_or_not_finite_are_refused(tmp_path):
    """They are not replaced by random ones, and a pickle is neither loaded nor ignored."""
    for value in (float("nan"), float("inf")):
        lm = tiny.make_lm(vocab=tiny.WORDS)
        lm.transformer.h[1].mlp.c_fc.weight.data[3, 4] = value
        lm.save_pretrained(tmp_path / f"{value}")
        refuses(lambda v=value: models.load_lm(str(tmp_path / f"{v}")), f"/{value}", "not finite")
    classifier = transformers.AutoModelForSequenceClassification.from_config(tiny.config("llama"))
    classifier.save_pretrained(tmp_path / "classifier")
    refuses(lambda: models.load_lm(str(tmp_path / "classifier")), "--base_model", "lm_head.weight")
    shutil.copytree(tmp_path / "nan", tmp_path / "pickle")
    (tmp_path / "pickle" / "model.safetensors").unlink()
    torch.save(lm.state_dict(), tmp_path / "pickle" / "pytorch_model.bin")
    refuses(lambda: models.load_lm(str(tmp_path / "pickle")), "/pickle", "safetensors")


# ------------------------------------------------------------------------------------ user functions


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_colon", ("no_colon", "module:function")),
        ("", ("module:function",)),
        ("nowhere.py:f", ("nowhere.py",)),
        ("no.such.package:f", ("no.such.package",)),
        ("math:pi", ("math", "pi")),
        ("mine.py:g", ("mine.py", "g")),
        ("..:f", ("..",)),
        ("exits.py:f", ("exits.py:f", "SystemExit")),
        ("broken.py:f", ("broken.py:f", "KeyError")),
    ],
)
def test_a_function_that_cannot_be_imported_is_refused(name, words, tmp_path, monkeypatch, capsys):
    """With the traceback of the user's file, also if it ends the process."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def f():\n    pass\n")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "broken.py").write_text("{}['no']\n")
    refuses(lambda: load_function(name), *words)
    if name in ("exits.py:f", "broken.py:f"):
        assert f'{name.removesuffix(":f")}", line ' in capsys.readouterr().err


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


def test_a_file_of_functions_is_imported_once(tmp_path, monkeypatch):
    """A judge that loads a model at its top must not load it for every use."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge.py").write_text(WITH_A_DATACLASS)
    assert [load_function("judge.py:f")(["a"], ["b"]) for _ in range(3)] == [[2.0]] * 3
    assert (tmp_path / "loaded").read_text() == "once\n"


def make_reward(code: str, task: tasks.Task, folder: Path):
    """The reward of a function with this body, and the tokenizer."""
    (folder / "mine.py").write_text(f"import sys, numpy\ndef f(queries, responses):\n    {code}\n")
    tokenizer, ids = models.load_tokenizer(task, 5)
    args = tiny.make_args(task, reward_fn=f"{folder}/mine.py:f")
    accelerator = SimpleNamespace(device=torch.device("cpu"))
    return load_reward(args, train_reward.RewardModel, tokenizer, ids, accelerator), tokenizer


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("return [1.0]", ("[1]",)),
        ("return [1.0] * 9", ("[9]",)),
        ("return [[1.0]] * len(queries)", ("[4, 1]",)),
        ("return [float('nan')] * len(queries)", ("nan",)),
        ("return [1.0, float('inf'), 0, 0]", ("inf",)),
        ("return None", ("None",)),
        ("return ['good'] * len(queries)", ("good",)),
        ("return 10**400", ()),
        ("return 1 / 0", ("ZeroDivisionError",)),
        ("sys.exit(0)", ("SystemExit",)),
    ],
)
def test_a_reward_function_without_one_finite_number_per_response_ends_the_run(
    code, words, task, tmp_path
):
    """A judge that calls sys.exit must not end the run with exit code 0."""
    reward, _ = make_reward(code, task, tmp_path)
    tokens = torch.full((4, 3), 14)
    message = refuses(lambda: reward(tokens, tokens), "mine.py:f", *words, error=RunError)
    assert len(message) < 400


def test_a_reward_model_with_too_few_positions_is_refused(task, tmp_path):
    """On a GPU its embedding would end the process without a word."""
    folder = tiny.write_reward(tmp_path / "reward")
    path = Path(folder, "config.json")
    config = json.loads(path.read_text())
    config["backbone"]["n_positions"] = length = task.query_length + task.response_length - 1
    path.write_text(json.dumps(config))
    weights = safetensors.torch.load_file(Path(folder, "model.safetensors"))
    (name,) = [name for name in weights if name.endswith("wpe.weight")]
    weights[name] = weights[name][:length].clone()
    safetensors.torch.save_file(weights, Path(folder, "model.safetensors"))
    tokenizer, ids = models.load_tokenizer(task, 5)
    args = tiny.make_args(task, reward_model=folder)
    accelerator = SimpleNamespace(device=torch.device("cpu"))
    rest = train_reward.RewardModel, tokenizer, ids, accelerator
    refuses(
        lambda: load_reward(args, *rest),
        f"--reward_model {folder}",
        f"at most {length}",
    )


def test_a_reward_function_reads_texts_and_may_return_an_array(task, tmp_path):
    code = "return numpy.array([len(q + 100 * r) for q, r in zip(queries, responses)])"
    reward, tokenizer = make_reward(code, task, tmp_path)
    queries, responses = (
        utils.pad_left([tokenizer.encode(text) for text in texts], 8, tiny.WORDS)
        for texts in (("Anna saw", "A"), (".", " .."))
    )
    assert reward(queries, responses).tolist() == [108, 301]


@pytest.mark.parametrize("script", RL)
def test_a_reward_of_0_for_every_response_does_not_stop_a_run(script, start, tmp_path):
    """As of a sparse reward in the first update, where the KL is 0, too."""
    (tmp_path / "mine.py").write_text("def f(queries, responses):\n    return [0] * len(queries)\n")
    start(script, reward_fn="mine.py:f", truncate_token=None, total_episodes=8)


# ------------------------------------------------------------------------------------------ the hub


@pytest.fixture
def unreachable_hub(monkeypatch, tmp_path):
    """A hub that refuses connections, and an empty cache."""
    constants, nowhere = huggingface_hub.constants, "http://127.0.0.1:9"
    for module, name, value in (
        (constants, "ENDPOINT", nowhere),
        (constants, "HF_HUB_OFFLINE", False),
        (constants, "HF_HUB_CACHE", str(tmp_path / "cache")),
        (datasets.config, "HF_ENDPOINT", nowhere),
        (datasets.config, "HF_HUB_OFFLINE", False),
        (datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache"),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize(
    ("source", "download", "local"),
    [
        ("abisee/cnn_dailymail:3.0.0", "abisee/cnn_dailymail", "cnn_dailymail:3.0.0"),
        ("SamuelYang/bookcorpus", "SamuelYang/bookcorpus", "bookcorpus"),
        ("OpenAI/lm:a/5k.json", "OpenAI/lm a/5k.json", "lm/a/5k.json"),
    ],
)
def test_a_dataset_that_cannot_be_reached_names_the_next_command_at_once(
    source, download, local, unreachable_hub
):
    began = time.perf_counter()
    words = f"hf download {download} --repo-type dataset --local-dir {local[:2]}", f" {local}"
    refuses(lambda: sources.load_rows(source, "--query_dataset"), "--query_dataset", *words)
    assert time.perf_counter() - began < 15  # the libraries retry for 23 s


def test_a_model_that_cannot_be_reached_names_the_next_command_at_once(unreachable_hub, tmp_path):
    """Also if the cache has its configuration and no weights, after an interrupted download."""
    began = time.perf_counter()
    words = "hf download gpt2 --local-dir gpt2", "--base_model gpt2"
    refuses(lambda: models.load_tokenizer(tiny.make_task(base_model="gpt2"), 5), *words)
    commit, cached = "0" * 40, tmp_path / "cache" / "models--gpt2"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    tiny.config().save_pretrained(cached / "snapshots" / commit)
    config = transformers.AutoConfig.from_pretrained("gpt2", cache_dir=tmp_path / "cache")
    assert config.vocab_size == tiny.VOCAB
    refuses(lambda: models.load_lm("gpt2"), *words)
    assert time.perf_counter() - began < 15  # the libraries retry for 23 s


def test_a_reward_model_without_its_tokenizer_is_refused(task, tmp_path):
    folder = tiny.write_reward(tmp_path / "reward")
    for path in Path(folder).glob("token*"):
        path.unlink()
    tokenizer, ids = models.load_tokenizer(task, 5)
    args = tiny.make_args(task, reward_model=folder)
    accelerator = SimpleNamespace(device=torch.device("cpu"))
    rest = train_reward.RewardModel, tokenizer, ids, accelerator
    refuses(lambda: load_reward(args, *rest), f"--reward_model {folder}")


def test_sft_needs_no_rouge_score(start, monkeypatch, capsys):
    """It only leaves ROUGE-L out."""
    start("sft", response_column="text")
    assert "ROUGE-L" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "rouge_score", None)  # as if it was not installed
    start("sft", response_column="text")
    assert "ROUGE-L" not in capsys.readouterr().out


def test_an_uploaded_reward_model_loads_by_its_name_on_the_hub(unreachable_hub, tmp_path):
    """From the hub's cache: refs/main, snapshots/<commit>/ with links into blobs/."""
    local = Path(tiny.write_reward(tmp_path / "reward"))
    commit, cached = "0" * 40, tmp_path / "cache" / "models--me--reward"
    for name in ("refs", "blobs", f"snapshots/{commit}"):
        (cached / name).mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    for i, path in enumerate(local.iterdir()):
        (cached / "blobs" / str(i)).write_bytes(path.read_bytes())
        (cached / "snapshots" / commit / path.name).symlink_to(f"../../blobs/{i}")
    cls = train_reward.RewardModel
    expected, loaded = (load_reward_model(cls, name) for name in (str(local), "me/reward"))
    for name, x in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], x), name
    words = "hf download me/other --local-dir other", "--reward_model other"
    refuses(lambda: load_reward_model(cls, "me/other"), *words)


# --------------------------------------------------------------------------------------- launchers


@pytest.fixture
def launch(monkeypatch):
    """A function that starts the accelerator in the environment of a launcher."""

    def launch(args=None, **env):
        AcceleratorState._reset_state(True)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        return distributed.start(args or tiny.make_args())

    yield launch
    AcceleratorState._reset_state(True)
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ACCELERATE_MIXED_PRECISION", "fp16", ("fp16", "--mixed_precision bf16")),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", ("=4", "--micro_batch_tokens")),
        ("ACCELERATE_USE_DEEPSPEED", "true", ("DEEPSPEED", "configs/ddp.yaml")),
        ("ACCELERATE_USE_MEGATRON_LM", "true", ("MEGATRON", "configs/ddp.yaml")),
        ("FSDP_OFFLOAD_PARAMS", "true", ("FSDP_OFFLOAD_PARAMS", "configs/ddp.yaml")),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", ("--gradient_checkpointing",)),
        ("ACCELERATE_USE_FSDP", "true", ("FSDP2", "NO started", "configs/fsdp2.yaml")),  # on a CPU
    ],
)
def test_a_launch_that_would_silently_change_the_mathematics_is_refused(name, value, words, launch):
    refuses(lambda: launch(**{name: value}), *words)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (dict(FSDP_VERSION="1"), ("FSDP2", "FSDP started", "--fsdp_version 2")),
        (dict(FSDP_RESHARD_AFTER_FORWARD="false"), ("fsdp_reshard_after_forward", "true")),
        (dict(), None),
    ],
)
def test_fsdp_has_to_be_version_2_with_resharding(env, words, launch, monkeypatch):
    tiny.shard_on_a_cpu(monkeypatch.setattr)
    env = dict(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2") | env
    if words:
        refuses(lambda: launch(**env), *words)
    else:
        assert launch(**env).is_fsdp2


def test_fp32_and_bf16_start_and_bf16_has_tf32_unless_it_is_off(launch):
    for precision, tf32, found in (
        ("no", True, "highest"),
        ("bf16", False, "highest"),
        ("bf16", True, "high"),
    ):
        args = tiny.make_args(tf32=tf32)
        assert launch(args, ACCELERATE_MIXED_PRECISION=precision).mixed_precision == precision
        assert torch.get_float32_matmul_precision() == found
    assert not torch.backends.cuda.cudnn_sdp_enabled()
