"""Tiny models, data files and settings of the tests: no network, nothing that is kept."""

import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import ppo
import rloo
import sft
import train_reward
import utils
from data import tasks
from machinery import cli, distributed, models, unpadding
from machinery.labels import OPENAI_PAD
from train_reward import RewardConfig


def refuses(call, *words) -> str:
    """Assert that `call` raises `InputError` whose message has all `words`; return the message."""
    with pytest.raises(cli.InputError) as caught:
        call()
    message = str(caught.value)
    assert [word for word in words if str(word) not in message] == [], message
    return message


def run_python(*words: Any, processes: int = 1, env: dict | None = None, **options: Any) -> str:
    """What a Python program prints, on one process or several, which torchrun starts."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes]
    command = [sys.executable, *(launcher if processes > 1 else []), *words]
    tests = Path(__file__).parent
    env = os.environ | {"PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}"} | (env or {})
    options = dict(timeout=300) | options
    done = subprocess.run([*map(str, command)], env=env, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


VOCAB = 61
PAD = VOCAB  # one past the vocabulary
WORDS = json.loads((tasks.SYNTHETIC / "model" / "config.json").read_text())["vocab_size"]
both = pytest.mark.parametrize("script", [ppo, rloo], ids=["ppo", "rloo"])
KINDS = ("gpt2", "gpt_neox", "llama", "falcon", "falcon_alibi", "qwen2", "mistral")
LENGTHS = [8, 1, 3, 5, 2, 8, 4, 1]  # of queries: uneven, so that there is padding
HELDOUT = 3  # queries of an evaluation in `start`
EOS = 5  # truncate token of `IDS`
IDS = utils.TokenIds(PAD, [EOS], [], [], truncate_after=2)
THINGS = ("cat", "old red house", "sea", "bus to the village", "soup that was very good")
DATA = ("policy", "queries", "responses", "epochs", "ids", "ref", "reward", "labels", "tokens")
QWEN = dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, head_dim=8)
QWEN |= dict(linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"])
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, num_local_experts=2)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8)
MLA = dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)
MLA |= dict(num_key_value_heads=4, mlp_layer_types=["dense"] * 2, first_k_dense_replace=2)
HYBRIDS: dict[str, dict] = {  # the cache has states or an index, besides or without keys and values
    "qwen3_5_text": QWEN,
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "granitemoehybrid": MAMBA | MOE | dict(layer_types=["mamba", "attention"]),
    "deepseek_v32": MLA | dict(index_n_heads=2, index_head_dim=16, index_topk=64),
}
OWN: dict[str, dict] = HYBRIDS | {  # what a kind has besides the sizes of all
    "deepseek_v3": MLA,
    "falcon_alibi": dict(alibi=True, multi_query=False, parallel_attn=False, bias=True),  # -rw
    "gptj": dict(rotary_dim=8),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]], num_layers=2, num_heads=4),
    "gemma2": dict(attn_implementation="eager"),  # transformers 5.19: by default without caps
    "mistral": dict(sliding_window=4096),  # as in the checkpoints
    "mistral_window": dict(sliding_window=6),  # narrower than the texts
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "opt": dict(ffn_dim=64, word_embed_proj_dim=32, dropout=0.0, init_std=0.3),
}


def config(kind="gpt2", vocab=VOCAB, dropout=0.0, positions=64, **settings: Any) -> Any:
    """Weights are large (0.3), so that mistakes show. `kind` is a `model_type`, or one of `OWN`."""
    values = dict(vocab_size=vocab, initializer_range=0.3, bos_token_id=0, eos_token_id=0)
    if kind in ("gpt2", "gptj"):
        values |= dict(n_embd=32, n_layer=2, n_head=2, n_positions=positions)
        values |= dict(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    else:
        values |= dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
        values |= dict(intermediate_size=64, max_position_embeddings=positions)
        values |= dict(attention_dropout=dropout, hidden_dropout=dropout)
    if not kind.startswith(("gpt2", "gpt_neox", "falcon")):  # no heads share keys in these
        values |= dict(num_key_value_heads=2)
    if kind not in KINDS:
        values |= dict(intermediate_size=48, head_dim=8, pad_token_id=0)
    name = kind.removesuffix("_window").removesuffix("_alibi")
    return AutoConfig.for_model(name, **values | OWN.get(kind, {}) | settings)


def make_lm(kind: str = "gpt2", seed: int = 0, **settings: Any) -> Any:
    torch.manual_seed(seed)
    lm = AutoModelForCausalLM.from_config(config(kind, **settings)).eval()
    unpadding.set_unpadding(lm.base_model, 0 if kind in HYBRIDS else 1024)
    return lm


def make_policy(kind="gpt2", seed=0, temperature=0.7, script: Any = ppo, **settings: Any) -> Any:
    """A random policy of `script`; ppo's value head is random too."""
    lm, pad_id = make_lm(kind, seed, **settings), settings.get("vocab", VOCAB)
    lm.get_output_embeddings().__class__ = models.Float32Linear  # as `load_lm` does
    if script is rloo:
        return rloo.Policy(lm, pad_id, temperature).eval()
    policy = ppo.PolicyAndValue(lm, pad_id, temperature)
    torch.nn.init.normal_(policy.value_head.weight, std=0.3)
    torch.nn.init.constant_(policy.value_head.bias, 0.1)
    return policy.eval()


def make_reward(kind: str = "gpt2", seed: int = 7, pad_id: int = PAD, **settings: Any) -> Any:
    """A random reward model whose gain and bias are not 1 and 0."""
    torch.manual_seed(seed)
    model = train_reward.RewardModel(RewardConfig(config(kind, vocab=pad_id, **settings), pad_id))
    unpadding.set_unpadding(model.backbone, 1024)
    torch.nn.init.normal_(model.head.weight, std=0.3)
    torch.nn.init.constant_(model.head.bias, 0.2)
    torch.nn.init.constant_(model.gain, 1.5)
    torch.nn.init.constant_(model.bias, -0.5)
    return model.eval()


def reward_function(model: Any, max_tokens: int = 36) -> Callable:
    """A reward model as a function of queries [B, Q] and responses [B, R] → [B]."""
    return lambda q, r, columns=None: model.score(torch.cat([q, r], 1), max_tokens)


def make_contexts(lengths: list[int], width: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    """Left-padded random rows of these lengths: [B, width]."""
    rng = np.random.default_rng(seed)
    rows = [[vocab] * (width - n) + rng.integers(1, vocab, n).tolist() for n in lengths]
    return torch.tensor(rows)


def uniform(length: int, rows: int) -> Tensor:
    """The random numbers [R, B] of B responses."""
    return torch.rand(length, rows, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def sample(lm, contexts, uniform, pad_id=PAD, temperature=0.7, **task: Any) -> Tensor:
    """`ppo.sample` with token 0 as the truncate token: [B, C], [R, B] → [B, R]."""
    args = make_args(make_task(temperature=temperature, **task))
    ids = utils.TokenIds(pad_id, [0], [], [], args.task.truncate_after)
    return ppo.sample(lm, contexts, uniform, ids, args)


def make_task(**changes: Any) -> tasks.Task:
    values = dict(query_length=8, response_length=5, temperature=0.7, truncate_after=2)
    return replace(tasks.TASKS["synthetic"], **values | dict(gold_fn=None) | changes)


SIZES: dict[str, dict[str, Any]] = {  # a flag that a script has → its flags for tiny models
    "total_episodes": dict(total_episodes=24, batch_size=8, num_minibatches=2, num_ppo_epochs=2)
    | dict(lr=1e-3, micro_batch_tokens=24, rollout_batch_size=3, eval_queries=4),
    "rloo_k": dict(rloo_k=2),
    "num_labels": dict(num_labels=12, batch_size=2, normalize_samples=4, rollout_batch_size=4),
    "block_size": dict(num_heldout=4, batch_size=4, block_size=6, num_epochs=3),
}
FLAGS = {  # of a small run, as on the command line
    "sft": "--num_heldout 2 --batch_size 8 --num_epochs 1 --block_size 96",
    "train_reward": "--num_labels 4 --batch_size 2 --normalize_samples 4 --rollout_batch_size 4",
    "ppo": "--total_episodes 8 --batch_size 4 --eval_queries 2 --num_ppo_epochs 1 --num_minibatches 1",
}
FLAGS["rloo"] = FLAGS["ppo"]


def make_args(task: tasks.Task | None = None, script: Any = ppo, **changes: Any) -> Any:
    """`Args` of a script. Changes may also be fields of its task, as on the command line."""
    task, values = task or make_task(), {}
    for flag, sizes in SIZES.items():
        values |= sizes if hasattr(script.Args, flag) else {}
    values |= changes
    of_task = {name: values.pop(name) for name in set(values) & set(vars(task))}
    return script.Args(task=replace(task, **of_task), **values)


def make_responses(batch_size: int, length: int, seed: int = 1) -> Tensor:
    """Random responses [B, R]; some have the truncate token."""
    torch.manual_seed(seed)
    return torch.randint(1, 8, (batch_size, length))


class Table:
    """A query table that returns given queries [B, Q], one batch after the other."""

    def __init__(self, batches: list[Tensor], heldout: Tensor | None = None):
        self.batches, self.size = list(batches), len(batches[0])
        self.heldout = batches[0][:HELDOUT] if heldout is None else heldout

    def __len__(self) -> int:
        return self.size

    def hold_out(self, n: int, needed: int = 1) -> tuple["Table", "Table"]:
        return Table([self.heldout] * 100), self

    def columns(self, rows: np.ndarray | slice = slice(None)) -> dict[str, list]:
        return {}

    def __getitem__(self, rows: np.ndarray | slice) -> Tensor:
        batch = self.batches.pop(0)
        copies = 1 if isinstance(rows, slice) else max(len(rows) // len(batch), 1)
        return batch.repeat_interleave(copies, dim=0)  # RLOO's K responses to a query


class Tokenizer:
    """In place of a tokenizer: a text is its token ids."""

    def batch_decode(self, sequences: list[list[int]], **settings: Any) -> list[str]:
        return [" ".join(map(str, tokens)) for tokens in sequences]


class FakeRun:
    """In place of `Run`: keeps metrics in memory and calls `after(update, metrics)`."""

    def __init__(self, after: Callable | None = None):
        self.after, self.main, self.step, self.folder = after, True, 0, Path("nowhere")
        self.metrics, self.model, self.optimizer = [], None, None

    def __call__(self, *args: Any) -> "FakeRun":
        return self

    def restore(self, model: Any, optimizer: Any, kl_coef: float = 0.0) -> tuple[int, float]:
        self.model, self.optimizer = model, optimizer
        return 0, kl_coef

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.metrics.append(metrics)
        self.step = step + 1
        if self.after:
            self.after(step, metrics)

    def __getattr__(self, name: str) -> Callable:
        return lambda *args, **kwargs: None


def fake_reward(function: Callable) -> Any:
    """In place of `Reward`: a function of queries and responses."""
    return lambda queries, responses, columns: (function(queries, responses), {})


class Recorder(torch.optim.SGD):
    """An optimizer that keeps the gradients of each step and moves nothing."""

    def __init__(self, params: Any, **settings: Any):
        super().__init__(params, lr=0.0)
        self.gradients: list[list[Tensor]] = []

    def step(self, closure: Callable | None = None) -> None:
        params = self.param_groups[0]["params"]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in params]
        self.gradients.append(grads)


def keep(function: Callable, kept: list[Any]) -> Callable:
    """A function that also keeps what it returns."""

    def keeping(*args: Any, **options: Any) -> Any:
        kept.append(function(*args, **options))
        return kept[-1]

    return keeping


def load_script(path: Path) -> Any:
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(script: Any, args: Any, *models: Any, files: bool = False, **given: Any) -> FakeRun:
    """Run `main` on given models and data (`stand_ins`), or on the files that `args` names. What else
    is given replaces names of the script, of which `Run` is a `FakeRun`."""
    replaced = {"Run": FakeRun()}
    if not files:
        replaced |= {"check": lambda *a: None} | stand_ins(script, args, *models, **given)
        column = dict(response_column="completion") if script is sft else {}
        args = replace(args, task=replace(args.task, gold_fn=None, **column))
    replaced |= {name: x for name, x in given.items() if name not in DATA}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in replaced.items():
            patch.setattr(script, name, value)
        patch.setattr(distributed, "stop", lambda accelerator: None)
        script.main(args)
    return replaced["Run"]


def stand_ins(script, args, policy=None, ref=None, reward=None, ids=IDS, **given) -> dict[str, Any]:
    """What is in place of what `main` loads. Of ppo and rloo: models, queries [B, Q] and responses
    [B, R] of each update, and `epochs` in place of `epoch_order`. Of train_reward, which normalizes on 4
    random samples: a model and `labels`. Of sft: a model and `tokens` [N, T]."""
    task, size = args.task, args.batch_size
    ids = ids._replace(truncate_after=task.truncate_after)
    stand_ins: dict[str, Any] = {"load_tokenizer": lambda *a, **k: (Tokenizer(), ids)}
    if script is sft:
        stand_ins |= dict(load_lm=lambda *a, **k: policy, sample_continuations=lambda *a: {})
        return stand_ins | dict(load_responses=lambda *a: Sequences(given["tokens"]))
    if script is train_reward:
        samples = make_contexts([8, 2, 5, 3], 8), make_responses(4, 5)
        texts = [torch.cat(samples, dim=1).to(policy.gain.device)] * 2
        stand_ins |= dict(load_labels=lambda *a: given["labels"], sample_policy=lambda *a: texts)
        stand_ins |= dict(load_config=lambda name: policy.config.backbone)
        return stand_ins | dict(new_reward_model=lambda *a: policy)
    contexts = make_contexts(LENGTHS[: size // getattr(args, "rloo_k", 1)], task.query_length)
    of_seeds = (make_responses(size, task.response_length, seed) for seed in range(100))
    responses, epochs = iter(given.get("responses", of_seeds)), list(given.get("epochs", []))
    reward = reward or reward_function(make_reward())
    policy = policy or make_policy(script=script)
    both = [policy, ref or make_policy(seed=3, script=script)]
    lms = iter([model.lm for model in both])

    def next_responses(lm: Any, contexts: Tensor, *args: Any) -> Tensor:
        if len(contexts) == HELDOUT:
            return make_responses(HELDOUT, task.response_length)
        return next(responses)

    stand_ins |= {
        "load_queries": lambda *a, **k: Table(given.get("queries") or [contexts] * 100),
        "load_reward": lambda *a: fake_reward(reward),
        "load_lm": lambda *names, **more: next(lms),
        type(policy).__name__: lambda lm, *a: next(model for model in both if model.lm is lm),
        "sample_in_batches": next_responses,
    }
    orders = (torch.cat(list(minibatches)).numpy() for update in epochs for minibatches in update)
    return stand_ins | ({"epoch_order": lambda *a: next(orders)} if epochs else {})


def keep_epochs(script: Any, args: Any, kept: list[list[list[Tensor]]]) -> Callable:
    """`epoch_order`, which also adds the indices of each minibatch of each epoch of each update."""
    function, size = script.epoch_order, args.batch_size // args.num_minibatches

    def keeping(epoch: int, *rest: Any) -> np.ndarray:
        if epoch == 0:
            kept.append([])
        order = function(epoch, *rest)
        kept[-1].append(list(torch.as_tensor(order).split(size)))
        return order

    return keeping


def make_rollout(policy: Any, args: Any, script: Any = ppo, kl_coef=0.15, **inputs: Any) -> Any:
    """The rollout that `main` makes of random queries and responses, or of those in `inputs`."""
    queries = inputs.pop("queries", make_contexts(LENGTHS, args.task.query_length))
    size, length = len(queries), args.task.response_length
    responses = inputs.pop("responses", make_responses(size, length))
    rollouts: list[Any] = []

    def spy(**fields: Any) -> None:
        rollouts.append(rollout_class(**fields))
        raise EOFError  # ends `main`

    args = replace(args, batch_size=size, total_episodes=2 * size)
    rollout_class, run = script.Rollout, FakeRun()
    run.restore = lambda *args: (1, kl_coef)  # so that nothing is evaluated
    inputs |= dict(Run=run, Rollout=spy, query_rows=lambda *a: np.arange(0))
    inputs.setdefault("epochs", [[[torch.arange(size)]]])
    with pytest.raises(EOFError):
        start(script, args, policy, queries=[queries], responses=[responses], **inputs)
    return rollouts[0]


def noisy_rollout(script: Any, kept: list[Any] | None = None) -> Callable:
    """`Rollout`, but old numbers and rewards are off the policy's own, so that losses clip."""
    rollout_class, kept = script.Rollout, [] if kept is None else kept

    def make_noisy_rollout(**fields: Any) -> Any:
        rollout = rollout_class(**fields)
        generator = torch.Generator().manual_seed(1)
        noise = torch.randn(3, *rollout.mask.shape, generator=generator) * rollout.mask
        noisy = dict(logprobs=rollout.logprobs + 0.2 * noise[0])
        if script is ppo:
            noisy |= dict(rewards=rollout.rewards + noise[1])
            noisy |= dict(values=rollout.values + 0.3 * noise[2])
        kept.append(rollout._replace(**noisy))
        return kept[-1]

    return make_noisy_rollout


def run_alone(policy: Any, context: Tensor, response: Tensor) -> tuple[Tensor, ...]:
    """Log-probabilities, entropies and values of one response, from a plain call without padding."""
    context, response = context[context != policy.pad_id], response[response != policy.pad_id]
    tokens, predicted = torch.cat([context, response])[None], slice(len(context) - 1, -1)
    logits = policy.lm(tokens).logits[0, predicted].float() / policy.temperature
    probs = logits.softmax(dim=-1)
    logprobs = probs.log().gather(1, response[:, None])[:, 0]
    entropies = -(probs * probs.log()).sum(dim=1)
    if not hasattr(policy, "value_head"):
        return logprobs, entropies
    hidden = policy.lm.base_model(tokens).last_hidden_state[0, predicted]
    return logprobs, entropies, policy.value_head(hidden)[:, 0]


def assert_gradients(run: Any, model: Any, loss: Tensor) -> None:
    """Assert that the first step of a run with a `Recorder` had the gradient of a loss."""
    loss.backward()
    for found, p in zip(run.optimizer.gradients[0], model.parameters(), strict=True):
        torch.testing.assert_close(found, p.grad, atol=4e-5, rtol=1e-4)


class Sequences:
    """A table of given sequences [N, T] for sft.py."""

    def __init__(self, tokens: Tensor):
        self.tokens, self.length = tokens, tokens.shape[1]

    def __len__(self) -> int:
        return len(self.tokens)

    def hold_out(self, n: int, needed: int = 1) -> tuple[Tensor, "Sequences"]:
        return self.tokens[:n], Sequences(self.tokens[n:])

    def __getitem__(self, rows: np.ndarray) -> Tensor:
        return self.tokens[rows]


def write_model(folder: Path, kind="gpt2", seed=0, dropout=0.1, **settings: Any) -> Path:
    """A folder with a random language model of the synthetic task's vocabulary, and its tokenizer."""
    make_lm(kind, seed, vocab=WORDS, dropout=dropout, **settings).save_pretrained(folder)
    return write_tokenizer(folder)


def write_tokenizer(folder: Path) -> Path:
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
    stories, label_file = folder / "stories.txt", folder / "labels.json"
    files = dict(query_dataset=str(stories), label_dataset=str(label_file))
    task = make_task(base_model=str(write_model(folder / "model", kind)), **files, **changes)
    names = ("Anna", "Ben", "Clara", "Tom the baker")
    lines = [f"{n} {verb} the {x}.\n" for n in names for verb in ("saw", "found") for x in THINGS]
    stories.write_text("".join(lines))
    rng, rows = np.random.default_rng(5), []
    sizes = dict(query=task.query_length) | {f"sample{k}": task.response_length for k in range(4)}
    for _ in range(labels):  # in OpenAI's format: token ids, padded on the right
        row: dict[str, Any] = {}
        for name, size in sizes.items():
            real = int(rng.integers(1, size + 1))
            row[name] = rng.integers(1, 200, real).tolist() + [OPENAI_PAD] * (size - real)
        rows.append(row | {"best": int(rng.integers(4))})
    label_file.write_text(json.dumps(rows))
    return task


def eos_task(task: tasks.Task, folder: Path) -> tasks.Task:
    """A task of `write_task` in the columns of TL;DR, its files in `folder`."""
    rows, pairs = [], []
    for name, thing in itertools.product(("Anna", "Ben", "Clara", "Tom"), THINGS[:4]):
        prompt, text = f"{name} found the {thing}.", f" {name} saw the {thing}."
        rows.append(dict(prompt=prompt, completion=text))
        pairs.append(dict(prompt=prompt, chosen=text, rejected=" It was cold."))
    files = dict(query_dataset=str(folder / "r.jsonl"), label_dataset=str(folder / "p.jsonl"))
    for path, content in zip(files.values(), (rows, pairs), strict=True):
        Path(path).write_text("\n".join(map(json.dumps, content)) + "\n")
    columns = dict(query_column="prompt", response_column="completion", truncate_after=0)
    eos = dict(truncate_token="<|endoftext|>", eos_task=True, query_length=8, response_length=12)
    return replace(task, **files, **columns, **eos)


def shard_on_a_cpu(put: Callable = setattr) -> None:
    """Let accelerate use its FSDP2 on a CPU, where it would silently use DDP instead."""
    init = AcceleratorState.__init__

    def forced(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **more: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **more)
        if fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)

    put(AcceleratorState, "__init__", forced)
