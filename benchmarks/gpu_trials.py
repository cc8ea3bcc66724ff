"""Ways to compute one thing on a GPU, compared: seven minutes; on a CPU with small sizes.

    python benchmarks/gpu_trials.py                  # gpu_trials.csv
    python benchmarks/gpu_trials.py --rows attention

Each row is a process (gpu.py). Milliseconds are medians of ten calls after two. Each way is also
compared with the first one: the norm of its difference, relative. A way that fails says why.
"""

import csv
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import transformers  # noqa: E402
import tyro  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks import gpu, speed  # noqa: E402
from machinery import decoding, models, unpadding  # noqa: E402

COLUMNS = ("what", "way", "ms", "difference", "peak GB", "result", "device", "versions", "date")
BLOCKS = {  # kind → width, heads, groups of heads that share keys, inner width, tokens of a sequence
    "gpt2": (768, 12, 12, 3072, 44),
    "gpt_neox": (2048, 8, 8, 8192, 360),
    "llama": (576, 9, 3, 1536, 44),
}
Way = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Args:
    """Ways to compute one thing on a GPU."""

    rows: str = ""
    """only rows whose name matches this regular expression"""
    out: Path = gpu.HERE / "results/gpu_trials.csv"
    """the file"""


def device() -> str:
    """The GPU or the CPU. As in a bf16 run, fp32 products may use TF32."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)
    return "cuda" if torch.cuda.is_available() else "cpu"


def wait() -> None:
    """Wait for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def milliseconds(function: Callable, repeats: int = 10) -> float:
    """Median milliseconds of a call, after two calls."""
    times = []
    for _ in range(repeats + 2 if torch.cuda.is_available() else 3):
        wait()
        begin = time.perf_counter()
        function()
        wait()
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times[2:])


def compare(ways: dict[str, Way]) -> dict[str, Any]:
    """For each way its milliseconds, difference from the first and memory, or its error."""
    found, first = {}, None
    for name, way in ways.items():
        try:
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            results = [x.detach().double().cpu() for x in way()]
            first = first or results
            gaps = [((x - y).norm() / y.norm()).item() for x, y in zip(results, first, strict=True)]
            found[name] = {"result": "ok", "difference": max(gaps), "ms": milliseconds(way)}
            if torch.cuda.is_available():
                found[name]["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
        except Exception as error:  # the other ways still count
            found[name] = {"result": f"{type(error).__name__}: {error}"[:200]}
    return found


def value_head(small: bool) -> dict[str, Any]:
    """A head with one output, and its gradients."""
    where, n, width = device(), 64 if small else 12_288, 768
    hidden = torch.randn(n, width, device=where, requires_grad=True)
    weight = torch.randn(1, width, device=where, requires_grad=True)

    def way(function: Callable) -> Way:
        return lambda: list(torch.autograd.grad(function().square().sum(), (hidden, weight)))

    return compare(
        {
            "sum": way(lambda: (hidden * weight).sum(dim=-1)),
            "matrix-vector product": way(lambda: F.linear(hidden, weight)),
            "eight columns": way(lambda: F.linear(hidden, F.pad(weight, (0, 0, 0, 7)))[:, 0]),
        }
    )


def one_token(small: bool, *shape: int) -> dict[str, Any]:
    """Attention of one new token of each sequence to a cache, half of which is padding at most."""
    where = device()
    b, heads, groups, columns, features = (4, 9, 3, 16, 64) if small else shape
    q = torch.randn(b, heads, 1, features, device=where, dtype=torch.bfloat16)
    k, v = torch.randn(2, b, groups, columns, features, device=where, dtype=torch.bfloat16)
    first = torch.randint(columns // 2, (b, 1, 1, 1), device=where)
    mask, scale = torch.arange(columns, device=where) >= first, features**-0.5

    def sdpa() -> list[Tensor]:
        keys, values = (x.repeat_interleave(heads // groups, dim=1) for x in (k, v))
        return [F.scaled_dot_product_attention(q, keys, values, mask, scale=scale).transpose(1, 2)]

    def products() -> list[Tensor]:
        with torch.no_grad(), torch.autocast(where, torch.bfloat16):
            return [unpadding.attend_once(q, k, v, mask, scale)]

    def read() -> list[Tensor]:
        return [sdpa()[0] if small else q.transpose(1, 2) + k.sum() * 0 + v.sum() * 0]

    return compare({"sdpa": sdpa, "products": products, "keys and values read once": read})


def logprobs(logits: Tensor, tokens: Tensor) -> list[Tensor]:
    """As in ppo.py: log-probabilities, and entropies without a gradient."""
    log_softmax = (logits / 0.7).log_softmax(dim=-1)
    found = log_softmax.gather(1, tokens[:, None]).squeeze(1)
    with torch.no_grad():
        return [found, -(log_softmax.exp() * log_softmax).sum(dim=-1)]


class Bf16Head(torch.autograd.Function):
    """A head's product with bf16 factors, fp32 sums and an fp32 result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x, w = x.bfloat16(), F.pad(weight, (0, 0, 0, -len(weight) % 8)).bfloat16()
        ctx.save_for_backward(x, w)
        if x.is_cuda:
            return torch.mm(x, w.t(), out_dtype=torch.float32)[:, : len(weight)]
        return (x.float() @ w.float().t())[:, : len(weight)]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        padded = F.pad(grad, (0, len(w) - grad.shape[1])).bfloat16()
        return (padded @ w).float(), (padded.t() @ x)[: grad.shape[1]].float()


def log_probabilities(small: bool) -> dict[str, Any]:
    """From hidden states to log-probabilities, entropies and gradients."""
    where = device()
    n, words, width = (16, 501, 32) if small else (12_288, 50_257, 768)
    head = models.Float32Linear(width, words, bias=False, device=where)
    hidden = torch.randn(n, width, device=where, requires_grad=True)
    tokens = torch.randint(words, (n,), device=where)
    fused = torch.compile(logprobs, dynamic=True)

    def way(product: Callable, function: Callable) -> Way:
        def run() -> list[Tensor]:
            found, entropies = function(product(), tokens)
            grads = torch.autograd.grad(found.square().sum(), (hidden, head.weight))
            return [found, entropies, *grads]

        return run

    def without() -> list[Tensor]:  # gradients: its bits have to be those of "compiled"
        with torch.no_grad():
            found = fused(head(hidden), tokens)
        same = torch.equal(found[0], fused(head(hidden), tokens)[0].detach())
        return [*found, *way(lambda: head(hidden), fused)()[2:]] if same else []

    return compare(
        {
            "plain": way(lambda: head(hidden), logprobs),
            "compiled": way(lambda: head(hidden), fused),
            "compiled, equal bits without gradients": without,
            "bf16 product": way(lambda: Bf16Head.apply(hidden, head.weight), logprobs),
            "bf16 product, compiled": way(lambda: Bf16Head.apply(hidden, head.weight), fused),
        }
    )


def block(small: bool, kind: str) -> dict[str, Any]:
    """A transformer block on a flat batch, forward and backward."""
    where = device()
    width, heads, groups, inner, length = (32, 4, 2, 64, 8) if small else BLOCKS[kind]
    form = dict(vocab_size=100, num_hidden_layers=1, hidden_size=width, num_attention_heads=heads)
    form |= dict(num_key_value_heads=groups, intermediate_size=inner)
    if kind == "gpt2":
        form = dict(vocab_size=100, n_layer=1, n_embd=width, n_head=heads)
    config = models.disable_dropout(transformers.AutoConfig.for_model(kind, **form))
    lm = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(where)
    models.choose_kernels(lm)
    unpadding.set_unpadding(lm.base_model, length)
    (part,) = (x for x in lm.modules() if type(x).__name__ in lm._no_split_modules)
    weights = [*part.parameters()]
    n = 3 if small else 22_528 // length
    hidden = torch.randn(1, n * length, width, device=where, requires_grad=True)
    bounds = torch.arange(0, n * length + 1, length, device=where).int()
    inputs: dict[str, Any] = dict(attention_mask=torch.ones(1, 1, 1, 1, device=where).bool())
    inputs["plan"] = [length] * n, [length] * n, [], (bounds, bounds, length, length), None
    if kind != "gpt2":
        positions = torch.arange(length, device=where).repeat(n)[None]
        inputs["position_embeddings"] = lm.base_model.rotary_emb(hidden, positions)

    def forward() -> Tensor:
        with torch.autocast(where, torch.bfloat16):
            out = part(hidden, use_cache=False, **inputs)
        return out if isinstance(out, Tensor) else out[0]

    def train() -> list[Tensor]:
        out = forward()
        return [out, *torch.autograd.grad(out.square().sum(), [hidden, *weights])]

    @torch.no_grad()
    def score() -> list[Tensor]:
        return [forward()]

    found = compare({"eager": train}) | compare({"eager, forward": score})
    if small:
        return found  # lists of lengths, as on a CPU, are no graph
    begin = time.perf_counter()
    part.compile(dynamic=True)
    same = torch.equal(train()[0].detach(), score()[0])
    took = (
        f"ok: compiled in {time.perf_counter() - begin:.0f} s, equal bits without gradients: {same}"
    )
    compiled = compare({"compiled": train}) | compare({"compiled, forward": score})
    compiled["compiled"]["result"] = took
    return found | compiled


def sampling(small: bool, work: speed.Work, folder: Path) -> dict[str, Any]:
    """Parts of sampling a batch; `host`: until the call returns."""
    import tiny

    from machinery import distributed
    from utils import sample_token

    gpu.make(work, folder)
    where = distributed.start(tiny.make_args()).device
    words, n = work.config["vocab_size"], min(work.episodes, 512)
    lm = models.load_lm(f"{folder}/policy").to(where).eval()
    decoder = decoding.Decoder(lm, work.response_length)
    lengths = speed.query_lengths(n, work)
    contexts = tiny.make_contexts(lengths, work.query_length, vocab=words).to(where)
    uniform = torch.rand(n, device=where, dtype=torch.float64)
    times: dict[str, list[float]] = {}

    def timed(name: str, function: Callable) -> Any:
        wait()
        begin = time.perf_counter()
        out = function()
        times.setdefault(f"{name}, host", []).append(1000 * (time.perf_counter() - begin))
        wait()
        times.setdefault(name, []).append(1000 * (time.perf_counter() - begin))
        return out

    with torch.no_grad(), torch.autocast(where.type, torch.bfloat16):
        for _ in range(4):
            unpadding.set_unpadding(lm.base_model, 0)
            timed("prompts with padding", decoder.start(contexts, contexts != words).next_logits)
            unpadding.set_unpadding(lm.base_model, work.query_length)
            batch = decoder.start(contexts, contexts != words)
            logits = timed("prompts", batch.next_logits)
            for _ in range(work.response_length - 1):
                batch.append(timed("a token", lambda x=logits: sample_token(x / 0.7, uniform)))
                logits = timed("step", batch.next_logits)
    medians = {name: statistics.median(x[len(x) // 2 :]) for name, x in times.items()}
    return {name: {"result": "ok", "ms": x} for name, x in medians.items()}


def plan(small: bool, folder: Path) -> Iterator[tuple[Any, ...]]:
    """The rows: a name, its seconds, a function, its arguments."""
    yield "value head", 30, value_head
    shapes = {"GPT-2": (512, 12, 12, 88, 64), "Pythia 1B": (64, 8, 8, 576, 256)}
    shapes |= {"SmolLM2": (512, 9, 3, 88, 64), "8B": (128, 32, 8, 2048, 128)}
    for name, shape in shapes.items():
        yield f"attention of one token, {name}", 20, one_token, *shape
    yield "log-probabilities", 90, log_probabilities
    for kind in BLOCKS:
        yield f"block of {kind}", 60, block, kind
    yield "sampling", 40, sampling, gpu.SMALL if small else gpu.GPT2, folder / "gpt2"


def main(args: Args) -> None:
    """Run row by row; print and write each."""
    with tempfile.TemporaryDirectory() as name, open(args.out, "w") as file:
        log = Path(name, "log")
        found = gpu.alone(60, log, gpu.device_name)["result"]
        if "forked" in found:  # importing used the GPU
            gpu.start_method = "spawn"
            found = gpu.alone(60, log, gpu.device_name)["result"]
        about = {"device": found or speed.processor(), "versions": gpu.contestants.versions()}
        about["date"] = time.strftime("%Y-%m-%d")
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for what, seconds, function, *rest in plan(not found, Path(name)):
            if not re.search(args.rows, what):
                continue
            limit = seconds if found else 300
            ways = gpu.alone(limit, log, function, not found, *rest)
            if "result" in ways:  # the process failed
                ways = {"": ways}
            for way, numbers in ways.items():
                row = {"what": what, "way": way, **numbers, **about}
                row = {k: f"{v:.3g}" if isinstance(v, float) else v for k, v in row.items()}
                writer.writerow(row)
                print(*(f"{row.get(column, '')}" for column in COLUMNS[:-3]), sep="  ", flush=True)
            file.flush()


if __name__ == "__main__":
    main(tyro.cli(Args))
