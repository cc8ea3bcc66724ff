"""From people's ratings to a policy: data, true score, tables and picture, for human.sh.

    python benchmarks/human.py data movie-ratings.tar.gz    # runs/human_data
    python benchmarks/human.py report    # human.csv, of the runs in runs/ that are finished
    python benchmarks/human.py draw      # human.png

The archive is that of Hutto and Gilbert 2014, VADER: snippets of movie reviews and
15 or more people's ratings of each. Every second rating belongs to the first half of the raters,
the others to the second half.
"""

import ast
import csv
import json
import os
import sys
import tarfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
import tyro

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import train_reward  # noqa: E402
from benchmarks import pretrained  # noqa: E402
from machinery import cli  # noqa: E402
from tools import winrate  # noqa: E402
from tools.calibration import calibration  # noqa: E402
from tools.curves import make_panels, provenance  # noqa: E402
from tools.policies import PolicyArgs, policy_tasks, sample_tokens  # noqa: E402
from utils import pad_left  # noqa: E402

Snippet = tuple[str, list[int]]  # a text and its ratings, from -4 to 4
PROMPT = "Review:"
NUM_TRAIN, NUM_HELDOUT = 6000, 1000  # snippets of labels and SFT; of held-out pairs
NUM_PAIRS, NUM_HELDOUT_PAIRS = 10_240, 1024
QUERY_WORDS, NUM_EVAL, BATCH_SIZE = 6, 256, 64  # of the policies; as in human.sh
TABLE = ROOT / "benchmarks/results/human.csv"
DATA = Path("runs/human_data")
PAIRS = os.environ.get("PAIRS", "2560")  # of the reward models
MODEL, TRUE_MODEL = (f"runs/human_{half}_{PAIRS}/model" for half in ("first", "second"))
SIDES = "chosen", "rejected"
DEVICE, MAX_TOKENS = ("cuda", 16384) if torch.cuda.is_available() else ("cpu", 1024)
CURVES = [f"objective/{x}" for x in ("scores", "gold_score", "kl", "ended", "entropy")]


@dataclass(frozen=True)
class Args:
    """From people's ratings to a policy: one step of human.sh."""

    command: tyro.conf.Positional[Literal["data", "report", "draw"]]
    """write the data, measure the models, or draw the picture"""
    archive: tyro.conf.Positional[Path | None] = None
    """the ratings, for `data`"""


# --------------------------------------------------------------------------------------------- data


def read_archive(path: Path) -> list[Snippet]:
    """Texts of 8 to 30 words, each once, and their ratings."""
    with cli.about(str(path)), tarfile.open(path) as archive:
        tables = []
        for name in ("GroundTruth", "anonDataRatings"):
            member: Any = archive.extractfile(f"movieReviewSnippets_{name}.txt")
            lines = member.read().decode("latin-1").splitlines()
            tables.append(dict(line.split("\t", 1) for line in lines if line))
        texts, ratings = tables  # id → mean and text; id → mean, deviation and list
        found = {}
        for key, line in texts.items():
            text = " ".join(line.split("\t")[1].split())
            if 8 <= len(text.split()) <= 30:
                found[text] = ast.literal_eval(ratings[key].split("\t")[2])
    return list(found.items())


def draw_pairs(snippets: list[Snippet], number: int, rng: Any) -> list[dict[str, Any]]:
    """Pairs of snippets; the better one by a single rating of each. Ties are drawn again.

    `agrees`: whether the mean of the other ratings prefers the same one; 0.5 if it is equal.
    `mean_agrees`: whether the mean of all ratings does.
    """
    pairs: list[dict[str, Any]] = []
    while len(pairs) < number:
        rows = rng.choice(len(snippets), 2, replace=False)
        (a, ratings_a), (b, ratings_b) = (snippets[row] for row in rows)
        i, j = rng.integers(len(ratings_a)), rng.integers(len(ratings_b))
        sign = np.sign(ratings_a[i] - ratings_b[j])
        if sign == 0:
            continue
        chosen, rejected = (a, b) if sign > 0 else (b, a)
        others = np.mean(np.delete(ratings_a, i)) - np.mean(np.delete(ratings_b, j))
        mean = np.mean(ratings_a) - np.mean(ratings_b)
        pair = {"prompt": PROMPT, "chosen": f" {chosen}", "rejected": f" {rejected}"}
        pair["agrees"], pair["mean_agrees"] = ((1 + sign * np.sign([others, mean])) / 2).tolist()
        pairs.append(pair)
    return pairs


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_data(archive: Path) -> None:
    """Write texts and pairs, held-out pairs, and queries into a new folder: no shared snippets."""
    snippets = read_archive(archive)
    needed = NUM_TRAIN + NUM_HELDOUT + 1
    if len(snippets) < needed:
        raise cli.InputError(
            f"{archive} has {len(snippets)} snippets of 8 to 30 words, not {needed}"
        )
    order = np.random.default_rng(0).permutation(len(snippets))
    snippets = [snippets[row] for row in order]
    train, heldout = snippets[:NUM_TRAIN], snippets[NUM_TRAIN : NUM_TRAIN + NUM_HELDOUT]
    DATA.mkdir(parents=True)
    write_lines(DATA / "texts.jsonl", [{"text": f"{PROMPT} {text}"} for text, _ in train])
    for half, name in enumerate(("first", "second")):  # other raters, and other pairs
        raters = [(text, ratings[half::2]) for text, ratings in train]
        rng = np.random.default_rng(half + 1)
        write_lines(DATA / f"{name}.jsonl", draw_pairs(raters, NUM_PAIRS, rng))
    rng = np.random.default_rng(3)
    write_lines(DATA / "heldout.jsonl", draw_pairs(heldout, NUM_HELDOUT_PAIRS, rng))
    queries = [text.split()[:QUERY_WORDS] for text, _ in snippets[NUM_TRAIN + NUM_HELDOUT :]]
    rows = [{"text": f"{PROMPT} {' '.join(words)}"} for words in queries]
    write_lines(DATA / "queries.jsonl", rows)
    print(f"{DATA}: {len(train)} texts, {NUM_PAIRS} pairs by each half, {len(rows)} queries")


# ------------------------------------------------------------------------------------ reward models


@cache
def load_scorer(folder: str) -> tuple[Any, Any]:
    """Reward model and tokenizer of a folder."""
    model = train_reward.RewardModel.from_pretrained(folder)
    return model.to(DEVICE), transformers.AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def score_texts(folder: str, texts: list[str], end: bool = False) -> np.ndarray:
    """A reward model's scores [N] of whole texts; `end`: with a last period, as labels have."""
    model, tokenizer = load_scorer(folder)
    sequences = tokenizer(texts, add_special_tokens=False)["input_ids"]
    if end:
        period = tokenizer.convert_tokens_to_ids(".")
        sequences = [ids if ids[-1:] == [period] else [*ids, period] for ids in sequences]
    tokens = pad_left(sequences, max(map(len, sequences)), model.config.pad_id).to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):  # as in the runs
        return model.score(tokens, max_tokens=MAX_TOKENS).cpu().numpy()


def true_score(queries: list[str], responses: list[str]) -> np.ndarray:
    """The score of the second half's model, which no policy is trained on: for `--gold_fn`."""
    return score_texts(TRUE_MODEL, [q + r for q, r in zip(queries, responses, strict=True)])


def accuracy(folder: Path, pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How often a model is right about held-out pairs: one rater's choice, and that of the mean."""
    texts = sorted({pair["prompt"] + pair[side] for pair in pairs for side in SIDES})
    scores = dict(zip(texts, score_texts(str(folder / "model"), texts, end=True), strict=True))
    rewards = np.array([[scores[pair["prompt"] + pair[side]] for side in SIDES] for pair in pairs])
    right = (rewards[:, 0] > rewards[:, 1]).astype(float)
    mean_agrees = np.array([pair["mean_agrees"] for pair in pairs])
    name, best = folder.name.removeprefix("human_"), torch.zeros(len(pairs), dtype=torch.long)
    rows = [measured("reward", name, "right about one rater", right)]
    right_about_mean = 1 - np.abs(right - mean_agrees)
    rows.append(measured("reward", name, "right about the mean", right_about_mean))
    groups = calibration(torch.as_tensor(rewards), best)
    for i, group in enumerate(groups):
        for metric in ("predicted", "accuracy"):
            rows.append(row("calibration", name, metric, group[metric], step=i))
    return rows


# ----------------------------------------------------------------------------------------- policies


def respond(folder: Path, queries: Path) -> list[dict[str, Any]]:
    """A policy's responses to the held-out queries, with their scores; sampled once."""
    path = folder / "heldout.jsonl"
    if path.exists():
        return read_lines(path)
    args = PolicyArgs(task="sentiment", query_dataset=str(queries))
    (task,), _ = policy_tasks([f"{folder}/model"], args)
    with torch.autocast(DEVICE, torch.bfloat16):
        policy, *tokens, _ = sample_tokens(task, NUM_EVAL)
    asked, responses = map(policy.decode, tokens)
    texts = [q + r for q, r in zip(asked, responses, strict=True)]
    columns = {"query": asked, "response": responses, "score": score_texts(MODEL, texts).tolist()}
    columns["true score"] = score_texts(TRUE_MODEL, texts).tolist()
    columns["VADER"] = pretrained.vader(asked, responses)
    late = tokens[1][:, task.truncate_after :]
    columns["period"] = (late == policy.ids.ends[0]).any(dim=1).float().tolist()
    rows = [{name: x[i] for name, x in columns.items()} for i in range(len(asked))]
    write_lines(path, rows)
    return rows


def policy_rows(folder: Path, found: list[dict], start: list[dict]) -> list[dict[str, Any]]:
    """A policy's held-out scores, and how often it beats the start by the true score."""
    name, _, seed = folder.name.removeprefix("human_").partition("_")
    rows = []
    for metric in ("score", "true score", "VADER", "period"):
        values = np.array([line[metric] for line in found])
        rows.append(measured("policy", name, metric, values, seed))
    ours, theirs = (np.array([line["true score"] for line in x]) for x in (found, start))
    rate = winrate.win_rate(ours, theirs, seed=1)
    rows.append(row("policy", name, "beats the start", *rate, seed=seed))
    for line in read_lines(folder / "metrics.jsonl"):
        for metric in CURVES:
            if metric in line:
                value = line[metric]
                rows.append(row("curve", name, metric, value, seed=seed, step=line["step"]))
        for metric in ("eval/kl", "eval/entropy", "eval/scores"):
            if metric in line:
                rows.append(row("policy", name, metric, line[metric], seed=seed, step=line["step"]))
    return rows


# ------------------------------------------------------------------------------------------- report


def row(
    kind: str,
    name: str,
    metric: str,
    value: float,
    low: float | str = "",
    high: float | str = "",
    seed: str = "",
    step: int | str = "",
) -> dict[str, Any]:
    """A line of the CSV."""
    numbers = [x if x == "" else f"{x:.4f}" for x in (value, low, high)]
    names = "kind", "name", "seed", "step", "metric", "value", "low", "high"
    return dict(zip(names, (kind, name, seed, step, metric, *numbers), strict=True))


def measured(kind: str, name: str, metric: str, values: np.ndarray, seed: str = "") -> dict:
    """A mean [N] with its 95% interval."""
    return row(kind, name, metric, *winrate.mean_and_interval(values, seed=1), seed=seed)


def finished(pattern: str) -> list[Path]:
    """Folders of runs that have ended."""
    return [path.parent for path in sorted(Path("runs").glob(f"{pattern}/curves.png"))]


def print_tables(rows: list[dict[str, Any]]) -> None:
    """Print each measured number with its interval: a line for each model, of each kind."""
    lines: dict[tuple, list[str]] = {}
    for line in rows:
        if line["kind"] != "curve":
            interval = f" ({line['low']} … {line['high']})" if line["low"] else ""
            key = line["kind"], f"{line['name']} {line['seed']}"
            cell = f"{line['metric']} {line['step']}: {line['value']}{interval}"
            lines.setdefault(key, []).append(cell)
    for (kind, name), cells in lines.items():
        print(kind, name, *cells, sep=" | ")


def report() -> None:
    """Measure the models of all finished runs; write the CSV, print it and three responses."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    heldout, queries = (DATA / f"{name}.jsonl" for name in ("heldout", "queries"))
    pairs = read_lines(heldout)
    agrees = np.array([pair["agrees"] for pair in pairs])
    rows = [measured("reward", "the other raters' mean", "right about one rater", agrees)]
    for folder in finished("human_first_*") + finished("human_second_*"):
        rows += accuracy(folder, pairs)
    policies = finished("human_sft") + finished("human_ppo_*") + finished("human_rloo_*")
    texts = {folder.name: respond(folder, queries) for folder in policies}
    for folder in policies:
        rows += policy_rows(folder, texts[folder.name], texts["human_sft"])
    with open(TABLE, "w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *provenance()], lineterminator="\n")
        writer.writeheader()
        writer.writerows(line | provenance() for line in rows)
    print_tables(rows)
    for i in range(3):
        print(f"\n{texts['human_sft'][i]['query']} …")
        for name, lines in texts.items():
            print(f"  {name}: …{lines[i]['response']!r}, true score {lines[i]['true score']:.2f}")


def read_csv(path: Path) -> dict[tuple, list[dict[str, str]]]:
    """(kind, metric) → lines."""
    found: dict[tuple, list] = {}
    for line in csv.DictReader(path.read_text().splitlines()):
        found.setdefault((line["kind"], line["metric"]), []).append(line)
    return found


def draw() -> None:
    """Draw the CSV: what reward models learn from how many pairs, and the runs' curves."""
    found = read_csv(TABLE)
    titles = ["right about one rater", "score that is trained on", "true score: the other raters'"]
    titles += ["KL from the start, nats", "responses with a period", "entropy of a response, nats"]
    figure, panels = make_panels(titles, "episodes")
    models, *curves = panels.values()
    models.set_xlabel("pairs", fontsize=8)
    models.set_xscale("log")
    sizes: list[int] = []
    for line in found["reward", titles[0]]:
        value, low, high = (float(line[x]) for x in ("value", "low", "high"))
        half, _, pairs = line["name"].partition("_")
        if pairs.isdecimal():
            style = dict(fmt="o", color="C0" if half == "first" else "C3", capsize=3)
            sizes.append(int(pairs))
            models.errorbar(sizes[-1], value, [[value - low], [high - value]], **style)
        else:
            models.axhline(value, color="gray", linestyle="--", label=line["name"])
    sizes = sorted(set(sizes))
    models.set_xticks(sizes, [f"{size:,}" for size in sizes])
    models.minorticks_off()
    models.legend(fontsize=8)
    for axis, metric in zip(curves, CURVES, strict=True):
        runs: dict[tuple, list] = {}
        for line in found["curve", metric]:
            point = (int(line["step"]) + 1) * BATCH_SIZE, float(line["value"])
            runs.setdefault((line["name"], line["seed"]), []).append(point)
        for name, seed in runs:
            color = "C0" if name == "ppo" else "C1"
            label = name.upper() if seed == "1" else None
            axis.plot(*zip(*runs[name, seed], strict=True), color=color, label=label)
    curves[2].axhline(6, color="gray", linestyle="--", label="target")
    curves[2].legend(fontsize=8)
    figure.savefig(TABLE.with_suffix(".png"), dpi=110)


def main(args: Args) -> None:
    """Run the command."""
    if args.command == "report":
        report()
    elif args.command == "draw":
        draw()
    elif args.archive is None:
        raise cli.InputError("data needs the archive: human.py data movie-ratings.tar.gz")
    else:
        write_data(args.archive)


if __name__ == "__main__":
    cli.run(main, Args)
