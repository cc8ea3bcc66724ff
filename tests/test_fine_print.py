"""Small things that nobody would look at twice, and that a random mistake changed unseen (LOG.md)."""

import threading
from types import SimpleNamespace

import pytest
import tiny
import torch
from test_resume import settings, write_files
from transformers import AutoTokenizer

import packing
import ppo
import records
import rloo
import sft
import tasks
import train_reward
import utils


@pytest.fixture
def long_row():
    """The synthetic task's tokenizer, a row of 40 words, and its text of more than 61 characters."""
    tokenizer = AutoTokenizer.from_pretrained(tasks.SYNTHETIC / "model")
    row = torch.arange(600, 640)[None]
    return tokenizer, row, tokenizer.decode(row[0], skip_special_tokens=True)


def test_an_error_shows_sixty_characters_of_a_response_and_of_its_query(long_row):
    tokenizer, row, text = long_row
    assert len(text) > 61
    with pytest.raises(utils.InputError) as caught:
        utils.text_scores(lambda queries, responses: [float("nan")], "f", tokenizer, row, row, tiny.WORDS)
    assert f"such as {text[:60]!r} to {text[:60]!r}; " in str(caught.value)


def test_a_gradient_that_is_not_finite_is_shown_with_sixty_characters_of_a_row(long_row):
    _, row, text = long_row
    task = tiny.make_task(base_model=str(tasks.SYNTHETIC / "model"))
    with pytest.raises(utils.RunError) as caught:
        utils.check_gradients(torch.tensor(float("nan")), task, row, loss=torch.tensor([float("nan")]))
    assert f"for 1 rows, such as {text[:60]!r}; " in str(caught.value)


def test_a_checksum_has_sixteen_digits(tmp_path):
    task = tiny.make_task(base_model=str(tmp_path), gold_fn=None)
    (tmp_path / "weights").write_text("1")
    args = SimpleNamespace(task=task)
    assert [len(value) for value in records.fingerprints(args, (torch.zeros(2),)).values()] == [16, 16]


def test_whether_the_hub_answers_is_known_after_two_seconds(monkeypatch):
    waited = []
    answer = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: waited.append(timeout) or answer)
    utils.go_offline_if_unreachable()
    assert waited == [2]


def test_the_time_left_is_that_of_the_steps_so_far_times_those_to_come(tmp_path, monkeypatch, capsys):
    """Ten seconds for 2 of 10 steps, of a run that went on after 4: 5 s each, and 4 are left."""
    quiet = SimpleNamespace(log=lambda *args, **more: None, update=lambda *args, **more: None)
    run = SimpleNamespace(total=10, start=4, begin=100.0, main=True, live=False, folder=tmp_path, bar=None)
    run.accelerator = run.progress = quiet
    run.say_where = lambda done: None
    monkeypatch.setattr("time.perf_counter", lambda: 110.0)
    records.Run.log(run, 5, {"x": 1.0}, {"x": "x"})
    assert capsys.readouterr().out.endswith("left 20 s\n")


def test_blocks_that_are_shorter_than_a_query_need_no_token_more_than_the_query(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    needed = []

    def seen(task, extra, *rest):
        needed.append(extra)
        raise utils.InputError("seen")

    monkeypatch.setattr(utils, "load_tokenizer", seen)
    monkeypatch.setattr(sft, "check", lambda *args: None)
    for block_size in (task.query_length - 4, task.query_length, task.query_length + 3):
        with pytest.raises(utils.InputError, match="seen"):
            sft.main(sft.Args(task=task, block_size=block_size))
    assert needed == [0, 0, 3]


@pytest.mark.parametrize("script", [ppo, rloo, sft, train_reward], ids=lambda script: script.__name__)
def test_while_sampling_the_vocabulary_head_sees_one_token_a_row(script):
    lm, (task, ids), kept = tiny.make_lm(), tiny.sampling(0.7), []

    def spy(*args, logits_to_keep, **inputs):
        kept.append(logits_to_keep)
        return lm(*args, logits_to_keep=logits_to_keep, **inputs)

    spy.config = lm.config
    script.sample(spy, tiny.make_contexts([3, 5], 5), tiny.uniform(4, 2), task, ids)
    assert kept == [1] * 4


def test_a_function_that_hangs_is_named_after_a_minute(monkeypatch):
    made = []
    timer = SimpleNamespace(start=lambda: None, cancel=lambda: None)
    monkeypatch.setattr(threading, "Timer", lambda seconds, *rest: made.append(seconds) or timer)
    assert tasks.call_function(lambda texts: len(texts), "f", ["a", "b"]) == 2 and made == [60]


def test_texts_are_taken_in_the_order_that_earlier_runs_took_them_in(task, monkeypatch):
    """A run of another version reads the same queries: NumPy's generator 0 begins a permutation of six with 3, 2, 5."""

    class Rows(list):
        def select(self, order):
            return [self[i] for i in order]

    monkeypatch.setattr(utils, "load_texts", lambda task: Rows("abcdef"))
    monkeypatch.setattr(utils, "FEW", 3)
    assert utils.shuffled_texts(task, 1) == ["d", "c", "f"]


def test_a_reward_models_run_is_known_by_the_queries_that_it_is_normalised_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    sets, policy_samples = [], train_reward.policy_samples

    def sampled(*args):
        sets.extend(policy_samples(*args))
        return sets

    def known_by(*args):
        assert args[-2] is sets[0][0] and args[-1] is sets[1][0]
        raise utils.InputError("seen")

    monkeypatch.setattr(train_reward, "policy_samples", sampled)
    monkeypatch.setattr(records, "Run", known_by)
    with pytest.raises(utils.InputError, match="seen"):
        train_reward.main(settings("train_reward", tmp_path))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("script", [ppo, rloo], ids=lambda script: script.__name__)
def test_compile_reaches_the_decoder_that_samples(script, compiled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)

    def seen(lm, asked):
        raise utils.InputError(f"asked for {asked}")

    monkeypatch.setattr(packing, "Decoder", seen)
    with pytest.raises(utils.InputError, match=f"asked for {compiled}"):
        script.main(settings(script.__name__, tmp_path, compile=compiled))
