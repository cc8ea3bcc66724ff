"""benchmarks/human.py on a tiny archive of the true form: Latin-1, tab-separated, CRLF."""

import io
import re
import tarfile

from benchmarks import human


def write_archive(path, texts, ratings):
    """A tar file with the two tables; `ratings`: a list for each text."""
    tables = {"GroundTruth": "", "anonDataRatings": ""}
    for i, (text, row) in enumerate(zip(texts, ratings, strict=True)):
        tables["GroundTruth"] += f"{i}\t0\t{text}\r\n"
        tables["anonDataRatings"] += f"{i}\t0\t0\t{row}\r\n"
    with tarfile.open(path, "w:gz") as archive:
        for name, table in tables.items():
            member = tarfile.TarInfo(f"movieReviewSnippets_{name}.txt")
            member.size = len(table)  # bytes, too: Latin-1
            archive.addfile(member, io.BytesIO(table.encode("latin-1")))
    return human.Args("data", path)


def test_parts_share_no_snippet_and_halves_no_rating(here, monkeypatch):
    for name, value in dict(TRAIN=12, HELDOUT=6, PAIRS=40, HELDOUT_PAIRS=30).items():
        monkeypatch.setattr(human, f"NUM_{name}", value)
    texts = [f"café  {i} is a film of eight  words." for i in range(24)] + ["too short."]
    # The first half of the raters likes large numbers, the second half small ones: all means are 0.
    ratings = [[i // 8 + 1, -(i // 8) - 1] * 7 for i in range(24)] + [[4] * 15]
    human.main(write_archive(here / "ratings.tar.gz", texts, ratings))
    data = {path.stem: path.read_text() for path in human.DATA.iterdir()}
    assert data["first"].count("\n") == 40 and data["heldout"].count("\n") == 30
    parts = data["texts"] + data["first"] + data["second"], data["heldout"], data["queries"]
    numbers = [set(re.findall(r"\\u00e9 (\d+) is a film of", part)) for part in parts]
    assert len(set.union(*numbers)) == sum(map(len, numbers)) == 24
    for half, sign in (("first", 1), ("second", -1)):
        for pair in human.read_lines(human.DATA / f"{half}.jsonl"):
            better, worse = (int(pair[side].split()[1]) // 8 for side in ("chosen", "rejected"))
            assert sign * better > sign * worse
