"""Rewards: models, functions of users, both; what a reward model reads."""

import importlib
import re
import sys
import threading
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import formats
import numpy as np
import pytest
import tiny
import torch
from accelerate import Accelerator
from conftest import read_lines, read_metrics, without_times
from test_readme import PAGES, code_of
from tiny import refuses
from vllm_server import serve

import train_reward
import utils
from machinery import cli, queries, rewards, sources
from machinery.runs import Run
from machinery.tokens import load_tokenizer
from tools.policies import Policy

pytestmark = pytest.mark.usefixtures("accelerator")
TOKENS = torch.full((1, 3), 14)
RETURNS = [
    "[1.0]",
    "[[1.0]] * 4",
    "[float('nan')] * 4",
    "[1e39, 0, 0, 0]",
    "None",
    "[1, None, 1, 1]",
    "['a', 'b', 'c', 'd']",
    "(1.0 for _ in range(4))",
    "{'rewards': [1.0] * 4}",
    "{}",
    "{'a': [1.0] * 4, 'b': [1.0]}",
    "1 / 0",
    "sys.exit(0)",
]


def load_reward(task, folder=None, code="", **flags):
    """The reward of a function with this body in `folder`, or of other flags; and the tokenizer."""
    if folder:
        path = folder / "function.py"
        path.write_text(f"import sys, numpy, torch\ndef f(queries, responses):\n    {code}\n")
        flags["reward_fn"] = f"{path}:f"
    tokenizer, ids = load_tokenizer(task, 5)
    args = tiny.make_args(task, **flags)
    rest = tokenizer, ids, Accelerator(cpu=True)
    return train_reward.load_reward(args, *rest), tokenizer


@pytest.mark.parametrize("returned", RETURNS)
def test_a_function_without_one_finite_number_per_response_ends_the_run(returned, task, tmp_path):
    """Of four responses. A judge that calls sys.exit must not end the run with exit code 0."""
    reward, _ = load_reward(task, tmp_path, f"return {returned}")
    tokens = TOKENS.repeat(4, 1)
    with pytest.raises(cli.InputError, match=f"--reward_fn {tmp_path}/function.py:f: ") as caught:
        reward(tokens, tokens)
    assert len(str(caught.value)) < 400
    is_users = returned in ("1 / 0", "sys.exit(0)")
    assert bool(caught.value.__cause__) == is_users


MISTAKES = {  # a name of a function → what the error says
    "mine.py": ("no function", "'score'", "'gold'"),
    "mine.py:scor": ("'scor'", "'score'"),
    "nowhere/mine.py:score": ("does not exist",),
    "nothing:score": ("path.py:function",),
    "score": ("path.py:function",),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_misspelt_function_is_one_sentence_without_a_traceback(name, task, here):
    (here / "mine.py").write_text("import json\ndef score(responses): pass\ngold = lambda x: x\n")
    with pytest.raises(cli.InputError) as caught:
        rewards.load_scorer("reward_fn", replace(task, reward_fn=name))
    assert caught.value.__cause__ is None
    for word in (f"--reward_fn {name}: ", *MISTAKES[name]):
        assert word in str(caught.value)
    assert "json" not in str(caught.value)


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_the_traceback_of_a_users_mistake_begins_in_the_users_file(kind, task, here, capsys):
    (here / "mine.py").write_text(f"{kind} score(responses):\n    return [len(x.none) for x in 0]")
    task = replace(task, gold_fn="mine.py:score")
    reward = rewards.Reward(task, *load_tokenizer(task, 5))
    with pytest.raises(cli.InputError, match=r"--gold_fn mine\.py:score: ") as caught:
        reward(TOKENS, TOKENS)
    cli.print_cause(caught.value.__cause__)
    first = capsys.readouterr().err.splitlines()[1]
    assert first == f'  File "{here}/mine.py", line 2, in score'


GLOBAL = """
import os, torch
def switch(*args):
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_float32_matmul_precision("medium")
    os.chdir("/")
    return [1.0]
switch()
def score(responses):
    return switch()
"""


def test_torchs_global_switches_in_a_reward_file_do_not_leak(task, here):
    (here / "mine.py").write_text(GLOBAL)
    reward, _ = load_reward(task, reward_fn="mine.py:score")
    for _ in range(2):
        assert torch.is_grad_enabled() and torch.zeros(1).dtype == torch.float32
        assert torch.zeros(1).device.type == "cpu" and Path.cwd() == here
        assert torch.get_float32_matmul_precision() == "highest"
        assert reward(TOKENS, TOKENS)[0].tolist() == [1.0]


POOL = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
def one(response):
    return 2.0 * len(response)
def f(responses):
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return list(pool.map(one, responses))
"""


@pytest.mark.parametrize("name", ["math", "utils"])
def test_a_reward_file_may_have_the_name_of_another_module(name, here):
    """Also if it starts other processes, which import it by the name of its module."""
    (here / "judges").mkdir()
    (here / f"judges/{name}.py").write_text(POOL)
    before = importlib.import_module(name)
    assert sources.load_function(f"judges/{name}.py:f")(["ab"]) == [4.0]
    assert sys.modules[name] is before and not hasattr(before, "one")


def test_a_reward_model_with_too_few_positions_is_refused(task, tmp_path):
    """On a GPU its embedding would end the process without a word."""
    folder = tiny.write_reward(tmp_path / "reward", positions=task.query_length + 4)
    refuses(lambda: load_reward(task, reward_model=folder), f"--reward_model {folder}", 12)


@pytest.mark.parametrize("form", ["numpy.array", "torch.tensor"])
def test_a_reward_function_reads_texts_and_may_return_an_array(form, task, tmp_path):
    code = f"return {form}([len(q + 100 * r) for q, r in zip(queries, responses)])"
    reward, tokenizer = load_reward(task, tmp_path, code)
    rows = [tokenizer.encode(text) for text in ("Anna saw", "A", ".", " ..")]
    queries, responses = utils.pad_left(rows, 8, tiny.WORDS).split(2)
    assert reward(queries, responses)[0].tolist() == [108, 301]


def test_an_uploaded_reward_model_loads_by_its_name_on_the_hub(hub):
    """Later from the cache, without the hub."""
    folder = hub.commit("models", "me/reward")
    tiny.write_reward(folder)
    expected = train_reward.RewardModel.from_pretrained(str(folder)).state_dict()
    for _ in range(2):
        loaded = train_reward.RewardModel.from_pretrained("me/reward").state_dict()
        assert all(x.equal(loaded[name]) for name, x in expected.items())
        hub.shutdown()
        hub.server_close()


def test_a_response_keeps_the_space_that_it_has_after_its_query(tmp_path):
    """Llama 2's decoder strips the first space of a text: alone, a response would lose it."""
    policy = formats.llama2_tokenizer(["Anna", "was", "happy", "Maria"])
    ids = utils.TokenIds(len(policy), [], [], [])
    q, r = (policy.convert_tokens_to_ids(t.split()) for t in ("▁Anna ▁was ▁happy .", "▁Maria ▁was"))
    assert policy.decode(r) == "Maria was" and policy.decode(q + r) == "Anna was happy. Maria was"
    code = "def f(responses):\n    return [x == ' Maria was' for x in responses]"
    (tmp_path / "f.py").write_text(code)
    score = rewards.Reward(tiny.make_task(reward_fn=f"{tmp_path}/f.py:f"), policy, ids)
    assert score(torch.tensor([[ids.pad, *q]]), torch.tensor([r]))[0].tolist() == [1]


LLAMA2 = partial(formats.llama2_tokenizer, ["Hi", "Yes", "No"])
ANSWERS = {  # a tokenizer's form → its end, tokens of a query and a response, the latter's text
    "gpt2": (
        formats.gpt2_tokenizer,
        "<|endoftext|>",
        "Hi .",
        "<|channel|> final <think> ĠYes . </think> <|end|>",
        "<|channel|>final<think> Yes.</think><|end|>",
    ),
    "llama2": (
        LLAMA2,
        "</s>",
        "<s> ▁Hi .",
        "<think> ▁Yes </think> <s> ▁No . <|end|>",
        "<think> Yes</think> No.<|end|>",
    ),
    "another end": (LLAMA2, "<|end|>", "<s> ▁Hi </s>", "▁Yes </s> ▁No", " Yes</s> No"),
}


@pytest.mark.parametrize("form", ANSWERS)
def test_special_tokens_are_text_but_for_bos_and_the_ends(form, tmp_path):
    """To reward functions, in the table of samples and in tools. A format reward needs <think>."""
    make, end, query, response, expected = ANSWERS[form]
    tokenizer = make()
    added = ["<think>", "</think>", "<|channel|>", "<|end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": added})
    folder = tiny.write_config(tmp_path, tokenizer)
    (tmp_path / "f.py").write_text(f"def f(responses): return [responses == [{expected!r}]]")
    task = tiny.make_task(base_model=folder, truncate_token=end, eos_task=True)
    policy = Policy(replace(task, reward_fn=f"{tmp_path}/f.py:f"))
    queries, responses = (
        torch.tensor([tokenizer.convert_tokens_to_ids(x.split())])
        for x in (query, f"{response} {end}")
    )
    reward = rewards.Reward(policy.task, policy.tokenizer, policy.ids)
    assert reward(queries, responses)[0].tolist() == [1]
    run = MagicMock()
    Run.log_samples(run, 0, {"response": responses}, policy.tokenizer, policy.ids)
    row = {"step": 0, "response": expected.lstrip()}
    run.append.assert_called_once_with("samples.jsonl", [row])
    assert policy.decode(responses) == [expected.lstrip()]


def test_a_reward_model_of_other_tokens_is_refused(task, tmp_path, gpt2):
    """A text would be other ids to it. A function can call it."""
    folder = tiny.write_reward(tmp_path / "reward")
    gpt2.save_pretrained(folder)
    load = partial(load_reward, task, reward_model=folder)
    refuses(load, folder, "tokens differ", "classifier.py")


def test_X13_models_of_one_tokenizer_may_be_padded_to_other_sizes(task):
    rows, weights = torch.tensor([[61, 61, 3, 60], [4, 58, 57, 61]]), 100 ** torch.arange(4)
    reward = rewards.Reward(task, None, utils.TokenIds(61, [], [], []))
    for pad, expected in (
        (58, [[58, 58, 3, 58], [4, 58, 57, 58]]),  # the ids 58 … 60 are no text to it
        (70, [[70, 70, 3, 60], [4, 58, 57, 70]]),
    ):
        score = lambda tokens, *rest: tokens @ weights  # noqa: E731
        reward.model = SimpleNamespace(score=score, config=SimpleNamespace(pad_id=pad))
        scores, _ = reward(rows[:, :2], rows[:, 2:])
        assert torch.equal(scores, torch.tensor(expected) @ weights)


def test_a_dict_of_named_parts_is_their_sum_and_its_names_stay(task, tmp_path):
    code = "return {'a': [len(x) for x in responses], 'b' * (1 + ('!' in queries[0])): [0.5]}"
    reward, tokenizer = load_reward(task, tmp_path, code)
    first, other, response = (
        torch.tensor([tokenizer.encode(x)]) for x in ("Anna", "!", " A cat .")
    )
    scores, components = reward(first, response)
    assert scores.tolist() == [8.5]
    assert components == {"reward/a": 8, "reward/b": 0.5}
    refuses(lambda: reward(other, response), "--reward_fn", "'bb'", "'b'")


def test_the_judge_of_the_page_asks_in_both_orders_and_all_at_once(tmp_path, monkeypatch, gpt2):
    """Its server answers in the recorded form, and only once all questions are there."""
    gpt2.chat_template = formats.CHATML
    gpt2.save_pretrained(tmp_path / "judge")
    arrived = threading.Barrier(6, timeout=20)

    def change(body, answer):
        arrived.wait()
        a, b = gpt2.decode(body["prompt"]).split("Summary A:\n")[1].split("Summary B:\n")
        probs = dict(A=0.6, B=0.2, C=0.1) if "good" in a else dict(A=0.3, B=0.5)
        logprobs = {x: np.log(p) for x, p in probs.items()}
        answer["choices"][0]["logprobs"]["top_logprobs"][0] = logprobs

    monkeypatch.setenv("JUDGE_URL", serve(change)[0])
    monkeypatch.setenv("JUDGE", str(tmp_path / "judge"))
    (tmp_path / "mine.py").write_text(code_of("docs/ppo.md", "async def"))
    judge = rewards.load_scorer("reward_fn", tiny.make_task(reward_fn=f"{tmp_path}/mine.py:judge"))
    texts = dict(queries=["A post."] * 3, responses=[" good one", " short", " a good one"])
    columns = dict(completion=[" bad", " good", " plain"])
    (found,) = rewards.call_reward_function(judge, texts, columns).values()
    better, worse = (0.6 + 0.1 / 2) / 0.9, 0.3 / 0.8
    high, low = (better + 1 - worse) / 2, (worse + 1 - better) / 2
    assert found.tolist() == pytest.approx([high, low, high])


PROCESSES = """
import multiprocessing, os, tempfile, time
fork = multiprocessing.get_context("fork")
def stuck(*args):
    time.sleep(60)
def score(responses):
    child = fork.Process(target=stuck)
    began = time.monotonic()
    child.start()
    child.terminate()  # at once: the signal may come before the child has run anything
    child.join()
    assert time.monotonic() - began < 0.9
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
    return plain(responses)
def plain(responses):
    return [len(response) / 9 for response in responses]
"""


def test_a_reward_function_may_stop_processes_and_leave_the_working_folder(start, here):
    """Forked children end at a signal that the run only notes; all files are where they were."""
    (here / "mine.py").write_text(PROCESSES)
    for name in ("score", "plain"):
        flags = dict(total_episodes=8, run_name=name, truncate_token=None)
        start("ppo", reward_fn=f"mine.py:{name}", output_dir=f"out/{name}", **flags)
    assert without_times(read_metrics("score")) == without_times(read_metrics("plain"))
    assert (here / "out" / "score" / "model.safetensors").exists()


COMPOSED = """
def composed(queries, responses, scores):
    assert isinstance(scores, list) and all(isinstance(score, float) for score in scores)
    return [10 + 2 * score for score in scores]
def plain(queries, responses):
    return [1.0] * len(responses)
"""


def test_a_reward_function_with_an_argument_scores_gets_the_reward_models(task, here):
    (here / "mine.py").write_text(COMPOSED)
    reward_folder = tiny.write_reward(here / "reward")
    queries, responses, rows = tiny.make_texts()
    model = train_reward.RewardModel.from_pretrained(reward_folder)
    alone = torch.tensor([model(torch.tensor([row])).item() for row in rows])
    assert alone.std() > 0.1
    expected = {None: alone, "composed": 10 + 2 * alone, "plain": torch.ones(4)}
    for function, scores in expected.items():
        spec = function and f"mine.py:{function}"
        reward, _ = load_reward(task, reward_model=reward_folder, reward_fn=spec)
        torch.testing.assert_close(reward(queries, responses)[0], scores, atol=1e-5, rtol=0)
    composed = dict(reward_fn="mine.py:composed", reward_model="./nowhere")
    refuses(lambda: load_reward(task, **composed), "--reward_model ./nowhere")
    load_reward(task, reward_fn="mine.py:plain", reward_model="./nowhere")  # needs none


# A query names its number; so do an int and a list. 5 occurs three times, with another `twin` each.
ROWS = [dict(prompt=f"Anna saw {i} cats.", number=i, tags=[str(i), "x"], twin=0) for i in range(40)]
ROWS += [ROWS[5] | {"twin": 1}, ROWS[5] | {"twin": 2}, ROWS[7] | {"prompt": " "}]
REWARD = """
import json
def check(queries, number, tags):
    assert len(queries) == len(number) == len(tags) > 0
    for query, n, (tag, x) in zip(queries, number, tags):
        assert type(n) is int and query.split()[2] == tag == str(n) and x == "x"
def score(queries, responses, tags, twin, number, step, missing=3.0):
    check(queries, number, tags)
    assert missing == 3.0
    with open("seen.jsonl", "a") as seen:
        print(json.dumps([number, twin, step]), file=seen)
    return {"e": [x.count("e") / 4 for x in responses], "long": [len(x) / 9 for x in responses]}
def gold(queries, responses, *, number, **columns):
    check(queries, number, columns["tags"])
    assert columns.keys() == {"prompt", "tags", "twin"} and columns["prompt"] == queries
    return [float(n) for n in number]
"""


@pytest.fixture
def by_column(task, here):
    """A task of `ROWS`; by_column.py in the current folder."""
    (here / "by_column.py").write_text(REWARD)
    rows = formats.write_rows(here / "rows.jsonl", ROWS)
    return replace(task, query_dataset=rows, query_column="prompt", truncate_token=None)


def test_columns_stay_beside_their_queries_in_every_table(by_column):
    """Also where a blank row is dropped, or rows are subsampled, and from the cache."""
    tokenizer, ids = load_tokenizer(by_column, 5)
    right = Counter((row["prompt"], row["number"], row["twin"]) for row in ROWS[:42])
    for num_queries, sizes in ((1000, {42}), (1000, {42}), (20, {19, 20})):
        table = queries.load_queries(replace(by_column, num_queries=num_queries), tokenizer, ids)
        assert len(table) in sizes and table.columns(np.array([3, 3, 0])).keys() == ROWS[0].keys()
        for part in (table, *table.hold_out(9)):
            columns, texts = part.columns(), utils.decode(tokenizer, part[:], ids)
            found = Counter(zip(texts, columns["number"], columns["twin"], strict=True))
            assert found <= right and found.total() == len(part)


@tiny.both
def test_a_reward_sees_the_columns_of_its_query_in_training_and_evaluation(script, by_column):
    task = replace(by_column, gold_fn="by_column.py:gold")
    flags = dict(reward_fn="by_column.py:score", run_name="run", output_dir="out")
    script.main(tiny.make_args(task, script, eval_every=1, eval_queries=6, **flags))
    *seen, steps = zip(*read_lines("seen.jsonl"), strict=True)
    calls = list(zip(*seen, strict=True))  # numbers and twins of each call
    assert [len(numbers) for numbers, _ in calls] == [6, 8] * 3 + [6]
    assert steps == (0, 0, 1, 1, 2, 2, 3)  # an evaluation has that of the next update
    heldout = calls[0]
    assert all(call == heldout for call in calls[::2])
    assert all(set(numbers).isdisjoint(heldout[0]) for numbers, _ in calls[1::2])
    if script.__name__ == "rloo":  # a query's rows are neighbors, as in TRL
        assert all(x == list(np.repeat(x[::2], 2)) for call in calls[1::2] for x in call)
    assert Path("runs/run/by_column.py").read_text() == Path("by_column.py").read_text()
    line = read_metrics("run")[0]
    assert line["eval/gold_score"] == pytest.approx(np.mean(heldout[0]))
    assert line["objective/gold_score"] == pytest.approx(np.mean(calls[1][0]))
    for row in read_lines("runs/run/samples.jsonl"):
        assert row["reward/e"] == row["response"].count("e") / 4
        assert row["reward/long"] > 0
        assert row["score"] == pytest.approx(row["reward/e"] + row["reward/long"])
    assert line["eval/scores"] == pytest.approx(line["eval/reward/e"] + line["eval/reward/long"])
    assert line["reward/long_std"] > 0


REST = dict(prompt=["1 + 1 ="], answer=["2"], labels=["two"])
TEXTS = dict(queries=["1 + 1 ="], responses=[" 2"])
TRL = dict(prompts=["1 + 1 ="], completions=[" 2"])
SIGNATURES = {  # the table in docs/ppo.md → what each parameter gets
    "queries, responses": TEXTS,
    "queries, responses, answer": TEXTS | dict(answer=["2"]),
    "queries, responses, scores": TEXTS | dict(scores=[0.5]),
    "responses, step": dict(responses=[" 2"], step=3),
    "responses, weight=2.0, answer=None": dict(responses=[" 2"], weight=2.0, answer=["2"]),
    "responses, **columns": dict(responses=[" 2"], columns=dict(queries=["1 + 1 ="]) | REST),
    "prompts, completions, answer": TRL | dict(answer=["2"]),
    "completions, **kwargs": dict(completions=[" 2"], kwargs=dict(prompts=["1 + 1 ="]) | REST),
    "**columns": dict(columns=TEXTS | REST),
}


def arguments(parameters, columns=REST):
    seen = {}
    function = eval(f"lambda {parameters}: seen.update(locals()) or [1.0]", {"seen": seen})
    scores = {"scores": [0.5]} if "scores" in parameters else {}
    rewards.call_reward_function(function, TEXTS | scores | {"step": 3}, columns)
    return seen


@pytest.mark.parametrize("parameters", SIGNATURES)
def test_a_reward_function_gets_what_it_names(parameters):
    assert arguments(parameters) == SIGNATURES[parameters]


def test_the_table_of_signatures_has_these_rows():
    rows = re.findall(r"^\| `score\((.*)\)` \|", PAGES["docs/ppo.md"], flags=re.M)
    assert rows == list(SIGNATURES)


# Functions of other forms: their parameters and what they compute for the query "1 + 1 =", its
# response " 2", the answer "2" and the label "two", as their own libraries would call them.
OTHERS = {  # OpenRLHF's, verl's
    "queries, prompts, labels": (
        "[float(x == ('1 + 1 = 2', '1 + 1 =', 'two')) for x in zip(queries, prompts, labels)]"
    ),
    "data_source, solution_str, ground_truth, extra_info=None": (
        "float(solution_str.strip() == ground_truth and data_source == 'sums')"
    ),
}


@pytest.mark.parametrize("parameters", OTHERS)
def test_a_function_of_another_form_is_refused_with_a_wrapper_to_paste(parameters, task, tmp_path):
    """Some of their names mean other texts: OpenRLHF's `queries` hold the responses, too."""
    path = tmp_path / "theirs.py"
    path.write_text(f"def judge({parameters}):\n    return {OTHERS[parameters]}\n")
    args = tiny.make_args(task, reward_fn=f"{path}:judge", reward_model="nowhere")
    message = refuses(lambda: rewards.check_reward(args), f"--reward_fn {path}:judge: ")
    path.write_text(path.read_text() + message[message.index("def ") :])
    sources.import_file.cache_clear()
    function = rewards.load_scorer("reward_fn", replace(task, reward_fn=f"{path}:wrapped"))
    columns = REST | dict(data_source=["sums"], ground_truth=["2"])
    assert rewards.call_reward_function(function, TEXTS, columns)[""].tolist() == [1]


def test_a_column_that_is_missing_ends_the_run_before_a_model_loads(by_column):
    Path("mine.py").write_text("def score(responses, solution, *more, own=1, **rest): pass")
    task = replace(by_column, gold_fn="mine.py:score")
    load = partial(queries.load_queries, task, *load_tokenizer(task, 5))
    refuses(load, "--gold_fn mine.py:score needs solution", "'number'", "'responses'")


def test_a_column_with_the_name_of_a_text_is_refused():
    taken = REST | dict(responses=["other"])
    for parameters in ("queries, responses", "queries, responses, **columns"):
        refuses(lambda: arguments(parameters, taken), "responses is also a column", "rename")
    refuses(lambda: arguments("responses, step", REST | dict(step=["1"])), "step is also a column")
    assert arguments("queries, responses", REST | dict(scores=["other"], step=["1"])) == TEXTS
