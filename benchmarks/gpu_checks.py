"""Checks of the scripts on a GPU: the rows of gpu.py that measure no update.

They also run on a CPU, and then their results begin with `no GPU`.
"""

import importlib
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from accelerate import Accelerator
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks import speed
from machinery import distributed, models
from machinery.unpadding import compute_hidden, set_unpadding

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests/test_golden.py"
TINY = {"sft": dict(num_heldout=6, block_size=10), "train_reward": dict(num_labels=4)}
TINY["train_reward"] |= dict(normalize_samples=8, rollout_batch_size=4)
TINY["ppo"] = dict(total_episodes=4, eval_queries=4, micro_batch_tokens=24)
TINY["rloo"] = TINY["ppo"] | dict(rloo_k=2)


def verdict(good: bool, text: str) -> dict[str, Any]:
    """A result that says whether it is good, and whether a GPU made it."""
    ok = "ok" if torch.cuda.is_available() else "no GPU"
    return {"result": f"{ok if good else 'not ok'}: {text}"}


def load_patched(name: str, base: str = "ppo") -> Any:
    """A script with a patch of diffs/, from then on as the module `base`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(shutil.copy(ROOT / f"{base}.py", folder))
        diff = ROOT / f"diffs/{name}.diff"
        subprocess.run(["patch", "--fuzz=0", "--quiet", path, diff], check=True)
        return tiny.load_script(path)


def probe(*backends: str) -> dict[str, Any]:
    """Masked bf16 attention by the first of these that can: its time, and NaN gradients.

    Every logit is near -120, where cuDNN's gradients of the queries were NaN for widths of 64
    modulo 128 (pytorch#196678).
    """
    device, batch = ("cuda", 64) if torch.cuda.is_available() else ("cpu", 1)
    chosen = set()

    def attend(width: int) -> tuple[float, bool]:
        """Milliseconds of attention and its gradients, and whether these are finite."""
        q, k, v = torch.randn(3, batch, 12, width, 64, device=device, dtype=torch.bfloat16) / 10
        q[..., 0], k[..., 0] = 1, -120 * 8
        mask = torch.full((batch, 1, width, width), torch.finfo(q.dtype).min, device=device)
        inputs, mask = [x.requires_grad_() for x in (q, k, v)], mask.triu(1).to(q.dtype)
        chosen.add(SDPBackend(torch._fused_sdp_choice(*inputs, mask)).name)
        mask.sum().item()  # waits for the GPU
        begin = time.perf_counter()
        out = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=mask)
        out.backward(torch.randn_like(out))
        finite = all(x.grad.isfinite().all().item() for x in inputs)
        return 1000 * (time.perf_counter() - begin), finite

    kernels = [getattr(SDPBackend, f"{name}_ATTENTION", SDPBackend.MATH) for name in backends]
    with sdpa_kernel(kernels, set_priority=True):
        attend(128)
        first, again = [], []
        for width in (100, 150, 201, 233, 249):
            first.append(attend(width)[0])
            again.append(attend(width)[0])
        nans = [width for width in (64, 192, 320, 448, 704) if not attend(width)[1]]
    new, old = statistics.median(first), statistics.median(again)
    text = f"{', '.join(chosen)}, cuDNN {torch.backends.cudnn.version()}, new shape {new:.3g} ms,"
    return verdict(not nans, f"{text} again {old:.3g} ms, widths with NaN gradients: {nans}")


def golden(times: float = 10.0) -> dict[str, Any]:
    """Run the golden tests on the device with larger tolerances: its sums have another order."""

    class Fixtures:
        @pytest.fixture
        def accelerator(self) -> Accelerator:
            return Accelerator()

    def widened(function: Callable, *args: Any, **limits: Any) -> Any:
        return function(*args, **{k: v if k == "msg" else times * v for k, v in limits.items()})

    device, from_numpy = Accelerator().device, torch.from_numpy
    torch.set_default_device(device)
    torch.from_numpy = lambda array: from_numpy(array).to(device)
    torch.testing.assert_close = partial(widened, torch.testing.assert_close)
    pytest.approx = partial(widened, pytest.approx)
    options = ["--noconftest", "-p", "no:cacheprovider", str(GOLDEN)]
    code = pytest.main(options, plugins=[Fixtures()])
    return verdict(code == 0, f"golden tests end with exit code {code}")


def distance(x: torch.Tensor, y: torch.Tensor) -> float:
    """The norm of the difference, relative to y's."""
    return ((x - y).norm() / y.norm()).item()


def unpadding(work: speed.Work, folder: Path) -> dict[str, Any]:
    """Errors of bf16 hidden states and gradients without padding, and of the padded call's.

    In fp32, padding is computed. Each prompt has two responses, and is computed once or twice.
    """
    device, words = distributed.start(tiny.make_args()).device, work.config["vocab_size"]
    length = work.query_length + work.response_length
    lm = models.load_lm(f"{folder}/policy", length=length).to(device).base_model
    prompts = tiny.make_contexts(speed.query_lengths(16, work), work.query_length, vocab=words)
    responses = torch.randint(words, (32, work.response_length))
    tokens = torch.cat([prompts.repeat_interleave(2, dim=0), responses], dim=1).to(device)
    with torch.no_grad():  # new models attend to all tokens alike
        for weight in lm.parameters():
            if weight.dim() > 1:
                weight.mul_(4)
    mask = tokens != words
    inputs = tokens.masked_fill(~mask, 0), mask, mask.cumsum(dim=1) - mask.long()
    longest, found = lm.max_unpadded, []
    calls = [(False, 0, 0), (True, 0, 0), (True, longest, 0), (True, longest, work.query_length)]
    for bf16, columns, prompt_length in calls:
        set_unpadding(lm, columns)
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            hidden = compute_hidden(lm, *inputs, prompt_length)[mask].float()
        noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
        loss = (hidden * noise.to(device)).sum()
        gradients = torch.autograd.grad(loss, [*lm.parameters()])
        found.append((hidden.detach(), torch.cat([x.flatten() for x in gradients])))
    (right_hidden, right_gradient), *others = found
    errors = []
    for states, gradient in others:
        errors.append((distance(states, right_hidden), distance(gradient, right_gradient)))
    limits = 1.5 * errors[0][0], 1.5 * errors[0][1]
    good = longest > 0 and all(x < limits[0] and y < limits[1] for x, y in errors)
    names = "padded", "unpadded", "and prompts shared"
    text = [f"{name} {x:.2g}, {y:.2g}" for name, (x, y) in zip(names, errors, strict=True)]
    return verdict(good, f"errors of hidden states, gradients: {'; '.join(text)}")


def tiny_runs(folder: Path, precision: str, *names: str) -> dict[str, Any]:
    """Run scripts on tiny files."""
    gaps: dict[str, list[float]] = {}
    for name in names or TINY:
        enter(folder / name, precision)
        script, settings = importlib.import_module(name), TINY[name]
        if name in ("ppo", "rloo"):
            gaps[name] = watch_first_step(script)
            settings = settings | dict(reward_model=tiny.write_reward(folder / name / "reward"))
        task = tiny.write_task(folder / name / "task")
        script.main(script.Args(task=task, batch_size=4, run_name=name, **settings))
    return verdict(max(map(max, gaps.values())) == 0, f"first log ratios {gaps}")


def enter(folder: Path, precision: str) -> None:
    """Make a folder the current one; set accelerate's precision."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    os.environ["ACCELERATE_MIXED_PRECISION"] = precision


def watch_first_step(script: Any) -> list[float]:
    """A list that gets max |log ratio| of each micro-batch before the first optimizer step (L6)."""
    name = "ppo_losses" if hasattr(script, "ppo_losses") else "rloo_loss"
    losses, gaps, steps = getattr(script, name), [], []
    register_optimizer_step_post_hook(lambda *_: steps.append(1))

    def spy(logprobs: torch.Tensor, *rest: Any) -> Any:
        if not steps:
            old = rest[1] if name == "ppo_losses" else rest[0]
            gaps.append((logprobs - old.logprobs).abs().max().item())
        return losses(logprobs, *rest)

    setattr(script, name, spy)
    return gaps
