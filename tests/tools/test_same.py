"""tools/same.py: the scripts compute the same on whatever they run, and it sees faults."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OFF = " is off by "
FAULTS = [  # a line of ppo.py, a wrong one in its place; columns that see it, what they say
    (
        "return rng.permutation(size)",
        "return np.random.permutation(size)",
        ["again"],
        OFF,
    ),
    (
        "return x.masked_fill(~old.mask, 0).sum() / num_tokens",
        "return x.masked_fill(~old.mask, 0).sum() / old.mask.sum()",
        ["one micro-batch", "one-sequence micro-batches"],
        OFF,
    ),
    (
        "(minibatch.mask.sum()) / processes",
        "(minibatch.mask.sum())",
        ["2 processes", "4 processes"],
        OFF,
    ),
    (
        "+ 1, policy, optimizer, kl_coef)",
        "+ 1, policy, optimizer, 0.1)",
        ["resumed", "2 processes, resumed"],
        OFF,
    ),
    (
        "with distributed.inference(accelerator, policy):  #",
        "with accelerator.autocast():  #",
        ["fsdp2", "fsdp2, 4 processes", "fsdp2, resumed", "fsdp2, resumed without"],
        "DTensor",
    ),
    (  # old numbers kept in bf16 (L6)
        "logprobs[rows], _, values[rows] = policy(contexts[rows], responses[rows])",
        "logprobs[rows], _, values[rows] = policy(contexts[rows], responses[rows]); "
        "logprobs[rows] = logprobs[rows].bfloat16().float()",
        ["bf16, first ratio", "bf16, fsdp2, first ratio"],
        "ppo/policy/approxkl_avg is ",
    ),
]
FEW = ["2 processes", "fsdp2, resumed without"]
# The first two divide by the deviation of a query's scores + 1e-4, which enlarges rounding a thousand
# times. In the third, processes have dropout of their own. The last needs a server: test_vllm.py.
LEFT_OUT = {"grpo", "gspo", "resid_dropout", "vllm"}


def tables(folder, jobs, seed=1):
    """Column → whether it is as it should be, and what was found: of scripts, of some columns or
    all, with flags; one process imports everything."""
    import tiny  # the processes that start here import this file, too, without it

    words, env = json.dumps(jobs, default=str), dict(SEED=str(seed))
    printed = tiny.run_python(__file__, words, timeout=900, cwd=folder, env=env)
    return json.loads(printed.splitlines()[-1])


def write_patched(folder, name):
    diff = ROOT / "diffs" / f"{name}.diff"
    (base,) = re.findall(r"^--- (\w+\.py)", diff.read_text(), re.M)
    path = folder / f"{name}.py"
    subprocess.run(["patch", "--fuzz=0", "--quiet", "-o", path, ROOT / base, diff], check=True)
    return path


def write_copy(path, right, wrong):
    """A copy of ppo.py with another line."""
    source = (ROOT / "ppo.py").read_text()
    assert source.count(right) == 1, right
    path.write_text(source.replace(right, wrong))
    return path


def test_ppo_is_the_same_on_two_processes_and_resumed_from_fsdp2_to_ddp(tmp_path):
    """And an error has the line of the copy. The slow tests below have all columns and faults."""
    right = "local_batch_size = args.batch_size // processes"
    broken = write_copy(tmp_path / "mine.py", right, right.replace("size //", "sizes //"))
    table, errors = tables(tmp_path, [(ROOT / "ppo.py", FEW), (broken, ["again"])])
    assert list(table) == FEW and all(fine for fine, _ in table.values()), table
    fine, text = errors["again"]
    number = broken.read_text().partition("args.batch_sizes")[0].count("\n") + 1
    line = f"mine.py:{number}, `local_batch_size = args.batch_sizes // processes`: AttributeError"
    assert not fine and text.startswith(line)


@pytest.mark.parametrize("right", [right for right, *_ in FAULTS])
def test_the_line_that_a_fault_changes_is_there_once(right, tmp_path):
    write_copy(tmp_path / "copy.py", right, "")


@pytest.mark.slow
@pytest.mark.parametrize("script", ["ppo", "rloo", "train_reward", "sft"])
def test_nothing_depends_on_what_a_script_runs_on(script, tmp_path):
    """Kills, processes, micro-batches, FSDP2: equal to the bit unless sums have another order."""
    (table,) = tables(tmp_path, [(ROOT / f"{script}.py", [])])
    assert all(fine for fine, _ in table.values()), table
    expected = []
    for _, _, columns, _ in FAULTS:
        if script in ("ppo", "rloo") or "ratio" not in columns[0]:
            expected += columns
    assert sorted(table) == sorted(expected)
    for column, (_, text) in table.items():
        if "again" in column or column.endswith("resumed"):
            assert text == "equal to the bit", column
        elif "ratio" not in column and text != "equal to the bit":
            assert float(text.removeprefix("weights equal to ")) <= 5e-6, column


@pytest.mark.exhaustive
def test_no_patch_depends_on_the_number_of_processes(tmp_path):
    """Where rounding flips a sampled token with one seed, it does not with all of three."""
    import tiny

    teacher = str(tiny.write_model(tmp_path / "teacher", seed=5))
    jobs = []
    for name in sorted({path.stem for path in ROOT.glob("diffs/*.diff")} - LEFT_OUT):
        flags = ["--ref_model", teacher] if name == "distill" else []
        jobs.append((write_patched(tmp_path, name), ["2 processes"], flags))
    for seed in (1, 2, 5):
        failed = []
        for job, table in zip(jobs, tables(tmp_path, jobs, seed), strict=True):
            fine, text = table["2 processes"]
            if not fine:
                failed.append((job, text))
        jobs = [job for job, _ in failed]
        if not jobs:
            return
    pytest.fail(f"{failed}")


@pytest.mark.slow
def test_a_patch_with_a_state_of_its_own_resumes_to_the_bit(tmp_path):
    """The average, missing moments, dropout's masks, older weights."""
    flags = dict(
        value_warmup=["--value_warmup_updates", "2"],
        stale=["--sampler_lag", "2"],
        ema=[],
        resid_dropout=[],
        entropy_rloo=["--entropy_target", "9"],
    )
    jobs = [(write_patched(tmp_path, name), ["resumed"], flags[name]) for name in flags]
    found = [table["resumed"] for table in tables(tmp_path, jobs)]
    assert found == [[True, "equal to the bit"]] * 5


@pytest.mark.slow
def test_every_column_sees_a_fault(tmp_path):
    jobs = []
    for i, (right, wrong, columns, _) in enumerate(FAULTS):
        jobs.append((write_copy(tmp_path / f"fault{i}.py", right, wrong), columns))
    for table, (*_, columns, said) in zip(tables(tmp_path, jobs), FAULTS, strict=True):
        for column in columns:
            fine, text = table[column]
            assert not fine and said in text, (column, text)


if __name__ == "__main__":
    from tools import same

    same.warm_up()
    tables = [same.table(Path(path), *map(tuple, x)) for path, *x in json.loads(sys.argv[1])]
    print(json.dumps(tables))
