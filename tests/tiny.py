"""Tiny models, data files and settings that the tests build from configurations: no network, nothing that is kept."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
)

import ppo
import rloo
import tasks
import train_reward
import utils

VOCAB = 61
PAD = VOCAB  # one past the vocabulary
WORDS = json.loads((tasks.SYNTHETIC / "model" / "config.json").read_text())[
    "vocab_size"
]  # of the synthetic task's tokenizer
KINDS = ("gpt2", "gpt_neox", "llama", "falcon", "falcon_alibi", "qwen2", "mistral")


def config(kind: str = "gpt2", vocab: int = VOCAB, dropout: float = 0.0, positions: int = 64) -> PretrainedConfig:
    """A language model of some thousand weights, large enough (0.3) for every mistake to show in its logits."""
    same = dict(vocab_size=vocab, initializer_range=0.3, bos_token_id=0, eos_token_id=0)
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=positions)
    grouped = dict(**sizes, intermediate_size=64, num_key_value_heads=2, attention_dropout=dropout)
    if kind == "gpt2":
        drops = dict(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
        return GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=positions, **drops, **same)
    if kind == "gpt_neox":
        return GPTNeoXConfig(**sizes, intermediate_size=64, hidden_dropout=dropout, attention_dropout=dropout, **same)
    if kind in ("falcon", "falcon_alibi"):  # falcon-rw: alibi, a key for each head, biases
        rw = dict(alibi=True, multi_query=False, parallel_attn=False, bias=True) if kind == "falcon_alibi" else {}
        return FalconConfig(**sizes, hidden_dropout=dropout, attention_dropout=dropout, **rw, **same)
    if kind == "mistral":  # a window wider than any text here, as in the checkpoints
        return MistralConfig(**grouped, sliding_window=4096, **same)
    return {"llama": LlamaConfig, "qwen2": Qwen2Config, "gemma2": Gemma2Config}[kind](**grouped, **same)


def make_lm(kind: str = "gpt2", seed: int = 0, **settings: Any) -> Any:
    """A random language model in eval mode."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config(kind, **settings)).eval()


def make_policy(
    kind: str = "gpt2", seed: int = 0, temperature: float = 0.7, script: Any = ppo, **settings: Any
) -> ppo.PolicyAndValue | rloo.Policy:
    """A random policy of `script`; ppo's value head is random too."""
    lm, pad_id = make_lm(kind, seed, **settings), settings.get("vocab", VOCAB)
    if script is rloo:
        return rloo.Policy(lm, pad_id, temperature).eval()
    policy = ppo.PolicyAndValue(lm, pad_id, temperature)
    torch.nn.init.normal_(policy.value_head.weight, std=0.3)
    torch.nn.init.constant_(policy.value_head.bias, 0.1)
    return policy.eval()


def make_reward(kind: str = "gpt2", seed: int = 7, pad_id: int = PAD, **settings: Any) -> utils.RewardModel:
    """A random reward model; gain and bias are not at their start."""
    torch.manual_seed(seed)
    model = utils.RewardModel(utils.RewardConfig(config(kind, vocab=pad_id, **settings), pad_id))
    torch.nn.init.normal_(model.head.weight, std=0.3)
    torch.nn.init.constant_(model.head.bias, 0.2)
    with torch.no_grad():
        model.gain.fill_(1.5)
        model.bias.fill_(-0.5)
    return model.eval()


def make_contexts(lengths: list[int], width: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    """Left-padded random rows of these lengths: [B, width]."""
    rng = np.random.default_rng(seed)
    return torch.tensor([[vocab] * (width - n) + rng.integers(1, vocab, n).tolist() for n in lengths])


def uniform(length: int, rows: int) -> Tensor:
    """The random numbers [R, B, 1] of B responses."""
    return torch.rand(length, rows, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def make_task(**changes: Any) -> tasks.Task:
    """A task of tiny lengths without files."""
    values = dict(query_length=8, response_length=5, temperature=0.7, truncate_after=2, gold_fn=None) | changes
    return replace(tasks.TASKS["synthetic"], **values)


def make_args(task: tasks.Task | None = None, script: Any = ppo, **changes: Any) -> ppo.Args | rloo.Args:
    """Settings of ppo or rloo for a batch of 8."""
    values = (
        dict(
            total_episodes=24,
            batch_size=8,
            num_minibatches=2,
            num_ppo_epochs=2,
            micro_batch_tokens=24,
            rollout_batch_size=3,
            lr=1e-3,
            eval_queries=4,
        )
        | changes
    )
    return script.Args(task=task or make_task(), **values)


LENGTHS = [8, 1, 3, 5, 2, 8, 4, 1]  # of the queries in `make_rollout`: uneven, so that trimming has something to do
EOS = 5  # the truncate token of `make_models`
IDS = utils.Ids(PAD, EOS, [], [])


def sampling(temperature: float, pad_id: int = PAD, **changes: Any) -> tuple[tasks.Task, utils.Ids]:
    """What `sample` has to know of a task."""
    return make_task(temperature=temperature, **changes), IDS._replace(pad=pad_id)


def make_models(policy: Any, reward: Any = None, ref: Any = None, script: Any = ppo, **ids: Any) -> Any:
    """What a rollout is made with; the reward model is random unless given as a function of queries and responses."""
    model = make_reward()
    reward = reward or (lambda queries, responses: model.score(queries, responses, size=36))
    return script.Models(policy, ref or make_policy(seed=3, script=script), reward, IDS._replace(**ids))


def make_responses(rows: int, length: int, seed: int = 1) -> Tensor:
    """Random responses [B, R]; the truncate token is in them now and then."""
    torch.manual_seed(seed)
    return torch.randint(1, 8, (rows, length))


def add_noise(rollout: Any, seed: int = 1, rows: Any = slice(None)) -> Any:
    """A rollout, of ppo or rloo, with rewards, advantages and old numbers off the policy's own: row `i` of it gets the
    noise of episode `rows[i]`, so that it does not depend on the processes. Still 0 behind the end of a response."""
    noise = torch.randn(3, len(LENGTHS), rollout.mask.shape[1], generator=torch.Generator().manual_seed(seed))
    noise = noise[:, rows]
    if isinstance(rollout, rloo.Rollout):
        return rollout._replace(
            logprobs=(rollout.logprobs + 0.1 * noise[0]).masked_fill(~rollout.mask, 0),
            rewards=rollout.rewards + noise[1, :, 0],
            advantages=rollout.advantages + noise[2, :, 0],
        )
    changed = dict(
        logprobs=rollout.logprobs + 0.2 * noise[0],
        values=rollout.values + 0.3 * noise[1],
        rewards=rollout.rewards + noise[2],
    )
    return rollout._replace(**{name: x.masked_fill(~rollout.mask, 0) for name, x in changed.items()})


def make_rollout(
    policy: Any, args: Any, order: np.ndarray | None = None, seed: int = 1, script: Any = ppo
) -> ppo.Rollout | rloo.Rollout:
    """What `make_rollout` of `script` makes of random queries and responses, with noise."""
    queries = make_contexts(LENGTHS, args.task.query_length)
    responses = make_responses(len(LENGTHS), args.task.response_length, seed)
    order = np.arange(len(queries)) if order is None else order
    models = make_models(policy, script=script)
    rollout, _ = script.make_rollout(models, queries, responses, order, 0.15, args)
    return add_noise(rollout._replace(forward=None), seed)


def step(script: Any, policy: Any, optimizer: Any, batch: Any, args: Any, accelerator: Any) -> dict[str, Tensor]:
    """One optimizer step on a minibatch, as `main` of ppo or rloo makes it: name → [sum, count] of this process."""
    if script is rloo:
        return rloo.train_step(policy, optimizer, batch, args, accelerator)
    return ppo.train_step(policy, optimizer, batch, ppo.estimate(batch, args), args, accelerator)


def update(
    script: Any, policy: Any, optimizer: Any, rollout: Any, epochs: list[np.ndarray], args: Any, accelerator: Any
) -> list[dict[str, Tensor]]:
    """The loops of `main` of ppo or rloo over epochs and minibatches; what each optimizer step gives."""
    steps = []
    for order in epochs:
        for rows in script.minibatches(order, args):
            batch = rollout.take(rows)._replace(forward=None if steps else rollout.forward)
            steps.append(step(script, policy, optimizer, batch, args, accelerator))
    return steps


class Gradients:
    """In place of an optimizer: keeps a copy of the gradients that there are at each step and moves nothing."""

    def __init__(self, model: torch.nn.Module):
        self.model, self.steps = model, []

    def step(self, closure: Callable | None = None) -> None:
        grads = {name: p.grad for name, p in self.model.named_parameters()}
        self.steps.append({name: grad.clone() for name, grad in grads.items() if grad is not None})

    def zero_grad(self) -> None:
        self.model.zero_grad()


def step_gradients(
    script: Any, policy: Any, batch: Any, args: Any, accelerator: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The sums and the gradient of one `step` on a minibatch; the weights stay."""
    optimizer = Gradients(accelerator.unwrap_model(policy))
    sums = step(script, policy, optimizer, batch, args, accelerator)
    return sums, optimizer.steps[0]


def summarise(script: Any, rollout: Any, score: Any, steps: list[dict[str, Tensor]], kl_coef: float, args: Any) -> Any:
    """`summarise` of ppo or rloo."""
    return script.summarise(rollout, score, steps, *(() if script is rloo else (kl_coef,)), PAD, args)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of every gradient; they are cleared."""
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return grads


def write_model(folder: Path, kind: str = "gpt2", seed: int = 0, dropout: float = 0.1, **settings: Any) -> Path:
    """A folder with a random language model of the synthetic task's vocabulary, and its tokenizer."""
    make_lm(kind, seed, vocab=WORDS, dropout=dropout, **settings).save_pretrained(folder)
    return write_tokenizer(folder)


def write_tokenizer(folder: Path) -> Path:
    """The synthetic task's tokenizer into a model's folder."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tasks.SYNTHETIC / "model" / name, folder / name)
    return folder


def write_reward(folder: Path, kind: str = "gpt2", pad_id: int = WORDS, **settings: Any) -> str:
    """A folder as train_reward.py leaves it, with a random reward model."""
    make_reward(kind, pad_id=pad_id, **settings).save_pretrained(folder)
    return str(write_tokenizer(folder))


def write_task(folder: Path, kind: str = "gpt2", labels: int = 16, **changes: Any) -> tasks.Task:
    """A task whose model, queries and labels are small local files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    task = make_task(
        base_model=str(write_model(folder / "model", kind)),
        query_dataset=str(folder / "stories.txt"),
        label_dataset=str(folder / "labels.json"),
        **changes,
    )
    stories = [
        f"{name} {verb} the {thing}."
        for name in ("Anna", "Ben", "Clara", "Tom the baker")
        for verb in ("saw", "found")
        for thing in ("cat", "old red house", "sea", "bus to the village", "soup that was very good")
    ]
    (folder / "stories.txt").write_text("\n".join(stories) + "\n")
    (folder / "labels.json").write_text(json.dumps(label_rows(labels, task.query_length, task.response_length)))
    return task


def eos_task(task: tasks.Task, folder: Path) -> tasks.Task:
    """A task of `write_task` in the columns of TL;DR, its files in `folder`: prompts with completions, and pairs; a
    completion ends at <|endoftext|>."""
    names, things = ("Anna", "Ben", "Clara", "Tom"), ("cat", "old red house", "sea", "bus to the village")
    rows = [
        {"prompt": f"{n} found the {thing}.", "completion": f" {n} saw the {thing}."} for n in names for thing in things
    ]
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": " It was cold."} for row in rows]
    for name, content in (("rows", rows), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, content)) + "\n")
    return replace(
        task,
        query_dataset=str(folder / "rows.jsonl"),
        query_column="prompt",
        response_column="completion",
        label_dataset=str(folder / "pairs.jsonl"),
        query_length=8,
        response_length=12,
        truncate_token="<|endoftext|>",
        truncate_after=0,
        eos_task=True,
    )


def label_rows(
    n: int, query_length: int, response_length: int, pad: int = train_reward.LABEL_PAD
) -> list[dict[str, Any]]:
    """Rows in OpenAI's label format: token ids, padded on the right."""
    rng = np.random.default_rng(5)

    def ids(length: int) -> list[int]:
        real = int(rng.integers(1, length + 1))
        return rng.integers(1, 200, real).tolist() + [pad] * (length - real)

    return [
        {
            "query": ids(query_length),
            **{f"sample{k}": ids(response_length) for k in range(4)},
            "best": int(rng.integers(4)),
        }
        for _ in range(n)
    ]
