"""Reward model from preference labels, as OpenAI's `lm-human-preferences` trains it (Ziegler et al. 2019), in one file.

    python train_reward.py --task synthetic
    accelerate launch train_reward.py --task sentiment

The language model's trunk with a scalar head reads query and response; of K candidate responses the one that a human
liked best gets the highest softmax probability. One epoch. Before and after, rewards are normalised on samples of the
policy.

Letters: `B` labels, `K` candidates per label, `Q` query tokens, `R` response tokens, `T = Q + R`, `S` samples.
"""

import copy
import json
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from os.path import commonprefix
from pathlib import Path
from typing import Annotated, Any

import datasets
import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from jinja2 import TemplateError
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

import packing
import records
import utils
from tasks import Bounds, Count, NonNegative, Positive, Shown, Size, Task, Whole, cli, parse_args
from utils import InputError, RewardModel


@dataclass(frozen=True)
class Args:
    """Reward model from preference labels."""

    task: Task
    seed: Whole = 1  # of head, order of the labels and samples; process r samples with seed + 100003 r (G6)
    num_labels: Count = 4992
    """labels to train on, the file's first; the rest, without the queries of these, measures accuracy"""
    batch_size: Size = 32  # labels per optimizer step, over all processes
    micro_batch_tokens: Count = 4096  # per forward on one process, a label's K sequences together: memory only
    lr: NonNegative = 5e-5  # learning rate of the first step; falls linearly to 0 (G5)
    adam_eps: Positive = 1e-5  # TensorFlow's ε̂ (A1)
    policy_model: str | None = None
    """model whose samples gain and bias are set from (R3): hub name or folder; None: base_model"""
    normalize_samples: Annotated[int, Bounds(2, 2**20)] = 256
    """the policy's samples that gain and bias are set from, at least (R3)"""
    rollout_batch_size: Size = 512  # samples come in batches of this many, over all processes (R3)
    gradient_checkpointing: bool = False  # less memory for activations, one more forward
    tf32: bool = False  # fp32 matrix products in TensorFloat-32 on NVIDIA GPUs: faster, 10 bits of mantissa
    output_dir: str | None = None
    """new folder for the reward model; None: the run's, and models/<task>/train_reward becomes a link to it"""
    run_name: str | None = None  # new folder in runs/; None: task, script, seed and time
    shown: Shown = Shown()
    save_every: Count | None = None  # steps between checkpoints that `--resume` goes on from; None: see save_minutes
    save_minutes: Positive | None = None
    """minutes between two checkpoints; with neither only SIGTERM, SIGUSR1 and SIGHUP make one, and stop the run"""
    resume: str | None = None
    """runs/<name> to go on with, by the same command; `latest`: the newest of this task and script with a checkpoint"""


PRESETS: dict[str, dict[str, Any]] = {  # what differs from the defaults above, by task
    "synthetic": dict(lr=1e-3, batch_size=8),
    "cnndm": dict(num_labels=46_000, batch_size=16, lr=2.5e-5, rollout_batch_size=128),
    "tldr": dict(num_labels=92_800, batch_size=64, lr=3e-6, rollout_batch_size=256),
    "synthetic_eos": dict(num_labels=9984, batch_size=16, lr=1e-3),
    "tldr_2019": dict(num_labels=46_000, batch_size=16, lr=2.5e-5, rollout_batch_size=128),
}
SCRIPT = Path(__file__)  # run and weight folders are named after this file: a copy has its own


# ------------------------------------------------------------------------------------------------------------- labels


LABEL_PAD = 50259  # OpenAI's files are padded with this id, two past GPT-2's vocabulary


@dataclass(frozen=True)
class Labels:
    """Comparisons: K candidate responses to a query and which one a human liked best."""

    query: Tensor  # [N, Q] left-padded
    responses: Tensor  # [N, K, R] right-padded
    best: Tensor  # [N] index of the preferred candidate

    def rows(self, rows: np.ndarray) -> "Labels":
        """A selection."""
        return Labels(self.query[rows], self.responses[rows], self.best[rows])

    def to(self, device: torch.device) -> "Labels":
        """A copy on `device`."""
        return Labels(self.query.to(device), self.responses.to(device), self.best.to(device))


def load_label_tokenizer(task: Task, tokenizer: Any) -> Any | None:
    """The tokenizer that made the labels' ids; None where the run's own reads them. Errors: `InputError` where it is
    not to be had."""
    name = task.label_tokenizer
    if name is None or name == task.base_model:
        return None
    files = "config.json tokenizer.json tokenizer_config.json"
    try:
        with utils.from_hub_or_folder(name, "--label_tokenizer", files=files):
            other = AutoTokenizer.from_pretrained(name)
    except InputError as error:
        raise InputError(
            f"--label_dataset={task.label_dataset} holds ids of {name}'s tokenizer. {error}\n"
            f"If they are the model's own ids, pass  --label_tokenizer {task.base_model}"
        ) from error
    return None if utils.reads_ids_of(tokenizer, other) else other


def id_column(rows: datasets.Dataset, name: str, length: int | None, where: str) -> np.ndarray:
    """A column of token lists → [N, length] (None: as long as the first). Errors: `InputError` with the first row that
    is no list of whole numbers or has another length."""
    column = rows.select_columns(name).with_format("arrow")[:][name].combine_chunks()
    counts, values = np.full(len(column), -1), np.empty(0)  # of what is no list of numbers at all
    if isinstance(column, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
        flat = column.flatten()
        if any(kind(flat.type) for kind in (pa.types.is_integer, pa.types.is_floating, pa.types.is_null)):
            counts = column.value_lengths().fill_null(-1).to_numpy(zero_copy_only=False)
            values = flat.to_numpy(zero_copy_only=False)  # one null makes floats with NaN of all ids
    broken = counts < 0
    if values.dtype.kind != "i":
        values = values.astype(float)
        no_id = (values != np.floor(values)) | (abs(values) > 2**53)
        broken[np.repeat(np.arange(len(counts)), counts.clip(0))[no_id]] = True
    length = counts[0] if length is None else length
    bad = np.flatnonzero(broken | (counts != length)).tolist()
    if bad and broken[bad[0]]:  # all rows are where one is of another type, and the library has made texts of all
        types = [[type(i) for i in ids] if isinstance(ids, list) else None for ids in rows[name]]
        i = next((i for i, kinds in enumerate(types) if kinds is None or set(kinds) - {int, float}), bad[0])
        raise InputError(f"{where} row {i}: {name}={str(rows[i][name])[:60]} is not a list of token ids")
    if bad:
        raise InputError(f"{where} row {bad[0]}: {name} has {counts[bad[0]]} ids, not {length}")
    return values.astype(np.int64).reshape(len(counts), length)


def label_columns(rows: datasets.Dataset, query: int | None, response: int | None, pad_id: int, where: str) -> Labels:
    """R4: OpenAI's label files (`query`, `sample0` … of ids, `best`) → queries [N, Q] left-padded, responses [N, K, R],
    best [N]. Ids are 0 … pad_id − 1; the files' own pad becomes `pad_id`. Errors: `InputError` with row and value."""
    count = sum(re.fullmatch(r"sample\d+", name) is not None for name in rows.column_names)
    samples = [f"sample{k}" for k in range(max(count, 2))]  # in the order of `best`, sample10 behind sample9
    missing = [name for name in ("query", "best", *samples) if name not in rows.column_names]
    if missing or len(rows) == 0:
        raise InputError(
            f"{where} has no {', '.join(missing) or 'rows'}; needed are query, sample0 … sampleK, best, "
            "or prompt, chosen, rejected"
        )
    columns, pad = {}, max(LABEL_PAD, pad_id)
    for name, length in [("query", query)] + [(name, response) for name in samples]:
        ids = id_column(rows, name, length, where)
        bad = np.argwhere((ids < 0) | (ids >= pad_id) & (ids != pad))
        if len(bad):
            i, j = bad[0]
            raise InputError(
                f"{where} row {i}: {name} holds id {ids[i, j]}; ids are 0 … {pad_id - 1}, padding is {pad}"
            )
        ids[ids == pad] = pad_id
        columns[name] = torch.from_numpy(ids)
    if len(blank := np.flatnonzero((columns["query"] == pad_id).all(dim=1))):
        raise InputError(f"{where} row {blank[0]}: query holds nothing but padding")
    best = rows["best"][:]
    for i, value in enumerate(best):
        if type(value) not in (int, float) or value not in range(len(samples)):
            raise InputError(f"{where} row {i}: best={value!r} is not in 0 … {len(samples) - 1}")
    if not isinstance(rows.features["best"], datasets.Value):  # the library has made numbers of all
        raise InputError(f"{where}: best is a number in some rows and a text in others; it has to be a number")
    responses = torch.stack([columns[name] for name in samples], dim=1)
    return Labels(utils.left_align(columns["query"], pad_id), responses, torch.tensor(best).long())


def right_pad(rows: list[list[int]], pad_id: int) -> Tensor:
    """Token lists → [B, the longest], padded on the right."""
    length = max(map(len, rows))
    return torch.tensor([row + [pad_id] * (length - len(row)) for row in rows])


def retokenise_labels(labels: Labels, source: Any, source_pad: int, tokenizer: Any, pad_id: int) -> Labels:
    """Labels in ids of tokenizer `source` → the same texts in ids of `tokenizer`. Nothing is cut: widths become the
    longest row's, for a reward model reads rows of any width (G3)."""
    queries = utils.retokenise(labels.query, source, source_pad, tokenizer)
    candidates = utils.retokenise(labels.responses.flatten(0, 1), source, source_pad, tokenizer)
    responses = right_pad(candidates, pad_id).view(*labels.responses.shape[:2], -1)
    return Labels(utils.pad_rows(queries, max(map(len, queries)), pad_id), responses, labels.best)


def heldout_rows(queries: Tensor, num_train: int) -> np.ndarray:
    """The rows behind the first `num_train` whose query [N, Q] is none of the training rows': labels repeat queries."""
    keys = [row.tobytes() for row in queries.numpy()]
    seen = set(keys[:num_train])
    return np.array([i for i in range(num_train, len(keys)) if keys[i] not in seen], dtype=int)


def split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Two whole dialogues → prompt, chosen, rejected: parted at the last `\\n\\nAssistant:` (Anthropic's hh-rlhf), else
    at the last space, of what both begin with."""
    both = commonprefix([chosen, rejected])
    turn = both.rfind("\n\nAssistant:")
    cut = turn + len("\n\nAssistant:") if turn >= 0 else len(re.sub(r"\s*\S*$", "", both))
    return chosen[:cut], chosen[cut:], rejected[cut:]


def split_messages(prompt: str | list | None, chosen: list, rejected: list, tokenizer: Any) -> tuple[str, str, str]:
    """Lists of messages → the texts that the chat template makes of them. The prompt is a list, or a text or nothing
    where the lists begin with its messages. Errors: `InputError` without a template, or a prompt in it."""
    for message in [*(prompt if isinstance(prompt, list) else []), *chosen, *rejected]:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise InputError(f"{str(message)[:60]} is no message, whose role and content are texts")
    if not tokenizer.chat_template:
        raise InputError(
            "the pairs are lists of messages, but the model's tokenizer has no chat template; pass a --base_model that "
            "has one (its name often ends in Instruct), or pairs of texts"
        )
    if not isinstance(prompt, list):
        same = [a == b for a, b in zip(chosen[:-1], rejected[:-1], strict=False)]  # the last message is the answer
        shared = chosen[: (same + [False]).index(False)]
        prompt = shared or ([{"role": "user", "content": prompt}] if prompt else [])
    if not prompt:
        raise InputError("chosen and rejected have no message in common that could be the prompt")
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    answers = []
    for side in (chosen, rejected):
        messages = side if side[: len(prompt)] == prompt else prompt + side
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        if not whole.startswith(text):
            raise InputError(f"the chat template writes {whole[:60]!r} …, which does not go on from {text[:60]!r} …")
        answers.append(whole[len(text) :].rstrip())  # a template's newline behind its end of turn is no token of ours
    return text, *answers


def split_pair(row: dict[str, Any], tokenizer: Any) -> tuple[str, str, str]:
    """A preference as people have it → texts of prompt, chosen, rejected. Errors: `InputError` for what is none."""
    prompt, chosen, rejected = (row.get(name) for name in ("prompt", "chosen", "rejected"))
    lists = isinstance(chosen, list) and isinstance(rejected, list)
    if not lists and not (isinstance(chosen, str) and isinstance(rejected, str)):
        raise InputError("chosen and rejected have to be two texts or two lists of messages")
    if "prompt" in row and not (isinstance(prompt, str) or lists and isinstance(prompt, list)):
        raise InputError(f"prompt={str(prompt)[:60]} has to be a text" + " or a list of messages" * lists)
    if lists:
        return split_messages(prompt, chosen, rejected, tokenizer)
    return (prompt, chosen, rejected) if "prompt" in row else split_texts(chosen, rejected)


def with_end(ids: list[int], end: int | None) -> list[int]:
    """A response with its end token, which data may hold already (`<|endoftext|>` in vwxyzjn's sets): never two."""
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


def load_pairs(rows: datasets.Dataset, task: Task, tokenizer: Any, pad_id: int) -> Labels:
    """R4: pairs (see `split_pair`) as labels of two candidates, the chosen one first; each ends with the truncate
    token. Errors: `InputError` with the row."""
    where = f"--label_dataset={task.label_dataset}"
    end, texts = utils.token_id(tokenizer, task.truncate_token, "--truncate_token"), []
    for i, row in enumerate(rows.select_columns([n for n in ("prompt", "chosen", "rejected") if n in rows.features])):
        try:
            texts.append(split_pair(row, tokenizer))
        except (InputError, TemplateError) as error:
            raise InputError(f"{where} row {i}: {error}") from error
    prompts, *sides = zip(*texts, strict=True)
    queries = utils.tokenise_queries(list(prompts), task, tokenizer)
    sides = [tokenizer(list(side), add_special_tokens=False)["input_ids"] for side in sides]
    pairs = [[with_end(ids, end) for ids in pair] for pair in zip(*sides, strict=True)]
    for i, (query, pair) in enumerate(zip(queries, pairs, strict=True)):
        if not query or not all(pair):  # an empty answer with its end is an answer
            raise InputError(f"{where} row {i}: prompt, chosen or rejected is blank")
    responses = right_pad([ids for pair in pairs for ids in pair], pad_id).view(len(queries), 2, -1)
    return Labels(utils.pad_rows(queries, task.query_length, pad_id), responses, torch.zeros(len(queries)).long())


def load_labels(task: Task, tokenizer: Any, pad_id: int) -> Labels:
    """R4: best-of-K labels in OpenAI's format, or pairs. Errors: `InputError` with row and value."""
    rows = utils.load_rows(task.label_dataset, "--label_dataset")
    if {"chosen", "rejected"} <= set(rows.column_names) and len(rows):
        return load_pairs(rows, task, tokenizer, pad_id)
    where = f"--label_dataset={task.label_dataset}"
    source = load_label_tokenizer(task, tokenizer)
    if source is None:
        return label_columns(rows, task.query_length, task.response_length, pad_id, where)
    labels = label_columns(rows, None, None, len(source), where)
    return retokenise_labels(labels, source, len(source), tokenizer, pad_id)


# ---------------------------------------------------------------------------------------------- samples to normalise on


def draw(logits: Tensor, uniform: Tensor, top_p: float = 1.0) -> Tensor:
    """One token a row from softmax(logits) by inverting its CDF. logits [B, V], uniform [B, 1] in [0, 1) → [B, 1].
    In fp64, and below the CDF's very top: a token of probability 0 is never drawn, not even at u = 0 or by rounding."""
    probs = logits.to(uniform.device).double().softmax(dim=-1)
    if top_p < 1:  # X7: only the likeliest tokens, the fewest that together have this probability
        falling = probs.sort(dim=-1, descending=True).values
        least = falling.where(falling.cumsum(dim=-1) - falling < top_p, 1).amin(dim=-1, keepdim=True)
        probs = probs.masked_fill(probs < least, 0)
    cdf = probs.cumsum(dim=-1)
    total = cdf[:, -1:]
    point = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, point, right=True).to(logits.device)


@torch.no_grad()
def sample(lm: PreTrainedModel, contexts: Tensor, uniform: Tensor, task: Task, ids: utils.Ids) -> Tensor:
    """G4: exactly R tokens for each left-padded context [B, C], drawn with `uniform` [R, B, 1] → [B, R]: full
    vocabulary unless the task says otherwise (X7), no stop at EOS, no `generation_config` of the checkpoint. Prefill
    once, then a token a step over a static cache."""
    start, response_length = contexts.shape[1], len(uniform)
    inputs = packing.model_inputs(F.pad(contexts, (0, response_length), value=0), ids.pad)  # 0: a token to come
    mask, positions = inputs["attention_mask"], inputs["position_ids"]  # G3
    mask[:, start:] = 0  # filled in, never grown: static shapes, and alibi is built from it
    cache = packing.empty_cache(lm, len(contexts), start + response_length)
    responses = torch.empty(len(contexts), response_length, dtype=torch.long, device=contexts.device)
    tokens, begin = inputs["input_ids"][:, :start], 0
    every = dict(attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
    for t in range(response_length):
        end = start + t
        logits = lm(tokens, position_ids=positions[:, begin:end], **every).logits[:, -1]
        logits = logits.float() / task.temperature  # P1
        if t + 1 < task.min_response_length:
            logits[:, ids.truncate] = -math.inf  # X7: no end yet
        tokens, begin = draw(logits, uniform[t], task.top_p), end
        responses[:, t], mask[:, end] = tokens[:, 0], 1
    return responses


def sample_all(lm: nn.Module, contexts: Tensor, task: Task, ids: utils.Ids, gen: torch.Generator, size: int) -> Tensor:
    """`sample` for any number of rows: `size` at a time, by length, trimmed; each with its own random numbers (X10).
    [B, C] → [B, R]"""
    shape = task.response_length, len(contexts), 1
    uniform = torch.rand(shape, generator=gen, device=gen.device, dtype=torch.float64)
    responses = torch.empty(shape[1], shape[0], dtype=torch.long, device=contexts.device)
    for rows, width in packing.by_length(packing.row_lengths(contexts, ids.pad), size):
        responses[rows] = sample(lm, contexts[rows, -width:], uniform[:, rows], task, ids)
    return responses


def truncate(responses: Tensor, token: int | None, after: int, pad_id: int) -> tuple[Tensor, Tensor]:
    """P5: cut each response behind its first `token` at or after position `after`, pads behind it.
    [B, R] → the cut responses [B, R], and whether the token was there [B]; always True if `token` is None."""
    if token is None:
        return responses, torch.ones_like(responses[:, 0]).bool()
    positions = torch.arange(responses.shape[1], device=responses.device)
    hits = (responses == token) & (positions >= after)
    ended = hits.any(dim=1)
    last = torch.where(ended, hits.byte().argmax(dim=1), responses.shape[1] - 1)
    return responses.masked_fill(positions > last[:, None], pad_id), ended


def moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population variance of x[mask] over all processes (X11), whatever stands outside the mask."""
    count = utils.all_sum(mask.sum())
    mean = utils.all_sum(x.masked_fill(~mask, 0).sum()) / count
    variance = utils.all_sum(((x - mean) ** 2).masked_fill(~mask, 0).sum()) / count
    return mean, variance


def policy_samples(args: Args, tokenizer: Any, pad_id: int, accelerator: Accelerator) -> list[tuple[Tensor, Tensor]]:
    """R3: samples of the pretrained policy to normalise on, before and after training: (queries [S, Q], responses
    [S, R], untruncated unless the task ends at EOS) twice, in ids of the policy's `tokenizer`. The policy is gone when
    this returns."""
    task, device = args.task, accelerator.device
    ids = utils.task_ids(task, tokenizer, pad_id)
    size = math.ceil(args.normalize_samples / args.rollout_batch_size) * args.rollout_batch_size
    table = utils.load_queries(task, tokenizer, pad_id, 2 * size)
    lm = utils.load_lm(args.policy_model or task.base_model).to(device).eval()
    seed = args.seed + 100003 * accelerator.process_index  # G6
    size //= accelerator.num_processes
    sets = []
    for step in range(2):
        queries = table[utils.rows_of_step(len(table), size, step, seed)].to(device)
        with accelerator.autocast():
            contexts, gen = utils.add_affixes(queries, ids), utils.generator(seed, step, device)
            rows = args.micro_batch_tokens // contexts.shape[1] or 1
            responses = sample_all(lm, contexts, task, ids, gen, rows)
        if task.eos_task:  # X9: what is behind the end is no part of it
            responses, _ = truncate(responses, ids.truncate, task.truncate_after, ids.pad)
        sets.append((queries, responses))
    return sets


@torch.no_grad()
def normalise(model: RewardModel, *parts: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """R3: set gain and bias so that these samples [S, …] (see `score`) of all processes have mean 0 and standard
    deviation 1; returns their mean and standard deviation without gain and bias."""
    model.eval()
    model.gain.fill_(1)
    model.bias.fill_(0)
    rewards = model.score(*parts, size=size)
    mean, variance = moments(rewards, torch.ones_like(rewards, dtype=torch.bool))
    if not variance > 0:
        raise InputError("all samples of the policy have one and the same reward; use more --normalize_samples")
    model.gain.fill_((1 / variance.sqrt()).item())
    model.bias.fill_(-(1 / variance.sqrt() * mean).item())
    return mean, variance.sqrt()


# ----------------------------------------------------------------------------------------------------------- training


class AdamTF(torch.optim.Adam):
    """A1: TensorFlow's Adam. There ε is added to √v without its bias correction (ε̂ in Kingma & Ba); PyTorch's formula
    with ε_t = ε̂ / √(1 − β₂ᵗ) is the same, so the library's fused kernel does the work."""

    def __init__(self, params: Any, lr: float, eps: float = 1e-5, **settings: Any):
        super().__init__(params, lr=lr, eps=eps, fused=True, decoupled_weight_decay=True, **settings)
        for group in self.param_groups:
            group["eps_hat"], group["t"] = eps, 0  # in the group, so that state_dict() keeps them

    def step(self, closure: Callable | None = None) -> Any:
        """One step; sets ε_t first. A group without gradients takes none."""
        for group in self.param_groups:
            if any(x.grad is not None for x in group["params"]):
                group["t"] += 1
                group["eps"] = group["eps_hat"] / math.sqrt(1 - group["betas"][1] ** group["t"])
        return super().step(closure)


def anneal(lr: float, step: int, steps: int, schedule: str = "linear", warmup: int = 0) -> float:
    """G5: linear from `lr` at step 0 to 0 at step `steps`. X8: or otherwise, and behind `warmup` steps up to `lr`."""
    if step < warmup:
        return lr * (step + 1) / warmup
    done = (step - warmup) / (steps - warmup)
    return lr * {"linear": 1 - done, "constant": 1.0, "cosine": 0.5 + 0.5 * math.cos(math.pi * done)}[schedule]


def new_reward_model(name: str, pad_id: int) -> RewardModel:
    """A language model's backbone with a fresh head (R2)."""
    lm = utils.load_lm(name)
    config = copy.deepcopy(lm.config)  # the library writes into it, and the backbone goes on with its own
    return RewardModel(utils.RewardConfig(config, pad_id), lm.base_model)


def candidate_tokens(labels: Labels) -> Tensor:
    """Each query with each of its candidates: [B, K, T]."""
    queries = labels.query[:, None].expand(-1, labels.responses.shape[1], -1)
    return torch.cat([queries, labels.responses], dim=2)


def candidate_rewards(model: nn.Module, tokens: Tensor) -> Tensor:
    """[B, K, T] → rewards [B, K]."""
    return model(tokens.flatten(0, 1)).view(tokens.shape[:2])


def micro_batches(tokens: Tensor, pad_id: int, size: int) -> list[np.ndarray]:
    """[B, K, T] → labels of about `size` tokens in all; a label's candidates stay together."""
    return utils.micro_batches(packing.row_sizes(tokens.flatten(1), pad_id), size)


def train_step(
    model: nn.Module, optimizer: Any, labels: Labels, pad_id: int, args: Args, accelerator: Accelerator
) -> dict[str, Tensor]:
    """R4: one optimizer step on this process's labels, as many as every process has; their loss and accuracy before."""
    model.train()
    tokens = candidate_tokens(labels)
    parts = micro_batches(tokens, pad_id, args.micro_batch_tokens)
    loss_sum, correct, seen = 0.0, 0.0, torch.empty(tokens.shape[:2], device=tokens.device)
    for i, rows in enumerate(parts):
        with accelerator.no_sync(model) if i + 1 < len(parts) else nullcontext():
            rewards = candidate_rewards(model, tokens[rows])  # [b, K]
            loss = F.cross_entropy(rewards, labels.best[rows], reduction="sum") / len(tokens)
            accelerator.backward(loss)  # every process has as many labels, and DDP averages the processes' gradients
        seen[rows] = rewards.detach()
        loss_sum += loss.detach()
        correct += (rewards.argmax(dim=1) == labels.best[rows]).sum() / len(tokens)
    utils.check_gradients(utils.gradient_norm(model), args.task, labels.query, reward=seen)
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss_sum, "accuracy": correct}


# -------------------------------------------------------------------------------------------------------- measurement


@torch.no_grad()
def predict(model: nn.Module, labels: Labels, pad_id: int, args: Args) -> Tensor:
    """Rewards [B, K] of the candidates of all labels."""
    model.eval()
    tokens = candidate_tokens(labels)
    out = torch.empty(tokens.shape[:2], device=tokens.device)
    for rows in micro_batches(tokens, pad_id, args.micro_batch_tokens):
        out[rows] = candidate_rewards(model, tokens[rows]).float()
    return out


def calibration(rewards: Tensor, best: Tensor, bins: int = 5) -> list[dict[str, float]]:
    """How often the top candidate [B, K] is the human's, beside the probability that the model gives it: the labels in
    `bins` groups of like probability, the least sure first."""
    top = rewards.softmax(dim=1).max(dim=1)
    right = (top.indices == best).float()
    order = top.values.argsort()
    groups = [
        (top.values[rows].mean().item(), right[rows].mean().item(), len(rows))
        for rows in order.tensor_split(bins)
        if len(rows)
    ]
    return [{"labels": n, "predicted": p, "accuracy": a} for p, a, n in groups]


def draw_histogram(groups: dict[str, list[float]], title: str, path: Path) -> None:
    """The distributions of a few groups of numbers as a picture."""
    plt = records.pyplot()
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    axis.hist(list(groups.values()), bins=40, density=True, histtype="stepfilled", alpha=0.5, label=list(groups))
    axis.set(title=title, ylabel="density")
    axis.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def report(run: records.Run, rewards: Tensor, best: Tensor) -> dict[str, float]:
    """Held-out accuracy, calibration table and picture of the rewards [B, K] of chosen and other candidates."""
    rows = calibration(rewards, best)
    run.table(rows, "calibration on held-out labels")
    chosen = torch.zeros_like(rewards, dtype=torch.bool).scatter(1, best[:, None], True)
    if run.main:
        groups = {"chosen": rewards[chosen].tolist(), "others": rewards[~chosen].tolist()}
        draw_histogram(groups, "reward of held-out candidates", run.folder / "histogram.png")
    error = sum(row["labels"] * abs(row["predicted"] - row["accuracy"]) for row in rows) / len(rewards)
    return {
        "heldout/accuracy": (rewards.argmax(dim=1) == best).float().mean().item(),
        "heldout/loss": F.cross_entropy(rewards, best).item(),
        "heldout/calibration_error": error,
        "heldout/reward_chosen": rewards[chosen].mean().item(),
        "heldout/reward_others": rewards[~chosen].mean().item(),
    }


def check(args: Args, processes: int) -> None:
    """Errors: `InputError` for values that cannot work, before anything is loaded."""
    records.check_args(args, SCRIPT, processes)
    for name, value, unit in (
        ("batch_size", args.batch_size, processes),
        ("rollout_batch_size", args.rollout_batch_size, processes),
        ("num_labels", args.num_labels, args.batch_size),
    ):
        if value % unit:
            raise InputError(f"{name}={value} does not divide by {unit}; use {max(value // unit, 1) * unit}")


PANELS = ["loss", "accuracy", "gain", "bias", "lr"]


def main(args: Args) -> None:
    """The run: normalise → one epoch → normalise → measure."""
    accelerator = utils.start_accelerator(args)
    check(args, accelerator.num_processes)
    task, device, rank, processes = args.task, accelerator.device, accelerator.process_index, accelerator.num_processes
    make = f"python sft.py --task {task.task}"
    tokenizer, config, pad_id = utils.load_tokenizer(task, task.response_length, make)
    policy_task = replace(task, base_model=args.policy_model or task.base_model)
    flag = "--policy_model" if args.policy_model else "--base_model"
    policy_tokenizer, policy_config, policy_pad = utils.load_tokenizer(policy_task, task.response_length, make, flag)
    utils.check_memory(policy_config, 4, "the policy that samples", device)  # gone before the other is there
    backbone = utils.RewardConfig(copy.deepcopy(config), pad_id)
    utils.check_memory(backbone, 16, "reward model, gradients and Adam's two moments", device)
    labels = load_labels(task, tokenizer, pad_id)
    longest = labels.query.shape[1] + labels.responses.shape[2]
    utils.check_length(config, longest, f"--label_dataset={task.label_dataset}")
    if len(labels.best) < args.num_labels:
        fitting = len(labels.best) // args.batch_size * args.batch_size
        raise InputError(
            f"--label_dataset={task.label_dataset} has {len(labels.best)} labels, num_labels={args.num_labels}; "
            + (f"use --num_labels {fitting}" if fitting else f"a batch_size={args.batch_size} is more than that too")
        )
    before, after = policy_samples(args, policy_tokenizer, policy_pad, accelerator)

    torch.manual_seed(args.seed)
    model = new_reward_model(task.base_model, pad_id)
    if args.gradient_checkpointing:
        utils.checkpoint_activations(model)
    model, optimizer = utils.prepare(accelerator, model, AdamTF(model.parameters(), lr=args.lr, eps=args.adam_eps))
    plain = accelerator.unwrap_model(model)
    read = utils.reward_reader(plain, tokenizer, policy_tokenizer, policy_pad)  # X13
    with accelerator.autocast():
        normalise(plain, read(*before), size=args.micro_batch_tokens)

    steps, data = args.num_labels // args.batch_size, (labels.query, labels.responses, labels.best)
    run = records.Run(args, SCRIPT, steps, PANELS, accelerator, *data, before[0], after[0])
    start, _ = run.restore(model, optimizer)
    clock = utils.Clock(device)
    order = np.random.default_rng([args.seed, 0]).permutation(args.num_labels)  # the same on every process
    for step in range(start, steps):
        done = step * args.batch_size
        batch = labels.rows(order[done : done + args.batch_size][rank::processes]).to(device)
        with clock("optimise"):
            lr = anneal(args.lr, done, args.num_labels)  # G5
            for group in optimizer.param_groups:  # no prepared scheduler, which would step once a process
                group["lr"] = lr
            stats = train_step(model, optimizer, batch, pad_id, args, accelerator)
        stats |= {"gain": utils.whole(plain.gain)[0], "bias": utils.whole(plain.bias)[0]}
        metrics = utils.mean_over_processes(stats, device) | {"lr": lr} | clock.pop()
        run.log(step, metrics, {"loss": "loss", "accuracy": "accuracy"})
        run.checkpoint(step + 1, model, optimizer)

    with accelerator.autocast():
        mean, std = normalise(plain, read(*after), size=args.micro_batch_tokens)
    results = {"samples/mean_before_normalising": mean.item(), "samples/std_before_normalising": std.item()}
    rows = heldout_rows(labels.query, args.num_labels)
    if len(rows):
        heldout = labels.rows(rows).to(device)
        with accelerator.autocast():
            results |= report(run, predict(plain, heldout, pad_id, args), heldout.best)
    run.save(plain, tokenizer)
    run.log(steps, results, {})
    run.finish(json.dumps({name: round(value, 4) for name, value in results.items()}))
    utils.stop_accelerator(accelerator)


if __name__ == "__main__":
    cli(main, lambda: parse_args(Args, PRESETS))
