"""docs/: details have code, tests and mutations; names, metrics and numbers are right. Versions."""

import csv
import json
import re
import statistics
import subprocess
import tomllib
from decimal import Decimal

import pytest
import tiny
import yaml
from test_readme import PAGES, ROOT, code_of

from benchmarks import mutations

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
SLOW = {
    "wandb",
    "matplotlib",
    "peft",
    "scipy",
    "torch.distributed.checkpoint",
    "transformers.modeling_utils",
    "transformers.generation.utils",
}

TREES = "*.* machinery/* data/**/* tools/* benchmarks/*.* diffs/**/* configs/*"
FILES = [path for tree in TREES.split() for path in ROOT.glob(tree) if path.is_file()]
SOURCES = [path for path in FILES if path.suffix in (".py", ".sh", ".diff", ".yaml")]
SOURCE = "\n".join(path.read_text() for path in SOURCES)
WORDS = set(re.findall(r"\w+", SOURCE + " ".join(path.name for path in FILES)))
FLAGS = set(re.findall(r"^\+?    (\w+): ", SOURCE, flags=re.M))  # fields
FLAGS |= {"help", "logdir", "mixed_precision", "num_processes", "fuzz", "fix"}
TEST_FILES = list(ROOT.glob("tests/**/*.py"))
TEST_SOURCE = "\n".join(path.read_text() for path in TEST_FILES)
TESTS = {path.stem for path in TEST_FILES}.union(re.findall(r"^def (test_\w+)", TEST_SOURCE, re.M))
# Names of other programs, or of an example:
OTHERS = {
    "starter",
    "gym_task",
    "completion_ids",
    "WANDB_ENTITY",
    "terminationGracePeriodSeconds",
    "copying",
    "max_length",
    "test_X15_",
    "run_python",
}
PAST = {"CHANGELOG.md", "docs/log.md"}  # which name what is gone


def test_every_detail_has_a_row_a_test_and_a_mutation():
    """A test's name has it; the text that its mutation changes is in the file once."""
    rows = re.findall(r"^\| ([GRPALX]\d+) \|", PAGES["docs/details.md"], flags=re.M)
    expected = []
    for kind, count in dict(G=6, R=4, P=11, A=1, L=6, X=15).items():
        expected += [f"{kind}{i + 1}" for i in range(count)]
    assert rows == expected
    assert set(re.findall(r"[(,] ?([GRPALX]\d+)\b", SOURCE)) <= set(rows)  # tags in the code
    assert set(re.findall(r"(?<=_)[GRPALX]\d+(?=_)", "".join(TESTS))) == set(rows)
    assert {detail for detail, *_ in mutations.DETAILS} == set(rows)
    for detail, file, right, wrong in mutations.DETAILS:
        assert (ROOT / file).read_text().count(right) == 1 and right != wrong, detail


def test_every_metric_is_explained(runs):
    pages = dict(ppo="ppo", rloo="rloo ppo", train_reward="train_reward", sft="train_reward")
    for script, lines in runs.metrics.items():
        text = "".join(PAGES[f"docs/{page}.md"] for page in pages[script].split())
        metrics = set().union(*lines)
        assert len(metrics) > 5
        for metric in metrics:
            known = metric.startswith(("eval/", "step")) or f"`{metric}`" in text
            assert known, (script, metric)


@pytest.mark.parametrize("page", sorted(PAGES.keys() - PAST))
def test_what_a_page_mentions_exists(page):
    """Flags, tests, functions, and files but those of a commit."""
    prose = re.sub(r"^ *```.*?^ *```", "", PAGES[page], flags=re.M | re.S)
    spans = re.findall(r"`([^`\n]+)`(?!\s+(?:of|in)\s)", prose)
    unknown = []
    for span in spans:
        unknown += set(re.findall(r"--(?:no-)?(\w+)", span)) - FLAGS
        for test in re.findall(r"\btest_\w+\b", span):
            if not any(name.startswith(test) for name in TESTS | OTHERS):
                unknown.append(test)
        file = re.fullmatch(
            r"((?:benchmarks|data|diffs|machinery|tests|tools)/[\w/]+\.\w+).*", span
        )
        if file and not (ROOT / file[1]).is_file():
            unknown.append(file[1])
        name = re.fullmatch(r"([A-Za-z_]\w*(?:\.\w+)*)(?:\(.*\))?", span)
        if name and page != "docs/from_trl.md":  # which names what is not here
            unknown += set(name[1].split(".")) - WORDS - OTHERS - TESTS
    assert unknown == []


def test_a_commit_that_a_page_names_is_in_the_history():
    """Where there is one; a shallow clone has only its end."""
    if not (ROOT / ".git").exists() or (ROOT / ".git/shallow").exists():
        return
    log = subprocess.check_output(["git", "log", "--format=%H"], cwd=ROOT, text=True)
    texts = [*PAGES.values(), *(path.read_text() for path in ROOT.glob("diffs/**/*.*"))]
    named = re.findall(r"(?<![\w.-])(?=[a-f]*\d)[0-9a-f]{7,40}\b", "\n".join(texts))
    named = [name for name in named if not name.isdigit()]
    assert len(named) > 20
    assert [name for name in named if f"\n{name}" not in f"\n{log}"] == []


def test_no_text_tells_how_it_was_made():
    """Pages, code and tests: the words are only right about the making of the project."""
    words = r"strangers?\b|fresh (?:eyes|readers?)|issue \d|this session|last stop|as before\b"
    words += r"|budget|(?:first|second|third|fourth|fifth) part\b|helpers?'|as asked|/root/|/work/"
    texts = dict(PAGES)
    for path in [*SOURCES, *TEST_FILES]:
        texts[path.name] = path.read_text()
    del texts["test_docs.py"]
    for name, text in texts.items():
        assert re.findall(words, text, flags=re.I) == [], name


SCORE, GOLD, KL = "objective/scores", "objective/gold_score", "objective/kl"


def column(file, name, **where):
    """The numbers of a column of a CSV, of the rows that have these values."""
    rows = csv.DictReader((ROOT / "benchmarks/results" / f"{file}.csv").read_text().splitlines())
    return [float(row[name]) for row in rows if where.items() <= row.items()]


def mean(file, name, **where):
    return statistics.mean(column(file, name, **where))


def curve(file, label, metric):
    """Of eight seeds the first update; of the last five updates mean and interval."""
    where = dict(label=label, metric=metric)
    numbers = column(file, "first", run="mean of 8", **where)
    for part in ("mean", "2.5%", "97.5%"):
        numbers += column(file, "last five", run=f"{part} of 8", **where)
    return numbers


def seeds(file, label, metric):
    """Mean, lowest and highest seed. The last three rows of a label are a summary of its seeds."""
    found = column(file, "last", label=label, metric=f"eval/{metric}")[:-3]
    return [statistics.mean(found), min(found), max(found)]


def claim(cells):
    if "true score before" not in cells[0]:
        return None
    return curve("synthetic", "PPO", GOLD) + curve("synthetic", "RLOO", GOLD)


def scores_and_kl(file, label):
    return curve(file, label, SCORE) + curve(file, label, GOLD) + curve(file, label, KL)[1:]


def synthetic(cells):
    kl_coef = curve("synthetic", cells[0], "objective/kl_coef")
    return scores_and_kl("synthetic", cells[0]) + kl_coef[1:]


def synthetic_eos(cells):
    lengths = curve("synthetic_eos", cells[0], "objective/response_length")
    return scores_and_kl("synthetic_eos", cells[0]) + lengths


def what_fits(cells):
    sizes = {"sentiment": "--micro_batch_tokens 32768 --rollout_batch_size 512", "tldr": ""}
    numbers = []
    for task, flags in sizes.items():
        where = dict(shape=cells[0], script="ppo", task=task, flags=flags)
        numbers += column("memory", "sample", **where) + column("memory", "optimize", **where)
    return numbers


def one_gpu(cells):
    return [max(what_fits([f"Pythia {cells[0]}"])[2:])]


WAYS = "0", "0.01", "0.03", "0.1", "random"


def arithmetic(cells, metric="gold_score", ways=WAYS):
    numbers = []
    for way in ways:
        numbers += seeds("arithmetic", f"{cells[0]} {way}", metric)
    return numbers


def arithmetic_kl(cells):
    return arithmetic(cells, "kl")[::3]  # means only


def long(cells):
    ways = "0.01 long", "0.1 long"
    return arithmetic(cells, "gold_score", ways) + arithmetic(cells, "kl", ways)


def ablation(cells):
    script, _, two = cells[0].partition(" on two")
    where = dict(what=cells[2], script=script, processes="2" if two else "1")
    gains = []
    for seed in "12345":
        (true,) = column("ablations", "true score", seed=seed, **where)
        base = where | dict(what="all details", seed=seed)
        gains.append(true - mean("ablations", "true score", **base))
    numbers = [mean("ablations", name, **where) for name in ("score", "true score", "KL")]
    if cells[2] != "all details":
        interval = 2.776 * statistics.stdev(gains) / 5**0.5  # Student's, 95%
        numbers[2:2] = [statistics.mean(gains), interval]
    return numbers


def patch(cells):
    return seeds("patches", cells[0], "gold_score") + seeds("patches", cells[0], "kl")


def row_of(file, key, *columns):
    """Of the rows that a table's first cell names; words may follow the name."""
    return lambda cells: [mean(file, name, **{key: cells[0].split("` ")[0]}) for name in columns]


PHASES = "sample", "score", "optimize"
TRL = "loss", "TRL", "loss difference", "largest gradient", "gradient difference"
GPU = "seconds", *PHASES, "first", "episodes/s", "1M min", "reserved GB"
RESULTS = "docs/results.md"
TABLES = [  # page, header, the columns with numbers, what they are
    ("README.md", "| claim ", 1, 2, claim),
    (RESULTS, "| | score | true score | KL | β", 1, 5, synthetic),
    (RESULTS, "| | score | true score | KL | r", 1, 5, synthetic_eos),
    (RESULTS, "| algorithm | loss ", 1, 6, row_of("against_trl", "algorithm", *TRL)),
    (RESULTS, "| PPO | policy", 3, 5, what_fits),
    ("docs/tldr.md", "| | one GPU ", 1, 2, one_gpu),
    (RESULTS, "| accuracy ", 1, 6, arithmetic),
    (RESULTS, "| KL, nats ", 1, 6, arithmetic_kl),
    (RESULTS, "| 16,384 episodes ", 1, 5, long),
    (RESULTS, "|  | detail ", 3, 7, ablation),
    ("docs/speed.md", "| one H200 ", 1, 9, row_of("gpu", "what", *GPU)),
    (
        "docs/speed.md",
        "| beside TRL ",
        1,
        6,
        row_of("gpu_trl", "what", "seconds", *PHASES, "reserved GB"),
    ),
    ("diffs/README.md", "| script or patch ", 1, 3, patch),
]


@pytest.mark.parametrize("page, header, start, end, expected", TABLES)
def test_numbers_of_a_table_are_those_of_its_csv(page, header, start, end, expected):
    rows = PAGES[page].split(f"\n{header}")[1].split("\n\n")[0].splitlines()[2:]
    assert rows
    for row in rows:
        cells = [cell.strip().strip("`") for cell in row.strip("|").split("|")]
        numbers = expected(cells)
        if numbers is None:
            continue
        printed = re.findall(r"−?\d[\d,]*(?:\.\d+)?(?:e-\d+)?", " ".join(cells[start:end]))
        assert len(printed) == len(numbers), row
        for text, number in zip(printed, numbers, strict=True):
            decimal = Decimal(text.replace("−", "-").replace(",", ""))
            unit = 10.0 ** int(decimal.as_tuple().exponent)  # of the last digit
            assert abs(float(decimal) - number) < 0.51 * unit, (row, text, number)


@pytest.mark.slow
def test_random_sentences_score_as_the_readme_says(capsys):
    exec(code_of("docs/results.md", "happy"), {})
    all_sentences, happy = (float(word) for word in capsys.readouterr().out.split())
    assert f"stories score\n{abs(all_sentences):.1f}" in PAGES["README.md"]
    assert f"happy sentences {happy:.1f}" in PAGES["README.md"]


HELP = """
import contextlib, runpy, sys
for script in ("ppo", "rloo", "train_reward", "sft"):
    sys.argv = [script, "--task", "synthetic", "--help"]
    with contextlib.suppress(SystemExit):
        runpy.run_path(f"{script}.py", run_name="__main__")
print(*sys.modules)
"""


def test_help_imports_nothing_that_takes_seconds():
    """Names instead of seconds, which depend on what else the machine does."""
    printed = tiny.run_python("-c", HELP, cwd=ROOT)
    found = set(printed.splitlines()[-1].split())
    assert printed.count("--task") >= 4 and {"tyro", "machinery.cli"} <= found
    assert not found & SLOW


def test_one_version_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert PROJECT["version"] == citation["version"] == "0.2.0"


def pins(file):
    return dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / file).read_text(), flags=re.M))


def version(text):
    return tuple(map(int, text.split(".")))


def test_a_lower_bound_is_the_oldest_version_that_was_tested():
    """And the exact versions of requirements.txt are inside the bounds."""
    oldest, exact = pins("requirements-oldest.txt"), pins("requirements.txt")
    optional = EXTRAS["rouge"] + EXTRAS["clean"]
    for requirement in PROJECT["dependencies"] + optional:
        bounds = re.fullmatch(r"([\w-]+)>=([\d.]+)(?:,<([\d.]+))?", requirement)
        name, low, high = bounds.groups()
        found, wanted = version(oldest[name]), version(low)
        assert found[: len(wanted)] == wanted and not any(found[len(wanted) :]), name
        assert found <= version(exact[name]) < version(high or "999"), name
    assert set(optional + EXTRAS["lora"]) <= set(EXTRAS["dev"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    env = dict(SITE_URL="https://example.org/below/")
    tiny.run_python("-m", "mkdocs", "build", "--strict", "-d", folder, cwd=ROOT, env=env)
    return folder


QUESTIONS = {  # as people type them → where one of the first three hits leads
    "own reward": "ppo.html#a-reward-of-your-own",
    "custom reward": "ppo.html#a-reward-of-your-own",
    "reward function": "ppo.html#a-reward-of-your-own",
    "train a reward model": "train_reward.html",
    "what is unfinished_score": "ppo.html#usage",
    "missing_eos_penalty": "ppo.html#usage",
    "best checkpoint": "ppo.html#which-policy-is-kept",
    "OOM": "running.html#out-of-memory",
    "CUDA out of memory": "running.html#out-of-memory",
    "Ctrl-C": "running.html#resume",
    "continue a run": "running.html#resume",
    "multi gpu": "running.html#many-gpus",
    "vllm": "running.html#sampling-with-vllm",
    "GRPO": "diffs/index.html#algorithms",
    "lora": "diffs/index.html#lora",
    "did it learn": "using.html#did-it-learn",
    "good KL": "using.html#did-it-learn",
    "sample": "using.html#how-do-i-sample",
    "win rate": "using.html#how-do-i-measure",
    "push to hub": "using.html#how-do-i-upload",
    "merge lora": "using.html#how-do-i-upload",
    "wandb": "using.html#how-do-i-watch",
    "compare two runs": "using.html#how-do-i-draw",
    "more episodes": "using.html#how-do-i-train",
    "change the model": "using.html#how-do-i-change",
    "system prompt": "using.html#how-do-i-change",
    "my own metric": "using.html#how-do-i-log",
    "learning rate": "data.html#learning-rates",
    "chat template": "data.html#other-forms",
    "own data": "data.html",
    "negative KL": "debugging.html#negative-kl",
}
AT_ONCE = {"own reward", "custom reward", "reward function"}  # of the first hit


@pytest.mark.slow
def test_the_search_finds_each_question_among_its_first_three_hits(site):
    """Of each page that is found, its best heading. Sources and patches come after pages."""
    command = ["node", str(ROOT / "tests/site_search.js"), str(site), *QUESTIONS]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    for (question, place), line in zip(QUESTIONS.items(), lines, strict=True):
        hits = [page[0] for page in json.loads(line)]
        first = hits[:1] if question in AT_ONCE else hits[:3]
        assert any(hit.startswith(place) for hit in first), (question, hits[:4])
        if question == "lora":
            assert not re.search(r"\.(py|diff|sh)\.html", " ".join(first))


@pytest.mark.slow
def test_a_missing_page_below_a_root_keeps_its_styles_and_moved_pages_lead_on(site):
    styles = re.findall(r'<link rel="stylesheet" href="([^"]+)"', (site / "404.html").read_text())
    assert styles
    for style in styles:
        assert style.startswith("/below/") and (site / style.removeprefix("/below/")).is_file()
    assert "url=train_reward.html#sftpy" in (site / "sft.html").read_text()


@pytest.mark.slow
def test_a_page_and_its_script_have_titles_of_their_own(site):
    titles = []
    for page in ("ppo.html", "ppo.py.html"):
        titles += re.findall("<title>(.*)</title>", (site / page).read_text())
    assert len(set(titles)) == 2
