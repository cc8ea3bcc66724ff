"""Run one contestant of speed.py; print seconds per update and phase, and peak memory, as JSON.

All have the same phases: `sample` ends with the responses, `score` with the first forward pass that
has a gradient, and `optimize` when the update has been logged. The first update is for warm-up.

TRL's trainers run in environments without this project's requirements, so ours are imported where
they are needed.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import math
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers import AutoModelForSequenceClassification as Classifier

sys.path.insert(0, str(Path(__file__).parents[1]))
Job = SimpleNamespace  # made by `job` of speed.py
LR, TEMPERATURE, KL_COEF = 1e-5, 0.7, 0.15


class Stopwatch:
    """CPU and wall seconds of each phase of each update, and peak memory."""

    def __init__(self):
        self.updates: list[dict[str, list[float]]] = []
        self.phase: str | None = None
        self.then, self.peak = (0.0, 0.0), 0.0
        self.full = 0.0  # seconds of `sample` / `full_batches`

    def __call__(self, phase: str | None) -> None:
        """Begin a phase; None: between two updates."""
        if phase == self.phase:
            return
        now = time.process_time(), time.perf_counter()
        if self.phase:
            seconds = self.updates[-1].setdefault(self.phase, [0.0, 0.0])
            for i in (0, 1):
                seconds[i] += now[i] - self.then[i]
        if phase == "sample" and self.phase in (None, "optimize"):
            self.updates.append({})
        self.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        self.phase, self.then = phase, (time.process_time(), time.perf_counter())

    def around(self, function: Callable, before: str | None, after: str | None) -> Callable:
        """`function` with a phase that begins before it and one that begins after it."""

        def marked(*args: Any, **kwargs: Any) -> Any:
            self(before)
            out = function(*args, **kwargs)
            self(after)
            return out

        return marked

    def at_gradients(self, *_: Any) -> None:
        """A forward hook: optimization begins with the first pass that has a gradient."""
        if torch.is_grad_enabled() and self.phase == "score":
            self("optimize")


def make(job: Job, watch: Stopwatch) -> None:
    """Write random models and a tokenizer of as many words; all contestants read these."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from machinery.models import disable_dropout
    from train_reward import RewardConfig, RewardModel

    folder, ends = Path(job.folder), dict(bos_token_id=None, eos_token_id=None)
    settings = {"model_type": "gpt2"} | job.config | ends
    config = disable_dropout(AutoConfig.for_model(**settings, num_labels=1, pad_token_id=0))
    vocabulary = {f"w{i}": i for i in range(config.vocab_size)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    torch.manual_seed(1)
    classifier = Classifier.from_config(config)
    reward = RewardModel(RewardConfig(config, config.vocab_size))
    reward.backbone.load_state_dict(classifier.base_model.state_dict())
    policy = AutoModelForCausalLM.from_config(config)
    if job.mean_length:  # the same logit for w1 at every position, as if an EOS bias were learned
        end, odds = policy.lm_head.weight[1].detach(), config.vocab_size / job.mean_length
        with torch.no_grad():
            policy.base_model.ln_f.bias += end / (end @ end) * TEMPERATURE * math.log(1.07 * odds)
    for name, model in (("policy", policy), ("classifier", classifier), ("reward", reward)):
        model.save_pretrained(folder / name)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
        tokenizer.save_pretrained(folder / name)


def script_args(script: Any, job: Job) -> Any:
    """A script's defaults for sentiment, except for what makes the work the same for all."""
    from machinery.cli import parse_args

    folder, batch = job.folder, len(job.queries)
    if script.__name__ == "rloo":
        batch *= job.k
    flags = dict(base_model=f"{folder}/policy", reward_model=f"{folder}/reward", lr=LR)
    flags |= dict(query_dataset=f"{folder}/queries.txt", eval_queries=1)
    flags |= dict(query_length=job.query_length, response_length=job.response_length)
    flags |= dict(truncate_token="w1" if job.mean_length else None, num_ppo_epochs=job.epochs)
    flags |= dict(batch_size=batch, total_episodes=batch * (job.updates + 1))
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    words += ["--eos_task", "--truncate_after", "0"] if job.mean_length else []
    return parse_args(script.Args, script.PRESETS, ["--task", "sentiment", *words, *job.flags])


def ours(job: Job, watch: Stopwatch) -> None:
    """The script's own `main`; its timer and `run.checkpoint` mark the phases."""
    from machinery.runs import Run

    script, updating = importlib.import_module(job.kind), []

    class Timer(script.Timer):
        def start(self, phase: str | None) -> None:
            if phase and updating:  # `optimize` ends at the checkpoint, after metrics are logged
                watch(phase)
            super().start(phase)

    def query_rows(*inputs: Any) -> np.ndarray:  # begins an update, after its evaluation
        updating.append(True)
        return rows(*inputs)

    def checkpoint(*inputs: Any) -> None:
        updating.clear()
        save(*inputs)

    def sample_in_batches(*inputs: Any) -> torch.Tensor:
        responses = sampler(*inputs)
        if job.mean_length and job.kind == "ppo" and watch.phase:  # not in evaluations
            watch(None)
            full = full_batches(sampler, *inputs)
            watch.full = watch.updates[-1]["sample"][0] / full
        return responses

    script.Timer, sampler = Timer, script.sample_in_batches
    script.sample_in_batches = sample_in_batches
    script.query_rows, rows = query_rows, script.query_rows
    save = Run.checkpoint
    Run.checkpoint = watch.around(checkpoint, None, None)
    script.main(script_args(script, job))


def full_batches(sampler: Callable, lm: Any, *inputs: Any) -> float:
    """CPU seconds of sampling the same tokens, each in a batch that no response leaves.

    A step counts by the share of responses that had not ended.
    """
    from machinery.decoding import DecodingBatch
    from utils import truncate

    contexts, uniform, ids, args = inputs
    began = []
    compute = DecodingBatch.next_logits

    def timed(batch: DecodingBatch) -> torch.Tensor:
        began.append(time.process_time())
        return compute(batch)

    endless = replace(args, task=replace(args.task, eos_task=False))
    with patch.object(DecodingBatch, "next_logits", timed):
        responses = sampler(lm, contexts, uniform, ids, endless)
    seconds = np.diff([*began, time.process_time()])
    real = truncate(responses, ids)[0] != ids.pad
    return float(seconds @ real.double().mean(dim=0).numpy())


def load(job: Job, name: str) -> Any:
    """Load a model that `make` wrote."""
    kind = Classifier if name == "classifier" else AutoModelForCausalLM
    return kind.from_pretrained(f"{job.folder}/{name}", dtype=torch.float32)


def plain_args(args: Any, micro_batch: int) -> Any:
    """The settings of plain_ppo.py that are those of ppo.py's `args`."""
    from benchmarks import plain_ppo

    names = [field.name for field in fields(plain_ppo.Args) if hasattr(args, field.name)]
    found = {name: getattr(args, name) for name in names}
    return plain_ppo.Args(**found, micro_batch=micro_batch)


def plain(job: Job, watch: Stopwatch) -> None:
    """The functions of plain_ppo.py."""
    import ppo
    from benchmarks import plain_ppo
    from utils import pad_left

    args = plain_args(script_args(ppo, job), job.micro)
    models = load(job, "policy"), load(job, "policy")
    pad_id = models[0].config.vocab_size
    policy, ref = (plain_ppo.LMWithScalar(model.eval(), pad_id) for model in models)
    ref.requires_grad_(False)
    reward = plain_ppo.load_reward(f"{job.folder}/reward", pad_id)
    optimizer = plain_ppo.AdamLoop(policy.parameters(), lr=args.lr, eps=args.adam_eps)
    queries = pad_left(job.queries, args.task.query_length, pad_id)
    end = 1 if job.mean_length else None
    for update in range(job.updates + 1):
        watch("sample")
        torch.manual_seed(update)
        responses = plain_ppo.sample(policy, queries, end, args)
        watch("score")
        models = policy, ref, reward
        episodes = plain_ppo.rollout(*models, queries, responses, end, KL_COEF, args)
        watch("optimize")
        rng = np.random.default_rng(update)
        orders = [rng.permutation(len(queries)) for _ in range(job.epochs)]
        plain_ppo.train(policy, optimizer, episodes, orders, args)
        watch(None)


def trl_settings(job: Job, episodes: int) -> dict[str, Any]:
    """Settings of both TRL trainers for the same work."""
    gpu = torch.cuda.is_available()
    found = dict(output_dir=f"{job.folder}/{job.kind}", use_cpu=not gpu, bf16=gpu, seed=1)
    found |= dict(learning_rate=LR, temperature=TEMPERATURE, max_grad_norm=0)
    found |= dict(per_device_train_batch_size=job.micro, gradient_checkpointing=False)
    found |= dict(gradient_accumulation_steps=episodes // job.micro, disable_tqdm=True)
    return found | dict(report_to="none", save_strategy="no")


def trl_tokenizer(job: Job, pad: str) -> Any:
    """The tokenizer with a pad token, and an EOS token that no model can sample, or w1."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(f"{job.folder}/policy")
    eos = "w1" if job.mean_length else "<end>"
    tokenizer.add_special_tokens({"pad_token": pad, "eos_token": eos})
    return tokenizer


def trl_ppo(job: Job, watch: Stopwatch) -> None:
    """TRL's PPOTrainer with a critic of the policy's size, which it demands."""
    from datasets import Dataset
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    episodes, tokenizer = len(job.queries), trl_tokenizer(job, "<pad>")
    pad = tokenizer.pad_token_id
    queries = torch.tensor([[pad] * (job.query_length - len(row)) + row for row in job.queries])
    policy = load(job, "policy")
    settings = trl_settings(job, episodes) | dict(num_ppo_epochs=job.epochs, kl_coef=KL_COEF)
    settings |= dict(total_episodes=episodes * (job.updates + 1), whiten_rewards=True)
    settings |= dict(response_length=job.response_length, num_sample_generations=0)
    settings |= dict(stop_token_id=1 if job.mean_length else None)
    models = dict(model=policy, ref_model=load(job, "policy"))
    models |= dict(reward_model=load(job, "classifier"), value_model=load(job, "classifier"))
    trainer = PPOTrainer(
        PPOConfig(**settings),
        tokenizer,
        **models,
        # Longer than the run: at the end of the data each micro-batch is an optimizer step.
        train_dataset=Dataset.from_dict({"row": range(episodes * (job.updates + 2))}),
        data_collator=lambda rows: {"input_ids": queries},
        eval_dataset=Dataset.from_dict({"row": []}),
    )
    race(trainer, policy, watch)


def trl_rloo(job: Job, watch: Stopwatch) -> None:
    """TRL's RLOOTrainer with a reward model."""
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    texts = [" ".join(f"w{token}" for token in tokens) + " " for tokens in job.queries]
    data = Dataset.from_dict({"prompt": texts * (job.updates + 1)})
    policy, tokenizer = load(job, "policy"), trl_tokenizer(job, "w0")
    settings = trl_settings(job, job.k * len(job.queries)) | dict(num_generations=job.k)
    settings |= dict(max_steps=job.epochs * (job.updates + 1), num_iterations=job.epochs)
    settings |= dict(max_completion_length=job.response_length, shuffle_dataset=False, beta=KL_COEF)
    classes = dict(processing_class=tokenizer, reward_processing_classes=tokenizer)
    trainer = RLOOTrainer(policy, load(job, "classifier"), RLOOConfig(**settings), data, **classes)
    race(trainer, policy, watch)


def race(trainer: Any, policy: Any, watch: Stopwatch) -> None:
    """Train; mark the phases at `generate` and at the first forward pass with a gradient."""
    policy.generate = watch.around(policy.generate, "sample", "score")
    trainer.model.register_forward_pre_hook(watch.at_gradients)
    trainer.train()
    watch(None)


def matmul(job: Job, watch: Stopwatch) -> None:
    """Matrix products of GPT-2's width, to measure the machine's rate."""
    x, w = torch.randn(512, 768), torch.randn(768, 3072)
    for _ in range(job.updates + 1):
        watch("sample")
        for _ in range(job.products):
            x @ w
        watch(None)


CONTESTANTS = {"ppo": ours, "rloo": ours}
CONTESTANTS |= {f.__name__: f for f in (make, plain, trl_ppo, trl_rloo, matmul)}


def versions() -> str:
    """Versions of the libraries."""
    names = filter(importlib.util.find_spec, ("torch", "transformers", "accelerate", "trl"))
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def main(path: str) -> None:
    """Run the job and print what it took. Raises `RuntimeError` for a wrong number of steps."""
    job, steps = Job(**json.loads(Path(path).read_text())), []
    torch.set_num_threads(1)
    register_optimizer_step_post_hook(lambda *_: steps.append(1))
    watch = Stopwatch()
    CONTESTANTS[job.kind](job, watch)
    if job.kind not in ("make", "matmul") and len(steps) != job.epochs * (job.updates + 1):
        raise RuntimeError(f"{len(steps)} optimizer steps: the work is not the same")
    found = dict(updates=watch.updates, peak=watch.peak, full=watch.full, versions=versions())
    print(json.dumps(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", help="JSON file, made by `job` of speed.py")
    main(parser.parse_args().job)
