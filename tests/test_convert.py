"""data/convert.py: rows of other forms as texts."""

import gzip
import json
from pathlib import Path

import datasets
import formats
import pytest
from formats import BAKE, BLACK, BLUE, GREEN, HELLO, NIGHT, SMOLTALK, SYSTEM, USER
from test_readme import blocks
from tiny import refuses
from transformers import AutoTokenizer

from data.convert import Args, main
from machinery.cli import InputError
from machinery.sources import load_rows

END = "<|im_end|>"
SKY, NO, YES = USER["content"], "It is green.", "It is blue."


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}{END}\n"


ASK, RULE = turn("user", SKY) + "<|im_start|>assistant\n", turn("system", SYSTEM["content"])
PAIR = dict(prompt=ASK, chosen=YES + END, rejected=NO + END)


def convert(rows: list[dict], **flags) -> list[dict]:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("out.jsonl").unlink(missing_ok=True)
    main(Args("rows.jsonl", Path("out.jsonl"), **flags))
    return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]


def texts(row: dict) -> dict:
    return {x: row[x] for x in ("prompt", "completion", "chosen", "rejected") if x in row}


@pytest.fixture
def chat(chat, here) -> dict:
    chat.save_pretrained("chat")
    return dict(chat="chat", end=END)


# What runs saw of these rows when they read them themselves, at commit a17f382:
AS_BEFORE = {
    "TRL's strings": (formats.TLDR_PREFERENCE[0], formats.TLDR_PREFERENCE[0]),
    "hh-rlhf": (
        formats.HH_RLHF[0],
        dict(prompt=BAKE, chosen=" Then mix it with water.", rejected=" Then buy bread."),
    ),
    "hh-rlhf without an answer": (
        formats.HH_RLHF[1],
        dict(prompt=HELLO, chosen=" Hello!", rejected=""),
    ),
    "hh-rlhf that part early": (
        {"chosen": f"{HELLO} B.\n\nHuman: C?\n\nAssistant: D.", "rejected": f"{HELLO} E."},
        dict(prompt=HELLO, chosen=" B.\n\nHuman: C?\n\nAssistant: D.", rejected=" E."),
    ),
    "messages": (formats.MESSAGES[0], PAIR),
    "messages without a prompt": (formats.MESSAGES_WITHOUT_PROMPT[0], PAIR),
    "trl-style": (formats.TRL_STYLE[0], PAIR),
    "a prompt of text and answers": (dict(prompt=SKY, chosen=[BLUE], rejected=[GREEN]), PAIR),
    "a prompt of text after a system message": (
        dict(prompt=SKY, chosen=[SYSTEM, BLUE], rejected=[SYSTEM, GREEN]),
        PAIR | dict(prompt=RULE + ASK),
    ),
    "HuggingFaceH4/ultrafeedback_binarized": (formats.ULTRAFEEDBACK_BINARIZED_H4[0], PAIR),
    "repeated prompt": (formats.MESSAGES[0] | formats.MESSAGES_WITHOUT_PROMPT[0], PAIR),
    "messages that part early": (
        dict(chosen=[USER, BLUE, USER, BLUE], rejected=[USER, GREEN, USER, BLUE]),
        dict(
            prompt=ASK,
            chosen=f"{YES}{END}\n{ASK}{YES}{END}",
            rejected=f"{NO}{END}\n{ASK}{YES}{END}",
        ),
    ),
    "identical answers": (
        dict.fromkeys(("chosen", "rejected"), [USER, BLUE]),
        PAIR | dict(rejected=YES + END),
    ),
    "a prompt": (
        formats.ULTRAFEEDBACK_PROMPT[0],
        dict(prompt=f"{turn('user', 'Name a color of the sky.')}<|im_start|>assistant\n"),
    ),
    "a conversation": (
        dict(prompt=SMOLTALK[0]["messages"]),
        dict(prompt=ASK, completion=YES + END),
    ),
    "a conversation of several turns": (
        dict(prompt=SMOLTALK[1]["messages"]),
        dict(
            prompt=f"{RULE}{ASK}{YES}{END}\n{turn('user', NIGHT['content'])}<|im_start|>assistant\n",
            completion=f"{BLACK['content']}{END}",
        ),
    ),
    "an answer of several messages": (
        dict(prompt=[USER], completion=[BLUE, NIGHT, BLUE]),
        dict(
            prompt=ASK,
            completion=f"{YES}{END}\n{turn('user', NIGHT['content'])}<|im_start|>assistant\n{YES}{END}",
        ),
    ),
    "an empty answer": (
        dict(prompt=[USER], completion=[BLUE | {"content": " "}]),
        dict(prompt=ASK, completion=""),
    ),
}


@pytest.mark.parametrize("name", AS_BEFORE)
def test_texts_are_those_that_runs_wrote_themselves(name, chat, capsys):
    row, expected = AS_BEFORE[name]
    rows = convert([row | {"margin": 0.5}], **({} if "strings" in name or "hh" in name else chat))
    assert texts(rows[0]) == expected and rows[0]["margin"] == 0.5
    assert "margin" in capsys.readouterr().out


HUMAN, GPT = {"from": "human", "value": SKY}, {"from": "gpt", "value": YES}
SFT = dict(prompt=ASK, completion=YES + END)
SAID = dict(prompt=SKY, chosen=YES, rejected=NO)
# Published forms (columns read on the hub's cards, and in code that reads them, 2026-11) → flags
# and the texts of the first row; a text: what the sentence says
PUBLISHED = {
    "Skywork/Skywork-Reward-Preference-80K-v0.2": (
        dict(chosen=[USER, BLUE], rejected=[USER, GREEN], source="magpie"),
        ({}, PAIR),
    ),
    "allenai/tulu-3-sft-mixture": (
        dict(id="a", messages=[USER, BLUE], source="b"),
        ({}, "--rename messages=prompt"),
        (dict(rename=("messages=prompt",)), SFT),
    ),
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": (
        dict(id="a", prompt=SKY, chosen=[USER, BLUE], rejected=[USER, GREEN]),
        ({}, PAIR),
    ),
    "nvidia/HelpSteer3": (
        dict(context=[USER], response1=NO, response2=YES, overall_preference=2),
        ({}, "--rename context=prompt"),
        (dict(map="forms.py:helpsteer3"), PAIR),
    ),
    "mlabonne/orpo-dpo-mix-40k": (
        dict(prompt=SKY, question=SKY, chosen=[USER, BLUE], rejected=[USER, GREEN]),
        ({}, PAIR),
    ),
    "argilla/distilabel-capybara-dpo-7k-binarized": (
        dict(
            conversation=[{"input": SKY, "output": YES}],
            prompt=SKY,
            chosen=[USER, BLUE, NIGHT, BLACK],
            rejected=[USER, BLUE, NIGHT, GREEN],
        ),
        ({}, dict(chosen=f"{BLACK['content']}{END}", rejected=NO + END)),
    ),
    "Anthropic/hh-rlhf": (
        dict(
            chosen=f"\n\nHuman: {SKY}\n\nAssistant: {YES}",
            rejected=f"\n\nHuman: {SKY}\n\nAssistant: {NO}",
        ),
        ({}, PAIR),
        (
            dict(chat=None),
            dict(prompt=f"\n\nHuman: {SKY}\n\nAssistant:", chosen=f" {YES}", rejected=f" {NO}"),
        ),
    ),
    "ShareGPT_Vicuna_unfiltered": (
        dict(id="a", conversations=[HUMAN, GPT]),
        ({}, "--rename conversations=prompt"),
        (dict(rename=("conversations=prompt",)), SFT),
    ),
    "Intel/orca_dpo_pairs": (
        dict(system=SYSTEM["content"], question=SKY, chosen=YES, rejected=NO),
        ({}, "--rename question=prompt"),
        (dict(rename=("question=prompt",)), PAIR | dict(prompt=RULE + ASK)),
        (dict(rename=("question=prompt",), chat=None), SAID),
    ),
    "openbmb/UltraInteract_pair": (
        dict(trajectory=[HUMAN | {"from": "user"}], chosen=YES, rejected=NO, parent_id=None),
        ({}, "--rename trajectory=prompt"),
        (dict(rename=("trajectory=prompt",)), PAIR),
        (dict(rename=("trajectory=prompt",), chat=None), "--chat"),
    ),
    "berkeley-nest/Nectar": (
        dict(
            prompt=f"\n\nHuman: {SKY}\n\nAssistant: ",
            answers=[{"answer": NO, "rank": 2.0}, {"answer": YES, "rank": 1.0}],
        ),
        ({}, dict(prompt=ASK)),
        (dict(map="forms.py:nectar"), PAIR),
    ),
    "openai/webgpt_comparisons": (
        dict(question={"full_text": SKY}, answer_0=NO, score_0=-1.0, answer_1=YES, score_1=1.0),
        (dict(rename=("question=prompt",)), "write a --map"),
        (dict(map="forms.py:webgpt"), PAIR),
    ),
    "stanfordnlp/SHP": (
        dict(history=SKY, human_ref_A=YES, human_ref_B=NO, labels=1),
        ({}, "--rename history=prompt"),
        (dict(map="forms.py:shp", chat=None), SAID),
    ),
    "nvidia/OpenMathReasoning": (
        dict(problem=SKY, generated_solution=YES, expected_answer="18"),
        ({}, "--rename problem=prompt"),
        (dict(rename=("problem=prompt", "generated_solution=completion")), SFT),
    ),
    "BytedTsinghua-SIA/DAPO-Math-17k": (
        dict(prompt=[USER], reward_model={"ground_truth": "34", "style": "rule"}),
        ({}, dict(prompt=ASK)),
    ),
    "agentica-org/DeepScaleR-Preview-Dataset": (
        dict(problem=SKY, answer="1/2", solution=YES),
        (dict(rename=("problem=prompt",)), dict(prompt=ASK)),
    ),
    "tatsu-lab/alpaca": (
        dict(instruction="What color is", input="the sky?", output=YES, text="Below is …"),
        ({}, "--rename instruction=prompt"),
        (
            dict(map="forms.py:alpaca", chat=None),
            dict(prompt="What color is\n\nthe sky?", completion=YES),
        ),
    ),
    "messages beside texts": (dict(prompt=[USER], completion=YES), ({}, SFT)),
    "messages as JSON": (
        dict(prompt=json.dumps([USER])),
        ({}, "neither a text"),
        (dict(chat=None), "--chat"),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_forms_are_right_or_a_sentence_says_the_flag(name, chat, capsys):
    (code,) = (x for x in blocks("docs/data.md", "python") if "def nectar" in x)
    Path("forms.py").write_text(code)
    row, *cases = PUBLISHED[name]
    for flags, expected in cases:
        if isinstance(expected, str):
            with pytest.raises(InputError):
                convert([row], **chat | flags)
            assert expected in capsys.readouterr().out and not Path("out.jsonl").exists()
        else:
            (found,) = convert([row], **chat | flags)
            assert expected.items() <= found.items()
            assert json.loads(capsys.readouterr().out.rpartition("\nout.jsonl: ")[0]) == found


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
            with pytest.raises(InputError, match="no row"):
                convert(rows, chat="chat", end=end)


WRONG: list = [[], None, " ", 3, ["Hi"], [{"role": "narrator", "content": "Hi"}], [USER, BLUE]]
WRONG += [[USER | {"content": content}] for content in (None, 3, [{"type": "text", "text": "?"}])]


def test_rows_of_other_forms_are_skipped_and_counted_by_what_is_wrong(chat, capsys):
    """Zephyr's template drops other roles."""
    rows = [dict(prompt=x, completion=[GREEN]) for x in ([USER], *WRONG)]
    assert len(convert(rows, **chat)) == 1
    found = [x for x in capsys.readouterr().out.splitlines() if x.startswith("skipped")]
    assert [int(x.split()[1]) for x in found] == [3, 1, 5, 1] and "of 11 rows" in found[0]
    for i, word in ((0, "row 1: no prompt"), (1, "row 4: neither"), (2, "row 5: no text of user")):
        assert word in found[i]
    assert "row 7: the prompt ends with an answer" in found[3]


def test_a_row_has_its_own_arguments_of_the_template(chat):
    """As TRL passes them."""
    tokenizer = AutoTokenizer.from_pretrained("chat")
    tokenizer.chat_template = formats.CHATML + "{% if think %}<think>{% endif %}"
    tokenizer.save_pretrained("chat")
    rows = [{"prompt": [USER], "chat_template_kwargs": x} for x in ({"think": True}, None)]
    assert [row["prompt"] for row in convert(rows, **chat)] == [f"{ASK}<think>", ASK]


@pytest.mark.parametrize(
    "form", ["csv", "parquet", "folder", "splits", "json", "jsonl", "gz", "files"]
)
def test_other_sources_become_lines_of_the_same_values(form, here):
    rows = [{"text": x, "id": "007"} for x in ("2024-01-05", "NA", "a\nb, “é”")]
    found, source = datasets.Dataset.from_list(rows), f"data.{form}"
    if form in ("csv", "parquet"):
        getattr(found, f"to_{form}")(source)
    elif form in ("folder", "splits"):
        kept = found if form == "folder" else datasets.DatasetDict(train=found, test=found)
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
