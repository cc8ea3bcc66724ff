"""data/convert.py: rows of other forms as texts."""

import json
from pathlib import Path

import datasets
import formats
import pytest
from formats import BLUE, GREEN, NIGHT, SMOLTALK, SYSTEM, USER
from test_readme import blocks
from transformers import AutoTokenizer

from data.convert import Args, main

END = "<|im_end|>"
ASK = f"<|im_start|>user\n{USER['content']}{END}\n<|im_start|>assistant\n"
RULE = f"<|im_start|>system\n{SYSTEM['content']}{END}\n"
PAIR = dict(prompt=ASK, chosen=f"It is blue.{END}", rejected=f"It is green.{END}")


def convert(rows: list[dict], **flags) -> list[dict]:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("out.jsonl").unlink(missing_ok=True)
    main(Args("rows.jsonl", Path("out.jsonl"), **flags))
    return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]


@pytest.fixture
def chat(chat, here) -> dict:
    chat.save_pretrained("chat")
    return dict(chat="chat", end=END)


@pytest.mark.parametrize("name", ["MESSAGES", "MESSAGES_WITHOUT_PROMPT", "TRL_STYLE"])
def test_pairs_as_people_have_them_become_texts(name, chat, capsys):
    """With a prompt, without, or with one that is a text and is repeated."""
    rows = [row | {"margin": 0.5} for row in getattr(formats, name)]
    assert convert(rows, **chat) == [PAIR | {"margin": 0.5, "messages": [USER]}]
    assert json.loads(capsys.readouterr().out)["prompt"] == ASK


def test_the_answer_of_a_conversation_is_its_last_message(chat):
    found = convert(SMOLTALK, column="messages", **chat)
    assert [row["messages"] for row in found] == [row["messages"][:-1] for row in SMOLTALK]
    assert found[0]["prompt"] == ASK and found[0]["completion"] == f"It is blue.{END}"
    before = f"{RULE}{ASK}It is blue.{END}\n<|im_start|>user\nAnd at night?{END}\n"
    assert found[1]["prompt"] == f"{before}<|im_start|>assistant\n"
    empty = BLUE | {"content": " "}
    rows = [{"prompt": [USER], "completion": [empty]}, {"prompt": [USER]}]
    rows += [{"prompt": [USER], "completion": [BLUE, NIGHT, BLUE]}]
    answers = [row.get("completion") for row in convert(rows, **chat)]
    turn = ASK.replace(USER["content"], NIGHT["content"])
    assert answers == ["", None, f"It is blue.{END}\n{turn}It is blue.{END}"]


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
            with pytest.raises(SystemExit, match="rows.jsonl: row 0: "):
                convert(rows, chat="chat", end=end)


FORMS: list = [[], None, "Hi", [{"from": "human", "value": "Hi"}]]
FORMS += [[USER | {"role": role}] for role in ("human", "model", "gpt")]
FORMS += [[USER | {"content": content}] for content in (None, 3, [{"type": "text", "text": "?"}])]


@pytest.mark.parametrize("messages", FORMS)
def test_messages_of_other_forms_are_refused_by_row(messages, chat):
    """Zephyr's template drops other roles."""
    with pytest.raises(SystemExit, match="rows.jsonl: row 1: "):
        convert([{"prompt": [USER]}, {"prompt": messages}], **chat)
    early = dict(chosen=[USER, BLUE, USER, BLUE], rejected=[USER, GREEN, USER, BLUE])
    with pytest.raises(SystemExit, match="differ before"):
        convert([early], **chat)


@pytest.mark.parametrize("form", ["csv", "parquet", "folder", "splits", "json", "jsonl"])
def test_other_sources_become_lines_of_the_same_values(form, here):
    rows = [{"text": x, "id": "007"} for x in ("2024-01-05", "NA", "a\nb, “é”")]
    found, source = datasets.Dataset.from_list(rows), f"data.{form}"
    if form in ("csv", "parquet"):
        getattr(found, f"to_{form}")(source)
    elif form in ("folder", "splits"):
        kept = found if form == "folder" else datasets.DatasetDict(train=found, test=found)
        kept.save_to_disk(source)
    else:
        text = json.dumps(rows) if form == "json" else "\n".join(map(json.dumps, rows))
        Path(source).write_text(text)
    main(Args(source, Path("out.jsonl")))
    assert [json.loads(line) for line in Path("out.jsonl").read_text().split("\n")[:-1]] == rows
    with pytest.raises(FileExistsError):
        main(Args(source, Path("out.jsonl")))


def test_a_row_of_a_csv_file_with_other_fields_than_the_header_is_refused(here):
    for row in ("Anna,1,", "Anna, who left,1", "Anna"):
        Path("a.csv").write_text(f"text,id\n{row}\n")
        with pytest.raises(ValueError, match="header"):
            main(Args("a.csv", Path(f"{len(row)}.jsonl")))


def test_three_statements_give_a_tokenizer_a_template(gpt2, here):
    gpt2.save_pretrained("my_model")
    (code,) = (x for x in blocks("docs/data.md", "python") if "chat_template" in x)
    exec(code)
    end = gpt2.eos_token
    (row,) = convert([{"prompt": [USER], "completion": [BLUE]}], chat="my_model", end=end)
    assert row["prompt"] == f"user:\n{USER['content']}{end}\nassistant:\n"
    assert row["completion"] == f"It is blue.{end}"
