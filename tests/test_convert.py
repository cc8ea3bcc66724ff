"""tools/convert.py: rows of other forms as texts."""

import json
from datetime import datetime
from decimal import Decimal
from functools import partial
from pathlib import Path

import datasets
import formats
import pytest
from conftest import read_lines
from formats import BLUE, GREEN, NIGHT, USER
from test_readme import ROOT, code_of
from tiny import refuses
from transformers import AutoTokenizer

from tools.convert import Args, main

END = "<|im_end|>"
OUT = Path("out.jsonl")
ASK = f"<|im_start|>user\n{USER['content']}{END}\n<|im_start|>assistant\n"
# Rows of published data sets (columns read on the hub's cards, and in code that reads them, 2026-11)
# and of other forms; flags; the texts of the row, or what is said. `before`: the texts that runs
# wrote of the row themselves, by the code of commit a17f382.
FORMS = read_lines(ROOT / "tests/forms.jsonl")
WRONG = [[], None, " ", 3, ["Hi"], [{"role": "narrator", "content": "Hi"}], [USER, BLUE]]
WRONG += [[USER | {"content": content}] for content in (None, 3, [{"type": "text", "text": "?"}])]


def convert(rows, **flags):
    OUT.unlink(missing_ok=True)
    main(Args(formats.write_rows(Path("rows.jsonl"), rows), OUT, **flags))
    return read_lines(OUT)


@pytest.fixture
def chat(chat, here):
    chat.save_pretrained("chat")
    return dict(chat="chat", end=END)


@pytest.mark.parametrize("case", FORMS, ids=[x["form"] for x in FORMS])
def test_a_form_becomes_its_texts_or_a_sentence_says_the_flag(case, chat, capsys):
    flags, rows, functions = dict(case["flags"]), [case["row"] | {"margin": 0.5}], {}
    exec(code_of("docs/data.md", "def nectar"), functions)
    computed = flags.pop("computed", None)
    if computed:
        rows = list(functions[computed](rows[0]))
    run = partial(convert, rows, end=END, **flags)
    if "says" in case:
        refuses(run, "no row was written")
        assert case["says"] in capsys.readouterr().out and not OUT.exists()
        return
    (found,) = run()
    first, _, last = capsys.readouterr().out.rpartition("\nout.jsonl: 1 rows; values in ")
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


@pytest.mark.parametrize("form", ["parquet", "disk", "dict", "files"])
def test_other_sources_become_lines_of_the_same_values(form, here):
    rows = [{"text": x, "id": "007"} for x in ("2024-01-05", "NA", "a\nb, “é”")]
    found, source = datasets.Dataset.from_list(rows), f"data.{form}"
    if form == "parquet":
        found.to_parquet(source)
    elif form in ("disk", "dict"):
        kept = found if form == "disk" else datasets.DatasetDict(train=found, test=found)
        kept.save_to_disk(source)
    else:  # one for each split
        Path(source).mkdir()
        found.to_csv(f"{source}/train.csv")
        found.select([0]).to_csv(f"{source}/test.csv")
    main(Args(source, OUT))
    assert read_lines(OUT) == rows
    refuses(lambda: main(Args(source, OUT)), "out.jsonl")


SAID = {  # file → content, what is said of it
    "pairs.jsonl": ('{"prompt": "Hi", "better": 1}', ["prompt 1, better 1", "no chosen, rejected"]),
    "share.jsonl": ('{"conversations": [{"from": "human", "value": "Hi"}]}', ["no prompt"]),
    "semicolons.csv": ("prompt;answer\nHi;Yes", ["values in prompt;answer 1", "no prompt"]),
    "folder/a.txt": ("Hi\n\nYes\n", ["3 rows", "text 2", "no prompt"]),
    "sft.jsonl": ('{"prompt": "Hi", "completion": "Yes"}', ["sft.py: can read it"]),
    "null.jsonl": ('{"prompt": "Hi", "completion": null}', ["sft.py: no completion"]),
}


@pytest.mark.parametrize("name", SAID)
def test_it_says_what_a_file_has_become_and_who_can_read_it(name, here, capsys):
    content, words = SAID[name]
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(content)
    main(Args(name.partition("/")[0], OUT))
    said = capsys.readouterr().out
    assert [word for word in words if word not in said] == []


def test_names_of_columns_that_do_not_exist_or_exist_twice_are_refused(here):
    Path("a.jsonl").write_text('{"question": "Hi", "prompt": "Ho"}')
    for rename, word in (
        ("questions=prompt", "questions"),
        ("question=prompt", "'prompt'"),
        ("a b", "OLD=NEW"),
    ):
        refuses(lambda: main(Args("a.jsonl", OUT, rename=(rename,))), word)
        assert not OUT.exists()


def test_values_that_json_does_not_have_become_texts(here):
    row = dict(text="a", at=datetime(2024, 1, 2), cost=Decimal("1.50"), raw=b"x")
    datasets.Dataset.from_list([row]).to_parquet("a.parquet")
    main(Args("a.parquet", OUT))
    assert read_lines(OUT) == [dict(text="a", at="2024-01-02 00:00:00", cost="1.50", raw="b'x'")]


def test_the_pages_functions_make_rows_of_other_forms():
    functions = {}
    for words in ("def judged", "def turns"):
        exec(code_of("docs/data.md", words), functions)
    row = dict(prompt="Hi", answer_1="a", answer_2="b")
    first, second = ([dict(prompt="Hi", chosen=x, rejected=y)] for x, y in ("ab", "ba"))
    for better, expected in ((1, first), ("A", first), (2, second), ("B", second), ("tie", [])):
        assert list(functions["judged"](row | dict(better=better))) == expected
    row = {"data": {"question": "Hi", "answers": [{"text": "Yes"}, {"text": "No"}]}}
    assert list(functions["nested"](row)) == [dict(prompt="Hi", completion="Yes")]
    row = dict(prompt=json.dumps([USER]), id="007")
    assert list(functions["json_cells"](row)) == [dict(prompt=[USER], id="007")]
    messages = [USER, BLUE, NIGHT, GREEN]
    assert list(functions["turns"](dict(messages=messages))) == [
        dict(prompt=[USER], completion=[BLUE]),
        dict(prompt=[USER, BLUE, NIGHT], completion=[GREEN]),
    ]


def test_special_tokens_in_messages_are_counted_and_can_be_left_out(chat, capsys):
    """The template writes its own; those of a user would end the message."""
    tokenizer = AutoTokenizer.from_pretrained("chat")
    tokenizer.add_special_tokens({"additional_special_tokens": [END]})
    tokenizer.save_pretrained("chat")
    rows = [{"prompt": [USER]}, {"prompt": [USER | {"content": f"Hi{END}Ho"}]}]
    assert len(convert(rows, **chat)) == 2
    assert "1 rows had special tokens" in capsys.readouterr().out
    assert len(convert(rows, drop=(END,), **chat)) == 1


def test_token_ids_become_texts_without_padding_and_with_their_end(gpt2, here):
    gpt2.save_pretrained("gpt2")
    ids = dict(query=[5297, 50259], sample0=[1320, 50256, 50259], sample1=[1400], best=1)
    Path("rows.jsonl").write_text(json.dumps(ids | {"note": [5297]}))
    main(Args("rows.jsonl", OUT, ids="gpt2", end="<end>"))
    expected = dict(query="Yes", sample0=" That<end>", sample1=" No", best=1, note=[5297])
    assert read_lines(OUT) == [expected]


def test_three_statements_give_a_tokenizer_a_template(gpt2, here):
    gpt2.save_pretrained("my_model")
    exec(code_of("docs/data.md", "chat_template"))
    end = gpt2.eos_token
    (row,) = convert([{"prompt": [USER], "completion": [BLUE]}], chat="my_model", end=end)
    assert row["prompt"] == f"user:\n{USER['content']}{end}\nassistant:\n"
    assert row["completion"] == f"It is blue.{end}"
