"""docs/: details have code, tests and mutations; names, metrics and numbers are right. Versions."""

import csv
import functools
import json
import re
import statistics
import subprocess
import tomllib
from decimal import Decimal

import pytest
import tiny
import yaml
from test_readme import PAGES, ROOT, blocks

from benchmarks import mutations

CODE = [*ROOT.glob("*.py"), *ROOT.glob("machinery/*.py"), ROOT / "data/tasks.py"]
PATCHES = list(ROOT.glob("diffs/*.diff"))
Numbers = list[float | None]  # of a table that is made from a CSV; None: it is not in there
SCORE, GOLD, KL = "objective/scores", "objective/gold_score", "objective/kl"
LENGTH, COEF = "objective/response_length", "objective/kl_coef"
SIZES = {"sentiment": "--micro_batch_tokens 32768 --rollout_batch_size 512", "tldr": ""}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
SLOW = {"wandb", "matplotlib", "peft", "scipy", "torch.distributed.checkpoint"}
SLOW |= {"transformers.modeling_utils", "transformers.generation.utils"}
ASKED = """did it learn: learn, good KL: kl, sample: from_pretrained, win rate: win-rate
merge lora: lora, hf upload: upload, tensorboard: tensorboard, wandb: wandb, qwen: qwen
two runs in one picture: picture, more episodes: episodes, change the model: qwen
system prompt: system-prompt, out of memory: memory, my own metric: metric"""
QUESTIONS = dict(re.findall(r"(\w[^:,\n]*): ([^,\n]+)", ASKED))  # → a heading's word in using.md


def test_every_detail_has_a_row_tags_in_the_code_a_test_and_a_mutation():
    """A test's name has it; the text that its mutation changes is in the file once."""
    rows = re.findall(r"^\| ([GRPALX]\d+) \|", PAGES["docs/details.md"], flags=re.M)
    code = "".join(path.read_text() for path in [*CODE, *PATCHES])
    tags = re.findall(r"[(,] ?([GRPALX]\d+)\b", code)
    counts = dict(G=6, R=4, P=11, A=1, L=6, X=15)
    assert sorted(rows) == sorted(f"{kind}{i + 1}" for kind, n in counts.items() for i in range(n))
    of_mutations = [detail for detail, *_ in mutations.DETAILS]
    for found in (tags, re.findall(r"(?<=_)[GRPALX]\d+(?=_)", "".join(TESTS)), of_mutations):
        assert {*found} == {*rows}
    for detail, file, right, wrong in mutations.DETAILS:
        assert (ROOT / file).read_text().count(right) == 1 and right != wrong, detail


def test_every_metric_is_explained(runs):
    pages = {"rloo": ["rloo", "ppo"], "sft": ["train_reward"]}
    for name, lines in runs.metrics.items():
        text = "".join(PAGES[f"docs/{page}.md"] for page in pages.get(name, [name]))
        metrics = {key for line in lines for key in line if not key.startswith(("eval/", "step"))}
        assert metrics
        for metric in metrics:
            assert f"`{metric}`" in text, (name, metric)


FOLDERS = (
    "",
    "machinery",
    "data",
    "data/synthetic",
    "data/arithmetic",
    "tools",
    "benchmarks",
    "diffs",
    "diffs/recipes",
    "configs",
)
FILES = [x for name in FOLDERS for x in (ROOT / name).glob("*") if x.is_file()]
SOURCES = [x.read_text() for x in FILES if x.suffix in (".py", ".sh", ".diff", ".yaml")]
WORDS = {word for text in [*SOURCES, *(x.name for x in FILES)] for word in re.findall(r"\w+", text)}
FLAGS = set(re.findall(r"^\+?    (\w+): ", "\n".join(SOURCES), flags=re.M))  # fields
FLAGS |= {"help", "logdir", "mixed_precision", "num_processes", "fuzz", "fix"}
IN_TESTS = {path.stem: path.read_text() for path in ROOT.glob("tests/**/*.py")}
TESTS = {*IN_TESTS, *re.findall(r"^def (test_\w+)", "".join(IN_TESTS.values()), flags=re.M)}
OTHERS = {  # of other programs, or of an example
    "README.md": {"my_reward"},
    "docs/course.md": {"render", "starter", "student"},
    "docs/data.md": {"gym_task", "chain_sum", "my_sft", "my_prompts", "my_pairs"},
    "docs/ppo.md": {"completion_ids"},
    "docs/running.md": {"WANDB_ENTITY", "terminationGracePeriodSeconds", "torchrun"}
    | {"set_requires_gradient_sync"},
    "docs/tldr.md": {"copying", "fmeasure"},
    "docs/your-experiment.md": {"max_length"},
    "CONTRIBUTING.md": {"fix", "test_X15_", "run_python"},
}
PAST = {"CHANGELOG.md", "docs/log.md"}  # which name what is gone


@pytest.mark.parametrize("page", sorted(PAGES.keys() - PAST))
def test_what_a_page_mentions_exists(page):
    prose = re.sub(r"^ *```.*?^ *```", "", PAGES[page], flags=re.M | re.S)
    spans = re.findall(r"`([^`\n]+)`", prose)
    tests = re.findall(r"\btest_\w+\b…?", " ".join(spans))
    found = {x for x in tests if x in TESTS or any(y.startswith(x.strip("…")) for y in TESTS)}
    assert set(tests) == found
    assert {x for span in spans for x in re.findall(r"--(?:no-)?(\w+)", span)} <= FLAGS
    found = (re.fullmatch(r"([A-Za-z_]\w*(?:\.\w+)*)(?:\(.*\))?", span) for span in spans)
    names = {x[1] for x in found if x} - TESTS
    if page != "docs/from_trl.md":  # which names what is not here
        assert {x for name in names for x in name.split(".")} <= WORDS | OTHERS.get(page, set())


def test_a_commit_that_a_page_names_is_in_the_history():
    """Where there is one; a shallow clone has only its end."""
    git = functools.partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)
    if not (ROOT / ".git").exists() or (ROOT / ".git/shallow").exists():
        return
    commits = git(["git", "log", "--format=%H"]).stdout.split()
    texts = [*PAGES.values(), *(x.read_text() for x in ROOT.glob("diffs/**/*.*"))]
    named = set(re.findall(r"(?<![\w.-])(?=[a-f]*\d)[0-9a-f]{7,40}\b", "\n".join(texts)))
    named = {x for x in named if not x.isdigit()}
    assert len(named) > 20 and commits
    assert {x for x in named if not any(y.startswith(x) for y in commits)} == set()


def test_no_text_tells_how_it_was_made():
    """Pages, code and tests: the words are only right about the making of the project."""
    words = r"strangers?\b|fresh (?:eyes|readers?)|issue \d|this session|last stop|as before\b"
    words += r"|budget|(?:first|second|third|fourth|fifth) part\b|helpers?'|as asked|/root/|/work/"
    kinds = {".py", ".sh", ".diff", ".yaml", ".md"}
    paths = [x for x in [*FILES, *ROOT.glob("tests/**/*.py")] if x.suffix in kinds]
    texts = {x.name: x.read_text() for x in paths} | PAGES
    texts.pop("test_docs.py")
    found = {name: re.findall(words, text, flags=re.I) for name, text in texts.items()}
    assert {name: x for name, x in found.items() if x} == {}


def pick(file: str, column: str, **where: str) -> list[float]:
    """The numbers of a column of a CSV, of the rows that have these values."""
    rows = csv.DictReader((ROOT / "benchmarks/results" / f"{file}.csv").read_text().splitlines())
    return [float(x[column]) for x in rows if where.items() <= x.items()]


def means(file: str, *columns: str, **where: str) -> Numbers:
    return [statistics.mean(pick(file, column, **where)) for column in columns]


def curves(name: str, label: str, *metrics: str) -> Numbers:
    """Mean and interval of the last five updates; before, the first update, except of KL and β."""
    found = []
    for metric in metrics:
        if metric not in (KL, COEF):
            found += pick(name, "first", label=label, metric=metric, run="mean of 8")
        for part in ("mean", "2.5%", "97.5%"):
            found += pick(name, "last five", label=label, metric=metric, run=f"{part} of 8")
    return found


def eight(label: str, last: str) -> Numbers:
    name = "synthetic" if last == COEF else "synthetic_eos"
    return curves(name, label, SCORE, GOLD, KL, last)


def seeds_of(file: str, label: str, metric: str) -> list[float]:
    """Mean, lowest and highest seed. The last three rows of a label are a summary of its seeds."""
    seeds = pick(file, "last", label=label, metric=metric)[:-3]
    return [statistics.mean(seeds), min(seeds), max(seeds)]


def arithmetic(script: str, metric: str, ways: str = "0,0.01,0.03,0.1,random") -> Numbers:
    labels = [f"{script} {way}" for way in ways.split(",")]
    return [x for label in labels for x in seeds_of("arithmetic", label, f"eval/{metric}")]


def long(script: str) -> Numbers:
    return [x for y in ("gold_score", "kl") for x in arithmetic(script, y, "0.01 long,0.1 long")]


def ablation(script: str, what: str) -> Numbers:
    script, _, two = script.partition(" on two")
    where = dict(script=script, processes="2" if two else "1")
    pick_true = functools.partial(pick, "ablations", "true score", **where)
    true, base = ([pick_true(what=x, seed=y)[0] for y in "12345"] for x in (what, "all details"))
    gains = [a - b for a, b in zip(true, base, strict=True)]
    interval = 2.776 * statistics.stdev(gains) / 5**0.5  # Student's, 95%
    columns = ("score", "true score", "KL")
    score, mean, *rest = means("ablations", *columns, **where, what=what)
    gain = [statistics.mean(gains), interval] if any(gains) else []
    return [score, mean, *gain, *rest]


def patch(name: str) -> Numbers:
    return [x for y in ("gold_score", "kl") for x in seeds_of("patches", name, f"eval/{y}")]


def memory(shape: str) -> Numbers:
    where = [dict(task=task, flags=flags, script="ppo") for task, flags in SIZES.items()]
    return [pick("memory", x, shape=shape, **w)[0] for w in where for x in ("sample", "optimize")]


def against_trl(algorithm: str) -> Numbers:
    columns = ("loss", "TRL", "loss difference", "largest gradient", "gradient difference")
    return means("against_trl", *columns, algorithm=algorithm)


def gpu(file: str, what: str) -> Numbers:
    what = what.split("` ")[0]  # a row of gpu.py; words may follow
    columns = ["seconds", "sample", "score", "optimize"]
    columns += ["first", "episodes/s", "1M min"] if file == "gpu" else []
    return means(file, *columns, "reserved GB", what=what)


CLAIM = [x for label in ("PPO", "RLOO") for x in curves("synthetic", label, GOLD)]
RESULTS = "docs/results.md"
TABLES = {  # page and header → the columns, and their numbers by the cells of a row
    ("README.md", "| claim "): (slice(1, 2), lambda x, *_: CLAIM if "true score" in x else None),
    (RESULTS, "| | score | true score | KL | β"): (slice(1, 5), lambda x, *_: eight(x, COEF)),
    (RESULTS, "| | score | true score | KL | r"): (slice(1, 5), lambda x, *_: eight(x, LENGTH)),
    (RESULTS, "| algorithm | loss "): (slice(1, 6), lambda x, *_: against_trl(x)),
    (RESULTS, "| PPO | policy"): (slice(3, 5), lambda x, *_: memory(x)),
    ("docs/tldr.md", "| | one GPU "): (slice(1, 2), lambda x, *_: [max(memory(f"Pythia {x}")[2:])]),
    (RESULTS, "| accuracy "): (slice(1, 6), lambda x, *_: arithmetic(x, "gold_score")),
    (RESULTS, "| KL, nats "): (slice(1, 6), lambda x, *_: arithmetic(x, "kl")[::3]),
    (RESULTS, "| 16,384 episodes "): (slice(1, 5), lambda x, *_: long(x)),
    (RESULTS, "|  | detail "): (slice(3, 7), lambda *x: ablation(x[0], x[2])),
    ("docs/speed.md", "| one H200 "): (slice(1, 9), lambda x, *_: gpu("gpu", x)),
    ("docs/speed.md", "| beside TRL "): (slice(1, 6), lambda x, *_: gpu("gpu_trl", x)),
    ("diffs/README.md", "| script or patch "): (slice(1, 3), lambda x, *_: patch(x)),
}


@pytest.mark.parametrize("page, header", TABLES)
def test_numbers_of_a_table_are_those_of_its_csv(page, header):
    columns, expected = TABLES[page, header]
    rows = PAGES[page].split(f"\n{header}")[1].split("\n\n")[0].splitlines()[2:]
    above: list[str] = []
    assert rows
    for row in rows:
        cells = [x.strip().strip("`") for x in row.strip("|").split("|")]
        above = [x or y for x, y in zip(cells, above or cells, strict=True)]  # blank: as above
        if (values := expected(*above)) is None:
            continue
        printed = re.findall(r"−?\d[\d,]*(?:\.\d+)?(?:e-\d+)?", " ".join(cells[columns]))
        for text, value in zip(printed, values, strict=True):
            number = Decimal(text.replace("−", "-").replace(",", ""))
            unit = 10.0 ** int(number.as_tuple().exponent)  # of the last digit
            assert value is None or abs(float(number) - value) < 0.51 * unit, (row, text, value)


@pytest.mark.slow
def test_random_sentences_score_as_the_readme_says(capsys):
    (code,) = (x for x in blocks("docs/results.md", "python") if "happy" in x)
    exec(code, {})
    scores = map(float, capsys.readouterr().out.split())
    found = re.findall(r"(?:stories score|happy sentences)\s([\d.]+)", PAGES["README.md"])
    assert [f"{abs(x):.1f}" for x in scores] == found


def pins(file: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / file).read_text(), flags=re.M))


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


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
    assert printed.count("--task") >= 4 and {"tyro", "machinery.cli"} <= found and not found & SLOW


def test_one_version_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert PROJECT["version"] == citation["version"] == "0.2.0"


def test_a_lower_bound_is_the_oldest_version_that_was_tested():
    """And the exact versions of requirements.txt are inside the bounds."""
    oldest, exact = pins("requirements-oldest.txt"), pins("requirements.txt")
    for requirement in [*PROJECT["dependencies"], *EXTRAS["rouge"], *EXTRAS["clean"]]:
        name, low, high = re.fullmatch(r"([\w-]+)>=([\d.]+)(?:,<([\d.]+))?", requirement).groups()
        found, wanted = version(oldest[name]), version(low)
        assert found[: len(wanted)] == wanted and not any(found[len(wanted) :]), name
        assert found <= version(exact[name]) < version(high or "999"), name
    assert {*EXTRAS["rouge"], *EXTRAS["clean"], *EXTRAS["lora"]} <= {*EXTRAS["dev"]}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    env = dict(SITE_URL="https://example.org/below/")
    tiny.run_python("-m", "mkdocs", "build", "--strict", "-d", folder, cwd=ROOT, env=env)
    return folder


@pytest.mark.slow
def test_the_search_finds_each_question_among_its_first_three_hits(site):
    """Of each page that is found, its best heading. Sources and patches come after pages."""
    command = ["node", str(ROOT / "tests/site_search.js"), str(site), *QUESTIONS, "lora"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = [json.loads(line) for line in lines]
    headings = [x for x in (ROOT / "docs/using.md").read_text().splitlines() if x[:3] == "## "]
    assert len(headings) == 10 and all(x.endswith("?") for x in headings)
    for (query, word), pages in zip(QUESTIONS.items(), found, strict=False):
        hits = [page[0] for page in pages[:3]]
        assert any(x.startswith("using.html#") and word in x for x in hits), (query, hits)
    assert not re.search(r"\.(py|diff|sh)\.html", " ".join(page[0] for page in found[-1][:3]))


@pytest.mark.slow
def test_a_missing_page_below_a_root_keeps_its_styles_and_moved_pages_lead_on(site):
    styles = re.findall(r'<link rel="stylesheet" href="([^"]+)"', (site / "404.html").read_text())
    assert styles and all(x.startswith("/below/") for x in styles)
    assert all((site / x.removeprefix("/below/")).is_file() for x in styles)
    assert "url=train_reward.html#sftpy" in (site / "sft.html").read_text()
