"""docs/tldr.md: ready SFT and reward models in the form that they have on the hub, through its commands.
The form is from the pages of trl-lib/pythia-{1b,2.8b,6.9b}-deduped-tldr-{sft,rm} (files, config.json,
tokenizer_config.json, special_tokens_map.json), read in 2024; weights here are tiny and random."""

import json
import re
import shlex
from pathlib import Path

import pytest
import tiny
import tokenizers
import torch
import transformers
from conftest import SCRIPTS, run_script
from formats import TLDR, write_rows
from test_readme import PRINTED
from tokenizers import decoders, normalizers, pre_tokenizers
from transformers import AutoTokenizer, GPTNeoXConfig, GPTNeoXForCausalLM

from machinery import models, tokens
from tools import convert_reward

EOS = 0
SFT, RM = "trl-lib/pythia-{}-deduped-tldr-sft", "trl-lib/pythia-{}-deduped-tldr-rm"
TASK = "--task tldr --query_dataset posts.jsonl"
TINY = "--total_episodes 16 --batch_size 16 --rollout_batch_size 16 --eval_queries 4 "
TINY += "--num_ppo_epochs 1 --lr 0 --output_dir policy"
# As transformers 4.33.2 wrote it, with tiny sizes; both kinds lack pad_token_id.
CONFIG = """{"_name_or_path": "EleutherAI/pythia-1b-deduped", "attention_dropout": 0.0,
"bos_token_id": 0, "classifier_dropout": 0.1, "eos_token_id": 0, "hidden_act": "gelu",
"hidden_dropout": 0.0, "hidden_size": 32, "initializer_range": 0.3, "intermediate_size": 64,
"layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "gpt_neox",
"num_attention_heads": 2, "num_hidden_layers": 2, "rope_scaling": null, "rotary_emb_base": 10000,
"rotary_pct": 0.25, "tie_word_embeddings": false, "torch_dtype": "float32",
"transformers_version": "4.33.2", "use_cache": true, "use_parallel_residual": true, "vocab_size": 352}"""
LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def write_tokenizer(folder, pad):
    """GPT-NeoX's tokenizer with few merges. Of SFT models, special_tokens_map alone names a [PAD],
    which becomes one more token; reward models have none."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=["<|endoftext|>", "<|padding|>"],
        vocab_size=300,
    )
    backend.train_from_iterator([TLDR[0]["prompt"]] * 3, trainer)
    backend.add_tokens([tokenizers.AddedToken(" " * n, normalized=True) for n in range(24, 1, -1)])
    backend.save(str(folder / "tokenizer.json"))
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    config = dict(
        add_prefix_space=False,
        clean_up_tokenization_spaces=True,
        model_max_length=10**30,
        tokenizer_class="GPTNeoXTokenizer",
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(special | config))
    if pad:
        special["pad_token"] = "[PAD]"
    (folder / "special_tokens_map.json").write_text(json.dumps(special))


def write_model(cls, folder, seed, dtype, form):
    """A folder as the hub has it: one safetensors `file`, or shards with an `index`."""
    path = Path(folder)
    path.mkdir(parents=True)
    write_tokenizer(path, pad=cls is GPTNeoXForCausalLM)
    config = json.loads(CONFIG) | dict(architectures=[cls.__name__])
    config |= LABEL if cls is transformers.GPTNeoXForSequenceClassification else {}
    torch.manual_seed(seed)
    model = cls(GPTNeoXConfig(**config))
    if cls is GPTNeoXForCausalLM:  # of 16 responses some end and some do not
        model.gpt_neox.final_layer_norm.bias.data.fill_(0.1)
        model.get_output_embeddings().weight.data[EOS] += 0.2
    model.to(dtype).save_pretrained(path, max_shard_size="60KB" if form == "index" else "1GB")
    (path / "config.json").write_text(json.dumps(config))
    return model.float().eval()


def write_models(size, form):
    """SFT model in bf16, reward model in fp32 (1B's), and posts as in trl-lib/tldr."""
    sft = write_model(GPTNeoXForCausalLM, SFT.format(size), 1, torch.bfloat16, form)
    cls = transformers.GPTNeoXForSequenceClassification
    rm = write_model(cls, RM.format(size), 2, torch.float32, form)
    words = ("house", "cat", "bus", "sea", "door", "red ship", "soup,  or\n\n  so", "tree")
    rows = [{key: text.replace("house", word) for key, text in TLDR[0].items()} for word in words]
    write_rows(Path("posts.jsonl"), rows)
    return sft, rm


def commands(script, size):
    """The flags of the page's commands that start from the models of this size."""
    found = [re.search(rf"(?:^|/| ){script}\.py (.*)", line) for line in PRINTED["docs/tldr.md"]]
    return [shlex.split(x[1]) for x in found if x and SFT.format(size) in x[1]]


@pytest.mark.parametrize("name, size, form", [("ppo", "1b", "file"), ("rloo", "6.9b", "index")])
def test_the_pages_command_scores_as_the_classifier_itself(name, size, form, here, monkeypatch):
    """Every response that ends is read through its end of text; the others get the penalty."""
    lm, classifier = write_models(size, form)
    convert_reward.main(RM.format(size), f"rm-{size}")
    script, rollouts = SCRIPTS[name], []
    monkeypatch.setattr(script, "Rollout", tiny.keep(script.Rollout, rollouts))
    words = [*commands(name, size)[0], *TASK.split(), *TINY.split()]
    run_script(name, words)
    pad = lm.config.vocab_size
    ended = torch.cat([rollout.finished for rollout in rollouts])
    assert 3 < ended.sum() < len(ended) - 3
    for rollout in rollouts:
        rows = torch.cat([rollout.queries, rollout.responses], dim=1)
        rows = [row[row != pad] for row in rows]
        assert [bool(row[-1] == EOS) for row in rows] == rollout.finished.tolist()
        with torch.no_grad():  # the classifier's own logit of each text, alone: at its last token
            own = torch.cat([classifier(row[None]).logits[:, 0] for row in rows])
        own = own.where(rollout.finished, -1.0)
        assert torch.allclose(rollout.scores, own, atol=1e-4) and own.std() > 0.1
    weights = models.load_lm("policy").state_dict()
    assert all(torch.equal(weights[name], x) for name, x in lm.state_dict().items())


def test_X13_a_pad_token_of_the_policys_tokenizer_alone_changes_no_text(tmp_path):
    for name, pad in (("sft", True), ("rm", False)):
        (tmp_path / name).mkdir()
        write_tokenizer(tmp_path / name, pad)
    sft, rm = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("sft", "rm"))
    assert len(sft) == len(rm) + 1 and tokens.same_tokens(rm, sft)
    sft.add_tokens(["house"])
    assert not tokens.same_tokens(rm, sft)
    rm.add_special_tokens({"pad_token": "[END]", "eos_token": "[END]"})  # a pad that ends texts
    assert not tokens.same_tokens(sft, rm)
