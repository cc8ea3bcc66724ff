"""benchmarks/human.py on a tiny archive of the true form: Latin-1, tab-separated, CRLF."""

import io
import json
import tarfile

import numpy as np
import tiny

from benchmarks import human


def write_archive(path, texts, ratings):
    """A tar file with the two tables; `ratings`: a list for each text."""
    tables = {"GroundTruth": [], "anonDataRatings": []}
    for i, (text, row) in enumerate(zip(texts, ratings, strict=True)):
        tables["GroundTruth"].append(f"{i}\t{np.mean(row):.3f}\t{text}\r\n")
        tables["anonDataRatings"].append(f"{i}\t{np.mean(row):.3f}\t{np.std(row):.3f}\t{row}\r\n")
    with tarfile.open(path, "w:gz") as archive:
        for name, lines in tables.items():
            content = "".join(lines).encode("latin-1")
            member = tarfile.TarInfo(f"movieReviewSnippets_{name}.txt")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_splits_share_no_snippet_and_halves_no_rater(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in dict(TRAIN=12, HELDOUT=6, PAIRS=40, HELDOUT_PAIRS=30).items():
        monkeypatch.setattr(human, f"NUM_{name}", value)
    texts = [f"café  {i} is a film of eight  words." for i in range(24)] + ["too short."]
    # The first half of the raters prefers large numbers, the second half small ones.
    ratings = [[i // 8, -(i // 8)] * 7 for i in range(24)] + [[4] * 15]
    archive = write_archive(tmp_path / "ratings.tar.gz", texts, ratings)
    human.main(human.Args("data", archive))
    data = {path.stem: human.read_lines(path) for path in human.DATA.iterdir()}
    assert {name: len(rows) for name, rows in data.items()} == dict(
        texts=12, first=40, second=40, heldout=30, queries=6
    )

    def numbers(*names: str) -> set[int]:
        return {
            int(word) for name in names for word in json.dumps(data[name]).split() if word.isdigit()
        }

    parts = [
        numbers(*names) for names in (("texts", "first", "second"), ("heldout",), ("queries",))
    ]
    assert set.union(*parts) == set(range(24)) and sum(map(len, parts)) == 24
    assert {row["text"][:13] for row in data["queries"]} <= {
        f"Review: café {i}"[:13] for i in range(24)
    }
    for half, sign in (("first", 1), ("second", -1)):
        for pair in data[half]:
            better, worse = (int(pair[side].split()[1]) // 8 for side in human.SIDES)
            assert sign * better > sign * worse and pair["agrees"] == 1
    assert {pair["mean_agrees"] for pair in data["heldout"]} == {0.5}  # all means are 0


def test_bad_archives_end_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    archive = write_archive(
        tmp_path / "few.tar.gz", ["one of the few texts of eight words"], [[1, 2]]
    )
    (tmp_path / "text.txt").write_text("not an archive")
    tiny.refuses(lambda: human.main(human.Args("data", archive)), "few.tar.gz", "1 snippets")
    for name in ("text.txt", "missing.tar.gz"):
        tiny.refuses(lambda name=name: human.main(human.Args("data", tmp_path / name)), name)
    tiny.refuses(lambda: human.main(human.Args("data")), "archive")
