"""docs/from_trl.md says what is so, and what TRL saves loads here; the models are built in its form, without TRL."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import ppo
import rloo
import tasks
import utils
from benchmarks import curves

PAGE = (utils.ROOT / "docs/from_trl.md").read_text()
# The fields that each class has of its own, in the order of its source; what they inherit is TrainingArguments'
PPO_CONFIG = """learning_rate dataset_num_proc num_mini_batches total_episodes local_rollout_forward_batch_size
    num_sample_generations response_length stop_token stop_token_id temperature missing_eos_penalty sft_model_path world_size
    num_total_batches micro_batch_size local_batch_size batch_size local_mini_batch_size mini_batch_size push_to_hub
    reward_model_path model_adapter_name ref_adapter_name num_ppo_epochs whiten_rewards kl_coef kl_estimator cliprange vf_coef
    cliprange_value gamma lam ds3_gather_for_generation"""  # TRL 1.12.0, trl.experimental.ppo
RLOO_CONFIG = """learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout remove_unused_columns
    num_generations num_generations_eval max_completion_length ds3_gather_for_generation shuffle_dataset pad_to_multiple_of
    generation_batch_size steps_per_generation temperature top_p top_k min_p generation_kwargs chat_template_kwargs
    repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode
    vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port
    vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size beta num_iterations epsilon epsilon_high
    reward_weights normalize_advantages reward_clip_range mask_truncated_completions sync_ref_model ref_model_mixup_alpha
    ref_model_sync_steps log_completions log_multimodal num_completions_to_print log_unique_prompts
    use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged"""  # 1.16.0

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
    reward = utils.load_reward(args, tokenizer, tiny.WORDS, torch.device("cpu"))
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
    utils.load_reward(args, None, tiny.WORDS, torch.device("cpu"))
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


# ----------------------------------------------------------------------------------------------------------- the page


def flags_of(text: str) -> set[str]:
    """Every `--flag` in a text, without its `no-`; --help is everybody's, --mixed_precision the launcher's."""
    return set(re.findall(r"--(?:no-)?([a-z][a-z0-9_]*)", text)) - {"help", "mixed_precision"}


def names_of(script) -> set[str]:
    """The flags of ppo or rloo."""
    return {field.name for cls in (script.Args, tasks.Task, tasks.Shown) for field in fields(cls)}


@pytest.mark.parametrize(
    ("name", "wanted", "script"), [("PPOConfig", PPO_CONFIG, ppo), ("RLOOConfig", RLOO_CONFIG, rloo)]
)
def test_the_page_names_every_field_once_beside_flags_that_the_script_has(name, wanted, script):
    (section,) = re.findall(rf"^## Every field of `{name}`\n(.*?)(?=^## )", PAGE, flags=re.M | re.S)
    rows = re.findall(r"^\| (`.+?) \| (.+) \|$", section, flags=re.M)
    found = [field for left, _ in rows for field in re.findall(r"`(\w+)`", left)]
    assert sorted(found) == sorted(wanted.split()) and len(found) == {"PPOConfig": 33, "RLOOConfig": 53}[name]
    assert flags_of(section) <= names_of(script)
    for left, right in rows:
        assert right.startswith(("`--", "none")), left


def test_the_page_names_no_flag_that_there_is_not():
    ours = names_of(ppo) | names_of(rloo) | {field.name for field in fields(curves.Args)}  # trl_ppo.py has --out too
    assert flags_of(PAGE) <= ours and len(flags_of(PAGE)) > 30


def test_the_page_names_files_and_details_that_there_are():
    for path in re.findall(r"`((?:diffs|tests|benchmarks)/\w+\.\w+)`", PAGE):
        assert (utils.ROOT / path).is_file(), path
    details = set(re.findall(r"\b([GRPALX]\d+)\b", PAGE))
    assert len(details) > 15
    readme = (utils.ROOT / "README.md").read_text()
    assert all(f"| {detail} |" in readme for detail in details)
    assert "(docs/from_trl.md)" in readme


def test_the_pages_commands_parse_and_the_first_is_the_run_of_its_configuration():
    commands = re.findall(r"^.*?ppo\.py (--task(?:.*\\\n)*.*)$", PAGE, flags=re.M)
    assert len(commands) == 2
    runs = [tasks.parse_args(ppo.Args, ppo.PRESETS, shlex.split(text.replace("\\\n", " "))) for text in commands]
    assert [run.task.task for run in runs] == ["tldr", "synthetic_eos"]
    args = runs[0]
    (config,) = re.findall(r"PPOConfig\((.*?)\n\)", PAGE, flags=re.S)
    theirs = {name: float(value) for name, value in re.findall(r"(\w+)=([\d._e-]+)", config)}
    for name in ("total_episodes", "num_ppo_epochs", "kl_coef"):
        assert getattr(args, name) == theirs[name]
    assert (args.lr, args.num_minibatches) == (theirs["learning_rate"], theirs["num_mini_batches"])
    assert (args.task.response_length, args.task.temperature) == (theirs["response_length"], theirs["temperature"])
    sizes = theirs["per_device_train_batch_size"], theirs["gradient_accumulation_steps"]
    assert args.batch_size == sizes[0] * sizes[1] * 8
    assert args.task.missing_eos_penalty == -theirs["missing_eos_penalty"]
    assert (args.kl_target, args.whiten_rewards, args.task.eos_task) == (None, False, True)
