"""benchmarks/ablations.py: what every entry replaces, by hand, and that a run notices; sweep.py measures nothing twice."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch

import ppo
import records
import rloo
import train_reward
import utils
from benchmarks import ablations, sweep

SCRIPTS = {"ppo": ppo, "rloo": rloo}
ENTRIES = [(off, script) for off in ablations.OFF for script in off.scripts if off.detail]
NAMES = [f"{script}: {off.what}" for off, script in ENTRIES]
X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 9.0]])  # mean 4, population variance 40 / 6
REAL = torch.ones_like(X).bool()
FOUR = torch.tensor([1.0, 2.0, 3.0, 6.0])

# ------------------------------------------------------------------------------------- a few numbers of what is replaced


def adam(script, folder):
    """How far the first step goes at lr 1 and a gradient of 1e-5, as large as ε."""
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.full((1,), 1e-5)
    script.AdamTF([weight], lr=1.0, eps=1e-5).step()
    return [-weight.item()]


def position_ids(script, folder):
    return utils.model_inputs(torch.tensor([[9, 9, 3, 4]]), 9)["position_ids"][0].tolist()


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


# -------------------------------------------------------------------------------------------------------- whole runs

SIZES = dict(query_length=8, response_length=5, truncate_after=1)
FLAGS = "--query_length 8 --response_length 5 --truncate_after 1 --total_episodes 24 --batch_size 8 --eval_queries 4"
FLAGS += " --num_minibatches 2 --num_ppo_epochs 2 --lr 0.01"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """`ablations.measure` of an entry with tiny models: the folder of its run, and its row."""
    home, found = tmp_path_factory.mktemp("ablations"), {}
    models = home / "models" / "synthetic"
    lm = tiny.make_lm(vocab=tiny.WORDS)
    stop = utils.AutoTokenizer.from_pretrained(tiny.tasks.SYNTHETIC / "model").encode(".")[0]
    direction = lm.transformer.wte.weight[stop]
    lm.transformer.ln_f.bias.data += 6 * direction / direction.square().sum()  # some responses have a full stop
    lm.save_pretrained(models / "sft")
    tiny.write_tokenizer(models / "sft")
    (models / "train_reward").symlink_to(Path("..", "sweep", "with_all"))
    (home / "labels.json").write_text(json.dumps(tiny.label_rows(16, 8, 5)))
    labels = dict(label_dataset=str(home / "labels.json"), num_labels=16, batch_size=8, lr=0.01, rollout_batch_size=16)

    def measured(off, script):
        key = (off.what, off.processes, script)
        if key not in found:
            folder = home / str(len(found))
            folder.mkdir()
            (folder / "models").symlink_to(home / "models")
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder)
                patch.setattr(records, "plot_run", lambda folder, names: (folder / "curves.png").touch())
                patch.setitem(train_reward.PRESETS, "synthetic", SIZES | labels | dict(normalize_samples=16))
                job = dict(script=script, detail=off.detail, what=off.what, processes=off.processes, seed=1, flags=FLAGS)
                sweep.reward_model("with_all", "")  # once
                (row,) = ablations.measure(job)
            found[key] = folder, {name: row[name] for name in ablations.METRICS}
        return found[key]

    return measured


def full(script):
    return next(off for off in ablations.OFF if off.what == "all details" and script in off.scripts)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_with_all_details_is_the_scripts_own(script, measured, monkeypatch):
    folder, row = measured(full(script), script)
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
    (folder, row), (_, base) = measured(off, script), measured(full(script), script)
    assert (row != base) == (off.processes == 1)
    assert all(math.isfinite(value) for value in row.values())
