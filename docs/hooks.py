"""Hooks of mkdocs. README is the front page, and the site has each file that a page links to.

Markdown files become pages, pictures, CSVs and notebooks are copied, scripts become listings.
Equations become MathML, which browsers show without JavaScript. A click on a picture opens it alone.
Links to the log lead to the repository. The search ranks listings below pages, and finds sections by
words that people type but that the text does not have. Pages that were merged into others lead there.
"""

import json
import os
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)#\s:]+)(?:#L(\d+))?(?=[)#])")  # of a file; with its line
MATH = re.compile(r"(?s)(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)|\$([^$]+)\$")  # code, or an equation
LOG = re.compile(r"\[([^]]+)\]\([^)]*\blog\.md(#[^)]*)?\)")  # not in the site
PICTURE = re.compile(r"!\[[^]]*\]\(([^)]+)\)")
MOVED = {
    "ablations": "results.html#what-each-detail-is-worth",
    "arithmetic": "data.html#answers-that-can-be-checked",
    "gpu": "speed.html#on-a-gpu",
    "resume": "running.html#resume",
    "sft": "train_reward.html#sftpy",
    "scaling": "running.html#many-gpus-many-machines",
    "worked-examples": "your-experiment.html#worked-examples",
    "your-data": "data.html",
}
KEYWORDS = {  # section → what people type who look for it
    "ppo.html#a-reward-of-your-own": "own custom reward function reward_fn",
    "ppo.html#usage": "missing_eos_penalty unfinished_score truncate_token",
    "ppo.html#which-policy-is-kept": "best checkpoint early stopping keep_every",
    "ppo.html#a-language-model-as-the-judge": "llm judge as a reward",
    "train_reward.html": "preference model classifier",
    "train_reward.html#sftpy": "sft supervised fine-tuning finetune",
    "data.html": "own dataset jsonl csv prompts",
    "data.html#learning-rates": "learning rate lr",
    "data.html#other-forms": "chat template messages convert",
    "data.html#answers-that-can-be-checked": "rlvr verifiable math",
    "running.html#out-of-memory": "oom cuda out of memory gpu",
    "running.html#many-gpus-many-machines": "multi gpu ddp distributed",
    "running.html#resume": "ctrl-c interrupt stop continue resume checkpoint",
    "running.html#sampling-with-vllm": "vllm",
    "using.html#did-it-learn-and-is-the-kl-good": "did it learn good kl",
    "using.html#how-do-i-sample-from-the-policy-or-load-it-with-from_pretrained": "generate chat",
    "using.html#how-do-i-measure-the-win-rate-on-my-own-data": "win rate better",
    "using.html#how-do-i-draw-two-runs-in-one-picture": "compare runs plot curves picture",
    "using.html#how-do-i-change-the-model-qwen-llama-or-the-system-prompt": "change model gemma",
    "using.html#how-do-i-upload-the-model-and-where-is-lora-merged": "push hub merge adapter",
    "using.html#how-do-i-train-for-more-episodes": "more episodes longer",
    "using.html#what-can-i-do-if-it-runs-out-of-memory": "oom cuda out of memory",
    "using.html#how-do-i-log-a-metric-of-my-own": "own custom metric callback",
    "your-experiment.html#where-to-change-what": "change the loss advantage",
    "diffs/index.html#algorithms": "grpo dapo gspo dpo patches",
    "diffs/index.html#lora-and-less-memory": "lora peft adapter qlora",
    "debugging.html": "nan diverges",
}
PAGES = {}  # path in the site → Markdown file


def site_path(file):
    """Where a file is in the site: docs/ppo.md is ppo.md, and ppo.py is ppo.py.md."""
    path = str(file.relative_to(ROOT)).removeprefix("docs/")
    return path if file.suffix in (".md", ".png", ".csv", ".ipynb") else f"{path}.md"


def page_of(file):
    """The Markdown of the listing of a script."""
    # Room for lines of 100 characters; ppo.md has the title ppo.py, too.
    top = f"---\nhide: [toc]\ntitle: source of {file.name}\n---\n# {file.name}"
    return f'{top}\n\n````{file.suffix[1:]} linenums="1"\n{file.read_text()}\n````'


def on_files(files, config):
    """Add the files that pages link to, also those of added pages."""
    queue = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    queue.remove(ROOT / "docs/log.md")
    for file in queue:
        path = site_path(file)
        if files.get_file_from_path(path) is None:
            is_copied = path == str(file.relative_to(ROOT))
            content = None if is_copied else page_of(file)
            abs_src_path = str(file) if is_copied else None
            files.append(File.generated(config, path, content=content, abs_src_path=abs_src_path))
        if file.suffix == ".md":
            PAGES[path] = file
            links = (file.parent / link[1] for link in LINK.finditer(LOG.sub("", file.read_text())))
            queue += {link.resolve() for link in links} - set(queue)
    return files


def on_page_markdown(markdown, page, config, **_):
    """Rewrite links to files, pictures and equations."""
    is_page = page.file.src_uri in PAGES
    page.meta["search"] = {"boost": 1 if is_page else 0.001}
    if not is_page:  # a listing
        return markdown
    folder = PAGES[page.file.src_uri].parent
    log = rf"[\1]({config.repo_url}/blob/main/docs/log.md\2)" if config.repo_url else r"\1"
    markdown = LOG.sub(log, markdown)

    def link(found):
        path = site_path((folder / found[1]).resolve())
        line = f"#__codelineno-0-{found[2]}" if found[2] else ""
        return f"]({os.path.relpath(path, os.path.dirname(page.file.src_uri))}{line}"

    markdown = PICTURE.sub(r"[\g<0>](\1)", LINK.sub(link, markdown))
    # In a span: an equation at the start of a line would be a paragraph of its own.
    return MATH.sub(lambda x: f"<span>{convert(x[2])}</span>" if x[2] else x[0], markdown)


def on_page_content(html, page, **_):
    """Tell mkdocs the anchors of a listing's lines, which it does not look for."""
    page.present_anchor_ids.update(re.findall(r'id="(__codelineno[^"]+)"', html))


def on_post_build(config):
    """Write keywords into the search's index, and pages that lead to where their text is now."""
    index_file = Path(config.site_dir, "search/search_index.json")
    index = json.loads(index_file.read_text())
    sections = {section["location"]: section for section in index["docs"]}
    for place, words in KEYWORDS.items():
        sections[place]["tags"] = [words]
    index_file.write_text(json.dumps(index))
    for name, place in MOVED.items():
        file, _, anchor = place.partition("#")
        assert f'id="{anchor}"' in Path(config.site_dir, file).read_text() or not anchor, place
        page = f'<meta http-equiv="refresh" content="0; url={place}"><a href="{place}">Moved</a>'
        Path(config.site_dir, f"{name}.html").write_text(page)
