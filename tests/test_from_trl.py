"""docs/from_trl.md says what is so, and what TRL saves loads here; the models are built in its form,
without TRL."""

import importlib.util
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from accelerate import Accelerator
from formats import BLUE, NIGHT, SYSTEM, USER
from test_readme import PAGES
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from machinery import cli, sources
from tools import convert_reward
from tools.classifier import Classifier
from train_reward import load_reward
from utils import TokenIds

TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{{ eos_token }}\n{% endfor %}"
TURNS += "{% if add_generation_prompt %}<|assistant|>{% endif %}"


def write_classifier(folder, kind="gpt2", num_labels=1):
    """A folder as TRL's RewardTrainer saves it: one label, a pad that the tokenizer has, bf16."""
    torch.manual_seed(0)
    sizes = dict(vocab=tiny.WORDS, positions=256, num_labels=num_labels, pad_token_id=3)
    config = tiny.config(kind, dropout=0.1, **sizes)
    model = AutoModelForSequenceClassification.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    tiny.write_tokenizer(folder)
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()


def own_scores(classifier, rows):
    return [classifier(torch.tensor([row])).logits.item() for row in rows]


def begin_with_bos(tokenizer):
    begin = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.backend_tokenizer.post_processor = begin


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["RLOO", "GRPO", "SFT", "DPO", "Reward"])
def test_the_page_names_every_field_of_a_configuration(name):
    """Read, not imported: TRL asks for other versions."""
    found = importlib.util.find_spec("trl")
    if not found:
        pytest.skip("pip install --no-deps trl==1.16.0")
    (folder,) = found.submodule_search_locations
    source = Path(folder, f"trainer/{name.lower()}_config.py").read_text()
    fields = set(re.findall(r"^    (\w+): ", source, re.M))
    assert len(fields) > 10
    assert fields <= set(re.findall(r"`(\w+)(?:=[^`]*)?`", PAGES["docs/from_trl.md"]))


def test_the_page_has_each_name_of_trl_that_a_script_answers():
    named = set(re.findall(r"`([^`\n]+)`", PAGES["docs/from_trl.md"]))
    assert len(cli.OURS) > 5
    for theirs, ours in cli.OURS.items():
        assert {theirs, f"--{ours}"} <= named


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama", "falcon_alibi"])
@torch.no_grad()
def test_X13_a_converted_classifier_scores_as_its_own_forward(kind, tmp_path, task):
    """Ours gets padding on both sides."""
    classifier = write_classifier(tmp_path / "trl", kind)
    convert_reward.main(str(tmp_path / "trl"), str(tmp_path / "reward"))
    queries, responses, rows = tiny.make_texts()
    args = tiny.make_args(task, reward_model=str(tmp_path / "reward"))
    given = AutoTokenizer.from_pretrained(task.base_model), TokenIds(tiny.WORDS, [], [], [])
    reward = load_reward(args, *given, Accelerator(cpu=True))
    expected = own_scores(classifier, rows)
    assert reward(queries, responses)[0].tolist() == pytest.approx(expected, abs=2e-5)
    assert torch.tensor(expected).std() > 0.1


def test_a_converted_classifier_reads_queries_that_begin_as_its_own_texts(tmp_path, task, capsys):
    """With a prefix, BOS would be before it: refused. Another template of its own is named."""
    write_classifier(tmp_path / "trl")
    own = AutoTokenizer.from_pretrained(tmp_path / "trl")
    begin_with_bos(own)
    own.save_pretrained(tmp_path / "trl")
    folder = str(tmp_path / "reward")
    convert_reward.main(str(tmp_path / "trl"), folder)
    plain = AutoTokenizer.from_pretrained(task.base_model)
    args = tiny.make_args(task, reward_model=folder)

    def load(tokenizer, args=args):
        load_reward(args, tokenizer, TokenIds(tiny.WORDS, None, [], []), Accelerator(cpu=True))

    load(own)
    assert "template" not in capsys.readouterr().out
    other = AutoTokenizer.from_pretrained(folder, chat_template="{{ messages[0].content }}")
    other.save_pretrained(folder)
    own.chat_template = TURNS
    load(own)
    assert f"{folder} reads the policy's chat template" in capsys.readouterr().out
    prefixed = tiny.make_args(replace(task, query_prefix="Anna"), reward_model=folder)
    for refused in (partial(load, plain), partial(load, own, prefixed)):
        tiny.refuses(refused, folder, "begin with other tokens", "classifier.py")


def test_what_is_no_classifier_of_one_label_is_refused_before_it_is_converted(tmp_path):
    """Language models, whose head `score` would be random; two labels; a pad that ends texts."""
    write_classifier(tmp_path / "two", num_labels=2)
    tiny.write_model(tmp_path / "lm")
    write_classifier(tmp_path / "pad")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "pad")
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(3)
    tokenizer.save_pretrained(tmp_path / "pad")
    for name in ("two", "lm", "pad"):
        convert = partial(convert_reward.main, str(tmp_path / name), str(tmp_path / "new"))
        tiny.refuses(convert, str(tmp_path / name))
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="2 labels"):
        Classifier(str(tmp_path / "two"))([""], [""])


def test_a_classifier_is_read_by_its_name_on_the_hub(hub):
    folder = hub.commit("models", "owner/classifier")
    write_classifier(folder)
    AutoTokenizer.from_pretrained(folder, pad_token="<|endoftext|>").save_pretrained(folder)
    texts = ["Anna saw"], [" a cat."]
    assert Classifier("owner/classifier")(*texts) == Classifier(str(folder))(*texts)
    assert sources.PINNED["owner/classifier"] == folder.name  # recorded, for --resume


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@torch.no_grad()
def test_a_classifier_as_a_function_reads_as_TRL_writes(kind, tmp_path):
    """Texts with BOS and its own end; messages by its own template, with the newline at its end."""
    classifier = write_classifier(tmp_path / "trl", kind)
    own = AutoTokenizer.from_pretrained(tmp_path / "trl")
    own.pad_token = own.convert_ids_to_tokens(3)
    begin_with_bos(own)
    own.chat_template = TURNS
    own.save_pretrained(tmp_path / "trl")
    queries, responses = ["Anna saw", "It", "Ben was glad to see"], [" a cat.", " rained.", " him"]
    texts = [f"{x}{y}{own.eos_token}" for x, y in zip(queries, responses, strict=True)]
    expected = own_scores(classifier, [own.encode(text) for text in texts])
    for size in (1, 2, 32):
        score = Classifier(str(tmp_path / "trl"), batch_size=size)
        assert score(queries, responses) == pytest.approx(expected, abs=2e-5)
    chats, answers = [[USER], [SYSTEM, USER, BLUE, NIGHT]], ["It is blue.", "Black"]
    rows = []
    for chat, answer in zip(chats, answers, strict=True):
        messages = [*chat, {"role": "assistant", "content": answer}]
        text = own.apply_chat_template(messages, tokenize=False)
        assert text.endswith("\n")
        rows.append(own.encode(text, add_special_tokens=False))
    found = score(["?"] * 2, answers, messages=chats)
    assert found == pytest.approx(own_scores(classifier, rows), abs=2e-5)
    with pytest.raises(ValueError, match="over 256 tokens"):
        score(["Anna"], [" saw" * 300])
