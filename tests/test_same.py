"""benchmarks/same.py: what it says of ppo.py and rloo.py, and that each of its columns sees a fault."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import utils
from benchmarks import sweep

FAULTS = {  # column: the line of ppo.py that is right, and what a copy has in its place
    "again": ("rng.permutation(local_batch)", "np.random.permutation(local_batch)"),
    "one micro-batch": ("(x.sum() / count for x in parted)", "(x.sum() / old.mask.sum() for x in parted)"),
    "2 processes": ("utils.all_sum(batch.mask.sum()) / accelerator.num_processes", "utils.all_sum(batch.mask.sum())"),
    "resumed": ("run.checkpoint(update + 1, policy, optimizer, kl_coef)", "run.checkpoint(update + 1, policy, optimizer, 0.1)"),
    "fsdp2": ('clock("sample"), utils.inference(accelerator, policy):', 'clock("sample"), accelerator.autocast():'),
    "bf16, first ratio": ("= (x.masked_fill(~mask, 0) for x in", "= (x.bfloat16().float().masked_fill(~mask, 0) for x in"),
}  # fmt: skip
ALIKE = {"4 processes": "2 processes", "micro-batches of a row": "one micro-batch", "2 processes, resumed": "resumed"}
ALIKE |= {
    "fsdp2, 4 processes": "fsdp2",
    "fsdp2, resumed": "fsdp2",
    "fsdp2, resumed without": "fsdp2",
    "bf16, fsdp2, first ratio": "bf16, first ratio",
}


FEW = ("2 processes", "4 processes", "fsdp2, resumed without")
PATCHES = sorted(path.stem for path in (utils.ROOT / "diffs").rglob("*.diff"))
# It divides by σ + 1e-4 of a prompt's scores, which makes 1e-3 of two equal ones that are off by 1e-7.
PATCHES.remove("grpo")


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, tuple[bool, str]]]:
    """Of all scripts and patches, and of the columns of each fault; from one process, which imports everything once."""
    folder = tmp_path_factory.mktemp("same")
    source = (utils.ROOT / "ppo.py").read_text()
    jobs = [(str(utils.ROOT / f"{script}.py"), []) for script in ("ppo", "rloo")]
    jobs += [(str(utils.ROOT / f"{script}.py"), list(FEW)) for script in ("train_reward", "sft")]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        jobs += [(sweep.load_script(name).__file__, ["2 processes"]) for name in PATCHES]
    for i, (column, (right, wrong)) in enumerate(FAULTS.items()):
        assert source.count(right) == 1, right
        (folder / f"fault{i}.py").write_text(source.replace(right, wrong))
        jobs.append((str(folder / f"fault{i}.py"), [column, *(other for other in ALIKE if ALIKE[other] == column)]))
    env = os.environ | {"PYTHONPATH": str(utils.ROOT)}
    command = [sys.executable, __file__, json.dumps(jobs)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {Path(script).stem: lines for script, lines in json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.parametrize("script", ["ppo", "rloo"])
def test_17_32_nothing_depends_on_what_a_script_runs_on(script, tables):
    """Kills, processes, micro-batches, FSDP2: fp32 to the bit but where sums are in another order."""
    lines = tables[script]
    assert all(fine for fine, _ in lines.values()), lines
    assert lines.keys() == FAULTS.keys() | ALIKE.keys()
    for column in ("again", "resumed", "2 processes, resumed", "fsdp2", "fsdp2, resumed", "fsdp2, resumed without"):
        assert lines[column][1] == "equal to the bit"
    for column in ("micro-batches of a row", "one micro-batch", "2 processes", "4 processes"):
        assert float(lines[column][1].removeprefix("weights equal to ")) <= 1e-6


@pytest.mark.parametrize("script", ["train_reward", "sft"])
def test_17_32_nor_do_reward_models_and_fine_tuning(script, tables):
    """Four steps; rows of uneven length."""
    lines = tables[script]
    assert lines.keys() == set(FEW) and all(fine for fine, _ in lines.values()), lines


@pytest.mark.parametrize("name", PATCHES)
def test_17_32_nor_do_diffs_and_recipes(name, tables):
    fine, text = tables[name]["2 processes"]
    assert fine, text


@pytest.mark.parametrize("column", [*FAULTS, *ALIKE])
def test_a_fault_is_seen_in_every_column(column, tables):
    fault = ALIKE.get(column, column)
    fine, text = tables[f"fault{list(FAULTS).index(fault)}"][column]
    assert not fine
    if fault == "fsdp2":
        assert "DTensor" in text
    elif fault == "bf16, first ratio":
        assert re.match(r"ppo/val/ratio_m(in|ax) is [01]\.\d+", text)
    else:
        assert re.match(r"(after update|metrics.jsonl, line) \d: \S+ is off by ", text), text


if __name__ == "__main__":
    from benchmarks import same

    same.warm_up()
    columns = [(script, same.table(Path(script), "gpt2", tuple(only))) for script, only in json.loads(sys.argv[1])]
    print(json.dumps(columns))
