"""benchmarks/sweep.py and the tools on it: nothing is measured twice, what every ablation replaces by hand, tiny sweeps."""

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from transformers import AutoTokenizer

import packing
import ppo
import records
import rloo
import tasks
import train_reward
import utils
from benchmarks import ablations, memory, overoptimise, recipes, sweep, what_rloo_saves

TOOL = """
import json, os, sys
job, rank = json.loads(sys.argv[2]), os.environ.get("RANK", "0")
open(os.environ["TOLD"], "a").write(f"{job['seed']} {rank} {os.environ['OMP_NUM_THREADS']} {os.path.isdir('models/mine')}\\n")
if job["seed"] == int(os.environ["FAILS"]):
    sys.exit(f"no luck with {job['seed']}")
print("much else")
print(json.dumps([{"at": 0, "x": 0.5}, {"at": 1, "x": 1.5}] if rank == "0" else []))
print("and more")
"""


@pytest.fixture
def told(tmp_path, monkeypatch):
    """A folder with a tool; what is written there is what its processes say."""
    monkeypatch.chdir(tmp_path)
    Path("models", "mine").mkdir(parents=True)
    Path("tool.py").write_text(TOOL)
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    monkeypatch.setenv("FAILS", "2")
    return tmp_path


def test_a_job_is_measured_once_and_one_that_fails_stops_no_other(told, monkeypatch):
    jobs, out, tool = (
        [dict(way="a, b", seed=seed) for seed in (1, 2, 3)],
        told / "new" / "out.csv",
        str(told / "tool.py"),
    )
    with pytest.raises(SystemExit, match="'seed': 2} failed:\nno luck with 2"):
        sweep.sweep(tool, jobs, out, workers=1)
    lines = ["way,seed,at,x", *(f'"a, b",{seed},{rest}' for seed in (1, 3) for rest in ("0,0.5", "1,1.5"))]
    assert out.read_text().splitlines() == lines
    monkeypatch.setenv("FAILS", "0")
    rows = sweep.sweep(tool, jobs, out, workers=1)
    assert [(row["seed"], row["at"]) for row in rows] == [(seed, at) for seed in "123" for at in "01"]
    assert (told / "told").read_text().splitlines() == [f"{seed} 0 1 True" for seed in (1, 2, 3, 2)]
    assert {path.name for path in told.iterdir()} == {"models", "tool.py", "told", "new"}


def test_a_job_of_two_processes_has_them(told):
    rows = sweep.measure_alone(str(told / "tool.py"), dict(seed=1, processes=2))
    assert rows == [{"seed": 1, "processes": 2, "at": at, "x": at + 0.5} for at in (0, 1)]
    assert sorted((told / "told").read_text().splitlines()) == ["1 0 1 True", "1 1 1 True"]


def test_rows_of_other_columns_are_not_mixed(tmp_path):
    sweep.append_rows(tmp_path / "x.csv", [{"a": 1, "b": 2}])
    with pytest.raises(ValueError, match=r"\['a', 'b'\], not \['a', 'c'\]"):
        sweep.append_rows(tmp_path / "x.csv", [{"a": 1, "c": 2}])
    assert (tmp_path / "x.csv").read_text().split() == ["a,b", "1,2"]


# -------------------------------------------------------------------------------------------- what an ablation replaces


SCRIPTS = {"ppo": ppo, "rloo": rloo}
ENTRIES = [(off, script) for off in ablations.OFF for script in off.scripts if off.detail]
NAMES = [f"{script}: {off.what}" for off, script in ENTRIES]
X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 9.0]])  # mean 4, population variance 40 / 6
REAL = torch.ones_like(X).bool()
FOUR = torch.tensor([1.0, 2.0, 3.0, 6.0])


def adam(script, folder):
    """How far the first step goes at lr 1 and a gradient of 1e-5, as large as ε."""
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.full((1,), 1e-5)
    script.AdamTF([weight], lr=1.0, eps=1e-5).step()
    return [-weight.item()]


def adams_memory(script, folder):
    """How many weights and steps it remembers behind an update."""
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    optimizer = script.AdamTF([weight], lr=1.0)
    optimizer.step()
    args, cpu = SimpleNamespace(save_every=None, save_minutes=None), SimpleNamespace(device="cpu")
    run = SimpleNamespace(args=args, asked=None, accelerator=cpu, total=1)
    records.Run.checkpoint(run, 1, None, optimizer)
    return [len(optimizer.state), optimizer.param_groups[0]["t"]]


def position_ids(script, folder):
    return packing.model_inputs(torch.tensor([[9, 9, 3, 4]]), 9)["position_ids"][0].tolist()


def lowest_draw(script, folder):
    """Of 50 tokens, and of 50 likelier ones behind them."""
    logits = torch.cat([torch.zeros(50), torch.ones(50)])[None]
    return [ppo.draw(logits, torch.zeros(1, 1, dtype=torch.float64)).item()]


def learning_rate(script, folder):
    return [script.anneal(3.0, 5, 10)]


def reward_head(script, folder):
    """Its spread in a model of width 32."""
    torch.manual_seed(1)
    return [utils.RewardModel(utils.RewardConfig(tiny.config(), tiny.PAD)).head.weight.std().item()]


def gain_and_bias(script, folder):
    """Of a model that gives its samples 1, 3, 5 and 7: mean 4, variance 5."""
    model = SimpleNamespace(gain=torch.ones(1), bias=torch.zeros(1), eval=lambda: None)
    model.score = lambda samples, size: 2 * samples + 1
    train_reward.normalise(model, torch.arange(4.0), size=2)
    return [model.gain.item(), model.bias.item()]


def logprob(script, folder):
    """Of a token nine times as likely as the other, at temperature ½."""
    return ppo.token_logprobs(torch.tensor([[[0.0, math.log(9)]]]), torch.tensor([[1]]), 0.5)[0].flatten().tolist()


def value_head(script, folder):
    return [ppo.PolicyAndValue(tiny.make_lm(), tiny.PAD, 0.7).value_head.weight.any().item()]


def chance_in_training(script, folder):
    lm = utils.load_lm(str(tiny.write_model(folder / "model", dropout=0.0))).train()
    first, second = (lm(torch.tensor([[1, 2, 3]])).logits for _ in range(2))
    return [not torch.equal(first, second)]


def cut_and_ended(script, folder):
    cut, ended = ppo.truncate(torch.tensor([[3, 5, 4], [3, 4, 4]]), 5, 0, 9)
    return [*cut.flatten().tolist(), *ended.tolist()]


def rows_of_minibatches(script, folder):
    rows = ppo.minibatches(np.array([3, 1, 2, 0]), tiny.make_args(num_minibatches=2))
    return np.concatenate(rows).tolist()


def rewards(script, folder):
    logprobs, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-2.0, -4.0]])
    return ppo.kl_penalised_rewards(logprobs, ref, torch.tensor([5.0]), REAL[:1, :2], 0.1)[0].tolist()


def whitened(script, folder):
    """Mean and variance of advantages, then of rewards."""
    both = ppo.whiten(X, REAL), ppo.whiten(X, REAL, shift_mean=False)
    return [x.item() for y in both for x in (y.mean(), y.var(correction=0))]


def baseline(script, folder):
    """Advantages of two completions, 1 and 3, of one prompt, and 2 and 6 of another."""
    return rloo.leave_one_out_advantages(FOUR, 2).tolist()


def two_processes_moments(script, folder):
    """As if all sums of another process were 6."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "all_sum", lambda x: x + 6)
        return [x.item() for x in ppo.moments(X, REAL)]


def same_draws(script, folder):
    """Of rows and of random numbers, by two processes."""
    seeds = (1, 1 + 100003)
    rows = [utils.rows_of_step(50, 8, 0, seed).tolist() for seed in seeds]
    draws = [torch.rand(4, generator=utils.generator(seed, 0, torch.device("cpu"))).tolist() for seed in seeds]
    return [rows[0] == rows[1], draws[0] == draws[1]]


PROBES = {  # what is replaced → numbers, with the detail, without it
    "PyTorch's Adam": (adam, [1 / (1 + math.sqrt(1000))], [1 / 2]),
    "Adam begins anew every update": (adams_memory, [1, 1], [0, 0]),
    "position ids count pads": (position_ids, [0, 0, 0, 1], [0, 1, 2, 3]),
    "samples from the top 50 tokens": (lowest_draw, [0], [50]),
    "constant learning rate": (learning_rate, [1.5], [3]),
    "reward head of std 0.02": (reward_head, [pytest.approx(33**-0.5, rel=0.3)], [pytest.approx(0.02, rel=0.3)]),
    "gain 1, bias 0": (gain_and_bias, [5**-0.5, -4 * 5**-0.5], [1, 0]),
    "log-probabilities at temperature 1": (logprob, [math.log(81 / 82)], [math.log(9 / 10)]),
    "value head as PyTorch makes it": (value_head, [False], [True]),
    "dropout 0.1 in training": (chance_in_training, [False], [True]),
    "cut, but no penalty": (cut_and_ended, [3, 5, 9, 3, 4, 4, True, False], [3, 5, 9, 3, 4, 4, True, True]),
    "same minibatches every epoch": (rows_of_minibatches, [1, 3, 0, 2], [0, 1, 2, 3]),
    "KL penalty on the last token": (rewards, [-0.1, 4.8], [0, 4.7]),
    "advantages not whitened": (whitened, [0, 1, 4, 1], [4, 40 / 6, 4, 1]),
    "rewards whitened to mean 0": (whitened, [0, 1, 4, 1], [0, 1, 0, 1]),
    "no baseline": (baseline, [-2, -4, 2, 4], [1, 2, 3, 6]),
    "baseline of the whole batch": (baseline, [-2, -4, 2, 4], [-2, -1, 0, 3]),
    "each process whitens alone": (two_processes_moments, [30 / 12, 59.5 / 12], [4, 40 / 6]),
    "processes sample the same": (same_draws, [False, False], [True, True]),
}
REPLACED = [(off, script) for off, script in ENTRIES if off.replaced]


@pytest.mark.parametrize(("off", "script"), REPLACED, ids=[f"{script}: {off.what}" for off, script in REPLACED])
def test_what_is_replaced_does_what_the_entry_says_and_is_back_afterwards(off, script, tmp_path):
    probe, expected, without = PROBES[off.what]

    def close(values):
        return [value if hasattr(value, "rel") else pytest.approx(value, abs=1e-5) for value in values]

    assert probe(SCRIPTS[script], tmp_path) == close(expected)
    with ablations.switched_off(off, script):
        assert probe(SCRIPTS[script], tmp_path / "off") == close(without)
    assert probe(SCRIPTS[script], tmp_path / "again") == close(expected)


def test_every_entry_switches_something_off_and_is_known_by_its_words():
    assert all(off.replaced or off.flags for off, _ in ENTRIES) and len(set(NAMES)) == len(NAMES)
    assert set(PROBES) == {off.what for off, _ in REPLACED}


@pytest.mark.parametrize("target", ["ppo.no_such", "ppo.NoSuch.step", "ppo.AdamTF.no_such", "no_such.thing"])
def test_what_is_not_there_cannot_be_replaced(target):
    off = ablations.Off("P0", "nothing", {target: lambda old, *args: None})
    with pytest.raises((AttributeError, ModuleNotFoundError), match="(?i)no_?such"), ablations.switched_off(off, "ppo"):
        pass


# ------------------------------------------------------------------------------------------------ runs of the ablations


SIZES = dict(query_length=8, response_length=5, truncate_after=1)
FLAGS = "--query_length 8 --response_length 5 --truncate_after 1 --total_episodes 24 --batch_size 8 --eval_queries 4"
FLAGS += " --num_minibatches 2 --num_ppo_epochs 2 --lr 0.01"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with tiny models, which know full stops, and labels."""
    home = tmp_path_factory.mktemp("sweeps")
    models = home / "models" / "synthetic"
    lm, tokenizer = tiny.make_lm(vocab=tiny.WORDS), AutoTokenizer.from_pretrained(tasks.SYNTHETIC / "model")
    stop = lm.transformer.wte.weight[tokenizer.encode(".")[0]]
    lm.transformer.ln_f.bias.data += 6 * stop / stop.square().sum()
    lm.save_pretrained(models / "sft")
    tiny.write_tokenizer(models / "sft")
    (models / "train_reward").symlink_to(Path("..", "sweep", "with_all"))
    (home / "labels.json").write_text(json.dumps(tiny.label_rows(16, 8, 5)))
    return home


@pytest.fixture(scope="module")
def measure_in(home):
    """A tool's `measure` of a job, in this process, in a folder of its own in `home`: its rows, and the folder."""

    def measure_in(tool, job):
        folder = home / str(len(list(home.iterdir())))
        folder.mkdir()
        (folder / "models").symlink_to(home / "models")
        few = dict(num_labels=16, batch_size=8, lr=0.01, rollout_batch_size=16, normalize_samples=16)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(records, "plot_run", lambda folder, names: (folder / "curves.png").touch())
            patch.setitem(
                train_reward.PRESETS, "synthetic", SIZES | few | dict(label_dataset=str(home / "labels.json"))
            )
            sweep.reward_model("with_all", "")  # once
            return [job | row for row in tool.measure(job)], folder

    return measure_in


@pytest.fixture(scope="module")
def measured(measure_in):
    """The row of an entry of the ablations, and the folder of its run; each measured once."""
    found = {}

    def measured(off, script):
        job = dict(script=script, detail=off.detail, what=off.what, processes=off.processes, seed=1, flags=FLAGS)
        if str(job) not in found:
            (row,), folder = measure_in(ablations, job)
            found[str(job)] = {name: row[name] for name in ablations.METRICS}, folder
        return found[str(job)]

    return measured


def full(script):
    return next(off for off in ablations.OFF if off.what == "all details" and script in off.scripts)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_with_all_details_is_the_scripts_own(script, measured, monkeypatch):
    row, folder = measured(full(script), script)
    monkeypatch.chdir(folder)
    SCRIPTS[script].main(sweep.settings(SCRIPTS[script], f"{FLAGS} --run_name own --output_dir own"))
    lines = [[{k: v for k, v in x.items() if "time/" not in k} for x in sweep.metrics(name)] for name in ("run", "own")]
    assert lines[0] == lines[1]
    assert row["first approxkl"] == lines[0][0]["ppo/policy/approxkl_avg"] > 0
    weights = [Path(name, "model.safetensors").read_bytes() for name in ("policy", "own")]
    assert weights[0] == weights[1]
    start = ablations.judge("models/synthetic/sft", sweep.settings(ppo, FLAGS))
    assert start["KL"] == 0 < row["KL"] and start["true score"] != row["true score"]


@pytest.mark.parametrize(("off", "script"), ENTRIES, ids=NAMES)
def test_a_run_without_a_detail_ends_elsewhere(off, script, measured):
    """Those of two processes are nothing on one, as they should be; there the probes above have to do."""
    (row, _), (base, _) = measured(off, script), measured(full(script), script)
    assert (row != base) == (off.processes == 1)
    assert all(math.isfinite(value) for value in row.values())


def ablation_rows():
    """Two seeds with all details and two without P2, whose true score is 1 and 3 lower; one seed of RLOO."""
    values = {("ppo", "", "all details"): (5, 9), ("ppo", "P2", "a head"): (4, 6), ("rloo", "", "all details"): (7,)}
    return [
        dict(script=script, detail=detail, what=what, processes="1", seed=str(seed), flags="", seconds="9")
        | dict.fromkeys(ablations.METRICS, "0.5")
        | {"true score": str(true)}
        for (script, detail, what), trues in values.items()
        for seed, true in enumerate(trues, 1)
    ]


def test_the_table_compares_runs_of_the_same_seed(tmp_path):
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ablations.table(ablation_rows()).splitlines()]
    names, _, *rows = lines
    assert [row[:4] for row in rows] == [
        ["ppo", "", "all details", "2"],
        ["ppo", "P2", "a head", "2"],
        ["rloo", "", "all details", "1"],
    ]
    assert [row[names.index("true score")] for row in rows] == ["7 (5 … 9)", "5 (4 … 6)", "7 (7 … 7)"]
    assert [row[names.index("Δ")] for row in rows] == ["", "-2 ± 13", ""]  # 12.71 · √2 / √2
    assert ablations.student([1.0, 2.0, 3.0, 4.0, 5.0]) == "3 ± 2"  # 2.78 · √2.5 / √5 = 1.97
    ablations.draw(ablation_rows(), tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_a_wanted_detail_comes_with_the_runs_that_it_is_compared_with():
    def wanted(*details):
        jobs = ablations.jobs(ablations.Args(details=details, seeds=2, flags="--lr 1"))
        assert [job["seed"] for job in jobs] == [1, 2] * (len(jobs) // 2)
        assert {job["flags"] for job in jobs} == {"--lr 1"}
        return [(job["script"], job["processes"], job["detail"]) for job in jobs[::2]]

    assert wanted("P2") == [("ppo", 1, ""), ("ppo", 1, "P2")]
    assert wanted("X11", "L4") == [
        ("ppo", 1, ""),
        ("ppo", 1, "L4"),
        ("rloo", 1, ""),
        ("rloo", 1, "L4"),
        ("ppo", 2, ""),
        ("ppo", 2, "X11"),
    ]
    assert len(wanted()) == sum(len(off.scripts) for off in ablations.OFF)


# --------------------------------------------------------------------------------------------------------- overoptimise


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_best_of_n_is_the_mean_over_all_subsets_of_the_one_with_the_highest_score(n):
    true = torch.tensor([[3.0, -1.0, 4.0, 1.5, -5.0], [0.0, 1.0, 2.0, 4.0, 8.0]], dtype=torch.float64)  # by score
    expected = [[row[max(subset)] for subset in itertools.combinations(range(5), n)] for row in true.tolist()]
    assert overoptimise.best_of(true, n).tolist() == pytest.approx([sum(x) / len(x) for x in expected])


def test_runs_and_best_of_n_are_measured_alike_and_drawn_together(measure_in, tmp_path):
    jobs = overoptimise.jobs(overoptimise.Args(labels=(8, 16), betas=(0.0, 0.5), seeds=1, flags=FLAGS))
    assert len(jobs) == 2 * (2 * 2 + 1)
    rows = [row for job in jobs for row in measure_in(overoptimise, job)[0]]
    for labels in (8, 16):
        mine = [row for row in rows if row["labels"] == labels]
        first = [[row["KL"], row["score"], row["true score"]] for row in mine if row["at"] == 0]
        assert len(first) == 4 and all(row == first[0] for row in first) and first[0][0] == 0  # nothing is learned yet
        last = [row["score"] for row in mine if row["at"] == 3]
        assert len(set(last)) == 4  # 24 episodes in batches of 8; each way and β ends elsewhere
        best = {row["at"]: row for row in mine if row["way"] == "best_of_n"}
        assert list(best) == list(overoptimise.NS) and best[4]["KL"] == pytest.approx(math.log(4) - 3 / 4)
        scores = [row["score"] for row in best.values()]
        assert scores == sorted(scores) and scores[0] < scores[-1]
    texts = [{name: str(value) for name, value in row.items()} for row in rows]
    assert len(overoptimise.table(texts).splitlines()) == 2 + 2 + len(jobs)
    overoptimise.draw(texts, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_the_table_says_where_a_way_ends_and_where_its_true_score_was_highest():
    rows = [
        dict(
            way="ppo",
            labels="9",
            beta="0.0",
            seed=str(seed),
            flags="",
            KL=str(2 * at),
            score=str(at + seed),
            at=str(at),
        )
        | {"true score": str(true + seed)}
        for seed in (1, 3)
        for at, true in enumerate((0, 5, 4))
    ]
    before, line = overoptimise.table(rows).splitlines()[2:]
    assert before == "| 9 | reference | | 0 | 2 | 2 | |"
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells == ["9", "ppo", "0.0", "4 (4 … 4)", "4 (3 … 5)", "6 (5 … 7)", "7, 2"]


# ------------------------------------------------------------------------------------------------------------- recipes


def test_diffs_and_recipes_run_beside_the_script_that_they_are_made_of(measure_in, tmp_path):
    names = ("ppo", "rloo", "ema", "dr_grpo", "openrlhf")  # the last needs a critic to start from
    jobs = recipes.jobs(recipes.Args(names=names, seeds=1, flags=FLAGS))
    found = {job["name"]: measure_in(recipes, job) for job in jobs}
    rows = [row for mine, _ in found.values() for row in mine]
    for name, (mine, folder) in found.items():
        assert [row["at"] for row in mine] == [0, 1, 2] and mine[0]["KL"] == 0 and mine[0]["seconds"] > 0
        assert (folder / f"{name}.py").exists() == (name not in ("ppo", "rloo"))
        last = json.loads((folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()[2])
        assert mine[2]["true score"] == pytest.approx(last["objective/gold_score"], rel=1e-3)
    curves = recipes.curves_of([{name: str(x) for name, x in row.items()} for row in rows], "KL")
    assert (curves["ppo"] == curves["ema"]).all() and (curves["ppo"] != curves["openrlhf"])[0, 1:].all()
    assert len(recipes.table(rows).splitlines()) == 3 * 3 + 2 + 2 + 2
    for some in (rows, [row for row in rows if row["name"] == "openrlhf"]):
        recipes.draw(some, tmp_path / "x.png")
        assert (tmp_path / "x.png").stat().st_size > 1000


def test_every_diff_and_recipe_is_in_the_table_with_the_mean_of_its_last_five_updates():
    patches = [path.stem for path in sorted((sweep.ROOT / "diffs").rglob("*.diff"))]
    assert sorted(recipes.Args.names) == sorted(["ppo", "rloo", *patches])
    rows = [
        dict(name="ppo", seed=seed, at=at, score=at + shift, KL=0.5, seconds=1, **{"true score": at, "peak MiB": 1250})
        for seed, shift in ((1, 0), (2, -10))
        for at in range(7)
    ]
    line = recipes.table(rows).splitlines()[3]
    assert line == "| `ppo` | 2 | −1 (−6 … 4) | 4 | 0.5 | 1 | 1250 |"


# -------------------------------------------------------------------------------------------------- what RLOO saves


def test_a_separate_critic_takes_weights_and_adams_moments_of_its_own_and_time(measure_in, monkeypatch):
    monkeypatch.setitem(memory.SHAPES, "tiny", tiny.config(vocab=tiny.WORDS, positions=96))
    job = dict(shape="tiny", episodes=8, updates=2)
    rows = {way: measure_in(what_rloo_saves, dict(way=way) | job)[0][0] for way in what_rloo_saves.WAYS}
    trunk = sum(p.numel() for p in tiny.make_lm(vocab=tiny.WORDS, positions=96).transformer.parameters())
    live = {way: row["live"] * 2**30 for way, row in rows.items()}
    assert live["separate_critic"] - live["ppo"] == pytest.approx(12 * trunk, rel=0.01)  # weight and two moments, fp32
    values = 12 * 33 + 256 * 4 * (
        24 + 24 - 1 - 1
    )  # of the head; values, rewards [256, 24] less rewards, advantages [256]
    assert live["ppo"] - live["rloo"] == pytest.approx(values, abs=64)
    for row in rows.values():
        assert max(row["sample"], row["score"], row["optimise"]) > row["live"] and row["seconds"] > 0


def test_what_is_saved_is_counted_from_each_way_to_rloo():
    sizes = {"separate_critic": (8, 20, 4.0), "ppo": (5, 10, 3.0), "rloo": (4, 10, 2.0)}
    rows = [
        dict(shape="s", way=way, live=str(live), sample="1", score="2", optimise=str(peak), seconds=str(seconds))
        for way, (live, peak, seconds) in sizes.items()
    ]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in what_rloo_saves.table(rows).splitlines()[2:]]
    assert [line[1:3] for line in lines] == [["separate_critic", "8.00"], ["ppo", "5.00"], ["rloo", "4.00"]]
    assert [line[-3:] for line in lines] == [["50%", "50%", "2.00"], ["20%", "0%", "1.50"], ["0%", "0%", "1.00"]]
