"""docs/from_trl.md says what is so, and what TRL saves loads here; the models are built in its form,
without TRL."""

import re
from dataclasses import replace
from pathlib import Path

import formats
import pytest
import tiny
import torch
from accelerate import Accelerator
from formats import BLUE, GREEN, NIGHT, SYSTEM, USER
from test_readme import PAGES, PRINTED
from tiny import WORDS
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import ppo
import utils
from data.tasks import SYNTHETIC
from machinery import rewards
from machinery.cli import InputError, parse_args
from machinery.labels import load_labels
from machinery.tokens import tokenize_prompt
from train_reward import RewardModel, new_reward_model
from utils import TokenIds


def write_classifier(folder: Path, kind: str = "gpt2", num_labels: int = 1):
    """A folder as TRL's RewardTrainer saves it: one label, a pad that the tokenizer has, bf16."""
    torch.manual_seed(0)
    config = tiny.config(kind, vocab=WORDS, dropout=0.1, positions=256)
    config.num_labels, config.pad_token_id = num_labels, 3
    model = AutoModelForSequenceClassification.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    tiny.write_tokenizer(folder)
    cls = AutoModelForSequenceClassification
    return cls.from_pretrained(folder, dtype=torch.float32).eval()


def load_reward(args, tokenizer):
    ids = TokenIds(WORDS, None, [], [])
    return rewards.load_reward(args, RewardModel, tokenizer, ids, Accelerator(cpu=True))


@pytest.mark.parametrize("kind", tiny.KINDS)
@torch.no_grad()
def test_X13_a_classifier_of_one_label_scores_as_its_own_forward(kind, tmp_path, task):
    """It pools the last token that is not its pad, which TRL sets to the end of text where a
    tokenizer has none: the last sequence ends with it. Ours gets padding on both sides."""
    classifier = write_classifier(tmp_path / "reward", kind)
    args = tiny.make_args(task, reward_model=str(tmp_path / "reward"))
    lengths, ends = [8, 3, 1, 5], [5, 1, 3, 2]
    queries = tiny.make_contexts(lengths, 8, vocab=WORDS)
    responses = tiny.make_contexts([5] * 4, 5, seed=1, vocab=WORDS)
    responses[3, 1] = 3  # the classifier's pad
    cut = responses.masked_fill(torch.arange(5) >= torch.tensor(ends)[:, None], WORDS)
    rows = [row[row != WORDS][None] for row in torch.cat([queries, cut], dim=1)]
    own = [classifier(row, attention_mask=torch.ones_like(row)).logits[:, 0] for row in rows]
    assert torch.cat(own).std() > 0.1
    reward = load_reward(args, AutoTokenizer.from_pretrained(task.base_model))
    assert torch.allclose(reward(queries, cut), torch.cat(own), atol=2e-5)


def test_X13_a_classifier_with_another_tokenizer_is_read_by_text(tmp_path, task, monkeypatch):
    """The tokenizer beside it decides."""
    write_classifier(tmp_path / "reward")
    seen = []
    monkeypatch.setattr(rewards, "reward_input", lambda *args: seen.extend(args))
    policy_tokenizer = AutoTokenizer.from_pretrained(SYNTHETIC / "model")
    load_reward(tiny.make_args(task, reward_model=str(tmp_path / "reward")), policy_tokenizer)
    own = AutoTokenizer.from_pretrained(tmp_path / "reward")
    assert seen[1].get_vocab() == own.get_vocab()
    assert seen[2] is policy_tokenizer and seen[3] == WORDS


TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHATS = [[USER], [SYSTEM, USER, BLUE, NIGHT]]
ANSWERS = ["It is blue.", "Black"]


def tokens_of_chats(tokenizer):
    """Padded tokens of `CHATS` and `ANSWERS`, which end."""
    queries = [tokenize_prompt(messages, 99, tokenizer) for messages in CHATS]
    responses = [tokenizer.encode(answer) + [tokenizer.eos_token_id] for answer in ANSWERS]
    return [utils.pad_left(rows, max(map(len, rows)), WORDS) for rows in (queries, responses)]


@pytest.mark.parametrize("template", [TURNS, formats.CHATML])
@torch.no_grad()
def test_X13_a_classifier_reads_conversations_in_its_own_template_to_its_end(
    template, tmp_path, task, hers
):
    """As TRL trains it, with the newline after the end token, which policies do not sample."""
    classifier = write_classifier(tmp_path / "reward")
    own = AutoTokenizer.from_pretrained(tmp_path / "reward")
    own.chat_template, hers.chat_template = template, TURNS
    own.save_pretrained(tmp_path / "reward")
    args = tiny.make_args(replace(task, query_column="chat"), reward_model=str(tmp_path / "reward"))
    chats = [CHATS[0], [*CHATS[1], GREEN]]  # an answer that the data has is not read
    found = load_reward(args, hers)(*tokens_of_chats(hers), {"chat": chats})
    for messages, answer, score in zip(CHATS, ANSWERS, found, strict=True):
        dialogue = [*messages, {"role": "assistant", "content": answer}]
        text = own.apply_chat_template(dialogue, tokenize=False)
        ids = torch.tensor([own.encode(text, add_special_tokens=False)])
        expected = classifier(ids, attention_mask=torch.ones_like(ids)).logits[0, 0]
        assert score.item() == pytest.approx(expected.item(), abs=2e-5)


@torch.no_grad()
def test_X13_a_classifier_reads_bos_also_if_that_of_the_policy_is_in_a_prefix(tmp_path, task):
    classifier = write_classifier(tmp_path / "reward")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "reward")
    begin = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.backend_tokenizer.post_processor = begin
    tokenizer.save_pretrained(tmp_path / "reward")
    texts = "Anna saw", " a cat."
    tokens = [torch.tensor([tokenizer.encode(x, add_special_tokens=False)]) for x in texts]
    args = tiny.make_args(replace(task, query_prefix="Q:"), reward_model=str(tmp_path / "reward"))
    expected = classifier(torch.tensor([[0, *torch.cat(tokens, dim=1)[0].tolist()]])).logits
    found = load_reward(args, tokenizer)(*tokens)
    assert found.item() == pytest.approx(expected.item(), abs=2e-5)


def test_X13_train_rewards_model_reads_conversations_as_it_was_trained_to(tmp_path, task, hers):
    """In its own template, if the policy's is another one; nothing after the end token of Phi's."""
    own, end = AutoTokenizer.from_pretrained(SYNTHETIC / "model"), "{{ eos_token }}"
    own.chat_template = TURNS + f"{{% if not add_generation_prompt %}}{end}{{% endif %}}"
    hers.chat_template = formats.CHATML
    answers = [[{"role": "assistant", "content": answer}] for answer in ANSWERS]
    rows = [dict(prompt=x, chosen=y, rejected=[GREEN]) for x, y in zip(CHATS, answers, strict=True)]
    files = dict(label_dataset=formats.write_rows(tmp_path / "pairs.jsonl", rows))
    task = replace(task, query_length=99, truncate_token=own.eos_token, **files)
    labels = load_labels(task, own, TokenIds(WORDS, own.eos_token_id, [], []))
    trained = [[*x.tolist(), *y[0]] for x, y in zip(labels.queries, labels.responses, strict=True)]
    write_classifier(tmp_path / "base")  # its transformer does not make it a classifier
    model = new_reward_model(str(tmp_path / "base"), WORDS)
    found = rewards.reward_input(model, own, hers, WORDS)(*tokens_of_chats(hers), CHATS)
    assert found.tolist() == utils.pad_left(trained, found.shape[1], WORDS).tolist()


def test_what_is_no_reward_model_is_refused(tmp_path):
    """Language models, whose head `score` would be random, and a classifier of two labels."""
    write_classifier(tmp_path / "two", num_labels=2)
    tiny.write_model(tmp_path / "lm")
    lm = tiny.make_lm(vocab=WORDS)
    lm.config.num_labels = 1
    lm.save_pretrained(tmp_path / "lm1")
    for name in ("two", "lm", "lm1"):
        with pytest.raises(InputError, match=f"--reward_model .*{name}: "):
            rewards.load_reward_model(RewardModel, str(tmp_path / name))


def test_the_pages_first_command_is_the_run_of_its_configuration():
    words = next(x for x in PRINTED["docs/from_trl.md"] if "ppo.py --task" in x).split("ppo.py ")
    args = parse_args(ppo.Args, ppo.PRESETS, words[1].split())
    (config,) = re.findall(r"PPOConfig\((.*?)\n\)", PAGES["docs/from_trl.md"], flags=re.S)
    trl = {name: float(value) for name, value in re.findall(r"(\w+)=([\d._e-]+)", config)}
    same = dict(learning_rate=args.lr, num_mini_batches=args.num_minibatches)
    same |= {name: getattr(args, name) for name in ("total_episodes", "num_ppo_epochs", "kl_coef")}
    same |= {name: getattr(args.task, name) for name in ("response_length", "temperature")}
    same["missing_eos_penalty"] = -args.task.missing_eos_penalty
    assert {name: trl[name] for name in same} == same
    sizes = trl["per_device_train_batch_size"] * trl["gradient_accumulation_steps"]
    assert args.batch_size == sizes * 8
    found = args.task.task, args.kl_target, args.whiten_rewards, args.task.eos_task
    assert found == ("tldr", None, False, True)
