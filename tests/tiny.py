"""Tiny models, data files and settings of the tests: no network, nothing that is kept."""

import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import formats
import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from transformers import AutoConfig, AutoModelForCausalLM

import ppo
import rloo
import sft
import train_reward
import utils
from data import tasks
from machinery import cli, distributed, models, unpadding
from machinery.decoding import DecodingBatch
from machinery.labels import OPENAI_PAD
from train_reward import RewardConfig


def refuses(call, *words):
    """Assert that `call` raises `InputError` whose message has all `words`; return the message."""
    with pytest.raises(cli.InputError) as caught:
        call()
    message = str(caught.value)
    for word in words:
        assert str(word) in message
    return message


def run_python(*words, processes=1, env=None, **options):
    """What a Python program prints, on one process or several, which torchrun starts."""
    launcher = []
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes]
    command = [sys.executable, *launcher, *words]
    tests = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}"}
    environment.update(env or {})
    options.setdefault("timeout", 300)
    options.update(env=environment, capture_output=True, text=True)
    done = subprocess.run([*map(str, command)], **options)
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
DATA = ("queries", "responses", "epochs", "labels", "tokens")  # see `start`
QWEN = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    head_dim=8,
    layer_types=["linear_attention", "full_attention"],
)
MOE = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    num_local_experts=2,
)
GRANITE = dict(
    MOE,
    mamba_n_heads=8,
    mamba_d_head=8,
    mamba_n_groups=1,
    mamba_d_state=8,
    layer_types=["mamba", "attention"],
)
MLA = dict(
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    num_key_value_heads=4,
    mlp_layer_types=["dense"] * 2,
    first_k_dense_replace=2,
)
HYBRIDS = {  # the cache has states or an index, besides or without keys and values
    "qwen3_5_text": QWEN,
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "granitemoehybrid": GRANITE,
    "deepseek_v32": dict(MLA, index_n_heads=2, index_head_dim=16, index_topk=64),
}
OWN = {  # what a kind has besides the sizes of all
    **HYBRIDS,
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


def config(kind="gpt2", vocab=VOCAB, dropout=0.0, positions=64, **settings):
    """Weights are large (0.3), so that mistakes show. `kind` is a `model_type`, or one of `OWN`."""
    values = dict(
        vocab_size=vocab,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=positions,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
    )
    if kind in ("gpt2", "gptj"):
        values.update(num_attention_heads=2)
        values.update(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    else:
        values.update(intermediate_size=64, attention_dropout=dropout, hidden_dropout=dropout)
    if not kind.startswith(("gpt2", "gpt_neox", "falcon")):  # no heads share keys in these
        values.update(num_key_value_heads=2)
    if kind not in KINDS:
        values.update(intermediate_size=48, head_dim=8, pad_token_id=0)
    values.update(OWN.get(kind, {}))
    values.update(settings)
    name = kind.removesuffix("_window").removesuffix("_alibi")
    return AutoConfig.for_model(name, **values)


def make_lm(kind="gpt2", seed=0, **settings):
    torch.manual_seed(seed)
    lm = AutoModelForCausalLM.from_config(config(kind, **settings)).eval()
    unpadding.set_unpadding(lm.base_model, 0 if kind in HYBRIDS else 1024)
    return lm


def make_policy(kind="gpt2", seed=0, temperature=0.7, script=ppo, **settings):
    """A random policy of `script`; ppo's value head is random too."""
    lm = make_lm(kind, seed, **settings)
    lm.get_output_embeddings().__class__ = models.Float32Linear  # as `load_lm` does
    pad_id = lm.config.vocab_size
    if script is rloo:
        return rloo.Policy(lm, pad_id, temperature).eval()
    policy = ppo.PolicyAndValue(lm, pad_id, temperature)
    torch.nn.init.normal_(policy.value_head.weight, std=0.3)
    torch.nn.init.constant_(policy.value_head.bias, 0.1)
    return policy.eval()


def make_reward(kind="gpt2", seed=7, pad_id=PAD, **settings):
    """A random reward model whose gain and bias are not 1 and 0."""
    torch.manual_seed(seed)
    model = train_reward.RewardModel(RewardConfig(config(kind, vocab=pad_id, **settings), pad_id))
    unpadding.set_unpadding(model.backbone, 1024)
    torch.nn.init.normal_(model.head.weight, std=0.3)
    torch.nn.init.constant_(model.head.bias, 0.2)
    torch.nn.init.constant_(model.gain, 1.5)
    torch.nn.init.constant_(model.bias, -0.5)
    return model.eval()


def reward_function(model, max_tokens=36):
    """A reward model as a function of queries [B, Q] and responses [B, R] → [B]."""
    return lambda q, r, columns=None: model.score(torch.cat([q, r], 1), max_tokens)


def make_contexts(lengths, width, seed=0, vocab=VOCAB):
    """Left-padded random rows of these lengths: [B, width]."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(1, vocab, n).tolist() for n in lengths]
    return utils.pad_left(rows, width, vocab)


def uniform(length, rows):
    """The random numbers [R, B] of B responses."""
    generator = torch.Generator().manual_seed(1)
    return torch.rand(length, rows, generator=generator, dtype=torch.float64)


def sample(lm, contexts, uniform, pad_id=PAD, temperature=0.7, **task):
    """`ppo.sample` with token 0 as the truncate token: [B, C], [R, B] → [B, R]."""
    args = make_args(make_task(temperature=temperature, **task))
    ids = utils.TokenIds(pad_id, [0], [], [], args.task.truncate_after)
    return ppo.sample(lm, contexts, uniform, ids, args)


def end_soon(patch):
    """Make about one sampled token in 20 a 0; return the list of batch sizes of each step."""
    compute = DecodingBatch.next_logits
    sizes = []

    def likely_to_end(batch):
        logits = compute(batch)
        sizes.append(len(logits))
        logits[:, 0] = logits.logsumexp(dim=-1) - 2.5
        return logits

    patch.setattr(DecodingBatch, "next_logits", likely_to_end)
    return sizes


def make_task(**changes):
    values = dict(
        query_length=8,
        response_length=5,
        temperature=0.7,
        truncate_after=2,
        gold_fn=None,
    )
    values.update(changes)
    return replace(tasks.TASKS["synthetic"], **values)


SIZES = {  # a flag that a script has → its flags for tiny models
    "total_episodes": dict(
        total_episodes=24,
        batch_size=8,
        num_minibatches=2,
        num_ppo_epochs=2,
        lr=1e-3,
        micro_batch_tokens=24,
        rollout_batch_size=3,
        eval_queries=4,
    ),
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


def make_args(task=None, script=ppo, **changes):
    """`Args` of a script. Changes may also be fields of its task, as on the command line."""
    task = task or make_task()
    values = {}
    for flag, sizes in SIZES.items():
        if hasattr(script.Args, flag):
            values.update(sizes)
    values.update(changes)
    of_task = {name: values.pop(name) for name in set(values) & set(vars(task))}
    return script.Args(task=replace(task, **of_task), **values)


def make_responses(batch_size, length, seed=1):
    """Random responses [B, R]; some have the truncate token."""
    torch.manual_seed(seed)
    return torch.randint(1, 8, (batch_size, length))


def make_texts():
    """Queries [4, 8] and responses [4, 5] of the synthetic task's ids, and the ids of each text."""
    queries = make_contexts([8, 3, 1, 5], 8, vocab=WORDS)
    responses = make_contexts([5] * 4, 5, seed=1, vocab=WORDS)
    texts = []
    for i, length in enumerate((5, 1, 3, 2)):
        responses[i, length:] = WORDS
        tokens = torch.cat([queries[i], responses[i]])
        texts.append(tokens[tokens != WORDS].tolist())
    return queries, responses, texts


class Table:
    """A query table that returns given queries [B, Q], one batch after the other."""

    def __init__(self, batches, heldout=None):
        self.batches = list(batches)
        self.size = len(batches[0])
        self.heldout = batches[0][:HELDOUT] if heldout is None else heldout

    def __len__(self):
        return self.size

    def hold_out(self, n, needed=1):
        return Table([self.heldout] * 100), self

    def columns(self, rows=slice(None)):
        return {}

    def __getitem__(self, rows):
        batch = self.batches.pop(0)
        if isinstance(rows, slice):
            return batch
        copies = max(len(rows) // len(batch), 1)
        return batch.repeat_interleave(copies, dim=0)  # RLOO's K responses to a query


class Tokenizer:
    """In place of a tokenizer: a text is its token ids."""

    def batch_decode(self, sequences, **settings):
        return [" ".join(map(str, tokens)) for tokens in sequences]


class FakeRun:
    """In place of `Run`: keeps metrics in memory and calls `after(update, metrics)`."""

    def __init__(self, after=None):
        self.after = after
        self.main = True
        self.step = 0
        self.folder = Path("nowhere")
        self.metrics = []

    def __call__(self, *args):
        return self

    def restore(self, model, optimizer, kl_coef=0.0):
        self.model = model
        self.optimizer = optimizer
        return 0, kl_coef

    def log(self, step, metrics):
        self.metrics.append(metrics)
        self.step = step + 1
        if self.after:
            self.after(step, metrics)

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def fake_reward(function):
    """In place of `Reward`: a function of queries and responses."""
    return lambda queries, responses, columns: (function(queries, responses), {})


class Recorder(torch.optim.SGD):
    """An optimizer that keeps the gradients of each step and moves nothing."""

    def __init__(self, params, **settings):
        super().__init__(params, lr=0.0)
        self.gradients = []

    def step(self, closure=None):
        grads = []
        for p in self.param_groups[0]["params"]:
            grads.append(torch.zeros_like(p) if p.grad is None else p.grad.clone())
        self.gradients.append(grads)


def keep(function, kept):
    """A function that also keeps what it returns."""

    def keeping(*args, **options):
        kept.append(function(*args, **options))
        return kept[-1]

    return keeping


def load_script(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(script, args, policy=None, ref=None, reward=None, files=False, ids=IDS, **given):
    """Run `main` on given models and data (`of_rl`, `of_labels`, `of_sft`), or on the files that
    `args` names. What else is given replaces names of the script, of which `Run` is a `FakeRun`."""
    data = {name: given.pop(name) for name in DATA if name in given}
    replaced = dict(Run=FakeRun())
    if not files:
        ids = ids._replace(truncate_after=args.task.truncate_after)
        replaced.update(check=lambda *a: None, load_tokenizer=lambda *a, **k: (Tokenizer(), ids))
        task = replace(args.task, gold_fn=None)
        if script is sft:
            task = replace(task, response_column="completion")
            replaced.update(of_sft(policy, **data))
        elif script is train_reward:
            replaced.update(of_labels(policy, **data))
        else:
            replaced.update(of_rl(script, args, policy, ref, reward, **data))
        args = replace(args, task=task)
    replaced.update(given)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in replaced.items():
            patch.setattr(script, name, value)
        patch.setattr(distributed, "stop", lambda accelerator: None)
        script.main(args)
    return replaced["Run"]


def of_sft(lm, tokens):
    """In place of what sft.py loads: a model and sequences [N, T]."""
    return dict(
        load_lm=lambda *a, **k: lm,
        load_responses=lambda *a: Sequences(tokens),
        sample_continuations=lambda *a: {},
    )


def of_labels(model, labels):
    """In place of what train_reward.py loads; it normalizes on 4 random samples."""
    samples = torch.cat([make_contexts([8, 2, 5, 3], 8), make_responses(4, 5)], dim=1)
    samples = samples.to(model.gain.device)
    return dict(
        load_labels=lambda *a: labels,
        sample_policy=lambda *a: [samples, samples],
        load_config=lambda name: model.config.backbone,
        new_reward_model=lambda *a: model,
    )


def of_rl(script, args, policy, ref, reward, queries=None, responses=None, epochs=None):
    """In place of what ppo.py and rloo.py load: models, queries [B, Q] and responses [B, R] of each
    update, and of each epoch of each update a permutation in place of `epoch_order`."""
    length = args.task.response_length
    if queries is None:
        lengths = LENGTHS[: args.batch_size // getattr(args, "rloo_k", 1)]
        queries = [make_contexts(lengths, args.task.query_length)] * 100
    if responses is None:
        responses = (make_responses(args.batch_size, length, seed) for seed in range(100))
    responses = iter(responses)
    reward = reward or reward_function(make_reward())
    policy = policy or make_policy(script=script)
    ref = ref or make_policy(seed=3, script=script)
    lms = iter([policy.lm, ref.lm])

    def next_responses(lm, contexts, *rest):
        if len(contexts) == HELDOUT:
            return make_responses(HELDOUT, length)
        return next(responses)

    stand_ins = {
        "load_queries": lambda *a: Table(queries),
        "load_reward": lambda *a: fake_reward(reward),
        "load_lm": lambda *names, **more: next(lms),
        type(policy).__name__: lambda lm, *a: policy if lm is policy.lm else ref,
        "sample_in_batches": next_responses,
    }
    if epochs:
        orders = iter(torch.cat(epochs).tolist())
        stand_ins["epoch_order"] = lambda *a: np.array(next(orders))
    return stand_ins


def keep_epochs(script, args, kept):
    """`epoch_order`, which also adds the indices of each minibatch of each epoch of each update."""
    function = script.epoch_order
    size = args.batch_size // args.num_minibatches

    def keeping(epoch, *rest):
        if epoch == 0:
            kept.append([])
        order = function(epoch, *rest)
        kept[-1].append(torch.as_tensor(order).split(size))
        return order

    return keeping


def make_rollout(policy, args, script=ppo, **inputs):
    """The rollout that `main` makes of random queries and responses, or of those in `inputs`."""
    queries = inputs.pop("queries", make_contexts(LENGTHS, args.task.query_length))
    size = len(queries)
    responses = inputs.pop("responses", make_responses(size, args.task.response_length))
    rollout_class = script.Rollout
    rollouts = []

    def spy(**fields):
        rollouts.append(rollout_class(**fields))
        raise EOFError  # ends `main`

    run = FakeRun()
    run.restore = lambda *args: (1, 0.15)  # update, kl_coef: so that nothing is evaluated
    inputs.update(Run=run, Rollout=spy, query_rows=lambda *a: np.arange(0))
    inputs.setdefault("epochs", [torch.arange(size)[None]])
    args = replace(args, batch_size=size, total_episodes=2 * size)
    with pytest.raises(EOFError):
        start(script, args, policy, queries=[queries], responses=[responses], **inputs)
    return rollouts[0]


def noisy_rollout(script, kept):
    """`Rollout`, but old numbers and rewards are off the policy's own, so that losses clip."""
    rollout_class = script.Rollout

    def make_noisy_rollout(**fields):
        rollout = rollout_class(**fields)
        generator = torch.Generator().manual_seed(1)
        noise = torch.randn(3, *rollout.mask.shape, generator=generator) * rollout.mask
        rollout = rollout._replace(logprobs=rollout.logprobs + 0.2 * noise[0])
        if script is ppo:
            rewards = rollout.rewards + noise[1]
            values = rollout.values + 0.3 * noise[2]
            rollout = rollout._replace(rewards=rewards, values=values)
        return rollout

    return keep(make_noisy_rollout, kept)


def run_alone(policy, context, response):
    """Log-probabilities, entropies and values of one response, from a plain call without padding."""
    context = context[context != policy.pad_id]
    response = response[response != policy.pad_id]
    tokens = torch.cat([context, response])[None]
    predicted = slice(len(context) - 1, -1)
    logits = policy.lm(tokens).logits[0, predicted].float() / policy.temperature
    probs = logits.softmax(dim=-1)
    logprobs = probs.log().gather(1, response[:, None])[:, 0]
    entropies = -(probs * probs.log()).sum(dim=1)
    if not hasattr(policy, "value_head"):
        return logprobs, entropies
    hidden = policy.lm.base_model(tokens).last_hidden_state[0, predicted]
    return logprobs, entropies, policy.value_head(hidden)[:, 0]


def assert_gradients(run, model, loss):
    """Assert that the first step of a run with a `Recorder` had the gradient of a loss."""
    loss.backward()
    expected = [p.grad for p in model.parameters()]
    torch.testing.assert_close(run.optimizer.gradients[0], expected, atol=4e-5, rtol=1e-4)


class Sequences:
    """A table of given sequences [N, T] for sft.py."""

    def __init__(self, tokens):
        self.tokens = tokens
        self.length = tokens.shape[1]

    def __len__(self):
        return len(self.tokens)

    def hold_out(self, n, needed=1):
        return self.tokens[:n], Sequences(self.tokens[n:])

    def __getitem__(self, rows):
        return self.tokens[rows]


def write_model(folder, kind="gpt2", seed=0, dropout=0.1, **settings):
    """A folder with a random language model of the synthetic task's vocabulary, and its tokenizer."""
    make_lm(kind, seed, vocab=WORDS, dropout=dropout, **settings).save_pretrained(folder)
    return write_tokenizer(folder)


def write_config(folder, tokenizer, **settings):
    """A folder with a tokenizer and the configuration of a model, without weights."""
    config(vocab=len(tokenizer), **settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def write_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tasks.SYNTHETIC / "model" / name, folder / name)
    return folder


def write_reward(folder, kind="gpt2", pad_id=WORDS, **settings):
    """A folder as train_reward.py leaves it, with a random reward model."""
    make_reward(kind, pad_id=pad_id, **settings).save_pretrained(folder)
    return str(write_tokenizer(folder))


def write_task(folder, kind="gpt2", **changes):
    """A task whose model, queries and labels are small local files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    model = write_model(folder / "model", kind)
    stories = folder / "stories.txt"
    label_file = folder / "labels.json"
    files = dict(
        base_model=str(model),
        query_dataset=str(stories),
        label_dataset=str(label_file),
    )
    task = make_task(**files, **changes)
    lines = []
    for name in ("Anna", "Ben", "Clara", "Tom the baker"):
        for verb in ("saw", "found"):
            lines += [f"{name} {verb} the {thing}.\n" for thing in THINGS]
    stories.write_text("".join(lines))
    rng = np.random.default_rng(5)
    rows = []
    for _ in range(16):  # in OpenAI's format: token ids, padded on the right
        row = {}
        for name in ("query", "sample0", "sample1", "sample2", "sample3"):
            size = task.query_length if name == "query" else task.response_length
            real = rng.integers(1, size + 1)
            row[name] = rng.integers(1, 200, real).tolist() + [OPENAI_PAD] * int(size - real)
        row["best"] = int(rng.integers(4))
        rows.append(row)
    label_file.write_text(json.dumps(rows))
    return task


def eos_task(task, folder):
    """A task of `write_task` in the columns of TL;DR, its files in `folder`."""
    responses = []
    pairs = []
    for name, thing in itertools.product(("Anna", "Ben", "Clara", "Tom"), THINGS[:4]):
        prompt = f"{name} found the {thing}."
        text = f" {name} saw the {thing}."
        responses.append(dict(prompt=prompt, completion=text))
        pairs.append(dict(prompt=prompt, chosen=text, rejected=" It was cold."))
    return replace(
        task,
        query_dataset=formats.write_rows(folder / "r.jsonl", responses),
        label_dataset=formats.write_rows(folder / "p.jsonl", pairs),
        query_column="prompt",
        response_column="completion",
        truncate_after=0,
        truncate_token="<|endoftext|>",
        eos_task=True,
        query_length=8,
        response_length=12,
    )


def shard_on_a_cpu(put=setattr):
    """Let accelerate use its FSDP2 on a CPU, where it would silently use DDP instead."""
    init = AcceleratorState.__init__

    def forced(self, *args, fsdp_plugin=None, **more):
        init(self, *args, fsdp_plugin=fsdp_plugin, **more)
        if fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)

    put(AcceleratorState, "__init__", forced)
