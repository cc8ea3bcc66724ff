"""The site: its search finds the questions, its 404 its styles, moved pages their new place."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
QUESTIONS = {  # what people type → a word of the heading in docs/using.md
    "did it learn": "learn",
    "good KL": "kl",
    "sample": "from_pretrained",
    "from_pretrained": "from_pretrained",
    "win rate": "win-rate",
    "merge lora": "lora",
    "hf upload": "upload",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "two runs in one picture": "picture",
    "more episodes": "episodes",
    "change the model": "qwen",
    "qwen": "qwen",
    "system prompt": "system-prompt",
    "out of memory": "memory",
    "my own metric": "metric",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    env = os.environ | {"SITE_URL": "https://example.org/below/"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
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
