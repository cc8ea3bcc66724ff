"""diffs/: experiments that change what is sampled (their losses are in test_diffs.py), and recipes,
which pass the values that their source published and never run half patched."""

import ast
import os
import re
import shutil
import subprocess

import formats
import numpy as np
import pytest
import test_diffs
import test_tokens
import tiny
import torch
from test_diffs import RECIPES, ROOT

import ppo
import utils
from data import tasks
from machinery import cli
from machinery.tokens import load_tokenizer

patched = test_diffs.patched
start = test_diffs.start
task = test_diffs.task


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_tools_sampling_continues_after_what_the_tool_inserts(calls, patched, monkeypatch):
    """The answer depends on the response so far, and is cut at R tokens."""
    script = patched("tools")
    lm = tiny.make_lm()
    contexts = tiny.make_contexts([3, 6, 8, 1] * 4, 8)
    uniform = tiny.uniform(12, 16)
    caller = tiny.sample(lm, contexts, uniform).flatten().mode().values.item()

    def encode(before, texts, tokenizer):
        return [[int(x) for x in texts[0].split()]], [], 0

    def tool(contexts, responses):
        return [f"{len(x.split())} 7" for x in responses]

    monkeypatch.setattr(script, "encode_after", encode)
    monkeypatch.setattr(script, "load_tool", lambda args: (tool, tiny.Tokenizer(), caller))
    args = tiny.make_args(
        script=script, response_length=12, tool_fn="mine.py:tool", tool_calls=calls
    )
    found = script.sample(lm, contexts, uniform, tiny.IDS, args)
    for row, context in enumerate(contexts):
        tokens = context[context != tiny.PAD].tolist()
        expected = []
        answer = []
        left = calls
        for t in range(12):
            logits = lm(torch.tensor([tokens])).logits[:, -1] / 0.7
            token = utils.sample_token(logits, uniform[t, row : row + 1]).item()
            mark = 0
            if answer:
                token = answer.pop(0)
                mark = 1
            elif token == caller and left:
                answer = [t + 1, 7]
                left -= 1
                mark = -1
            tokens.append(token)
            expected.append(token + mark * (tiny.PAD + 1))
        assert found[row].tolist() == expected
    assert (found > tiny.PAD).any() == (calls > 0)


@pytest.mark.parametrize(
    "kind", ["llama2", "small", pytest.param("smollm2", marks=test_diffs.SLOW)]
)
def test_tools_an_answer_is_a_text_or_the_users_turn(kind, patched, here):
    """Without the space that a tokenizer adds. A call ends no response, not even by an end token."""
    tool_token = end = test_tokens.END
    turns = [f"It is.{end}", f"I saw.{end}"]
    answer = f"\n<|im_start|>user\nWhy?{end}\n<|im_start|>assistant\n"
    text = answer.join(turns)
    if kind == "llama2":
        tool_token = "?"
        end = "</s>"
        turns = ["7?", "8</s>"]
        answer = "42"
        text = "7?42 8</s>"
    tokenizer = getattr(formats if kind == "llama2" else test_tokens, f"{kind}_tokenizer")()
    tiny.make_lm(vocab=len(tokenizer)).save_pretrained(here / "model")
    tokenizer.save_pretrained(here / "model")
    (here / "tool.py").write_text(f"def ask(*texts): return [{answer!r}]")
    model = str(here / "model")  # `load_tool` is cached
    task = tiny.make_task(base_model=model, truncate_token=end, truncate_after=0, eos_task=True)
    script = patched("tools")
    ids = load_tokenizer(task, 5)[1]
    args = tiny.make_args(task, script, tool_fn="tool.py:ask", tool_token=tool_token)
    responses = torch.full((1, 60), ids.pad)
    start = 0
    for turn in turns:  # the second may call no more
        assert not script.truncate(responses, ids)[1]
        tokens = tokenizer.encode(turn, add_special_tokens=False)
        responses[0, start : start + len(tokens)] = torch.tensor(tokens)
        script.insert_answers(responses, responses, start + len(tokens) - 1, ids, args)
        start = int((responses != ids.pad).sum())
    responses[0, start:] = tokens[0]
    truncated, ended = script.truncate(responses, ids)
    tokens = (truncated % (ids.pad + 1))[truncated != ids.pad]
    assert ended and tokenizer.decode(tokens, clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize("limit", [0, 1, 20])
def test_dynamic_sampling_replaces_groups_with_equal_scores_until_the_limit(limit, start):
    batches = []

    def score(queries, responses):
        if len(queries) != 3:  # no evaluation
            batches.append(torch.cat([queries, responses], dim=1).split(4))
        return (responses.sum(dim=1) % 4 == 0).float()

    reward = tiny.fake_reward(score)
    flags = dict(max_resamples=limit, eval_queries=3, num_minibatches=1)
    run = start("dynamic_sampling", load_reward=lambda *_: reward, **flags)
    for rollout, line in zip(run.rollouts, run.metrics, strict=False):
        missing = [0, 1, 2, 3]
        kept = {}
        sizes = []
        while missing and len(sizes) <= limit:
            sizes.append(len(missing))
            kept.update(zip(missing, batches.pop(0), strict=True))
            missing = []
            for query, group in kept.items():
                if len((group[:, 8:].sum(dim=1) % 4 == 0).unique()) == 1:
                    missing.append(query)
        found = torch.cat([rollout.queries, rollout.responses], dim=1).split(4)
        for query, group in kept.items():
            assert torch.equal(found[query], group)
        assert line["objective/sampled_batches"] == sum(sizes) / 4
        dropped = sum(sizes[1:]) + len(missing)
        assert line["objective/frac_reward_zero_std"] == pytest.approx(dropped / sum(sizes))
    assert not batches


def test_curriculum_draws_queries_by_1_minus_the_mean_score_of_their_last_responses(patched, start):
    """Weights are at least 0.3, and frequencies are those of weights."""
    own = patched("curriculum").query_rows
    draws = []

    def draw(weights, *rest):
        draws.append((weights, own(weights, *rest)))
        return draws[-1][1]

    def score(responses):
        return responses[:, 0] % 3 - 1.0

    run = start("curriculum", query_rows=draw, total_episodes=192, min_weight=0.3, score=score)
    success = np.zeros(len(draws[0][0]))
    again = 0
    for rollout, (weights, rows) in zip(run.rollouts, draws, strict=True):
        assert weights == pytest.approx(np.maximum(1 - success, 0.3))
        again += success[rows].astype(bool).sum()
        for row, scores in zip(rows, rollout.scores.split(4), strict=True):
            success[row] = scores.mean().clamp(0, 1)
    assert again > 4 and len(np.unique(success)) > 3
    drawn = [own(np.array([0.3, 0.5, 1.2]), 1, 1, i).item() for i in range(2000)]
    assert np.bincount(drawn) / 2000 == pytest.approx([0.15, 0.25, 0.6], abs=0.05)


@pytest.mark.parametrize(("base", "spread"), [(1e6, 1.0), (1e3, 0.01), (1e6, 0.0)])
@pytest.mark.parametrize("name", ["rloo", "dapo", "dynamic_sampling"])
def test_scores_of_a_group_are_equal_by_their_own_spread(name, base, spread, start):
    """Not by one relative to their size, nor if only their mean is another one than the others'."""

    def score(responses):
        return base + spread * (torch.arange(len(responses)) % 4 == 1)

    run = start(name, score=score, total_episodes=16)
    assert run.metrics[0]["objective/frac_reward_zero_std"] == (spread == 0)


ALL = "kl_target=None cliprange=0.2 gamma=1.0 lam=0.95"
ONCE = "num_ppo_epochs=1 adam_beta1=0.9 adam_beta2=0.95 weight_decay=0.0"
CODE = f"""{ONCE} vf_coef=1.0 cliprange_value=0.2 anneal_lr=True
    whiten_rewards=False whiten_advantages=False temperature=1.0"""
PUBLISHED = {  # beside what is above; by openrlhf, 59 updates of warm-up: 3% of all
    "instructgpt": f"""{ONCE} total_episodes=256000 batch_size=512 num_minibatches=8 kl_coef=0.02
        lr=5e-6 critic_lr=5e-6 anneal_lr=False warmup_updates=10 ptx_coef=27.8 ema_decay=0.992
        temperature=1.0""",
    "llama2": f"""{ONCE} total_episodes=204800 batch_size=512 num_minibatches=8 kl_coef=0.01 lr=1e-6
        critic_lr=1e-6 anneal_lr=False adam_eps=1e-5 weight_decay=0.1 max_grad_norm=1.0
        vf_coef=1.0""",
    "qwen": """num_ppo_epochs=4 samples_per_query=2 kl_coef=0.04 cliprange_value=0.15 lr=1e-6
        critic_lr=5e-6 value_warmup_updates=50 top_p=0.9 min_response_length=1""",
    "chinese_llama": f"""{CODE} total_episodes=14000 batch_size=14 num_minibatches=1 lr=5e-7
        critic_lr=1.5e-6 decay='inverse_sqrt' warmup_updates=100 adam_eps=1e-6 kl_coef=0.1
        max_grad_norm=1.0 clip_score=None temperature=0.8 top_p=0.9""",
    "deepspeed_chat": f"""{CODE} total_episodes=30528 batch_size=64 num_minibatches=1 kl_coef=0.1
        lr=9.65e-6 critic_lr=5e-6 decay='cosine' min_lr_ratio=0.0 warmup_updates=100 adam_eps=1e-8
        max_grad_norm=1.0 clip_score=5.0 ema_decay=0.992 top_p=1.0 min_response_length=3""",
    "openrlhf": f"""{CODE} batch_size=512 num_minibatches=4 kl_coef=0.01 lr=1e-6 critic_lr=9e-6
        decay='cosine' min_lr_ratio=0.1 warmup_updates=59 adam_eps=1e-8 clip_score=10.0
        max_grad_norm=1.0 whiten_advantages=True""",
    "trlx": f"""{CODE} total_episodes=12800 batch_size=128 num_minibatches=4 num_ppo_epochs=4
        kl_coef=0.001 lr=3e-5 anneal_lr=False adam_eps=1e-8 weight_decay=1e-6
        clip_score=10.0 unfrozen_layers=2 whiten_advantages=True""",
}


def run_recipe(folder, name):
    command = ["bash", folder / "diffs" / "recipes" / f"{name}.sh", "--seed", "7"]
    env = os.environ | {"LAUNCH": "echo"}
    return subprocess.run(command, capture_output=True, text=True, env=env)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_passes_the_published_values_and_works_for_every_task(name, tmp_path, capsys):
    """What is not published is as in ppo.py."""
    shutil.copy(ROOT / "ppo.py", tmp_path)
    shutil.copytree(ROOT / "diffs", tmp_path / "diffs")
    file, *flags = run_recipe(tmp_path, name).stdout.split()
    assert file == f"{name}.py" and flags[-2:] == ["--seed", "7"]
    script = tiny.load_script(tmp_path / file)
    values = re.findall(r"(\w+)=(\S+)", f"{ALL} {PUBLISHED[name]}")
    published = {key: ast.literal_eval(x) for key, x in values}
    for task in tasks.TASKS:
        more = ["--task", task, "--reward_fn", "data.answers:gsm8k", "--seed", "7"]
        args = cli.parse_args(script.Args, script.PRESETS, [*flags, *more])
        script.check(args, 1)
        preset = cli.parse_args(ppo.Args, ppo.PRESETS, more)
        expected, found = (vars(x.task) | vars(x) | {"task": task} for x in (preset, args))
        found["critic_lr"] = pytest.approx(args.lr * getattr(args, "critic_lr_ratio", 1), rel=1e-3)
        expected |= published
        assert expected == {key: found[key] for key in expected}
    text = RECIPES[name].replace("\n#    ", "")
    command = re.search(rf"^# Synthetic: diffs/recipes/{name}\.sh --task (.*)$", text, re.M)[1]
    args = cli.parse_args(script.Args, script.PRESETS, [*flags, "--task", *command.split()])
    assert args.total_episodes == 4096
    with pytest.raises(SystemExit):  # what the recipe prints with --help: its own defaults
        cli.parse_args(script.Args, script.PRESETS, [*flags, "--help"])
    shown = re.search(r"--lr .*?default: ([-.e\d]+)", capsys.readouterr().out, re.S)
    assert float(shown[1]) == published["lr"]


def test_a_recipe_keeps_the_users_changes_and_never_runs_half_patched(tmp_path):
    shutil.copytree(ROOT / "diffs", tmp_path / "diffs")
    (tmp_path / "llama2.py").write_text("mine")
    assert run_recipe(tmp_path, "llama2").stdout.startswith("llama2.py")
    assert (tmp_path / "llama2.py").read_text() == "mine"
    changed = (ROOT / "ppo.py").read_text().replace("@torch.no_grad()\ndef sample(", "def sample(")
    (tmp_path / "ppo.py").write_text(changed)  # the third patch of qwen.sh does not apply to it
    for _ in range(2):
        assert run_recipe(tmp_path, "qwen").returncode != 0
