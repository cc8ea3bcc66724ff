"""docs/from_trl.md says what is so, and what TRL saves loads here; the models are built in its form, without TRL."""

import re
import types
import typing
from dataclasses import fields
from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import ppo
import rloo
import sft
import tasks
import train_reward
import utils

both = pytest.mark.parametrize("script", [ppo, rloo], ids=["ppo", "rloo"])


def write_classifier(folder: Path, kind: str = "gpt2", **settings) -> AutoModelForSequenceClassification:
    """A folder as TRL's RewardTrainer saves it: one label, a pad that the tokenizer has, bf16 weights."""
    torch.manual_seed(0)
    config = tiny.config(kind, vocab=tiny.WORDS, dropout=0.1)
    config.num_labels, config.pad_token_id = settings.get("num_labels", 1), 3
    AutoModelForSequenceClassification.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    tiny.write_tokenizer(folder)
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_classifier_of_one_label_scores_as_it_does_in_its_own_forward(kind, tmp_path, task):
    """Its own forward reads a row without pads and pools the last token that is not its pad, which TRL sets to the end
    of text where a tokenizer has none: the last row ends with it. Ours gets pads of our own on both sides."""
    classifier = write_classifier(tmp_path / "reward", kind)
    args = tiny.make_args(task, reward_model=str(tmp_path / "reward"), rollout_batch_size=2)
    tokenizer = AutoTokenizer.from_pretrained(task.base_model)
    reward = ppo.load_reward(args, tokenizer, tiny.WORDS, torch.device("cpu"))
    lengths, ends = [8, 3, 1, 5], [5, 1, 3, 2]
    queries = tiny.make_contexts(lengths, 8, vocab=tiny.WORDS)
    responses = tiny.make_contexts([5] * 4, 5, seed=1, vocab=tiny.WORDS)
    responses[3, 1] = 3  # `write_classifier`'s pad
    cut = responses.masked_fill(torch.arange(5) >= torch.tensor(ends)[:, None], tiny.WORDS)
    rows = [torch.cat([q[8 - n :], r[:m]])[None] for q, r, n, m in zip(queries, responses, lengths, ends, strict=True)]
    with torch.no_grad():
        own = torch.cat([classifier(row, attention_mask=torch.ones_like(row)).logits[:, 0] for row in rows])
    assert own.std() > 0.1
    assert torch.allclose(reward(queries, cut), own, atol=2e-5)


def test_a_classifier_is_read_by_text_where_its_tokenizer_is_another(tmp_path, task, monkeypatch):
    """X13 holds for it too: the tokenizer beside it decides."""
    write_classifier(tmp_path / "reward")
    seen = []
    monkeypatch.setattr(utils, "reward_reader", lambda model, theirs, *rest: seen.append(theirs.get_vocab()))
    args = tiny.make_args(task, reward_model=str(tmp_path / "reward"))
    ppo.load_reward(args, None, tiny.WORDS, torch.device("cpu"))
    assert seen == [AutoTokenizer.from_pretrained(tmp_path / "reward").get_vocab()]


def test_what_is_no_reward_model_is_refused(tmp_path):
    """A language model, whose head `score` would be random, and a classifier of two labels."""
    write_classifier(tmp_path / "two", num_labels=2)
    tiny.write_model(tmp_path / "lm")
    (tmp_path / "lm1").mkdir()
    lm = tiny.make_lm(vocab=tiny.WORDS)
    lm.config.num_labels = 1
    lm.save_pretrained(tmp_path / "lm1")
    for name in ("two", "lm", "lm1"):
        with pytest.raises(tasks.InputError, match=f"{name} is neither a reward model nor a classifier of one label"):
            utils.RewardModel.from_folder(str(tmp_path / name), "")


def test_its_parameters_count_for_the_memory_that_a_run_needs(tmp_path, task):
    classifier = write_classifier(tmp_path / "reward")
    config = utils.reward_config(tiny.make_args(task, reward_model=str(tmp_path / "reward")))
    assert utils.count_parameters(config) == classifier.num_parameters() + 3  # the head's bias, gain and bias


@both
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama", "qwen2"])
def test_a_run_goes_on_from_a_policy_and_a_reward_model_that_trl_saved(
    script, kind, tmp_path, monkeypatch, accelerator
):
    """Both in bf16, as TRL trains them. With lr 0 the run ends with the very weights, and its scores are the classifier's."""
    monkeypatch.chdir(tmp_path)
    task = tiny.write_task(tmp_path / "task", kind)
    lm = tiny.make_lm(kind, vocab=tiny.WORDS).to(torch.bfloat16)
    lm.generation_config.eos_token_id, lm.config.pad_token_id = 3, 3
    lm.save_pretrained("policy")
    tiny.write_tokenizer(Path("policy"))
    classifier = write_classifier(Path("reward"), kind)
    task = tiny.replace(task, base_model="policy", truncate_token=None)
    args = tiny.make_args(task, script, total_episodes=8, lr=0.0, reward_model="reward", run_name="a", eval_queries=4)
    made, make_rollout = [], script.make_rollout
    monkeypatch.setattr(script, "make_rollout", lambda *a: made.append(make_rollout(*a)) or made[-1])
    script.main(args)
    weights, wanted = utils.load_lm("runs/a/model").state_dict(), lm.state_dict()
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name].float()) for name in weights)
    ((rollout, score),) = made
    for context, response, found in zip(rollout.contexts, rollout.responses, score.scores, strict=True):
        row = torch.cat([context[context != tiny.WORDS], response])[None]
        with torch.no_grad():
            assert classifier(row, attention_mask=torch.ones_like(row)).logits.item() == pytest.approx(
                found.item(), abs=1e-4
            )
