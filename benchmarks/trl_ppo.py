"""TRL's PPOTrainer on `synthetic_eos`, from the models and queries that ppo.py gets: docs/from_trl.md puts both side by side.

    pip install trl==1.12.0                                # the last version with it; what else it wants is here already
    python benchmarks/trl_ppo.py --out runs/trl            # needs the models of both scripts for that task

Our reward model becomes the classifier that TRL reads, `runs/trl/reward`, which ppo.py then reads too.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
import ppo  # noqa: E402
import tasks  # noqa: E402
import utils  # noqa: E402


@dataclass(frozen=True)
class Args:
    """TRL's PPOTrainer on `synthetic_eos`."""

    out: Path
    """new folder: reward/, policy/ and TensorBoard events"""
    reward_model: str = "models/synthetic_eos/train_reward"
    """of train_reward.py"""
    seed: int = 1
    """TRL's"""


def write_classifier(source: str, folder: Path) -> None:
    """gain · (w · h + b) + bias without its constant, for which `score` has no place."""
    reward = utils.RewardModel.from_folder(source, "python train_reward.py --task synthetic_eos")
    config = reward.config.backbone
    config.num_labels = 1
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    model.base_model.load_state_dict(reward.backbone.state_dict())
    model.score.weight.data = (reward.gain * reward.head.weight).detach()
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def main(args: Args) -> None:
    """The values of ppo.py's preset, in TRL's names."""
    import datasets
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    task, preset = tasks.TASKS["synthetic_eos"], ppo.PRESETS["synthetic_eos"]
    write_classifier(args.reward_model, args.out / "reward")
    tokenizer, _, pad_id = utils.load_tokenizer(task, task.response_length)
    _, table = utils.load_queries(task, tokenizer, pad_id, preset["total_episodes"]).hold_out(256, "")
    rows = [{"input_ids": [token for token in row if token != pad_id]} for row in table[:].tolist()]
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.padding_side = "left"
    classifier = transformers.AutoModelForSequenceClassification
    config = PPOConfig(
        output_dir=str(args.out),
        seed=args.seed,
        total_episodes=preset["total_episodes"],
        per_device_train_batch_size=32,
        gradient_accumulation_steps=preset["batch_size"] // 32,
        num_ppo_epochs=preset["num_ppo_epochs"],
        learning_rate=preset["lr"],
        kl_coef=preset["kl_coef"],
        response_length=task.response_length,
        temperature=task.temperature,
        stop_token="eos",
        missing_eos_penalty=1.0,
        num_sample_generations=0,
        gradient_checkpointing=False,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to=["tensorboard"],
    )
    policy = transformers.AutoModelForCausalLM.from_pretrained(task.base_model, dtype=torch.float32)
    policy.resize_token_embeddings(len(tokenizer))  # it gathers log-probabilities of pads, so the pad has to have one
    reward, value = (classifier.from_pretrained(args.out / "reward", dtype=torch.float32) for _ in range(2))
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=None,
        reward_model=reward,
        value_model=value,
        train_dataset=datasets.Dataset.from_list(rows),
        eval_dataset=datasets.Dataset.from_list(rows[:8]),
    )
    trainer.train()
    trainer.save_model(args.out / "policy")


if __name__ == "__main__":
    tasks.cli(main, lambda: tyro.cli(Args))
