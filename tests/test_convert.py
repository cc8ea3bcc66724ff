"""tools/convert.py: rows of other forms as texts."""

import gzip
import json
from functools import partial
from pathlib import Path

import datasets
import formats
import pytest
from formats import BLUE, GREEN, USER
from test_readme import ROOT, blocks
from tiny import refuses
from transformers import AutoTokenizer

from machinery.sources import load_rows
from tools.convert import Args, main

END = "<|im_end|>"
ASK = f"<|im_start|>user\n{USER['content']}{END}\n<|im_start|>assistant\n"
# Rows of published data sets (columns read on the hub's cards, and in code that reads them, 2026-11)
# and of other forms; flags; the texts of the row, or what is said. `before`: the texts that runs
# wrote of the row themselves, by the code of commit a17f382.
FORMS = [json.loads(line) for line in (ROOT / "tests" / "forms.jsonl").read_text().splitlines()]
WRONG: list = [[], None, " ", 3, ["Hi"], [{"role": "narrator", "content": "Hi"}], [USER, BLUE]]
WRONG += [[USER | {"content": content}] for content in (None, 3, [{"type": "text", "text": "?"}])]


def convert(rows: list[dict], **flags) -> list[dict]:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("out.jsonl").unlink(missing_ok=True)
    main(Args("rows.jsonl", Path("out.jsonl"), **flags))
    return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]


@pytest.fixture
def chat(chat, here) -> dict:
    chat.save_pretrained("chat")
    return dict(chat="chat", end=END)


@pytest.mark.parametrize("case", FORMS, ids=[x["form"] for x in FORMS])
def test_a_form_becomes_its_texts_or_a_sentence_says_the_flag(case, chat, capsys):
    (code,) = (x for x in blocks("docs/data.md", "python") if "def nectar" in x)
    flags, rows, functions = dict(case["flags"]), [case["row"] | {"margin": 0.5}], {}
    exec(code, functions)
    computed = flags.pop("computed", None)
    if computed:
        rows = [*functions[computed](rows[0])]
    run = partial(convert, rows, end=END, **flags)
    if "says" in case:
        refuses(run, "no row was written")
        assert case["says"] in capsys.readouterr().out and not Path("out.jsonl").exists()
        return
    (found,) = run()
    first, _, last = capsys.readouterr().out.rpartition("\nout.jsonl: ")
    assert json.loads(first) == found and ("margin" in last) == (not computed)
    assert case.get("texts", {}).items() <= found.items()
    if "before" in case:
        names = "prompt", "completion", "chosen", "rejected"
        assert {x: found[x] for x in names if x in found} == case["before"]


# Of nvidia/Llama-3_3-Nemotron-Super-49B-v1_5 and DeepSeek-R1's distilled models [llama.cpp's
# models/templates]: thoughts of all answers are dropped; DeepSeek's prompt begins one.
DROPS = "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}E\n{% endfor %}"
NEMOTRON = DROPS + "{% if add_generation_prompt %}assistant: {% endif %}"
DEEPSEEK = DROPS + "{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
THOUGHT = BLUE | {"content": "<think>\nAir scatters it.\n</think>\n\nIt is blue."}
# Phi-3-small's; Phi-3-mini, 3.5 and 4-mini also end a dialogue with <|end|>, and then EOS.
PHI = """{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""


def test_what_a_template_changes_is_refused_and_what_it_writes_after_the_end_is_left_out(chat):
    tokenizer = AutoTokenizer.from_pretrained("chat")
    for template, answer, end, expected in (
        (NEMOTRON, THOUGHT, "E", None),
        (NEMOTRON, BLUE, "E", "It is blue.E"),
        (DEEPSEEK, BLUE, "E", None),
        (PHI, BLUE, "<|end|>", "It is blue.<|end|>"),
        (PHI, BLUE, END, None),  # not this template's end
        (PHI, BLUE, "", None),
    ):
        tokenizer.chat_template = template
        tokenizer.save_pretrained("chat")
        rows = [{"prompt": [USER], "completion": [answer]}]
        if expected:
            assert convert(rows, chat="chat", end=end)[0]["completion"] == expected
        else:
            refuses(partial(convert, rows, chat="chat", end=end), "no row")


def test_rows_of_other_forms_are_skipped_and_counted_by_what_is_wrong(chat, capsys):
    """Zephyr's template drops other roles."""
    rows = [dict(prompt=x, completion=[GREEN]) for x in ([USER], *WRONG)]
    assert len(convert(rows, **chat)) == 1
    found = [x for x in capsys.readouterr().out.splitlines() if x.startswith("skipped")]
    assert [int(x.split()[1]) for x in found] == [2, 1, 1, 5, 1] and "of 11 rows" in found[0]
    words = ("row 1: no text: ", "row 2: no prompt", "row 4: neither", "row 5: no text of user")
    for line, word in zip(found, (*words, "row 7: the prompt ends with an answer"), strict=True):
        assert word in line


def test_a_row_has_its_own_arguments_of_the_template(chat):
    """As TRL passes them."""
    tokenizer = AutoTokenizer.from_pretrained("chat")
    tokenizer.chat_template = formats.CHATML + "{% if think %}<think>{% endif %}"
    tokenizer.save_pretrained("chat")
    rows = [{"prompt": [USER], "chat_template_kwargs": x} for x in ({"think": True}, None)]
    assert [row["prompt"] for row in convert(rows, **chat)] == [f"{ASK}<think>", ASK]


@pytest.mark.parametrize("form", ["csv", "parquet", "disk", "dict", "json", "jsonl", "gz", "files"])
def test_other_sources_become_lines_of_the_same_values(form, here):
    rows = [{"text": x, "id": "007"} for x in ("2024-01-05", "NA", "a\nb, “é”")]
    found, source = datasets.Dataset.from_list(rows), f"data.{form}"
    if form in ("csv", "parquet"):
        getattr(found, f"to_{form}")(source)
    elif form in ("disk", "dict"):
        kept = found if form == "disk" else datasets.DatasetDict(train=found, test=found)
        kept.save_to_disk(source)
    elif form == "files":  # one for each split
        Path(source).mkdir()
        for split in ("train", "test"):
            found.select(range(3 if split == "train" else 1)).to_csv(f"{source}/{split}.csv")
    elif form == "gz":
        source = "data.jsonl.gz"
        Path(source).write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    else:
        text = json.dumps(rows) if form == "json" else "\n".join(map(json.dumps, rows))
        Path(source).write_text(text)
    main(Args(source, Path("out.jsonl")))
    assert [json.loads(line) for line in Path("out.jsonl").read_text().split("\n")[:-1]] == rows
    refuses(lambda: main(Args(source, Path("out.jsonl"))), "out.jsonl")


def test_a_row_of_a_csv_file_with_other_fields_than_the_header_is_refused(here):
    for row in ("Anna,1,", "Anna, who left,1", "Anna"):
        Path("a.csv").write_text(f"text,id\n{row}\n")
        refuses(lambda: load_rows("a.csv", "--flag"), "--flag a.csv", "header")


def test_three_statements_give_a_tokenizer_a_template(gpt2, here):
    gpt2.save_pretrained("my_model")
    (code,) = (x for x in blocks("docs/data.md", "python") if "chat_template" in x)
    exec(code)
    end = gpt2.eos_token
    (row,) = convert([{"prompt": [USER], "completion": [BLUE]}], chat="my_model", end=end)
    assert row["prompt"] == f"user:\n{USER['content']}{end}\nassistant:\n"
    assert row["completion"] == f"It is blue.{end}"
