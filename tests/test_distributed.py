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


def test_two_processes_really_ran_on_other_rows(both):
    assert [rank["processes"] for rank in both.ranks] == [2, 2]
    rows = [set(rank["ppo"]["rows"].tolist()) for rank in both.ranks]
    assert rows[0] | rows[1] == set(range(8)) and not rows[0] & rows[1]


def test_P7_09_the_gradient_of_a_minibatch_does_not_depend_on_the_number_of_processes(both):
    """The processes have other numbers of real tokens: means of means would differ."""
    counts = [int(rank["ppo"]["mask"][:2].sum()) for rank in both.ranks]
    assert counts[0] != counts[1]
    for rank in both.ranks:
        assert_same(rank["ppo"]["gradients"], both.one["ppo"]["gradients"], **CLOSE)
        torch.testing.assert_close(rank["ppo"]["loss"], both.one["ppo"]["loss"], **CLOSE)


def test_P7_A1_10_weights_and_steps_after_an_update_do_not_depend_on_the_number_of_processes(both):
    """Four steps of at most 1e-3 each."""
    start = tiny.make_policy().state_dict()
    moved = max((both.one["ppo"]["weights"][name] - value).abs().max() for name, value in start.items())
    assert moved > 1e-3
    for rank in both.ranks:
        assert_same(rank["ppo"]["weights"], both.one["ppo"]["weights"], **CLOSE)
        assert rank["ppo"]["t"] == both.one["ppo"]["t"] == 4


def test_X11_whitening_moments_are_over_all_processes(both):
    """Each process holds its rows of what one process makes of all."""
    whole = dict(zip(both.one["ppo"]["rows"].tolist(), both.one["ppo"]["whitened"], strict=True))
    for rank in both.ranks:
        mask = rank["ppo"]["mask"]
        expected = torch.stack([whole[row] for row in rank["ppo"]["rows"].tolist()])
        torch.testing.assert_close(rank["ppo"]["whitened"][mask], expected[mask], **CLOSE)
        mean, variance = rank["ppo"]["whitened"][mask].mean(), rank["ppo"]["whitened"][mask].var(unbiased=False)
        assert abs(mean) > 1e-3 or abs(variance - 1) > 1e-3  # a process alone is not white


def test_19_metrics_are_means_over_both_processes(both):
    for rank in both.ranks:
        assert_same(rank["ppo"]["stats"], both.one["ppo"]["stats"], **CLOSE)
        assert_same(rank["ppo"]["metrics"], both.one["ppo"]["metrics"], **CLOSE)


def test_R3_R4_reward_training_does_not_depend_on_the_number_of_processes(both):
    for rank in both.ranks:
        assert_same(rank["reward"]["weights"], both.one["reward"]["weights"], **CLOSE)
        for ours, theirs in zip(rank["reward"]["stats"], both.one["reward"]["stats"], strict=True):
            assert_same(ours, theirs, **CLOSE)
        for name in ("before", "after"):
            torch.testing.assert_close(rank["reward"][name], both.one["reward"][name], **CLOSE)


def test_sft_does_not_depend_on_the_number_of_processes(both):
    for rank in both.ranks:
        assert_same(rank["sft"]["weights"], both.one["sft"]["weights"], **CLOSE)
        assert float(rank["sft"]["loss"]) == pytest.approx(float(both.one["sft"]["loss"]), rel=1e-5)
        assert rank["sft"]["heldout"] == pytest.approx(both.one["sft"]["heldout"], rel=1e-5)


def test_both_processes_end_with_identical_weights(both):
    for name in ("ppo", "reward", "sft"):
        assert_same(both.ranks[0][name]["weights"], both.ranks[1][name]["weights"], atol=0, rtol=0)
    ours, theirs = (rank["scripts"]["weights"] for rank in both.ranks)
    assert_same(ours, theirs, atol=0, rtol=0)
    saved = tiny.AutoModelForCausalLM.from_pretrained(both.folder / "ppo").state_dict()
    assert_same(saved, ours, atol=0, rtol=0)


def test_G5_11_learning_rates_and_episodes_are_those_of_one_process(both):
    """20 episodes in batches of 8 and 12 labels in batches of 4, lr 1e-3: as in test_details.py on one process."""
    lines = {
        name: [json.loads(line) for line in (both.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("ppo", "reward")
    }
    expected = pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3])
    assert [line["ppo/lr"] for line in lines["ppo"]] == expected
    assert [line["lr"] for line in lines["reward"] if "lr" in line] == expected
    assert [line["ppo/episode"] for line in lines["ppo"]] == [8, 16, 24]


def test_G6_each_process_draws_other_queries_and_other_samples(both):
    ours, theirs = (rank["scripts"] for rank in both.ranks)
    assert len(ours["responses"]) == len(theirs["responses"]) == 3
    for name in ("contexts", "responses"):
        for a, b in zip(ours[name], theirs[name], strict=True):
            assert len(a) == len(b) == 4  # a batch of 8 over two processes
            assert not {tuple(row) for row in a.tolist()} >= {tuple(row) for row in b.tolist()}


def test_processes_that_did_not_come_up_are_refused(accelerator, monkeypatch):
    """`torchrun` without ACCELERATE_USE_CPU on a CPU: two were launched, each sees itself alone."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(utils.InputError, match="2 processes were launched but this one sees 1.*--num_processes 2"):
        utils.start_accelerator()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert utils.start_accelerator().num_processes == 1


def test_an_accelerate_launch_that_silently_starts_one_of_two_processes_is_refused(accelerator, monkeypatch):
    """`accelerate launch --cpu --num_processes 2` starts one process. It sets no WORLD_SIZE; what gives it away is the
    address of a rendezvous, which it sets for more than one process only."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert utils.start_accelerator().num_processes == 1
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(utils.InputError, match="ACCELERATE_USE_CPU=true"):
        utils.start_accelerator()
