"""benchmarks/sweep.py and its tools: what they measure, what ablations remove, tables by hand."""

import importlib.util
import math
import shutil
import sys
import types
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from accelerate import Accelerator
from transformers import AutoTokenizer

import ppo
import rloo
import utils
from benchmarks import ablations, patches, sweep
from data import tasks
from machinery.rewards import RewardConfig

TOOL = """
import json, os, sys
job = json.loads(sys.argv[2])
threads, models = os.environ["OMP_NUM_THREADS"], os.path.isdir("models/mine")
open(os.environ["LOG"], "a").write(f"{job['seed']} {threads} {models}\\n")
if job["seed"] == int(os.environ["FAILS"]):
    sys.exit(f"no luck with {job['seed']}")
print("much else")
print(json.dumps([{"at": 0, "x": 0.5}, {"at": 1, "x": 1.5}]))
print("and more")
"""


def test_a_job_is_measured_once_and_a_failed_one_stops_no_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("models", "mine").mkdir(parents=True)
    Path("tool.py").write_text(TOOL)
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAILS", "2")
    monkeypatch.setattr(sweep.curves, "provenance", lambda: dict(date="today", commit="abc"))
    jobs = [dict(way="a, b", seed=seed) for seed in (1, 2, 3)]
    out, tool = tmp_path / "new" / "out.csv", str(tmp_path / "tool.py")
    with pytest.raises(SystemExit, match="'seed': 2} failed:\nno luck with 2"):
        sweep.sweep(tool, jobs, out, workers=1)
    rows = [f'"a, b",{seed},{rest}' for seed in (1, 3) for rest in ("0,0.5", "1,1.5")]
    rows = ["way,seed,at,x,date,commit", *(f"{row},today,abc" for row in rows)]
    assert out.read_text().splitlines() == rows
    monkeypatch.setenv("FAILS", "0")
    rows = sweep.sweep(tool, jobs, out, workers=1)
    assert [(row["seed"], row["at"]) for row in rows] == [(s, at) for s in "123" for at in "01"]
    assert Path("log").read_text().splitlines() == [f"{seed} 1 True" for seed in (1, 2, 3, 2)]
    assert {path.name for path in tmp_path.iterdir()} == {"models", "tool.py", "log", "new"}


def test_rows_of_other_columns_are_not_mixed(tmp_path):
    sweep.append_rows(tmp_path / "x.csv", [{"a": 1, "b": 2}])
    with pytest.raises(ValueError, match=r"\['a', 'b'\], not \['a', 'c'\]"):
        sweep.append_rows(tmp_path / "x.csv", [{"a": 1, "c": 2}])
    assert (tmp_path / "x.csv").read_text().split() == ["a,b", "1,2"]
    with pytest.raises(SystemExit, match="x.csv has the columns a, b; "):
        sweep.sweep("tool.py", [{"a": 1, "c": 2}], tmp_path / "x.csv", workers=1)


# -------------------------------------------------------------------------- what an ablation removes

X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 9.0]])  # mean 4, population variance 40 / 6
REAL = torch.ones_like(X).bool()


def first_step(m: ModuleType) -> list:
    """How far Adam goes with lr 1 and a gradient of 1e-5, which is epsilon."""
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.full((1,), 1e-5)
    m.AdamTF([weight], lr=1.0, eps=1e-5).step()
    return [-weight.item()]


def run(m: ModuleType, **patches: Any) -> tiny.FakeRun:
    """Run the `main` of a changed ppo.py on tiny inputs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo, "main", types.FunctionType(m.main.__code__, vars(ppo)))
        return tiny.run_updates(ppo, tiny.make_args(), tiny.make_policy(), **patches)


def adam_after_a_run(m: ModuleType) -> list:
    """Steps that Adam remembers after 3 updates of 2 epochs with 2 minibatches."""
    return [run(m).optimizer.param_groups[0]["t"]]


def dropout(m: ModuleType) -> list:
    modules = run(m).model.lm.modules()
    return [*{x.p for x in modules if isinstance(x, torch.nn.Dropout)}]


def seed_of_process_1(m: ModuleType) -> list:
    seeds = set()

    def query_rows(num_queries: int, size: int, step: int, seed: int) -> Any:
        seeds.add(seed)
        return utils.query_rows(num_queries, size, step, seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Accelerator, "process_index", 1)
        run(m, query_rows=query_rows)
    return [*seeds]


def position_ids(m: ModuleType) -> list:
    """Of a context with two pads: in the training forward pass, and while sampling."""
    seen, context = [], torch.tensor([[9, 9, 3, 4]])

    def backbone(tokens: Any, mask: Any, position_ids: Any, past_key_values: Any = None) -> Any:
        seen.extend(position_ids[0].tolist())
        if past_key_values is None and tokens.shape[1] == 5:
            return torch.zeros(1, 5, 32)
        return SimpleNamespace(logits=torch.zeros(1, 1, 9), past_key_values=1)

    ids = utils.TokenIds(9, None, [], [])
    policy = m.PolicyAndValue(tiny.make_lm(), ids.pad, 1.0)
    policy.backbone = backbone
    policy(context, torch.tensor([[5]]))
    m.sample(backbone, context, tiny.uniform(1, 1), ids, tiny.make_args(script=m))
    return seen


def lowest_token(m: ModuleType) -> list:
    """Of 50 tokens, and after them 50 with a higher probability."""
    logits = torch.cat([torch.zeros(50), torch.ones(50)])[None]
    return [m.sample_token(logits, torch.zeros(1, 1, dtype=torch.float64)).item()]


def head_std(m: ModuleType) -> list:
    """Of a model of width 32."""
    torch.manual_seed(1)
    return [m.RewardModel(RewardConfig(tiny.config(), tiny.PAD)).head.weight.std().item()]


class Scores:
    """A reward model that gives the samples 0 to 3 rewards of 1, 3, 5, 7: mean 4, variance 5."""

    config = SimpleNamespace(pad_id=-1)

    def __init__(self):
        self.gain, self.bias = torch.ones(1), torch.zeros(1)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        return 2.0 * tokens[:, 0] + 1


def gain_and_bias(m: ModuleType) -> list:
    model = Scores()
    m.normalize(model, torch.arange(4)[:, None], 2)
    return [model.gain.item(), model.bias.item()]


def logprob(m: ModuleType) -> list:
    """Of a token 9 times as probable as the other, at temperature 1/2."""
    policy = m.PolicyAndValue(tiny.make_lm(), tiny.PAD, 0.5)
    m.compute_logits = lambda lm, hidden: torch.tensor([[0.0, math.log(9)]])
    return [policy(torch.tensor([[1]]), torch.tensor([[1]]))[0].item()]


def value_head(m: ModuleType) -> list:
    return [m.PolicyAndValue(tiny.make_lm(), tiny.PAD, 0.7).value_head.weight.any().item()]


def scores(m: ModuleType) -> list:
    """Of a response with the truncate token 5, and one without."""
    args = tiny.make_args(tiny.make_task(truncate_after=0))
    responses = torch.tensor([[3, 5, 4], [3, 4, 4]])
    seven = torch.tensor([7.0, 7.0])
    found, _, _ = m.score_responses(lambda *_: seven, None, responses, tiny.IDS, args)
    return found.tolist()


def same_minibatches(m: ModuleType) -> list:
    first, second = m.shuffle(8, tiny.make_args(), [1, 0], "cpu")
    return [torch.cat(first).equal(torch.cat(second))]


def rewards(m: ModuleType) -> list:
    return m.kl_penalized_rewards(X[:1, :2], torch.tensor([5.0]), REAL[:1, :2], 0.1)[0].tolist()


def mean_of_whitened_rewards(m: ModuleType) -> list:
    args = tiny.make_args(gamma=0.0, whiten_advantages=False)
    minibatch = SimpleNamespace(rewards=X, values=torch.zeros_like(X), mask=REAL)
    return [m.compute_advantages(minibatch, args)[0].mean().item()]


def mean_of_whitened(m: ModuleType) -> list:
    """As if all sums of another process were 6: mean 30 / 12, variance 59.5 / 12."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "all_sum", lambda x: x + 6)
        return [m.whiten(X, REAL).mean().item()]


def advantages(m: ModuleType) -> list:
    """Of two responses with rewards 1 and 3 to one query, and 2 and 6 to another."""
    return m.leave_one_out_advantages(torch.tensor([1.0, 2.0, 3.0, 6.0]), 2).tolist()


PROBES = {  # what is removed → numbers, with the detail, without it
    "PyTorch's Adam": (first_step, [1 / (1 + math.sqrt(1000))], [1 / 2]),
    "Adam is reset in every update": (adam_after_a_run, [12], [0]),
    "position ids count padding": (
        position_ids,
        [0, 0, 0, 1, 2, 0, 0, 0, 1],
        [0, 1, 2, 3, 4, 0, 1, 2, 3],
    ),
    "samples from the top 50 tokens": (lowest_token, [0], [50]),
    "reward head of std 0.02": (head_std, [33**-0.5], [0.02]),
    "gain 1, bias 0": (gain_and_bias, [5**-0.5, -4 * 5**-0.5], [1, 0]),
    "log-probabilities at temperature 1": (logprob, [math.log(81 / 82)], [math.log(9 / 10)]),
    "PyTorch's initial value head": (value_head, [False], [True]),
    "dropout 0.1 in training": (dropout, [0.0], [0.1]),
    "truncation, but no penalty": (scores, [7, -1], [7, 7]),
    "same minibatches every epoch": (same_minibatches, [False], [True]),
    "KL penalty on the last token": (rewards, [-0.1, 4.8], [0, 4.7]),
    "rewards whitened to mean 0": (mean_of_whitened_rewards, [4], [0]),
    "no baseline": (advantages, [-2, -4, 2, 4], [1, 2, 3, 6]),
    "baseline of the whole batch": (advantages, [-2, -4, 2, 4], [-2, -1, 0, 3]),
    "each process whitens alone": (mean_of_whitened, [1.5 / math.sqrt(59.5 / 12)], [0]),
    "processes sample the same": (seed_of_process_1, [100004], [1]),
}
ENTRIES = [(script, off) for script in ablations.OFF for off in ablations.OFF[script]]
CHANGED = [(script, off) for script, off in ENTRIES if off.file]


def load(path: Path) -> ModuleType:
    """Import a file under a name of its own."""
    name = f"changed_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("script", "off"), CHANGED, ids=[f"{s}: {off.what}" for s, off in CHANGED])
def test_a_changed_line_removes_what_the_entry_says(script, off, tmp_path):
    probe, right, wrong = PROBES[off.what]
    tolerance = 0.3 if probe is head_std else 1e-5
    shutil.copy(sweep.ROOT / off.file, tmp_path)
    assert probe(load(tmp_path / off.file)) == pytest.approx(right, rel=tolerance, abs=1e-6)
    ablations.remove_detail(off, tmp_path)
    assert probe(load(tmp_path / off.file)) == pytest.approx(wrong, rel=tolerance, abs=1e-6)
    with pytest.raises(ValueError, match=off.file):
        ablations.remove_detail(off._replace(right="no such line"), tmp_path)


def test_every_entry_removes_something_and_has_its_own_words():
    for script, module in (("ppo", ppo), ("rloo", rloo)):
        entries, usual = ablations.OFF[script], sweep.settings(module, "")
        assert len({off[:2] + (off.processes,) for off in entries}) == len(entries)
        for off in entries:
            changed = bool(off.flags) and sweep.settings(module, off.flags) != usual
            assert (changed, bool(off.file)).count(True) == bool(off.detail), off
    assert set(PROBES) == {off.what for _, off in CHANGED}


def test_wanted_details_come_with_the_runs_that_they_are_compared_with():
    def wanted(*details: str) -> list:
        jobs = ablations.jobs(ablations.Args(details=details, seeds=2, flags="--lr 1"))
        assert [job["seed"] for job in jobs] == [1, 2] * (len(jobs) // 2)
        assert {job["flags"] for job in jobs} == {"--lr 1"}
        return [(job["script"], job["processes"], job["detail"]) for job in jobs[::2]]

    one, two = [("ppo", 1, ""), ("ppo", 1, "L4")], [("ppo", 2, ""), ("ppo", 2, "X11")]
    assert wanted("P2") == [("ppo", 1, ""), ("ppo", 1, "P2")]
    assert wanted("X11", "L4") == [*one, ("rloo", 1, ""), ("rloo", 1, "L4"), *two]
    assert len(wanted()) == len(ENTRIES)


def test_the_table_of_ablations_compares_runs_of_the_same_seed(tmp_path):
    """Two seeds with all details, and without P2, whose true scores are 1 and 3 lower."""
    true = {("ppo", "", "all details"): (5, 9), ("ppo", "P2", "x"): (4, 6)}
    true[("rloo", "", "all details")] = (7,)
    rows = [
        dict(script=script, detail=detail, what=what, processes="1", seed=str(seed))
        | dict.fromkeys(ablations.METRICS, "0.5")
        | {"true score": str(value)}
        for (script, detail, what), values in true.items()
        for seed, value in enumerate(values)
    ]
    names, _, *cells = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in ablations.table(rows).splitlines()
    ]
    assert [tuple(row[:3]) for row in cells] == list(true)
    assert [row[3] for row in cells] == ["2", "2", "1"]
    column = names.index("true score")
    assert [row[column] for row in cells] == ["7 (5 … 9)", "5 (4 … 6)", "7 (7 … 7)"]
    assert [row[names.index("Δ")] for row in cells] == ["", "-2 ± 13", ""]  # 12.71 · √2 / √2
    assert ablations.student([1.0, 2.0, 3.0, 4.0, 5.0]) == "3 ± 2"  # 2.78 · √2.5 / √5 = 1.97
    ablations.draw(rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


# ------------------------------------------------------------------------------------- whole tools

FLAGS = "--query_length 8 --response_length 5 --truncate_after 1 --total_episodes 24 --batch_size 8"
FLAGS += " --eval_queries 4 --num_minibatches 2 --num_ppo_epochs 2 --lr 0.01"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with tiny models: a policy that often writes periods, and a reward model."""
    home = tmp_path_factory.mktemp("sweeps")
    models = home / "models" / "synthetic"
    lm = tiny.make_lm(vocab=tiny.WORDS)
    stop = AutoTokenizer.from_pretrained(tasks.SYNTHETIC / "model").encode(".")[0]
    stop = lm.transformer.wte.weight[stop]
    lm.transformer.ln_f.bias.data += 6 * stop / stop.square().sum()
    lm.save_pretrained(models / "sft")
    tiny.write_tokenizer(models / "sft")
    tiny.write_reward(models / "train_reward")
    return home


@pytest.fixture
def new_folder(home, tmp_path, monkeypatch):
    """A function that changes to a new folder with these models."""

    def new_folder(name: str) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "models").symlink_to(home / "models")
        monkeypatch.chdir(tmp_path / name)
        return tmp_path / name

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    return new_folder


@pytest.mark.slow
def test_an_ablation_with_all_details_is_the_scripts_own_run(new_folder, monkeypatch):
    own, removed = new_folder("own"), new_folder("removed")
    job = dict(script="ppo", detail="", what="all details", processes=1, seed=1, flags=FLAGS)
    (row,) = ablations.measure(job)
    lines = [x for x in sweep.metrics("run") if "ppo/lr" in x]
    assert row["first approxkl"] == lines[0]["ppo/policy/approxkl_avg"] > 0 and row["KL"] > 0
    monkeypatch.chdir(own)
    ppo.main(sweep.settings(ppo, f"{FLAGS} --run_name run --output_dir policy"))
    weights = [(x / "policy" / "model.safetensors").read_bytes() for x in (own, removed)]
    assert weights[0] == weights[1]


def test_a_curve_of_a_patch_has_at_most_16_points_and_its_table_the_last_one(tmp_path):
    lines = [{"step": i, "accuracy": i % 2} for i in range(32)] + [{"step": 32}]
    found = patches.curve(lines, "accuracy")
    assert [(row["at"], row["value"]) for row in found] == [(2 * i + 0.5, 0.5) for i in range(16)]
    assert patches.curve(lines, "loss") == []
    rows = [
        dict(name=name, seed=str(seed), metric="objective/kl", at=str(at), value=str(at + seed))
        for name in ("rloo", "gspo")
        for seed in (1, 2)
        for at in (0, 5)
    ]
    *_, rloo_row, gspo_row = patches.table(rows).splitlines()
    assert rloo_row == "| `rloo` | 2 | 6.5 (6 … 7) |" and gspo_row.startswith("| `gspo`")
    patches.draw(rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000
