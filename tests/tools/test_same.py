"""tools/same.py: the scripts compute the same on whatever they run, and it sees faults."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULTS = {  # columns that see it: a line of ppo.py, a part of it, and a wrong one in its place
    ("again",): ("return rng.permutation(size)", "rng", "np.random"),
    ("one micro-batch", "one-sequence micro-batches"): (
        "return x.masked_fill(~old.mask, 0).sum() / num_tokens",
        "num_tokens",
        "old.mask.sum()",
    ),
    ("2 processes", "4 processes"): ("(minibatch.mask.sum()) / processes", " / processes", ""),
    ("resumed", "2 processes, resumed"): ("+ 1, policy, optimizer, kl_coef)", "kl_coef", "0.1"),
    ("fsdp2", "fsdp2, 4 processes", "fsdp2, resumed", "fsdp2, resumed without"): (
        "with distributed.inference(accelerator, policy):  # in eval mode",
        "distributed.inference(accelerator, policy)",
        "accelerator.autocast()",
    ),
    ("bf16, first ratio", "bf16, fsdp2, first ratio"): (  # old numbers kept in bf16 (L6)
        "logprobs[rows], _, values[rows] = policy(contexts[rows], responses[rows])",
        "responses[rows])",
        "responses[rows]); logprobs[rows] = logprobs[rows].bfloat16().float()",
    ),
}
SAID = {"fsdp2": "DTensor", "bf16, first ratio": "ppo/policy/approxkl_avg is "}
FEW = ["2 processes", "fsdp2, resumed without"]
PATCHES = sorted(path.stem for path in (ROOT / "diffs").glob("*.diff"))
# The first two divide by the deviation of a query's scores + 1e-4, which enlarges rounding a thousand
# times. In the third, processes have dropout of their own.
PATCHES = [name for name in PATCHES if name not in ("grpo", "gspo", "resid_dropout")]
Table = dict[str, tuple[bool, str]]  # column: whether it is as it should be, and what was found


def tables(folder: Path, jobs: list[tuple], seed: int = 1) -> list[Table]:
    """The tables of scripts, of some columns or all, with flags; one process imports everything."""
    import tiny  # the processes that start here import this file, too, without it

    words, options = json.dumps(jobs, default=str), dict(cwd=folder, env=dict(SEED=str(seed)))
    return json.loads(tiny.run_python(__file__, words, timeout=900, **options).splitlines()[-1])


def write_patched(folder: Path, name: str) -> Path:
    diff = ROOT / "diffs" / f"{name}.diff"
    (base,) = re.findall(r"^--- (\w+\.py)", diff.read_text(), re.M)
    path = folder / f"{name}.py"
    subprocess.run(["patch", "--fuzz=0", "--quiet", "-o", path, ROOT / base, diff], check=True)
    return path


def write_copy(path: Path, right: str, wrong: str, base: str = "ppo") -> tuple[Path, int]:
    """A copy of a script with another line, and the number of that line."""
    source = (ROOT / f"{base}.py").read_text()
    assert source.count(right) == 1, right
    path.write_text(source.replace(right, wrong))
    return path, source[: source.index(right)].count("\n") + 1


def test_ppo_is_the_same_on_two_processes_and_resumed_from_fsdp2_to_ddp(tmp_path):
    """And an error has the line of the copy. The slow tests below have all columns and faults."""
    right = "local_batch_size = args.batch_size // processes"
    broken, number = write_copy(tmp_path / "mine.py", right, right.replace("size //", "sizes //"))
    table, errors = tables(tmp_path, [(ROOT / "ppo.py", FEW), (broken, ["again"])])
    assert list(table) == FEW and all(fine for fine, _ in table.values()), table
    fine, text = errors["again"]
    line = f"mine.py:{number}, `local_batch_size = args.batch_sizes // processes`: AttributeError"
    assert not fine and text.startswith(line)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ppo", "rloo", "train_reward", "sft"])
def test_nothing_depends_on_what_a_script_runs_on(script, tmp_path):
    """Kills, processes, micro-batches, FSDP2: equal to the bit unless sums have another order."""
    table = tables(tmp_path, [(ROOT / f"{script}.py", [])])[0]
    assert all(fine for fine, _ in table.values()), table
    columns = {column for columns in FAULTS for column in columns}
    has_ratios = script in ("ppo", "rloo")
    assert table.keys() == {x for x in columns if has_ratios or "ratio" not in x}
    for column, (_, text) in table.items():
        if "again" in column or column.endswith("resumed"):
            assert text == "equal to the bit", column
        elif "ratio" not in column and text != "equal to the bit":
            assert float(text.removeprefix("weights equal to ")) <= 5e-6, column


@pytest.mark.exhaustive
def test_no_patch_depends_on_the_number_of_processes(tmp_path):
    """Where rounding flips a sampled token with one seed, it does not with all of three."""
    import tiny

    names = [name for name in PATCHES if name != "vllm"]  # it needs a server: test_vllm.py
    teacher = str(tiny.write_model(tmp_path / "teacher", seed=5))
    for seed in (1, 2, 5):
        scripts = [write_patched(tmp_path, name) for name in names]
        flags = [["--ref_model", teacher] if name == "distill" else [] for name in names]
        jobs = [(path, ["2 processes"], x) for path, x in zip(scripts, flags, strict=True)]
        found = tables(tmp_path, jobs, seed)
        lines = {name: table["2 processes"] for name, table in zip(names, found, strict=True)}
        names = [name for name, (fine, _) in lines.items() if not fine]
        if not names:
            return
    pytest.fail(f"{lines}")


@pytest.mark.slow
def test_a_patch_with_a_state_of_its_own_resumes_to_the_bit(tmp_path):
    """The average, missing moments, dropout's masks, older weights."""
    flags = dict(value_warmup=["--value_warmup_updates", "2"], stale=["--sampler_lag", "2"])
    flags |= dict(ema=[], resid_dropout=[], entropy_rloo=["--entropy_target", "9"])
    jobs = [(write_patched(tmp_path, name), ["resumed"], flags[name]) for name in flags]
    found = [table["resumed"] for table in tables(tmp_path, jobs)]
    assert found == [[True, "equal to the bit"]] * 5


@pytest.mark.slow
def test_every_column_sees_a_fault(tmp_path):
    jobs = []
    for i, (columns, (line, part, wrong)) in enumerate(FAULTS.items()):
        path, _ = write_copy(tmp_path / f"fault{i}.py", line, line.replace(part, wrong))
        jobs.append((path, columns))
    for table, columns in zip(tables(tmp_path, jobs), FAULTS, strict=True):
        for column in columns:
            fine, text = table[column]
            assert not fine and SAID.get(columns[0], " is off by ") in text, (column, text)


if __name__ == "__main__":
    from tools import same

    same.warm_up()
    tables = [same.table(Path(path), *map(tuple, x)) for path, *x in json.loads(sys.argv[1])]
    print(json.dumps(tables))
