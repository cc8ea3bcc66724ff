"""Texts to queries, as OpenAI cleaned them; the table of tokens, its cache; what sft.py learns."""

import functools
import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import datasets
import formats
import numpy as np
import pytest
import torch
from formats import write_rows
from tiny import WORDS, load_script, refuses

import utils
from data import clean, tasks
from machinery import queries, tokens
from machinery.queries import cut_query, ends_word
from utils import TokenIds, query_rows

SENTENCES = [
    "Anna saw the old red house .",
    "",
    "  \t",
    "Ben was glad .",
    "The cat slept under the table in the kitchen .",
    "So .",
]
EOS_TEXTS = [
    ("Anna saw it.", " Ben saw it too."),
    ("Ben saw Anna.", " So."),
    (" ", " nothing"),
    ("Ben saw Anna.", " So.<|endoftext|>\n"),  # some datasets have the end
    ("Anna", ""),
    ("So", " the end of the story was that Ben was glad and so was Anna."),
    ("Ben saw Anna.", None),
]
EOS_ROWS = [{"prompt": prompt, "completion": text} for prompt, text in EOS_TEXTS]


def write_sentences(path, n=100):
    return write_rows(path, [{"text": f"Anna saw {i} cats. So did Ben."} for i in range(n)])


def tokenizer_of(task):
    return tokens.load_tokenizer(task, task.response_length)[0]


def load_queries(task):
    return queries.load_queries(task, *tokens.load_tokenizer(task, task.response_length))


def rows_of(table):
    return [tuple(row) for row in table[:].tolist()]


def test_G2_books_are_one_sentence_a_row_padded_on_the_left(task, tmp_path):
    rows = [{"text": sentence, "tokens": [1], "cut": 0} for sentence in SENTENCES]  # own columns
    task = replace(task, query_dataset=write_rows(tmp_path / "books.jsonl", rows))
    table, tokenizer = load_queries(task), tokenizer_of(task)
    expected = [tokenizer.encode(SENTENCES[i])[:8] for i in (0, 3, 4, 5)]  # blank rows: no queries
    assert sorted(rows_of(table)) == sorted((WORDS,) * (8 - len(r)) + tuple(r) for r in expected)


CLEAN = [
    "A baker of 61 has won £1.5million. She said: 'I cried.' Happy: The baker at home . "
    "More at CNN.com",
    "LONDON, England (Reuters) -- A painter gained access to a reported £20 million on Monday. "
    "He won't cast a spell on it.",
    "The Senate voted on Tuesday. The bill passed by 51 to 49, a clerk said .",
    "Rain fell on Sunday. It did not stop.",
]
STAMP = "07:03 EST, 2 March 2013 ."
EDGES = {
    f"By . Anna Smith . PUBLISHED: . {STAMP} It rained .": "It rained .",
    f"By . Dr A. Smith, in Rome . UPDATED: . {STAMP} It rained .": "It rained .",
    f"PUBLISHED: . {STAMP} | . UPDATED: . 08:07 BST, 2 May 2013 . It rained .": "It rained .",
    "By . Anna Smith . and Ben Jones . It rained . He left .": "It rained . He left .",
    "By . Anna Smith . It rained . PUBLISHED: . 07:03": "It rained . PUBLISHED: . 07:03",
    "(CNN) -- Rain. (CNN) -- Sun.": "Sun.",  # after the last one, as [O]
    f"Rain (CNN) came. {'x' * 100} (CNN) went.": f"came. {'x' * 100} (CNN) went.",
    f"By . Anna . PUBLISHED: . {STAMP} ": f"By . Anna . PUBLISHED: . {STAMP}",  # nothing else
    "“Rain,” he said: ‘it’s â€™ &amp; so’": "\"Rain,\" he said: 'it's ' & so'",
}
UNCHANGED = [
    *CLEAN,
    "",
    "It rained. (CNN) --",
    f"By now it rained . He said so . PUBLISHED: . {STAMP}",  # no byline
    f"It rained . UPDATED: . {STAMP} He left .",  # not at the start: [O] would empty it
]


def test_articles_lose_what_openai_removed_and_nothing_else():
    assert [clean.clean_article(row["article"]) for row in formats.CNNDM] == CLEAN
    assert {text: clean.clean_article(text) for text in EDGES} == EDGES
    assert [clean.clean_article(text) for text in UNCHANGED] == UNCHANGED


def test_posts_are_cleaned_as_openai_cleaned_them():
    post = formats.TLDR_17[0]["content"]
    assert clean.clean_post(post) == "I painted the house.\n\nIt's red now."
    assert clean.clean_post("a\nb\n\nc\n\n\nd\n\n\n\n\ne") == "a\nb\n\nc\n\nd\n\ne"


def test_tldrs_prompts_can_be_given_the_form_of_its_preferences():
    (row,), (pair,) = formats.TLDR, formats.TLDR_PREFERENCE
    assert row["prompt"] != pair["prompt"]
    assert clean.clean_tldr(row["prompt"]) == pair["prompt"] == clean.clean_tldr(pair["prompt"])
    assert clean.clean_tldr("no post\n\nat all") == "no post\n\nat all"


@pytest.fixture
def cnndm(task, tmp_path):
    """The task's own settings; lengths and model are tiny."""
    articles = [*formats.CNNDM[2:], {"article": "Nothing here ends a sentence"}]
    return replace(
        tasks.TASKS["cnndm"],
        query_dataset=write_rows(tmp_path / "cnn.jsonl", articles),
        base_model=task.base_model,
        query_length=40,
        response_length=8,
        truncate_after=4,
    )


def test_P3_cnndm_queries_are_cleaned_end_a_sentence_and_have_prefix_and_suffix(cnndm):
    tokenizer, ids = tokens.load_tokenizer(cnndm, 8)
    queries = load_queries(cnndm)[:]
    assert utils.decode(tokenizer, queries, ids) == CLEAN[2:]
    contexts = utils.add_affixes(queries, ids)
    expected = [f"Article:\n\n{text}\n\nTL;DR:" for text in CLEAN[2:]]
    assert utils.decode(tokenizer, contexts, ids) == expected
    for row in contexts.tolist():  # all padding is on the left
        assert row == sorted(row, key=lambda token: token != ids.pad)
    assert ids.ends == tokenizer.encode("\n")


@pytest.mark.parametrize("make", [formats.gpt2_tokenizer, formats.llama2_tokenizer])
@pytest.mark.parametrize("end", ["", "\n", " "])
def test_a_post_that_is_too_long_loses_its_last_lines_then_its_last_characters(make, end, task):
    """As in OpenAI's summarize-from-feedback, also of a post that is one line."""
    tokenizer, head, rest = make(), "TITLE: soup\n\nPOST: ", f"\n\nTL;DR:{end}"
    for post in ("Anna saw it.\nBen saw it too.\n\nThe end.", "Anna saw that Ben saw it, too."):
        text = head + post + rest
        for length in range(len(tokenizer.encode(text)), len(tokenizer.encode(head + rest)), -1):
            while len(tokenizer.encode(head + post + rest)) > length:
                post = post[: post.rindex("\n")] if "\n" in post else post[:-1]
            task = replace(task, keep_last_line=True, query_length=length)
            (found,) = queries.tokenize_queries([text], task, tokenizer)
            assert found == tokenizer.encode(head + post + rest)
        assert "\n" not in post and len(post) < 9


@pytest.fixture
def tokenized(monkeypatch):
    """Every text that is tokenized as a query from now on."""
    seen, tokenize = [], queries.tokenize_queries

    def spy(texts, *rest):
        seen.extend(texts)
        return tokenize(texts, *rest)

    monkeypatch.setattr(queries, "tokenize_queries", spy)
    return seen


def test_tables_and_samples_are_found_again_and_hold_out_the_first_rows(task, tmp_path, tokenized):
    """A start whose rows and settings another one had tokenizes nothing; samples are distinct."""
    many = replace(task, query_dataset=write_sentences(tmp_path / "many.txt"))
    table = load_queries(many)
    held, rest = map(rows_of, table.hold_out(5))
    assert held == rows_of(table)[:5] and len({*held, *rest}) == len(table) == 100
    few = replace(many, num_queries=50)
    for expected in (100, 150, 150):
        assert len(tokenized) == expected and torch.equal(load_queries(many)[:], table[:])
        sample = rows_of(load_queries(few))
        assert len(sample) == len(set(sample) & set(rows_of(table))) == 50


def test_a_heldout_query_is_not_trained_on_where_it_is_once_more(task, tmp_path):
    lines = [{"text": f"Anna saw {i} cats."} for i in range(30)]
    task = replace(task, query_dataset=write_rows(tmp_path / "twice.txt", lines * 2))
    held, rest = map(rows_of, load_queries(task).hold_out(10))
    assert not set(held) & set(rest) and len(set(held) | set(rest)) == 30
    assert len(rest) == 60 - 2 * len(set(held))  # duplicates of others stay
    one = replace(task, query_dataset=write_rows(tmp_path / "one.txt", lines[:1] * 8))
    refuses(lambda: load_queries(one).hold_out(2), "2 of 8")


@pytest.mark.parametrize("change", ["query_length", "query_column", "content", "tokenizer", "pad"])
def test_what_a_table_depends_on_makes_another_one(change, task, tmp_path, tokenized):
    rows = [dict(text=f"Anna saw {i} cats. So did Ben.", title=f"{i}.") for i in range(100)]
    task = replace(task, query_dataset=write_rows(tmp_path / "a.jsonl", rows), truncate_token=None)
    tokenizer, ids = tokens.load_tokenizer(task, 5)
    before = rows_of(queries.load_queries(task, tokenizer, ids))
    assert len(tokenized) == 100
    tokenized.clear()
    if change == "content":
        write_rows(tmp_path / "a.jsonl", [row | dict(text="The " + row["text"]) for row in rows])
    if change == "tokenizer":
        tokenizer.add_tokens(["Anna saw"])
    if change == "pad":
        ids = ids._replace(pad=WORDS + 1)
    changes = dict(query_length=7, query_column="title")
    task = replace(task, **{name: value for name, value in changes.items() if name == change})
    after = rows_of(queries.load_queries(task, tokenizer, ids))
    assert len(tokenized) == len(after) == 100
    assert change == "pad" or before != after


def test_only_the_rows_that_are_used_are_checked(task, tmp_path):
    """Which rows these are does not depend on what the others hold. The first bad one is named."""
    path = tmp_path / "a.jsonl"
    task = replace(task, query_dataset=str(path), num_queries=10)
    rows = [{"text": f"Anna saw {i} cats."} for i in range(100)]
    write_rows(path, rows)
    used = [rows.index(row) for row in load_queries(task).source]
    bad = {"text": '[{"role": "user"'}
    write_rows(path, [row if i in used else bad for i, row in enumerate(rows)])
    assert len(load_queries(task)) == 10
    rows[used[0]] = bad
    write_rows(path, rows)
    refuses(lambda: load_queries(task), f"text of row {used[0]} is", "tools/convert.py")


def test_processes_wait_at_a_file_lock_for_the_table_of_the_first(task, tmp_path, tokenized):
    many = replace(task, query_dataset=write_sentences(tmp_path / "many.txt", 2500))
    with ThreadPoolExecutor() as pool:
        tables = [x[:] for x in pool.map(load_queries, [many] * 2)]
    assert len(tokenized) == 2500 and torch.equal(*tables)


def test_G6_rows_of_a_step_are_a_pure_function_and_visit_every_row_once_an_epoch():
    """10 rows, 4 a step: steps 0 to 4 are two epochs. Every process has another order."""
    orders = []
    for seed in (1, 100_004, 200_007):
        steps = [query_rows(10, 4, seed, step).tolist() for step in range(5)]
        assert [query_rows(10, 4, seed, step).tolist() for step in (4, 0)] == [steps[4], steps[0]]
        flat = sum(steps, [])
        orders += [tuple(flat[:10]), tuple(flat[10:])]
    assert all(sorted(order) == list(range(10)) for order in orders) and len(set(orders)) == 6
    assert np.bincount(query_rows(3, 9, 1, 0)).tolist() == [3, 3, 3]  # fewer than a step's


def query(text, tokenizer, length, end="."):
    ids = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    cut = cut_query(ids["input_ids"], length, None, ends_word(text, ids["offset_mapping"], end))
    return tokenizer.decode(cut, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("name", ["gpt2", "hers"])
def test_P3_a_query_ends_with_its_last_sentence_whatever_is_before_the_stop(name, request):
    tokenizer = request.getfixturevalue(name)
    cuts = {
        "It won £1.5million. More at CNN.com": "It won £1.5million.",  # 13, and 13 within words
        "It rained. Happy: the baker . More at": "It rained. Happy: the baker .",  # 764
        "It rained . He": "It rained .",
        "It rained . ": "It rained .",
        "It rained.": "It rained.",
        "1.5 at CNN.com": "",
        "": "",
    }
    assert {text: query(text, tokenizer, 500) for text in cuts} == cuts
    expected = [article.removesuffix(" More at CNN.com") for article in CLEAN]
    assert [query(article, tokenizer, 500) for article in CLEAN] == expected


def test_P3_the_last_sentence_inside_the_length_counts(gpt2):
    text = "It was hot. He left . She"
    cuts = [query(text, gpt2, n) for n in (3, 4, 6, 7, 8)]
    assert cuts == ["", "It was hot.", "It was hot.", *["It was hot. He left ."] * 2]
    assert query("One.\n\nTwo", gpt2, 9, "\n") == "One.\n\n"
    assert query("One.\nTwo\n", gpt2, 3, "\n") == "One.\n"


def test_what_a_users_function_cleaned_is_not_taken_from_an_earlier_run(task, tmp_path, tokenized):
    """It may call anything, for example a module that is edited between two runs."""
    (tmp_path / "mine.py").write_text("def clean(text):\n    return text\n")
    task = replace(task, clean_fn=f"{tmp_path / 'mine.py'}:clean")
    for texts in (40, 80):
        load_queries(task)
        assert len(tokenized) == texts


@pytest.fixture
def eos_task(task, tmp_path):
    """The embedded EOS task's settings on rows that are written by hand."""
    return replace(
        tasks.TASKS["synthetic_eos"],
        query_dataset=write_rows(tmp_path / "eos.jsonl", EOS_ROWS),
        base_model=task.base_model,
        query_prefix="So",
        query_suffix=" was Anna.",
        query_length=6,
        response_length=8,
        gold_fn=None,
    )


def test_X9_sft_sequences_of_an_eos_task_are_context_response_and_one_end(eos_task, capsys):
    """Padded on both sides, as the policy sees them. A response that is too long has no end.

    An empty one is an end alone; one that is not there is skipped.
    """
    tokenizer, ids = tokens.load_tokenizer(eos_task, 8)
    expected = []
    for row in (EOS_ROWS[i] for i in (0, 1, 1, 4, 5)):
        prompt = tokenizer.encode(row["prompt"])[:6]
        response = [*tokenizer.encode(row["completion"]), tokenizer.eos_token_id][:8]
        context = [*tokenizer.encode("So"), *prompt, *tokenizer.encode(" was Anna.")]
        padded = [WORDS] * (6 - len(prompt)) + context + response + [WORDS] * (8 - len(response))
        expected.append(padded)
    found = queries.load_responses(eos_task, tokenizer, ids)[:]
    assert sorted(found.tolist()) == sorted(expected)
    assert (found == tokenizer.eos_token_id).sum(dim=1).sort()[0].tolist() == [0, 1, 1, 1, 1]
    said = capsys.readouterr().out
    assert "7 rows: 1 prompt blank, 1 completion blank, 1 completion null" in said
    assert "skipped 2 of 7 rows" in said


def test_special_tokens_inside_of_texts_are_counted(eos_task, tmp_path, capsys):
    """One at the end of an answer is its end. Said again at a later start, from the cache."""
    end = "<|endoftext|>"
    rows = [
        dict(prompt=f"Anna {end} saw", completion=f" it.{end}\n"),
        dict(prompt="Ben", completion=f" saw{end} it.{end}"),
        dict(prompt="Tom", completion=""),
    ]
    task = replace(eos_task, query_dataset=write_rows(tmp_path / "a.jsonl", rows))
    for _ in range(2):
        queries.load_responses(task, *tokens.load_tokenizer(task, 8))
        said = capsys.readouterr().out
        found = f"1 prompt with '{end}', 1 completion with '{end}', 1 completion blank"
        assert f"3 rows: {found} (docs/data.md)" in said


def blocks_by_hand(texts, tokenizer, size):
    """Texts with a space between them; what does not fit into a full block is dropped."""
    blocks, block = [], []
    for text in filter(None, map(str.strip, texts)):
        block = block + tokenizer.encode(" " + text if block else text)
        if len(block) >= size:
            blocks, block = [*blocks, block[:size]], []
    return blocks


def load_blocks(task, block_size, load=queries.load_blocks):
    return load(task, block_size, *tokens.load_tokenizer(task, 5))[:].tolist()


@pytest.mark.parametrize("batch", [1, 3, 10_000])
def test_sft_blocks_do_not_depend_on_the_batches_of_texts(batch, task, tmp_path, monkeypatch):
    """A block continues in the next batch, also over blank ones, and begins with a text's start."""
    texts = [f"  {name} saw {i} cats." for i in range(20) for name in ("Anna", "Ben ")]
    texts += [""] * 8 + ["The end."] * 30
    task = replace(task, query_dataset=write_rows(tmp_path / "t.txt", [{"text": t} for t in texts]))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")  # an empty one
    in_batches = functools.partialmethod(datasets.Dataset.map, batch_size=batch)
    monkeypatch.setattr(datasets.Dataset, "map", in_batches)
    expected = blocks_by_hand(texts, tokenizer_of(task), 11)
    assert sorted(load_blocks(task, 11)) == sorted(expected) and len(expected) > 20


def test_another_way_to_make_blocks_makes_another_table(task, tmp_path, monkeypatch):
    original = load_blocks(task, 10)
    source = Path(queries.__file__).read_text()
    changed = source.replace("append(block.copy())", "append(block[block_size - 1 :: -1])")
    assert changed != source
    (tmp_path / "mine.py").write_text(changed)
    mine = load_script(tmp_path / "mine.py")
    assert load_blocks(task, 10, load=mine.load_blocks) == [row[::-1] for row in original]


@pytest.mark.parametrize("load", [queries.load_queries, queries.load_responses])
def test_a_dialogue_with_its_answer_is_no_query(load, eos_task, tmp_path):
    """Of hh-rlhf: a policy would continue the chosen answer. Its prompts alone are queries."""
    rows = [dict(prompt=x, completion=" Hi") for x in (formats.HELLO, formats.HH_RLHF[0]["chosen"])]
    path = tmp_path / "a.jsonl"
    task = replace(eos_task, query_length=40, query_dataset=write_rows(path, rows[:1]))
    start = functools.partial(load, task, *tokens.load_tokenizer(task, 8))
    start()
    write_rows(path, rows)
    refuses(start, "Then mix it", "tools/convert.py")


def test_queries_without_the_tokens_of_a_chat_template_are_said(chat, eos_task, tmp_path, capsys):
    ids = TokenIds(WORDS, 0, [], [])
    chat.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    missing = "no prompt with special tokens of the chat template"
    for text, expected in (("Hi", missing), ("<|im_start|>Hi", "1 prompt with '<|im_start|>'")):
        path = write_rows(tmp_path / f"{len(text)}.jsonl", [dict(prompt=text)])
        queries.load_queries(replace(eos_task, query_dataset=path), chat, ids)
        assert f"1 rows: {expected} (docs/data.md)" in capsys.readouterr().out


def test_sounds_are_not_decoded_and_rows_that_nothing_reads_are_counted(task, tmp_path, capsys):
    rows = {"text": [f"Anna saw {i} cats." for i in range(9)], "answer": [*range(9)]}
    rows |= {"sound": [{"bytes": b"no sound", "path": None}] * 9}
    found = datasets.Dataset.from_dict(rows).cast_column("sound", datasets.Audio())
    found.to_parquet(tmp_path / "a.parquet")
    task = replace(task, query_dataset=str(tmp_path / "a.parquet"), num_queries=7)
    assert load_queries(task).columns().keys() == {"text", "answer"}
    assert "7 of 9 rows are used (--num_queries)" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["blocks", "responses"])
def test_sft_holds_out_sequences_from_all_of_a_sorted_file(kind, eos_task, tmp_path):
    rows = [dict(prompt=f"{i}{' the' * (i // 40)}", completion=" Ben") for i in range(400)]
    task = replace(eos_task, query_dataset=write_rows(tmp_path / "a.jsonl", rows), query_length=20)
    tokenizer, ids = tokens.load_tokenizer(task, 8)
    if kind == "blocks":
        table = queries.load_blocks(task, 20, tokenizer, ids)
    else:
        table = queries.load_responses(task, tokenizer, ids)
    counts = (table[:] == tokenizer.encode(" the")[0]).sum(dim=1)
    assert counts[:60].min() == counts.min() and counts[:60].max() == counts.max() > 7


def test_answers_in_the_column_of_the_prompts_are_refused(eos_task):
    """sft.py would learn to repeat the prompt."""
    task = replace(eos_task, response_column=eos_task.query_column)
    load = functools.partial(queries.load_responses, task, *tokens.load_tokenizer(task, 8))
    refuses(load, "--response_column prompt")


def test_sft_holds_out_a_tenth_of_few_sequences(start, capsys):
    start("sft", num_heldout=None)
    out = capsys.readouterr().out
    found = re.search(r"(\d+) training sequences, (\d+) held out", out)
    learned, held_out = int(found[1]), int(found[2])
    assert held_out == math.ceil((learned + held_out) / 10)
