"""Run the notebook of the course, and write its page with outputs and pictures: lessons.md.

    OMP_NUM_THREADS=1 python docs/course/render.py my_course

Runs and weights go to the folder `my_course`; a run that is there is not repeated. Prints the CPU
minutes of each lesson. What Jupyter collapses is collapsed on the page.
"""

import json
import os
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import matplotlib.pyplot as plt

NOTEBOOK = Path(__file__).resolve().with_name("course.ipynb")
PICTURES = NOTEBOOK.parents[1] / "img" / "course"
FOLD = '<details markdown="1"><summary>{}</summary>'


def run_cell(source: str, names: dict) -> str:
    """What a cell prints and draws, as Markdown. Its figures have names."""
    printed = StringIO()
    with redirect_stdout(printed):
        exec(source, names)
    text = f"\n\n```text\n{printed.getvalue().rstrip()}\n```" if printed.getvalue() else ""
    for name in plt.get_figlabels():
        plt.figure(name).savefig(PICTURES / f"{name}.png", dpi=80)
        text += f"\n\n![{name.replace('_', ' ')}](../img/course/{name}.png)"
    plt.close("all")
    return text


def main(folder: str) -> None:
    """Run all cells in order."""
    plt.switch_backend("Agg")
    Path(folder).mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    names = {"__name__": "__main__"}
    page, lesson, start, end = "", "", 0.0, ""
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        source, metadata = "".join(cell["source"]), cell["metadata"]
        if cell["cell_type"] == "code":
            code = f"```python\n{source}\n```"
            if metadata.get("jupyter"):  # the source is hidden
                code = f"{FOLD.format('Code')}\n\n{code}\n\n</details>"
            page += code + run_cell(source, names) + "\n\n"
            continue
        if source.startswith("#"):
            page, end = page + end, ""
        if source.startswith("## "):
            now = sum(os.times()[:4])  # user and system time, of this process and its children
            if lesson:
                print(f"{lesson}: {(now - start) / 60:.1f} CPU minutes", flush=True)
            lesson, start = source.split("\n")[0], now
        if metadata.get("jp-MarkdownHeadingCollapsed"):  # up to the next heading
            source, end = FOLD.format(source.strip("# ")), "</details>\n\n"
        page += source + "\n\n"
    print(f"{lesson}: {(sum(os.times()[:4]) - start) / 60:.1f} CPU minutes")
    NOTEBOOK.with_name("lessons.md").write_text((page + end).rstrip() + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
