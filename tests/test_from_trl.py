"""docs/from_trl.md says what is so, and what TRL saves loads here; the models are built in its form,
without TRL."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import tiny
import torch
from accelerate import Accelerator
from tiny import WORDS
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import ppo
import rloo
from benchmarks import curves
from data.tasks import SYNTHETIC, Task
from machinery import rewards
from machinery.cli import InputError, parse_args
from train_reward import RewardModel
from utils import TokenIds

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/from_trl.md").read_text()
# The fields that each class has of its own, in the order of its source; what they inherit is
# TrainingArguments'. TRL 1.12.0, trl.experimental.ppo:
PPO_CONFIG = """learning_rate dataset_num_proc num_mini_batches total_episodes
    local_rollout_forward_batch_size num_sample_generations response_length stop_token stop_token_id
    temperature missing_eos_penalty sft_model_path world_size num_total_batches micro_batch_size
    local_batch_size batch_size local_mini_batch_size mini_batch_size push_to_hub reward_model_path
    model_adapter_name ref_adapter_name num_ppo_epochs whiten_rewards kl_coef kl_estimator cliprange
    vf_coef cliprange_value gamma lam ds3_gather_for_generation"""
# TRL 1.16.0:
RLOO_CONFIG = """learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef
    disable_dropout remove_unused_columns num_generations num_generations_eval max_completion_length
    ds3_gather_for_generation shuffle_dataset pad_to_multiple_of generation_batch_size
    steps_per_generation temperature top_p top_k min_p generation_kwargs chat_template_kwargs
    repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl
    vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host
    vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization
    vllm_max_model_length vllm_tensor_parallel_size beta num_iterations epsilon epsilon_high
    reward_weights normalize_advantages reward_clip_range mask_truncated_completions sync_ref_model
    ref_model_mixup_alpha ref_model_sync_steps log_completions log_multimodal
    num_completions_to_print log_unique_prompts use_transformers_continuous_batching
    transformers_continuous_batching_config use_transformers_paged"""


def write_classifier(folder: Path, kind: str = "gpt2", num_labels: int = 1):
    """A folder as TRL's RewardTrainer saves it: one label, a pad that the tokenizer has, bf16."""
    torch.manual_seed(0)
    config = tiny.config(kind, vocab=WORDS, dropout=0.1)
    config.num_labels, config.pad_token_id = num_labels, 3
    model = AutoModelForSequenceClassification.from_config(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    tiny.write_tokenizer(folder)
    cls = AutoModelForSequenceClassification
    return cls.from_pretrained(folder, dtype=torch.float32).eval()


def load_reward(args, tokenizer):
    return rewards.load_reward(
        args, RewardModel, tokenizer, TokenIds(WORDS, None, [], []), Accelerator(cpu=True)
    )


@pytest.mark.parametrize("kind", tiny.KINDS)
@torch.no_grad()
def test_X13_a_classifier_of_one_label_scores_as_its_own_forward(kind, tmp_path, task):
    """It pools the last token that is not its pad, which TRL sets to the end of text where a
    tokenizer has none: the last sequence ends with it. Ours gets padding of our own on both sides.
    Whole runs of ppo.py and rloo.py: test_tldr.py."""
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


def test_X13_a_classifier_is_read_by_text_where_its_tokenizer_is_another(
    tmp_path, task, monkeypatch
):
    """The tokenizer beside it decides."""
    write_classifier(tmp_path / "reward")
    seen = []
    monkeypatch.setattr(rewards, "reward_input", lambda *args: seen.extend(args))
    policy_tokenizer = AutoTokenizer.from_pretrained(SYNTHETIC / "model")
    load_reward(tiny.make_args(task, reward_model=str(tmp_path / "reward")), policy_tokenizer)
    own = AutoTokenizer.from_pretrained(tmp_path / "reward")
    assert seen[1].get_vocab() == own.get_vocab()
    assert seen[2] is policy_tokenizer and seen[3] == WORDS


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


# ----------------------------------------------------------------------------------------- the page


def flags_of(text: str) -> set[str]:
    """Every `--flag` in a text, without its `no-`; some are everybody's or the launcher's."""
    found = set(re.findall(r"--(?:no-)?([a-z][a-z0-9_]*)", text))
    return found - {"help", "mixed_precision"}


def names_of(*classes: type) -> set[str]:
    return {field.name for cls in (*classes, Task) for field in fields(cls)}


@pytest.mark.parametrize(
    ("name", "wanted", "script"),
    [("PPOConfig", PPO_CONFIG, ppo), ("RLOOConfig", RLOO_CONFIG, rloo)],
)
def test_the_page_names_every_field_once_beside_flags_that_the_script_has(name, wanted, script):
    heading = rf"^## Every field of `{name}`\n(.*?)(?=^## )"
    (section,) = re.findall(heading, PAGE, flags=re.M | re.S)
    rows = re.findall(r"^\| (`.+?) \| (.+) \|$", section, flags=re.M)
    found = [field for left, _ in rows for field in re.findall(r"`(\w+)`", left)]
    assert sorted(found) == sorted(wanted.split())
    assert flags_of(section) <= names_of(script.Args)
    for left, right in rows:
        if right.startswith("the same name"):
            assert set(re.findall(r"`(\w+)`", left)) <= names_of(script.Args), left
        else:
            assert right.startswith(("`--", "none")), left


def test_the_page_names_flags_files_and_details_that_there_are():
    flags = flags_of(PAGE)
    assert len(flags) > 30 and flags <= names_of(ppo.Args, rloo.Args, curves.Args)
    for path in re.findall(r"`((?:diffs|tests|benchmarks)/\w+\.\w+)`", PAGE):
        assert (ROOT / path).is_file(), path
    details = set(re.findall(r"\b([GRPALX]\d+)\b", PAGE))
    listed = (ROOT / "docs/details.md").read_text()
    assert len(details) > 15 and all(f"| {detail} |" in listed for detail in details)
    assert "docs/from_trl.md" in (ROOT / "README.md").read_text()


def test_the_pages_commands_parse_and_the_first_is_the_run_of_its_configuration():
    commands = re.findall(r"^.*?ppo\.py (--task(?:.*\\\n)*.*)$", PAGE, flags=re.M)
    commands = [shlex.split(text.replace("\\\n", " ")) for text in commands]
    args, *_ = [parse_args(ppo.Args, ppo.PRESETS, command) for command in commands]
    (config,) = re.findall(r"PPOConfig\((.*?)\n\)", PAGE, flags=re.S)
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
