"""Hooks of mkdocs. README is the front page, and the site has each file that a page links to.

Markdown files become pages, pictures, CSVs and notebooks are copied, scripts become listings.
Equations become MathML, which browsers show without JavaScript. A click on a picture opens it alone.
Links to the log lead to the repository. The search ranks listings below pages. Pages that were merged into others lead there.
"""

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
PAGES = {}  # path in the site → Markdown file


def site_path(file):
    """Where a file is in the site: docs/ppo.md is ppo.md, and ppo.py is ppo.py.md."""
    path = str(file.relative_to(ROOT)).removeprefix("docs/")
    return path if file.suffix in (".md", ".png", ".csv", ".ipynb") else f"{path}.md"


def page_of(file):
    """The Markdown of the listing of a script."""
    top = f"---\nhide: [toc]\n---\n# {file.name}"  # room for lines of 100 characters
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
    """Write the pages that lead to where their text is now."""
    for name, place in MOVED.items():
        file, _, anchor = place.partition("#")
        assert f'id="{anchor}"' in Path(config.site_dir, file).read_text() or not anchor, place
        page = f'<meta http-equiv="refresh" content="0; url={place}"><a href="{place}">Moved</a>'
        Path(config.site_dir, f"{name}.html").write_text(page)
