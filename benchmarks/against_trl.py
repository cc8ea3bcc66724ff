"""Losses and gradients of our scripts and of TRL's trainers, on the same weights and data.

    python benchmarks/against_trl.py    # needs the hub, for TRL; prints the table, writes the CSV

Each side is the real thing: `main` of a script or of a patched copy, and `train` of a trainer of
TRL 1.16.0 in an environment of its own, which speed.py makes. Both read the same random models in
fp32, texts of unequal lengths and reward function, and get the same responses instead of sampling.
Loss and gradients are read where the optimizer steps.

Reinforcement learning takes two steps on one batch. Between them both sides get the same other
weights, so that ratios are not 1, and some are clipped.
"""

import argparse
import csv
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook as hook_after
from torch.optim.optimizer import register_optimizer_step_pre_hook as hook_before
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers import AutoModelForSequenceClassification as Classifier

HERE = Path(__file__).resolve().parent
P, K, R = 6, 4, 12  # prompts, responses to each, tokens of the longest response
END, PAD = 60, 61  # token ids; TRL pads with a token of the vocabulary
SAME = dict(vocab_size=64, bos_token_id=None, eos_token_id=END, initializer_range=0.3)
SAME |= dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, tie_word_embeddings=False)
SAME |= dict(max_position_embeddings=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
Steps = list[dict[str, Tensor]]  # of each step of the optimizer: gradients by name, and the loss


class Row(NamedTuple):
    """A row of the table: a script with its patch and flags, a trainer with its settings."""

    name: str
    script: str
    flags: str
    trainer: str
    settings: dict[str, Any]  # of TRL, where its defaults will not do
    reward: str = "distinct_words"
    model: str = "llama"


KL, LABELS = "--kl_coef 0.1", f"--num_labels {P} --num_heldout 0"
GRPO, RLOO = dict(loss_type="grpo", beta=0.1), dict(beta=0.1)
DR_GRPO, DAPO = dict(loss_type="dr_grpo", scale_rewards="none"), dict(epsilon_high=0.28)
CISPO = dict(loss_type="cispo", epsilon_high=1.5)  # the bound itself; ours is added to 1
GSPO = dict(loss_type="grpo", importance_sampling_level="sequence", epsilon=0.02, epsilon_high=0.03)
ROWS = [
    Row("SFT", "sft", "--num_epochs 1 --num_heldout 1 --max_grad_norm 1e9", "SFT", {}),
    Row("reward model", "train_reward", f"{LABELS} --normalize_samples 2", "Reward", {}),
    Row("DPO", "train_reward dpo", LABELS, "DPO", {}),
    Row("RLOO", "rloo", KL, "RLOO", RLOO),
    Row("GRPO", "rloo grpo", KL, "GRPO", GRPO | dict(use_bias_correction_kl=False)),
    Row("GRPO, unbiased KL", "rloo grpo", f"{KL} --correct_kl_gradient", "GRPO", GRPO),
    Row("Dr. GRPO", "rloo dr_grpo", "--kl_coef 0", "GRPO", DR_GRPO),
    Row("DAPO", "rloo dapo", "--kl_coef 0", "GRPO", DAPO),
    Row("CISPO", "rloo cispo", "--kl_coef 0 --cliprange_high 0.5", "GRPO", CISPO),
    Row("GSPO", "rloo gspo", "--kl_coef 0 --cliprange 0.02 --cliprange_high 0.03", "GRPO", GSPO),
    Row("DAPO, groups of equal scores", "rloo dapo", "--kl_coef 0", "GRPO", DAPO, "of_some"),
    Row("RLOO, GPT-2", "rloo", KL, "RLOO", RLOO, model="gpt2"),
]


def distinct_words(responses: Any = None, completions: Any = None, **_: Any) -> list[float]:
    """The reward of both sides: of our `responses`, or TRL's `completions`."""
    return [len(set(text.split())) / 4 for text in responses or completions]


def of_some(queries: Any = None, prompts: Any = None, responses: Any = None, **more: Any) -> list:
    """The same, but 0 to prompts with an odd number of words."""
    scores, prompts = distinct_words(responses, **more), queries or prompts
    return [x * (len(y.split()) % 2 == 0) for x, y in zip(scores, prompts, strict=True)]


def make(folder: Path) -> None:
    """Write models, a tokenizer of words, and texts with responses."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = [f"w{i}" for i in range(END)] + ["<end>", "<pad>"]
    words = Tokenizer(models.WordLevel({x: i for i, x in enumerate(names)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="<end>")
    torch.manual_seed(0)
    for kind in ("llama", "gpt2"):
        config = AutoConfig.for_model(kind, **SAME, num_labels=1, pad_token_id=PAD)
        policy = AutoModelForCausalLM.from_config(config)
        classifier = Classifier.from_config(config)
        saved = dict(classifier=classifier, policy=policy, reference=policy, moved=policy)
        for name, model in saved.items():
            for weight in model.parameters():
                weight.data += 0.003 * torch.randn_like(weight)
            model.save_pretrained(folder / kind / name)
            tokenizer.save_pretrained(folder / kind / name)

    rng = np.random.default_rng(0)

    def text(shortest: int, longest: int) -> str:
        return " ".join(f"w{i}" for i in rng.integers(1, END, rng.integers(shortest, longest + 1)))

    held_out: dict[str, Any] = dict(prompt="w1 w2", completion=" w1", chosen=" w1", rejected=" w2")
    rows = [dict(prompt=text(3, 12), given=[text(1, 11) for _ in range(K)]) for _ in range(P)]
    rows = [{name: f" {text(1, 11)}" for name in held_out} | row for row in rows]
    first = np.random.default_rng(0).permutation(P + 1)[0]  # which row sft.py and rloo.py hold out
    queries = [*rows[:first], held_out, *rows[first:]]
    for name, found in dict(rows=rows, queries=queries, texts=queries).items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, found)))


def sampler() -> Callable[[list[int]], list[int]]:
    """A function from a prompt's token ids to its next response, which ends with END."""

    def ids(text: str) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    rows = map(json.loads, Path("rows.jsonl").read_text().splitlines())
    found = {str(ids(x["prompt"])): itertools.cycle(map(ids, x["given"])) for x in rows}
    of_held_out = itertools.repeat([1, 2])
    return lambda prompt: [*next(found.get(str(prompt), of_held_out)), END]


# ------------------------------------------------------------------------------------ the two sides


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by the names that they have in a language model or classifier."""
    found = {}
    for name, weight in model.named_parameters():
        name = name.removeprefix("lm.").replace("backbone.", "model.")
        found["score.weight" if name == "head.weight" else name] = weight
    return found


def load(model: nn.Module, folder: Path) -> None:
    """Set the weights to those of a saved model."""
    from safetensors.torch import load_file

    for name, value in load_file(folder / "model.safetensors").items():
        named(model)[name].data.copy_(value)


@contextmanager
def recorded(models: list[nn.Module], moved: Path | None) -> Iterator[Steps]:
    """Record each step of `models[-1]`, which then gets the weights in `moved`."""
    steps: Steps = []
    losses: list[Tensor] = []
    backward: Any = Tensor.backward

    def compute(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        losses.append(loss.detach())
        backward(loss, *args, **kwargs)

    def before(*_: Any) -> None:
        if not losses:  # hooks run twice a step in a process that has also made a torch Adam
            return
        weights = named(models[-1]).items()
        steps.append({name: x.grad.clone() for name, x in weights if x.grad is not None})
        steps[-1]["loss"] = torch.stack(losses).sum()
        losses.clear()

    hooks = [hook_before(before)]
    if moved:
        hooks.append(hook_after(lambda *_: load(models[-1], moved)))
    Tensor.backward = compute
    yield steps
    Tensor.backward = backward
    for hook in hooks:
        hook.remove()


def ours(row: Row) -> Steps:
    """`main` of the script."""
    from machinery import distributed
    from machinery.cli import parse_args

    base, *patch = row.script.split()
    for name in patch:
        command = ["patch", "--fuzz=0", f"--output={name}.py", HERE.parent / f"{base}.py"]
        subprocess.run([*command, HERE.parent / f"diffs/{name}.diff"], check=True)
    script = importlib.import_module((patch or [base])[0])
    models: list[nn.Module] = []
    where, prepare, respond = Path(row.model).resolve(), distributed.prepare, sampler()

    def start(accelerator: Any, model: nn.Module, *rest: Any) -> Any:
        models.append(model)  # DPO starts from other weights than its reference
        load(model, where / ("classifier" if row.trainer == "Reward" else "policy"))
        return prepare(accelerator, model, *rest)

    def sample(decoder: Any, contexts: Tensor, uniform: Tensor, ids: Any, *_: Any) -> Tensor:
        found = [respond([x for x in row if x != ids.pad]) for row in contexts.tolist()]
        return torch.tensor([x + [ids.pad] * (R - len(x)) for x in found])

    script.sample_in_batches, distributed.prepare = sample, start
    script.normalize = lambda *_: (0.0, 1.0)  # TRL normalizes no reward model (R3)
    flags = f"--task synthetic_eos --base_model {where}/policy --query_length 16 --gold_fn None"
    flags += f" --response_length {R} --truncate_token <end> --batch_size {P} {row.flags}"
    if base == "rloo":
        flags += f" --ref_model {where}/reference --kl_target None --query_dataset queries.jsonl"
        flags += f" --rloo_k {K} --batch_size {P * K} --total_episodes {P * K} --num_ppo_epochs 2"
        flags += f" --eval_queries 1 --reward_fn {HERE / 'against_trl.py'}:{row.reward}"
    elif base == "sft":
        flags += " --query_dataset texts.jsonl"
    else:
        flags += f" --base_model {where}/reference --temperature 1"
        flags += " --query_dataset rows.jsonl --label_dataset rows.jsonl"
    with recorded(models, where / "moved" if base == "rloo" else None) as steps:
        script.main(parse_args(script.Args, script.PRESETS, flags.split()))
    distributed.prepare = prepare
    return steps


def theirs(row: Row) -> Steps:
    """`train` of the trainer."""
    import trl
    from datasets import load_dataset

    where, rl, respond = Path(row.model), "rloo" in row.script, sampler()
    settings = dict(output_dir="trl", use_cpu=True, bf16=False, report_to="none", max_grad_norm=0)
    settings |= dict(per_device_train_batch_size=P, max_steps=1, save_strategy="no")
    columns = dict(SFT=["prompt", "completion"], RLOO=["prompt"], GRPO=["prompt"])
    names = columns.get(row.trainer, ["prompt", "chosen", "rejected"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(where / "policy", pad_token="<pad>")
    data = load_dataset("json", data_files="rows.jsonl", split="train").select_columns(names)
    more: dict[str, Any] = dict(train_dataset=data, processing_class=tokenizer)
    model = AutoModelForCausalLM.from_pretrained(where / "policy")
    if rl:
        settings |= dict(per_device_train_batch_size=P * K, max_steps=2, num_iterations=2)
        settings |= dict(num_generations=K, max_completion_length=R, temperature=0.7)
        more["reward_funcs"] = globals()[row.reward]
    elif row.trainer == "DPO":
        more["ref_model"] = AutoModelForCausalLM.from_pretrained(where / "reference")
    elif row.trainer == "Reward":
        model = Classifier.from_pretrained(where / "classifier")
    args = getattr(trl, f"{row.trainer}Config")(**settings | row.settings)
    trainer = getattr(trl, f"{row.trainer}Trainer")(model, args=args, **more)

    def sample(prompts: list[list[int]], *_: Any) -> Any:
        found = [respond(prompt) for prompt in prompts]
        return (found, None) if row.trainer == "GRPO" else found

    if rl:
        trainer._generate_single_turn = sample
    if rl and trainer.ref_model:
        load(trainer.ref_model, where / "reference")
    with recorded([trainer.model], where / "moved" if rl else None) as steps:
        trainer.train()
    return steps


# ---------------------------------------------------------------------------------------- the table


def compare(row: Row, mine: Steps, other: Steps) -> dict[str, Any]:
    """A row of the table: losses of the last step, largest differences of all steps."""
    loss_gap = largest = gradient_gap = 0.0
    for here, there in zip(mine, other, strict=True):
        for name, value in there.items():
            gap = (here[name] - value).abs().max().item()
            if name == "loss":
                loss_gap = max(loss_gap, gap)
            else:
                gradient_gap = max(gradient_gap, gap)
                largest = max(largest, value.abs().max().item())
    found = {"algorithm": row.name, "script": row.script.replace(" ", " + ")}
    found["trainer"] = row.trainer
    found["settings"] = ", ".join(f"{name}={value}" for name, value in row.settings.items())
    numbers = {"loss": mine[-1]["loss"].item(), "TRL": other[-1]["loss"].item()}
    numbers |= {"loss difference": loss_gap, "largest gradient": largest}
    numbers["gradient difference"] = gradient_gap
    for name, number in numbers.items():
        found[name] = f"{number:.6g}"
    return found


def main(out: Path) -> None:
    """Run the two sides, each in a process of its own; print and write the table."""
    sys.path.insert(0, str(HERE.parent))
    from benchmarks.speed import TRL, peer_python
    from tools.curves import provenance

    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        for side, python in dict(ours=sys.executable, theirs=peer_python("trl-rloo")).items():
            command = [python, str(HERE / "against_trl.py"), "--side", side]
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env)
            if done.returncode:
                raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
        mine, other = (torch.load(f"{folder}/{side}.pt") for side in ("ours", "theirs"))
    about = dict(versions=f"{TRL['trl-rloo']}, torch {torch.__version__}") | provenance()
    table = [compare(row, mine[row.name], other[row.name]) | about for row in ROWS]
    with open(out, "w", newline="") as file:
        writer = csv.DictWriter(file, table[0])
        writer.writeheader()
        writer.writerows(table)
    for found in table:
        print("|", *(f"{value} |" for name, value in found.items() if name not in about))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "results/against_trl.csv")
    parser.add_argument("--side", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        sys.path[:0] = [str(HERE.parent), "."]
        run = globals()[given.side]
        torch.save({row.name: run(row) for row in ROWS}, f"{given.side}.pt")
    else:
        main(given.out)
