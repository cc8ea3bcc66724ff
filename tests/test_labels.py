"""Labels: token ids as OpenAI's files hold them, and pairs of texts as people have them."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import formats
import numpy as np
import pytest
from conftest import read_metrics
from tiny import make_args, make_task, refuses, write_task
from transformers import GPT2Config

import train_reward
from machinery.labels import Labels, load_labels
from tools import convert
from utils import TokenIds

PADS = [  # the model's pad id, a row of a file, its tokens
    (50257, [50256, 50259], [50256]),  # the files' 50259 is padding
    (50259, [7, 50259], [7]),
    (50260, [7, 50259], [7, 50259]),  # in a vocabulary of more ids it is a token; the padding of
    (60_000, [50259, 60_000], [50259]),  # such a file is the model's own pad id
]
RIGHT = dict(query=[1, 2, 3, 4], sample0=[0, 1, 2], sample1=[999], best=1)
JUNK = [3, "ab", {"a": 1}, [2.5], [-1], [1000], [True], ["1"], [[1]], [None], [2**70]]
WRONG = [(name, value) for name in ("query", "sample1") for value in JUNK]
WRONG += [("best", value) for value in (2, -1, 0.5, "1", [1], True)]


def ids_of(pad, truncate=None):
    return TokenIds(pad, [] if truncate is None else [truncate], [], [])


def lists(arrays):
    return [lists(x) if isinstance(x, list) else x.tolist() for x in arrays]


def label_task(path, rows, **changes):
    return make_task(label_dataset=formats.write_rows(path, rows), **changes)


def test_R4_openais_labels_load_without_padding(tmp_path):
    """In a batch queries are padded on the left and responses on the right."""
    p = 50259
    rows = [
        dict(query=[7, 8, p, p], sample0=[1, p, p], sample1=[2, 3, p], best=1),
        dict(query=[1, 2, 3], sample0=[5, p, p], sample1=[0], best=0),
    ]
    found = load_labels(label_task(tmp_path / "l.json", rows), None, ids_of(100))
    assert lists(found.queries) == [[7, 8], [1, 2, 3]] and found.best.tolist() == [1, 0]
    assert lists(found.responses) == [[[1], [2, 3]], [[5], [0]]]
    tokens, best, q = train_reward.candidate_tokens(found, np.array([1, 0]), 100, "cpu")
    assert best.tolist() == [0, 1] and q == 3
    assert tokens[0].tolist() == [[1, 2, 3, 5, 100], [1, 2, 3, 0, 100]]
    assert tokens[1].tolist() == [[100, 7, 8, 1, 100], [100, 7, 8, 2, 3]]


def make_labels(queries, responses):
    arrays = [[np.array(ids, np.int32) for ids in samples] for samples in (queries, *responses)]
    return Labels(arrays[0], arrays[1:], np.zeros(len(queries), dtype=int))


def test_heldout_labels_share_no_query_with_the_training_labels(capsys):
    """If none is left, as with one constant prompt, a sentence says so."""
    queries = [[1, 2], [3, 4], [1, 2], [5, 6], [3, 4], [5, 6], [2, 1], [1], [3, 4, 5]]
    found = make_labels(queries, [[[1], [2]]] * len(queries))
    assert found.held_out(2).tolist() == [3, 5, 6, 7, 8] and found.held_out(2).dtype.kind == "i"
    assert found.held_out(len(queries)).tolist() == [] == capsys.readouterr().out.split()
    constant = make_labels([[1, 2]] * 5, [[[1], [2]]] * 5)
    assert len(constant.held_out(2)) == 0 and "3 labels" in capsys.readouterr().out


@pytest.mark.parametrize("pad_id, query, expected", PADS)
def test_R4_openais_padding_is_50259_or_the_models_pad_id(pad_id, query, expected, tmp_path):
    rows = [{"query": query, "sample0": query, "sample1": [1, 2], "best": 1}]
    found = load_labels(label_task(tmp_path / "l.json", rows), None, ids_of(pad_id))
    assert lists(found.queries) == [expected] and lists(found.responses) == [[expected, [1, 2]]]


@pytest.mark.parametrize("vocab", [50257, 50400])  # GPT-J's is larger than its tokenizer's
def test_labels_of_gpt2_are_read_as_they_are_or_converted_for_another(vocab, gpt2, hers, here):
    """By 1,000 other tokens they are longer; nothing is cut."""
    gpt2.save_pretrained("gpt2")
    rows = formats.oai_labels(gpt2)
    task = label_task(here / "labels.json", rows, query_length=8, label_tokenizer="gpt2")
    command = f"{here}/labels.json labels_texts.jsonl --ids gpt2"
    refuses(lambda: load_labels(task, hers, ids_of(1000)), "--label_tokenizer gpt2", command)
    convert.main(convert.Args(f"{here}/labels.json", Path("labels_texts.jsonl"), ids="gpt2"))
    other = make_task(query_length=8, label_dataset="labels_texts.jsonl", label_tokenizer="gpt2")
    for own, tokenizer, size in ((task, gpt2, vocab), (other, hers, 1000)):
        found = load_labels(own, tokenizer, ids_of(size))
        assert len(found) == 3 and found.best.tolist() == [2, 0, 3]
        assert found.queries[1].tolist() == tokenizer.encode("“Go,” she said.\n\nNobody went.")
        end = tokenizer.encode(" There was nobody.<|endoftext|>The")
        assert found.responses[2][1].tolist() == end and len(found.queries[1]) > 8


def test_candidates_are_sorted_by_number(tmp_path):
    """`best` counts them: sample10 is the eleventh. Ids and `best` may be written as floats."""
    rows = [{f"sample{k}": [float(k)] for k in range(12)} | dict(query=[1.0], best=10.0)]
    found = load_labels(label_task(tmp_path / "l.json", rows), None, ids_of(100))
    assert lists(found.responses) == [[[k] for k in range(12)]] and found.best.tolist() == [10]


@pytest.mark.parametrize("name, value", WRONG)
def test_the_first_bad_row_of_several_is_named(name, value, tmp_path):
    rows = [RIGHT | {"note": value}, RIGHT | {name: value}, {}]
    task = label_task(tmp_path / "l.jsonl", rows)
    refuses(lambda: load_labels(task, None, ids_of(1000)), "--label_dataset", ".jsonl: row 1: ")


def test_R4_what_is_no_pair_of_texts_is_refused(hers, tmp_path):
    for row, word in (
        (formats.MESSAGES[0], "tools/convert.py"),
        ({"prompt": "Hi", "chosen": "a", "rejected": [formats.BLUE]}, "tools/convert.py"),
        (formats.HH_RLHF[0], "tools/convert.py"),  # there is no prompt
        (dict(question="Q", chosen="a", rejected="b"), "pairs_texts.jsonl --rename COLUMN=prompt"),
        ({"prompt": "Q:", "chosen": "Q: a", "rejected": "Q: b"}, "repeat"),  # the prompt twice
    ):
        task = label_task(tmp_path / "pairs.jsonl", [row] * 2)
        load = partial(load_labels, task, hers, ids_of(1000, 0))
        refuses(load, "--label_dataset", "pairs.jsonl: ", word)


@pytest.mark.parametrize("name", ["TLDR_PREFERENCE", "OAI_PREPROCESSED", "RENDERED"])
def test_R4_the_first_candidate_was_chosen_and_each_has_exactly_one_end(name, hers, tmp_path):
    settings = dict(query_length=128, truncate_token="<|endoftext|>")
    task = label_task(tmp_path / "p.jsonl", getattr(formats, name), **settings)
    found = load_labels(task, hers, ids_of(1000, 0))
    prompt, *sides = formats.TLDR_PREFERENCE[0].values()
    assert lists(found.queries) == [hers.encode(prompt)] and found.best.tolist() == [0]
    assert lists(found.responses) == [[[*hers.encode(side), 0] for side in sides]]


def test_R4_what_is_skipped_is_counted_by_its_reason(hers, tmp_path, capsys):
    """An empty answer has no tokens where nothing ends it; with its end it is one (hh-rlhf)."""
    texts = [
        (" ", " yes", " no"),
        ("Hi:", " yes", ""),
        ("So:", " yes", " no"),
        ("Is:", " yes", " yes"),
        ("It:", None, " no"),
        (None, " yes", " no"),
    ]
    rows = [dict(prompt=x, chosen=y, rejected=z) for x, y, z in texts]
    task = label_task(tmp_path / "p.jsonl", rows)
    found = load_labels(task, hers, ids_of(1000, None))
    assert lists(found.queries) == [hers.encode("So:")]
    said = capsys.readouterr().out
    assert "skipped 5 of 6 rows" in said and "1 null, such as row 4" in said
    assert "3 without tokens, such as row 0" in said and "1 with equal responses" in said
    assert "6 rows: 1 prompt blank, 1 prompt null, 1 chosen null, 1 rejected blank" in said
    found = load_labels(task, hers, ids_of(1000, 0))
    assert lists(found.queries) == [hers.encode("Hi:"), hers.encode("So:")]
    assert found.responses[0][1].tolist() == [0] and found.best.tolist() == [0, 0]
    assert "skipped 4 of 6 rows" in capsys.readouterr().out


def test_R4_of_ids_rows_without_a_query_a_response_or_a_judgment_are_skipped(tmp_path, capsys):
    rows = [
        RIGHT,
        RIGHT | {"best": None},
        RIGHT | {"query": []},
        RIGHT | {"sample1": None},
        RIGHT | {"sample0": [50259, 50259]},
        RIGHT | {"sample0": [999]},
        {},
    ]
    task = label_task(tmp_path / "l.jsonl", rows)
    found = load_labels(task, None, ids_of(1000))
    assert lists(found.queries) == [[1, 2, 3, 4]]
    said = capsys.readouterr().out
    assert "skipped 6 of 7 rows: 3 null, such as row 1; 2 without tokens, such as row 2" in said


def test_R4_texts_of_several_responses_are_read_as_they_are(hers, tmp_path):
    """No end is added, nothing is cleaned or cut. Columns such as sample_id are no samples."""
    samples = [" It rained.", " Ben saw it\n", " No", " Yes"]
    row = dict(query="Anna saw it. So did", sample_id="a", sample_text="b", best=2)
    row |= {f"sample{k}": text for k, text in enumerate(samples)}
    settings = dict(query_length=2, end_text=".", truncate_token=".", label_tokenizer="gpt2")
    task = label_task(tmp_path / "l.jsonl", [row], **settings)
    found = load_labels(task, hers, ids_of(1000, 0))
    assert lists(found.queries) == [hers.encode("Anna saw it. So did")]
    assert lists(found.responses) == [[hers.encode(text) for text in samples]]
    assert found.best.tolist() == [2]


@pytest.mark.parametrize("eos", [False, True])
def test_R4_a_long_prompt_loses_its_end_or_is_skipped_in_eos_tasks(eos, hers, tmp_path, capsys):
    rows = [dict(prompt=x, chosen=" a", rejected=" b") for x in ("Anna saw the cat .", "Anna")]
    full = [hers.encode(row["prompt"]) for row in rows]
    n, end = len(full[0]) - 1, dict(eos_task=eos, truncate_token="<|endoftext|>")
    task = label_task(tmp_path / "p.jsonl", rows, query_length=n, **end)
    found = lists(load_labels(task, hers, ids_of(1000, 0)).queries)
    assert found == ([full[1]] if eos else [full[0][:n], full[1]])
    assert ("1 without tokens" if eos else "cut 1 of 2 prompts") in capsys.readouterr().out


def test_rows_that_are_longer_than_the_model_reads_are_skipped_and_counted(hers, tmp_path, capsys):
    rows = [dict(query=[1, 2], sample0=[3] * n, sample1=[4], best=1) for n in (1, 30, 2, 9)]
    task = label_task(tmp_path / "l.jsonl", rows)
    found = load_labels(task, hers, ids_of(1000), GPT2Config(n_positions=4))
    assert lists(found.responses) == [[[3], [4]], [[3, 3], [4]]]
    said = capsys.readouterr().out
    assert "skipped 2 of 4 rows: 2 with more tokens" in said and "such as row 1" in said


@pytest.mark.slow
def test_openais_labels_train_a_model_with_another_tokenizer(gpt2, here):
    """Softmax over four responses, as for GPT-2; nothing of the files' ids is left."""
    gpt2.save_pretrained("gpt2")
    task = write_task(here, "gpt_neox", label_tokenizer="gpt2")
    formats.write_rows(here / "labels.json", formats.oai_labels(gpt2) * 4)
    convert.main(convert.Args("labels.json", Path("texts.jsonl"), ids="gpt2"))
    task = replace(task, label_dataset="texts.jsonl")
    train_reward.main(make_args(task, train_reward, output_dir="out", run_name="run"))
    losses = [row["loss"] for row in read_metrics("run") if "loss" in row]
    assert len(losses) == 6 and abs(losses[0] - math.log(4)) < 1
