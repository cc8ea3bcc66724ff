"""What each implementation detail is worth on the synthetic task: runs with one switched off, beside runs with all.

    python sft.py --task synthetic && python train_reward.py --task synthetic
    python benchmarks/ablations.py                                  # ablations.csv, .png, and the table on the terminal
    python benchmarks/ablations.py --details P9 A1 --seeds 2 --out mine.csv

A detail is switched off by flags, or by replacing a function of the script from outside. Score, true score and KL are of the
policy at the end, on held-out queries, measured by ppo.py as it is and with the reward model that has all details: a run
without P1 or G3 measures itself wrongly. The rest is the run's own: approxkl of its first update, and means over all updates.
A band is the 95% interval of a bootstrap over the seeds, which is narrow with five; Δ the true score less that of the run with
all details and the same seed, with Student's interval: of twenty details worth nothing one seems to be worth something.
"""

import importlib
import math
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
import packing
import ppo  # noqa: E402
import records  # noqa: E402
import tasks  # noqa: E402
import utils  # noqa: E402
from benchmarks import sweep  # noqa: E402

METRICS = ("score", "true score", "KL", "first approxkl", "approxkl", "clip fraction")
BOTH = ("ppo", "rloo")
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # t's 97.5% quantile for 2 … 10 seeds


@dataclass(frozen=True)
class Args:
    """What each implementation detail is worth."""

    out: Path = Path(__file__).with_suffix(".csv")
    """CSV to write, or to go on with; a picture beside it"""
    details: tuple[str, ...] = ()
    """only these, such as P9; empty: all"""
    seeds: int = 5
    """runs of each"""
    workers: int = os.cpu_count() or 1
    """runs at a time"""
    flags: str = ""
    """for every run; write --flags="--total_episodes 512" with its ="""
    only: str | None = None
    """one job as JSON, in this process"""


# ------------------------------------------------------------------------------------------------------- what is off


class Off(NamedTuple):
    """A detail that is switched off."""

    detail: str
    what: str
    replaced: dict[str, Callable] = {}  # full name of a function → what takes its place; it gets the old one first
    flags: str = ""
    scripts: tuple[str, ...] = ("ppo",)
    processes: int = 1
    new_reward: bool = False  # the reward model is made without the detail too


def own_head(old: Callable, self: Any, *args: Any) -> None:
    old(self, *args)
    self.value_head.reset_parameters()


def with_dropout(old: Callable, config: Any) -> Any:
    for key, value in old(config).to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.1)
    return config


def never_missing(old: Callable, responses: Any, *rest: Any) -> tuple[Any, Any]:
    return old(responses, *rest)[0], torch.ones_like(responses[:, 0]).bool()


def penalty_at_the_end(old: Callable, logprobs: Any, ref: Any, scores: Any, mask: Any, beta: float, *rest: Any) -> Any:
    return old(logprobs, logprobs, scores - beta * (logprobs - ref).sum(dim=1), mask, beta, *rest)


def pads_counted(old: Callable, tokens: Any, pad_id: int) -> dict[str, Any]:
    return old(tokens, pad_id) | {"position_ids": torch.arange(tokens.shape[1]).expand(tokens.shape)}


def padded(old: Callable, base: Any, tokens: Any, columns: Any, pad_id: int, prompt: int = 0) -> Any:
    hidden = base(**packing.model_inputs(tokens, pad_id), use_cache=False).last_hidden_state
    return hidden[torch.arange(len(tokens))[:, None], columns]


def top_50(old: Callable, logits: Any, *rest: Any) -> Any:
    return old(logits.masked_fill(logits < logits.topk(50).values[:, -1:], -torch.inf), *rest)


def small_head(old: Callable, self: Any, module: Any) -> None:
    old(self, module)
    if module is getattr(self, "head", None):
        torch.nn.init.normal_(module.weight, std=0.02)


def gain_1_bias_0(old: Callable, model: Any, *samples: Any, size: int) -> Any:
    found = old(model, *samples, size=size)
    with torch.no_grad():
        model.gain.fill_(1)
        model.bias.fill_(0)
    return found


def one_process_alone(old: Callable, *args: Any) -> Any:
    with patch.object(utils, "all_sum", lambda x: x):
        return old(*args)


def forgotten(old: Callable, run: Any, update: int, policy: Any, optimizer: Any, *rest: Any) -> None:
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["t"] = 0
    old(run, update, policy, optimizer, *rest)


def unchecked(*args: Any) -> None:
    """In place of `utils.check_policy`, which refuses such a run."""


FIRST = 100_003  # modulo this, the seed of every process is that of the first
OFF = (
    Off("", "all details", scripts=BOTH),
    Off(
        "A1", "PyTorch's Adam", {"{script}.AdamTF.step": lambda old, *args: torch.optim.Adam.step(*args)}, scripts=BOTH
    ),
    Off("A1", "Adam begins anew every update", {"records.Run.checkpoint": forgotten}),
    Off(
        "G3",
        "position ids count pads",
        {
            "packing.model_inputs": pads_counted,
            "packing.hidden_states": padded,
            "utils.check_policy": unchecked,
        },
    ),
    Off("G4", "samples from the top 50 tokens", {"ppo.draw": top_50}),
    Off("G5", "constant learning rate", {"{script}.anneal": lambda old, lr, *rest: lr}, scripts=BOTH),
    Off("R2", "reward head of std 0.02", {"utils.RewardModel._init_weights": small_head}, new_reward=True),
    Off("R3", "gain 1, bias 0", {"train_reward.normalise": gain_1_bias_0}, scripts=BOTH, new_reward=True),
    Off(
        "P1",
        "log-probabilities at temperature 1",
        {"ppo.token_logprobs": lambda old, *args: old(*args[:2], 1.0), "utils.check_policy": unchecked},
    ),
    Off("P2", "value head as PyTorch makes it", {"ppo.PolicyAndValue.__init__": own_head}),
    Off("P4", "dropout 0.1 in training", {"utils.without_dropout": with_dropout}),
    Off("P5", "neither cut nor penalty", flags="--truncate_token None"),
    Off("P5", "cut, but no penalty", {"ppo.truncate": never_missing}),
    Off("P5", "KL and losses end at the cut too", flags="--eos_task"),
    Off("P6", "λ = 1", flags="--lam 1"),
    Off("P7", "same minibatches every epoch", {"ppo.minibatches": lambda old, order, args: old(np.sort(order), args)}),
    Off("P8", "no KL penalty", flags="--kl_coef 0 --kl_target None", scripts=BOTH),
    Off("P8", "KL penalty on the last token", {"ppo.kl_penalised_rewards": penalty_at_the_end}),
    Off(
        "P9",
        "advantages not whitened",
        {"ppo.whiten": lambda old, x, mask, shift_mean=True: x if shift_mean else old(x, mask, False)},
    ),
    Off("P9", "rewards not whitened", flags="--no-whiten_rewards"),
    Off("P9", "rewards whitened to mean 0", {"ppo.whiten": lambda old, x, mask, shift_mean=True: old(x, mask)}),
    Off("P10", "values not clipped", flags="--cliprange_value 1e6"),
    Off("P10", "value loss without ½", flags="--vf_coef 0.2"),
    Off("P10", "no critic: values stay 0", flags="--vf_coef 0"),
    Off("P11", "fixed β", flags="--kl_target None", scripts=BOTH),
    Off("L3", "no baseline", {"rloo.leave_one_out_advantages": lambda old, rewards, k: rewards}, scripts=("rloo",)),
    Off(
        "L3",
        "baseline of the whole batch",
        {"rloo.leave_one_out_advantages": lambda old, rewards, k: rewards - rewards.mean()},
        scripts=("rloo",),
    ),
    Off("L4", "ratio not clipped", flags="--cliprange 1e6", scripts=BOTH),
    Off("", "all details", processes=2),
    Off("X11", "each process whitens alone", {"ppo.moments": one_process_alone}, processes=2),
    Off(
        "G6",
        "processes sample the same",
        {
            "utils.rows_of_step": lambda old, n, size, step, seed: old(n, size, step, seed % FIRST),
            "utils.generator": lambda old, seed, *rest: old(seed % FIRST, *rest),
        },
        processes=2,
    ),
)


@contextmanager
def switched_off(off: Off, script: str) -> Iterator[None]:
    """Inside, `script` lacks the detail. Errors: `AttributeError` for a function that there is not."""
    with ExitStack() as stack:
        for target, new in off.replaced.items():
            owner, _, name = target.format(script=script).rpartition(".")
            owner = pkgutil.resolve_name(owner)
            old = getattr(owner, name)
            stack.enter_context(patch.object(owner, name, lambda *a, new=new, old=old, **k: new(old, *a, **k)))
        yield


# ------------------------------------------------------------------------------------------------------------- a run


def judge(policy: str, args: ppo.Args) -> dict[str, float]:
    """Score, true score and KL of a policy on held-out queries, four responses to each, the same random numbers for all."""
    queries, tokenizer, models = sweep.held_out(args)
    gold, lm = tasks.load_function(args.task.gold_fn), utils.load_lm(policy).eval()
    models = models._replace(policy=ppo.Policy(lm, models.ids.pad, args.task.temperature).eval())
    found, _ = ppo.evaluate(models, lm, queries.repeat(4, 1), gold, tokenizer, args)
    return dict(zip(METRICS, (found["eval/scores"], found["eval/gold_score"], found["eval/kl"]), strict=False))


def measure(job: sweep.Job) -> list[dict[str, float]]:
    """The row of one run, in this folder; none on any process but the first."""
    off = next(off for off in OFF if off.processes == job["processes"] and off[:2] == (job["detail"], job["what"]))
    script, begin = importlib.import_module(job["script"]), time.process_time()
    flags = f"--run_name run --output_dir policy {job['flags']} --seed {job['seed']} {off.flags}"
    with switched_off(off, job["script"]):
        if off.new_reward:
            flags += f" --reward_model {sweep.reward_model(f'without_{off.detail}', '')}"
        script.main(sweep.settings(script, flags))
    if os.environ.get("RANK", "0") != "0":
        return []
    seconds = time.process_time() - begin
    kls, clipped = (
        [line[name] for line in sweep.metrics("run") if name in line]
        for name in ("ppo/policy/approxkl_avg", "ppo/policy/clipfrac_avg")
    )
    own = dict(zip(METRICS[3:], (kls[0], np.mean(kls), np.mean(clipped)), strict=True))
    return [judge("policy", sweep.settings(ppo, job["flags"])) | own | {"seconds": seconds}]


# ------------------------------------------------------------------------------------------------------------ output


def seeds_of(rows: list[dict[str, str]], metric: str) -> dict[tuple, dict[str, float]]:
    """Script, processes, detail and what is off → seed → value."""
    found: dict[tuple, dict[str, float]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("script", "processes", "detail", "what"))
        found.setdefault(key, {})[row["seed"]] = float(row[metric])
    return found


def student(values: list[float]) -> str:
    """Mean and Student's 95% interval; nothing of fewer than two."""
    if len(values) < 2:
        return ""
    half = STUDENT[min(len(values), 10) - 2] * np.std(values, ddof=1) / math.sqrt(len(values))
    return f"{np.mean(values):.2g} ± {half:.2g}"


def table(rows: list[dict[str, str]]) -> str:
    """Markdown: a line for each detail, means and bands over its seeds."""
    names = ("", "detail", "switched off", "seeds", *METRICS[:2], "Δ", *METRICS[2:])
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    found = {metric: seeds_of(rows, metric) for metric in METRICS}
    for key, values in found["true score"].items():
        base = found["true score"].get((*key[:2], "", "all details"), {}) if key[2] else {}
        bands = (sweep.interval(list(found[metric][key].values())) for metric in METRICS)
        cells = ["{:.3g} ({:.3g} … {:.3g})".format(*band) for band in bands]
        cells.insert(2, student([value - base[seed] for seed, value in values.items() if seed in base]))
        where = key[0] + " on two processes" * (key[1] == "2")
        lines.append(f"| {where} | {key[2]} | {key[3]} | {len(values)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """A panel for each metric, a line for each detail; behind them the band of the runs with all."""
    plt = records.pyplot()
    keys = list(seeds_of(rows, "score"))
    size = (2.6 * len(METRICS) + 3, 0.26 * len(keys) + 1)
    figure, axes = plt.subplots(1, len(METRICS), figsize=size, sharey=True, layout="constrained")
    for axis, metric in zip(axes, METRICS, strict=True):
        found = {key: sweep.interval(list(values.values())) for key, values in seeds_of(rows, metric).items()}
        for y, (key, (middle, low, high)) in enumerate(found.items()):
            color = f"C{BOTH.index(key[0]) + 2 * (key[1] == '2')}"
            axis.plot([low, high], [y, y], color=color, linewidth=1.4)
            axis.plot(middle, y, "o", color=color, markersize=4)
            if key[3] == "all details":
                group = [i for i, other in enumerate(keys) if other[:2] == key[:2]]
                axis.fill_betweenx([group[0] - 0.4, group[-1] + 0.4], low, high, color=color, alpha=0.15, linewidth=0)
        axis.set_title(metric, fontsize=10)
        axis.grid(alpha=0.3, axis="x")
        axis.set_xscale("log" if "approxkl" in metric or metric == "KL" else "linear")
        if metric == "KL":
            axis.set_xticks((10, 20, 40), ("10", "20", "40"))
            axis.minorticks_off()
    labels = [" ".join(filter(None, (key[0], "× 2" * (key[1] == "2"), *key[2:]))) for key in keys]
    axes[0].set_yticks(range(len(keys)), labels, fontsize=8)
    axes[0].set_ylim(len(keys) - 0.4, -0.6)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def jobs(args: Args) -> list[sweep.Job]:
    """The wanted details, each behind the runs with all details that it is compared with."""
    kinds = [(off.processes, script, off) for off in OFF for script in off.scripts]
    wanted = [kind for kind in kinds if kind[2].detail and (kind[2].detail in args.details or not args.details)]
    groups = {kind[:2] for kind in wanted}
    kinds = [kind for kind in kinds if kind in wanted or not kind[2].detail and kind[:2] in groups]
    return [
        dict(script=script, detail=off.detail, what=off.what, processes=processes, seed=seed, flags=args.flags)
        for processes, script, off in sorted(kinds, key=lambda kind: kind[:2])
        for seed in range(1, args.seeds + 1)
    ]


if __name__ == "__main__":
    sweep.main(__file__, tyro.cli(Args), measure, jobs, table, draw)
