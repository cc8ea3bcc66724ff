"""A folder for students: the notebook without solutions, starter.py, and the tests that grade it.

python docs/course/student.py my_course
"""

import json
import re
import shutil
import sys
from pathlib import Path

COURSE = Path(__file__).parent


def without_solutions(cells: list[dict]) -> list[dict]:
    """The cells but those from a solution's heading to the next lesson."""
    kept, in_solution = [], False
    for cell in cells:
        source = "".join(cell["source"])
        if source.startswith("## "):
            in_solution = False
        in_solution |= source.startswith("#### Solution")
        if not in_solution:
            source = source.removesuffix("\n\n### Solutions")
            source = re.sub(r" Solutions are folded[^.]*\.", "", source)
            kept.append(cell | {"source": source.splitlines(keepends=True)})
    return kept


def main(folder: Path) -> None:
    """Write the folder."""
    notebook = json.loads((COURSE / "course.ipynb").read_text())
    notebook["cells"] = without_solutions(notebook["cells"])
    folder.mkdir(parents=True)
    (folder / "course.ipynb").write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    for name in ("starter.py", "grade.py"):
        shutil.copy(COURSE / name, folder)
    print(f"{folder}: course.ipynb, starter.py, grade.py")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/course/student.py FOLDER, a new one")
    if Path(sys.argv[1]).exists():
        sys.exit(f"{sys.argv[1]} exists: pass a new folder, or delete it")
    main(Path(sys.argv[1]))
