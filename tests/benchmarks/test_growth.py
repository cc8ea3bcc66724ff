"""benchmarks/growth.py on the smallest rows."""

import csv

import pytest
from tiny import refuses

from benchmarks import growth


@pytest.mark.slow
def test_rows_are_measured_and_those_of_other_names_stay(here, monkeypatch):
    sizes = {"batch": ({}, (8,)), "labels": ({}, (20,)), "queries": ({}, (30,))}
    monkeypatch.setattr(growth, "ROWS", sizes)
    for names in (("batch",), ("labels", "queries")):
        growth.main(growth.Args(names, here / "growth.csv"))
    with open("growth.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    tokens = [float(row["tokens"]) for row in rows]
    assert tokens == [8 * (16 + 24), 20 * (16 + 24 + 24), 30 * 16]
    assert all(float(row["peak GB"]) > 0.1 for row in rows)
    assert all(float(row["cpu s"]) > 0 for row in rows)


def test_an_unknown_row_is_refused(here):
    refuses(lambda: growth.main(growth.Args(("width",), here / "x.csv")), "width", "batch")
