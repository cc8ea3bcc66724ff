"""Two processes have the gradients of one (X11, P7, pitfalls 9, 10, 11, 19). One launch for all.
Whole runs on one process and on several: tools/test_same.py."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import filelock
import pytest
import tiny
import torch
import two_processes
from accelerate.state import AcceleratorState
from conftest import SCRIPTS, read_metrics
from safetensors.torch import load_file, save_file
from tiny import make_args, refuses
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from machinery import distributed

CPUS = [  # a container's quota, processes, CPUs of this process, and its threads
    ("max 100000", 6, 96, 16),  # six share 96 CPUs, and one GPU
    ("150000 100000", 8, 96, 1),
    ("800000 100000", 2, 96, 4),  # a container's 8 CPUs
    (None, 1, 5, 5),  # Slurm gives 5
    ("200000 100000", 1, 96, 2),  # docker --cpus 2
]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The results of one process, and of each of two; all workers of pytest share one launch."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    folder = root / "two_processes"
    with filelock.FileLock(root / "two_processes.lock"):
        if not folder.exists():
            tiny.write_task(folder / "task")
            tiny.run_python(two_processes.__file__, folder, processes=2)
    ranks = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    one, alone = two_processes.results(rank=0, processes=1), tmp_path_factory.mktemp("alone")
    (alone / "task").symlink_to(folder / "task")
    with contextlib.chdir(alone):
        handed = {name: two_processes.run_script(name)["handed"] for name in two_processes.RUNS}
    return SimpleNamespace(folder=folder, one=one, ranks=ranks, alone=alone, handed=handed)


@pytest.mark.parametrize("name", SCRIPTS)
def test_P7_R4_L3_P8_X11_gradients_and_metrics_do_not_depend_on_the_number_of_processes(name, both):
    """On uneven shares: means of means would differ. Three held-out sequences of sft.py count once.
    Adam would hide a factor; what follows from gradients is compared by same.py."""
    expected, metrics = both.one[name]
    assert len(expected) == (4 if name in ("ppo", "rloo") else 2)
    assert max(gradient.abs().max() for gradient in expected[0]) > 1e-2
    for rank in both.ranks:
        assert_close(rank[name][0], expected, atol=2e-5, rtol=1e-4)
        assert rank[name][1] == [pytest.approx(line, rel=1e-4, abs=1e-5) for line in metrics]


@pytest.mark.parametrize("name", ["ppo", "rloo", "train_reward"])
def test_G6_processes_sample_other_queries_and_other_responses(name, both):
    first, second = (rank["scripts"][name]["samples"] for rank in both.ranks)
    assert len(first) == len(second) == 2
    for ours, theirs in zip(first, second, strict=True):
        for x, y in zip(ours, theirs, strict=True):  # contexts, responses
            assert len(x) == len(y) == 4
            assert sorted(x.tolist()) != sorted(y.tolist())


@pytest.mark.parametrize("name", ["ppo", "rloo"])
def test_saved_weights_are_the_same_on_all_processes(name, both):
    ours, theirs = (rank["scripts"][name] for rank in both.ranks)
    assert_close(ours["weights"], theirs["weights"], atol=0, rtol=0)
    saved = AutoModelForCausalLM.from_pretrained(both.folder / name).state_dict()
    assert_close(saved, ours["weights"], atol=0, rtol=0)


@pytest.mark.parametrize("name", two_processes.RUNS)
def test_held_out_queries_are_split_if_all_processes_get_equally_many(name, both, monkeypatch):
    """12 are, 3 are not, by the texts that --reward_fn gets. Numbers are those of one process."""
    first, second = (rank["scripts"][name]["handed"] for rank in both.ranks)
    heldout = both.handed[name][0]
    size = 6 if "split" in name else 3
    for texts in (first, second):
        assert list(map(len, texts)) == [size, 4, 4, size]
    assert (first[0], second[0]) == (heldout[:size], heldout[-size:])
    found = []
    for folder in (both.folder, both.alone):
        monkeypatch.chdir(folder)
        metrics = read_metrics(name)[0]
        found.append({key: x for key, x in metrics.items() if "eval/" in key})
        found.append(Path("runs", name, "samples.jsonl").read_text().splitlines()[:3])
    two, samples_of_two, one, samples_of_one = found
    assert two == pytest.approx(one, rel=1e-5) and samples_of_two == samples_of_one


def test_the_first_process_gives_all_copies_its_weights_and_buffers(both):
    """Also a head that no seed initializes. torch.distributed's wrapper did this."""
    ours, theirs = (rank["average"]["copy"] for rank in both.ranks)
    assert_close(ours, theirs, atol=0, rtol=0)
    assert ours["head.own"] == 0 and ours["head.weight"].std() > 0


def test_a_gradient_that_one_process_lacks_counts_as_0(both):
    """Embeddings 1 and 2; the head's weight none and 3; all others none on any process."""
    for rank in both.ranks:
        found = {name: x.unique().tolist() for name, x in rank["average"]["means"].items()}
        assert found == {"lm.transformer.wte.weight": [1.5], "head.weight": [1.5]}
        assert rank["average"]["calls"] == 2  # which have one, and one large message


def test_metrics_are_averaged_by_their_names_which_all_processes_have(both):
    for rank in both.ranks:
        means, message = rank["metrics"]
        assert means == {"a": 1.5, "b": 4.5} and "reward/own" in message


@pytest.mark.slow
def test_under_fsdp2_only_the_first_process_reads_weights_one_model_after_the_other(tmp_path):
    """In bytes per parameter. The small file has a head, though its config says tied."""
    totals = []
    for name, layers, width in (("small", 1, 8), ("large", 8, 768)):
        sizes = dict(n_layer=layers, n_embd=width, n_head=4, vocab_size=20_000)
        lm = GPT2LMHeadModel(GPT2Config(**sizes)).bfloat16()
        lm.save_pretrained(tmp_path / name)
        totals.append(sum(p.double().sum().item() for p in lm.parameters()))
    file = tmp_path / "small" / "model.safetensors"
    head = torch.randn(20_000, 8).bfloat16()
    save_file({**load_file(file), "lm_head.weight": head}, file, {"format": "pt"})
    totals[0] += head.double().sum().item()
    env = dict(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", MALLOC_MMAP_THRESHOLD_="65536")
    env["FSDP_AUTO_WRAP_POLICY"] = "TRANSFORMER_BASED_WRAP"
    tiny.run_python(two_processes.__file__, tmp_path, processes=2, env=env)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    small, large = totals
    expected = pytest.approx([large, large, small, small], rel=1e-6)
    assert first["sums"] == second["sums"] == expected
    assert first["peak"] < 9 and second["peak"] < 5.5


def test_a_gpu_that_torch_cannot_use_is_not_replaced_by_the_cpu(accelerator, monkeypatch, capsys):
    device = Path("/dev/nvidia3")  # of several, in a container
    monkeypatch.setattr(Path, "glob", lambda path, name: [device] if device.match(name) else [])
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    refuses(lambda: distributed.start(make_args()), "docs/running.md")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    distributed.start(make_args())
    assert capsys.readouterr().out == "cpu, fp32 (on GPUs, bf16 is faster), processes: 1\n"


def test_processes_that_did_not_start_are_refused(accelerator, monkeypatch):
    """`torchrun` without ACCELERATE_USE_CPU: each of two sees only itself. `accelerate launch --cpu
    --num_processes 2` starts one, without WORLD_SIZE, but with the address of a rendezvous."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert distributed.start(make_args()).num_processes == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    start = lambda: distributed.start(make_args())  # noqa: E731
    refuses(start, "only 1 of the launcher's processes started")
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert start().num_processes == 1  # left in a shell by another job
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    refuses(start, "docs/running.md")


@pytest.mark.parametrize("case", CPUS)
def test_threads_are_a_process_share_of_the_cpus_that_it_may_use(case, monkeypatch, tmp_path):
    quota, processes, affinity, threads = case
    (tmp_path / "cpu.max").write_text(quota or "")
    monkeypatch.setattr(distributed, "Path", lambda name: tmp_path / Path(name).name)
    monkeypatch.setattr(os, "cpu_count", lambda: 96)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(affinity), raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert distributed.count_cpus() == threads


def test_on_a_cpu_too_a_run_has_its_share_of_threads(accelerator, monkeypatch):
    """Unless the user has set OMP_NUM_THREADS. A number above torch's own is not taken."""
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 32)
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    for cpus in (2, 96):
        monkeypatch.setattr(distributed, "count_cpus", lambda cpus=cpus: cpus)
        distributed.start(make_args())
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        distributed.start(make_args())
    assert chosen == [2, 32, 32]


WAITS = """
import os, machinery, tqdm
print(os.environ.get("GOMP_SPINCOUNT"))
list(tqdm.tqdm(range(9)))
"""


@pytest.mark.parametrize(("policy", "spins"), [(None, "10000"), ("active", None)])
def test_threads_that_wait_spin_shortly_unless_the_user_has_said_how(policy, spins):
    """Set before torch is imported, which reads it. Nor is a bar shown that nobody waits for."""
    env = {name: x for name, x in os.environ.items() if "OMP_" not in name}
    if policy:
        env["OMP_WAIT_POLICY"] = policy
    options = dict(env=env, capture_output=True, text=True, check=True)
    found = subprocess.run([sys.executable, "-c", WAITS], **options)
    assert (found.stdout, found.stderr) == (f"{spins}\n", "")


@pytest.mark.parametrize("script", SCRIPTS.values())
def test_a_script_imports_machinery_before_torch(script):
    lines = Path(script.__file__).read_text().splitlines()
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    assert imports[0].startswith("import machinery ")


def test_a_mac_computes_on_its_cpu(accelerator, monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    AcceleratorState._reset_state(True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert distributed.start(make_args()).device.type == "cpu"
