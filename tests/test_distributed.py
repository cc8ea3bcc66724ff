"""Two processes on a CPU make the very step that one makes (X11, P7, pitfalls 9, 10, 11, 19). One launch for all."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
import two_processes
from accelerate import Accelerator

import ppo
import rloo
import utils

CLOSE = dict(atol=2e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory):
    """The results of one process, and of both of two."""
    folder = tmp_path_factory.mktemp("two")
    tiny.write_task(folder / "task")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        str(Path(two_processes.__file__)),
        str(folder),
    ]
    paths = os.pathsep.join([str(utils.ROOT), str(Path(__file__).parent)])
    env = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    return SimpleNamespace(folder=folder, one=two_processes.work(Accelerator(cpu=True)), ranks=ranks)


def assert_same(ours: dict, theirs: dict, **tolerance) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(
            torch.as_tensor(ours[name]), torch.as_tensor(value), **tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


BOTH = pytest.mark.parametrize("name", ["ppo", "rloo"])


@BOTH
def test_two_processes_really_ran_on_other_rows(name, both):
    assert [rank["processes"] for rank in both.ranks] == [2, 2]
    rows = [set(rank[name]["rows"].tolist()) for rank in both.ranks]
    assert rows[0] | rows[1] == set(range(8)) and not rows[0] & rows[1]


@BOTH
def test_P7_09_the_gradient_of_a_minibatch_does_not_depend_on_the_number_of_processes(name, both):
    """The processes have other numbers of real tokens: means of means would differ. Gradients, not weights: Adam hides
    a factor. On one process they are those of a naive loop, see test_pitfalls.py."""
    counts = [int(rank[name]["first_mask"].sum()) for rank in both.ranks]
    assert counts[0] != counts[1]
    assert max(value.abs().max() for value in both.one[name]["gradients"].values()) > 1e-2
    for rank in both.ranks:
        assert_same(rank[name]["gradients"], both.one[name]["gradients"], **CLOSE)
        torch.testing.assert_close(rank[name]["loss"], both.one[name]["loss"], **CLOSE)


@BOTH
def test_P7_A1_10_weights_and_steps_after_an_update_do_not_depend_on_the_number_of_processes(name, both):
    """Four steps of at most 1e-3 each."""
    start = tiny.make_policy(script=rloo if name == "rloo" else ppo).state_dict()
    moved = max((both.one[name]["weights"][key] - value).abs().max() for key, value in start.items())
    assert moved > 1e-3
    for rank in both.ranks:
        assert_same(rank[name]["weights"], both.one[name]["weights"], **CLOSE)
        assert rank[name]["t"] == both.one[name]["t"] == 4


@BOTH
def test_L3_P8_what_a_rollout_holds_of_an_episode_does_not_depend_on_the_number_of_processes(name, both):
    """rloo's baselines too: whole groups of completions are on one process."""
    whole, place = both.one[name]["made"], {row: i for i, row in enumerate(both.one[name]["rows"].tolist())}
    for rank in both.ranks:
        rows = [place[row] for row in rank[name]["rows"].tolist()]
        for key, value in rank[name]["made"].items():
            expected = torch.as_tensor(whole[key])[rows]
            if key == "sizes":  # a prompt's number says which rows share one, whatever it is
                value, expected = value[:, 0], expected[:, 0]
            torch.testing.assert_close(torch.as_tensor(value), expected, **CLOSE, msg=lambda m, n=key: f"{n}: {m}")


def test_X11_whitening_moments_are_over_all_processes(both):
    """Each process holds its rows of what one process makes of all."""
    whole = dict(zip(both.one["ppo"]["rows"].tolist(), both.one["ppo"]["whitened"], strict=True))
    for rank in both.ranks:
        mask = rank["ppo"]["mask"]
        expected = torch.stack([whole[row] for row in rank["ppo"]["rows"].tolist()])
        torch.testing.assert_close(rank["ppo"]["whitened"][mask], expected[mask], **CLOSE)
        mean, variance = rank["ppo"]["whitened"][mask].mean(), rank["ppo"]["whitened"][mask].var(unbiased=False)
        assert abs(mean) > 1e-3 or abs(variance - 1) > 1e-3  # a process alone is not white


@BOTH
def test_X11_mean_and_variance_are_those_of_all_processes_rows(name, both):
    scores = both.one[name]["made"]["scores"]
    for result in (both.one, *both.ranks):
        mean, variance = result[name]["moments"]
        torch.testing.assert_close(mean, scores.mean(), **CLOSE)
        torch.testing.assert_close(variance, scores.var(unbiased=False), **CLOSE)


@BOTH
def test_19_metrics_are_means_over_both_processes(name, both):
    """`ppo/…` exactly: sums and counts come together before they are divided. `objective/…` as well: every process has
    as many episodes."""
    for rank in both.ranks:
        assert_same(rank[name]["stats"], both.one[name]["stats"], **CLOSE)
        assert_same(rank[name]["metrics"], both.one[name]["metrics"], **CLOSE)
    for key, sums in both.one[name]["sums"].items():  # sum, count, −min, max
        each = torch.stack([rank[name]["sums"][key] for rank in both.ranks])
        ours = torch.cat([each[:, :2].sum(dim=0), each[:, 2:].amax(dim=0)])
        torch.testing.assert_close(ours, sums, atol=1e-4, rtol=1e-4, msg=lambda m, n=key: f"{n}: {m}")


def test_R3_R4_reward_training_does_not_depend_on_the_number_of_processes(both):
    assert max(value.abs().max() for value in both.one["reward"]["gradients"].values()) > 1e-2
    for rank in both.ranks:
        assert_same(rank["reward"]["gradients"], both.one["reward"]["gradients"], **CLOSE)
        assert_same(rank["reward"]["weights"], both.one["reward"]["weights"], **CLOSE)
        for ours, theirs in zip(rank["reward"]["stats"], both.one["reward"]["stats"], strict=True):
            assert_same(ours, theirs, **CLOSE)
        for name in ("before", "after"):
            torch.testing.assert_close(rank["reward"][name], both.one["reward"][name], **CLOSE)


def test_sft_does_not_depend_on_the_number_of_processes(both):
    """The gradient before it is clipped: clipping hides a factor."""
    assert max(value.abs().max() for value in both.one["sft"]["gradients"].values()) > 1e-2
    for rank in both.ranks:
        assert_same(rank["sft"]["gradients"], both.one["sft"]["gradients"], **CLOSE)
        assert_same(rank["sft"]["weights"], both.one["sft"]["weights"], **CLOSE)
        assert float(rank["sft"]["loss"]) == pytest.approx(float(both.one["sft"]["loss"]), rel=1e-5)
        assert rank["sft"]["heldout"] == pytest.approx(both.one["sft"]["heldout"], rel=1e-5)


def test_both_processes_end_with_identical_weights(both):
    for name in ("ppo", "rloo", "reward", "sft"):
        assert_same(both.ranks[0][name]["weights"], both.ranks[1][name]["weights"], atol=0, rtol=0)
    for name in ("ppo", "rloo"):
        ours, theirs = (rank["scripts"][name]["weights"] for rank in both.ranks)
        assert_same(ours, theirs, atol=0, rtol=0)
        saved = tiny.AutoModelForCausalLM.from_pretrained(both.folder / name).state_dict()
        assert_same(saved, ours, atol=0, rtol=0)


def test_G5_11_learning_rates_and_episodes_are_those_of_one_process(both):
    """20 episodes in batches of 8 and 12 labels in batches of 4, lr 1e-3: as in test_details.py on one process."""
    lines = {
        name: [json.loads(line) for line in (both.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("ppo", "rloo", "reward")
    }
    expected = pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3])
    assert [line["lr"] for line in lines["reward"] if "lr" in line] == expected
    for name in ("ppo", "rloo"):
        assert [line["ppo/lr"] for line in lines[name] if "ppo/lr" in line] == expected
        assert [line["ppo/episode"] for line in lines[name] if "ppo/lr" in line] == [8, 16, 24]


@BOTH
def test_G6_each_process_draws_other_queries_and_other_samples(name, both):
    ours, theirs = (rank["scripts"][name] for rank in both.ranks)
    assert len(ours["responses"]) == len(theirs["responses"]) == 3
    for key in ("contexts", "responses"):
        for a, b in zip(ours[key], theirs[key], strict=True):
            assert len(a) == len(b) == 4  # a batch of 8 over two processes
            assert not {tuple(row) for row in a.tolist()} >= {tuple(row) for row in b.tolist()}


def test_processes_that_did_not_come_up_are_refused(accelerator, monkeypatch):
    """`torchrun` without ACCELERATE_USE_CPU on a CPU: two were launched, each sees itself alone."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(utils.InputError, match="sees 1.*--num_processes 2"):
        utils.start_accelerator(tiny.make_args())
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert utils.start_accelerator(tiny.make_args()).num_processes == 1


def test_an_accelerate_launch_that_silently_starts_one_of_two_processes_is_refused(accelerator, monkeypatch):
    """`accelerate launch --cpu --num_processes 2` starts one process. It sets no WORLD_SIZE; what gives it away is the
    address of a rendezvous, which it sets for more than one process only."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert utils.start_accelerator(tiny.make_args()).num_processes == 1
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(utils.InputError, match="ACCELERATE_USE_CPU=true"):
        utils.start_accelerator(tiny.make_args())
