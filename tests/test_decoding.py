"""machinery/decoding.py: logits with a static cache, and samples, are those of the plain model (G4)."""

from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import tiny
import torch
from test_device import READS, aten
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map

from machinery import decoding, models, unpadding
from utils import truncate

OTHERS = dict.fromkeys(["gemma2", "opt", "gptj"], {})
OTHERS |= {"gpt_neo": dict(window_size=13)}  # local attention, as wide as context and response
OTHERS |= {"mistral": dict(sliding_window=6)}  # narrower than the contexts
OTHERS |= dict.fromkeys(tiny.HYBRIDS, {})
KINDS = (*((kind, {}) for kind in tiny.KINDS), *OTHERS.items())
KINDS += (("gemma2", dict(sliding_window=20)),)  # in one of two layers; full after the first block
LENGTH = 5  # tokens of a response
CONTEXTS = tiny.make_contexts([8, 3, 5, 8, 1], 11).repeat(3, 1)  # 3 columns are pads


def next_logits(lm, tokens: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Logits [B, V] after sequences [B, T] by the plain model, without a cache."""
    mask = tokens != tiny.PAD
    inputs = dict(attention_mask=mask, position_ids=position_ids, use_cache=False)
    return lm(tokens.masked_fill(~mask, 0), **inputs).logits[:, -1].float()


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind, settings", KINDS)
def test_G4_decoder_gives_the_logits_of_the_plain_model(kind, settings, bf16, monkeypatch):
    """With any ids as padding, prompts that repeat, a cache that grows."""
    monkeypatch.setattr(decoding, "BLOCK", 3)
    lm, read = tiny.make_lm(kind, **settings), []
    tokens, mask = CONTEXTS, CONTEXTS != tiny.PAD
    responses = tiny.make_responses(15, LENGTH)
    hook = lambda module, args: read.append(tuple(args[0].shape))  # noqa: E731
    pads = torch.randint(-1, 999, tokens.shape)
    batch = decoding.Decoder(lm, LENGTH).start(tokens.where(mask, pads), mask)
    for step in range(LENGTH):
        mask = tokens != tiny.PAD
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            expected = next_logits(lm, tokens, mask.cumsum(dim=1) - mask.long())
            handle = lm.get_input_embeddings().register_forward_pre_hook(hook)
            logits = batch.next_logits()
            handle.remove()
        assert logits.shape == (15, tiny.VOCAB) and logits.dtype == torch.float32
        error = (logits - expected).norm(dim=1) / expected.norm(dim=1)
        limit = 0.1 if kind in tiny.HYBRIDS else 0.03  # the plain hybrid itself is off by as much
        assert error.max() < (limit if bf16 else 1e-5), step
        tokens = torch.cat([tokens, responses[:, step : step + 1]], dim=1)
        batch.append(responses[:, step])
    first = (1, 25) if lm.base_model.max_unpadded else (5, 8)  # distinct prompts, real tokens only
    assert read == [first] + [(15, 1)] * (LENGTH - 1)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama", "opt", "deepseek_v3"])
def test_G4_attention_as_products_gives_the_logits_of_the_plain_model(kind, bf16, monkeypatch):
    """Of one token, as on a GPU. Llama's heads share keys, DeepSeek's values are narrower."""
    attend = Mock(side_effect=unpadding.attend_once)
    monkeypatch.setattr(unpadding, "attend_once", attend)
    monkeypatch.setattr(unpadding, "ONE_TOKEN", {"cpu"})
    test_G4_decoder_gives_the_logits_of_the_plain_model(kind, {}, bf16, monkeypatch)
    assert attend.call_count == tiny.make_lm(kind).config.num_hidden_layers * (LENGTH - 1)


def ending_soon(decoder, calls: list):
    """`decoder` with token 0, at which responses of EOS tasks end, made likely. Notes its calls."""

    def start(*inputs: torch.Tensor):
        batch = decoder.start(*inputs)
        compute = batch.next_logits

        def next_logits() -> torch.Tensor:
            logits = compute()
            calls.append((len(batch.rows), batch.length))
            logits[:, 0] = logits.logsumexp(dim=-1) - 2.5  # about 0.05
            return logits

        batch.next_logits = next_logits
        return batch

    return SimpleNamespace(start=start)


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_G4_responses_that_have_ended_leave_the_batch(number, monkeypatch):
    """Up to their ends all are the same to the bit as when none leaves, whatever the batch size."""
    (kind, settings), size, bf16 = KINDS[number], (1, 17, 40)[number % 3], number % 2 == 1
    monkeypatch.setattr(decoding, "BLOCK", 16)
    lm, calls = tiny.make_lm(kind, **settings), []
    decoder = ending_soon(decoding.Decoder(lm, 50), calls)
    inputs = tiny.make_contexts([8, 3, 5, 8, 1] * 8, 8)[:size], tiny.uniform(50, size)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        full = tiny.sample(decoder, *inputs)
        assert [rows for rows, _ in calls] == [size] * 50
        for after in (0, 4):
            calls.clear()
            found = tiny.sample(decoder, *inputs, eos_task=True, truncate_after=after)
            expected, ended = truncate(full, [0], after, tiny.PAD)
            assert torch.equal(truncate(found, [0], after, tiny.PAD)[0], expected)
            last = (expected != tiny.PAD).sum(dim=1)
            sizes = [rows for rows, _ in calls]
            for t, rows in enumerate(sizes):  # checked after every 16 tokens
                left = int((last > t // 16 * 16).sum() + (~ended & (last == t // 16 * 16)).sum())
                assert rows == min(max(left, decoding.MIN_ROWS), size)
            assert len(sizes) == min(-(-int(last.max()) // 16) * 16, 50) or not ended.all()
        assert size < 40 or sizes[-1] < 40


class Graph(TorchDispatchMode):
    """A CUDA graph played on a CPU. Recording computes nothing, and the host may read nothing."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function not in READS, f"{function} waits for the GPU"
        if function is torch.ops.aten.lift_fresh.default and args[0].dim():
            raise RuntimeError("a copy from the host while a graph is recorded")
        kwargs = kwargs or {}
        for argument, x in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.before.append((x, x.clone()))
        result = function(*args, **kwargs)
        self.calls.append((function, args, kwargs, result))
        return result

    def replay(self):
        for function, args, kwargs, result in self.calls:
            with torch.autocast("cpu", enabled=False):  # its casts are recorded
                again = function(*args, **kwargs)
            if all(x.alias_info is None for x in function._schema.returns):  # not a view
                tree_map(lambda old, new: old.copy_(new), result, again)


@contextmanager
def recording(graph, pool, stream, mode):
    """`torch.cuda.graph`."""
    graph.calls, graph.before = [], []
    try:
        with graph:
            yield
    finally:
        for x, old in reversed(graph.before):
            x.copy_(old)


@pytest.fixture
def fake_graphs(monkeypatch):
    """CUDA graphs, streams and pools on a CPU. Returns the graphs that were made."""
    made, stream = [], SimpleNamespace()
    recorded = lambda: made and made[-1] in _get_current_dispatch_mode_stack()  # noqa: E731
    fakes = dict(CUDAGraph=lambda: made.append(Graph()) or made[-1], graph=recording)
    fakes |= dict(graph_pool_handle=lambda: (0, 1), mem_get_info=lambda: (0, 2**30))
    fakes |= dict(Stream=lambda: stream, is_current_stream_capturing=lambda: bool(recorded()))
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return made


def with_graphs(lm) -> decoding.Decoder:
    on_gpu = dict(device=torch.device("cuda"), modules=lm.modules, config=lm.config)
    decoder = decoding.Decoder(SimpleNamespace(**on_gpu), LENGTH, True)
    decoder.lm = lm
    return decoder


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "llama", "qwen2", "deepseek_v32"])
def test_G4_replayed_steps_sample_the_same_tokens(kind, precision, fake_graphs):
    """One graph for each shape, also in later batches; it reads the weights of today, in bf16."""
    lm, uniform = tiny.make_lm(kind), tiny.uniform(LENGTH, 5)
    lm.get_output_embeddings().__class__ = models.Float32Linear  # as `load_lm` does
    decoders = decoding.Decoder(lm, LENGTH), with_graphs(lm)
    for graphs, width in enumerate((11, 6, 11, 11), 1):
        contexts = tiny.make_contexts([5, 3, 5, 1, width], width)
        if width == 11 and graphs == 4:  # as after moving to the CPU and back
            lm.get_output_embeddings().weight.data = lm.get_output_embeddings().weight.clone()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            plain, replayed = (tiny.sample(x, contexts, uniform) for x in decoders)
        assert torch.equal(plain, replayed) and len(fake_graphs) == min(graphs, 2) + (graphs == 4)
        casts = [call for call in fake_graphs[-1].calls if call[0] is aten._to_copy.default]
        assert not {id(x) for x in lm.parameters()} & {id(x) for _, args, *_ in casts for x in args}
        with torch.no_grad():
            _ = [weight.mul_(1.1) for weight in lm.parameters()]


def test_graphs_are_recorded_again_if_caches_grow_or_responses_leave(fake_graphs, monkeypatch):
    monkeypatch.setattr(decoding, "BLOCK", 24)
    lm, contexts, samples = tiny.make_lm("llama"), tiny.make_contexts([8, 3, 5, 8, 1] * 16, 8), []
    for decoder in (decoding.Decoder(lm, 50), with_graphs(lm)):
        decoder.response_length, calls = 50, []  # of tests with fewer tokens
        inputs = ending_soon(decoder, calls), contexts, tiny.uniform(50, 80)
        for _ in range(1 + bool(decoder.graphs)):  # the second batch finds its graphs
            samples.append(tiny.sample(*inputs, eos_task=True, truncate_after=0))
            seen = calls.copy()
            calls.clear()
    plain, *others = (truncate(x, [0], 0, tiny.PAD)[0] for x in samples)
    assert all(torch.equal(plain, x) for x in others)
    steps = Counter((rows, -(-length // 24)) for rows, length in seen[1:])
    assert {rows for rows, _ in seen} == {80, 32, 16}  # powers of two
    assert len(fake_graphs) == sum(n > 1 for n in steps.values()) == 4


def test_a_graph_that_cannot_be_recorded_ends_the_run_with_the_flag_that_avoids_it(fake_graphs):
    lm, contexts, uniform = tiny.make_lm(), tiny.make_contexts([5, 3], 8), tiny.uniform(LENGTH, 2)
    hook = lambda *_: 1 / 0 if torch.cuda.is_current_stream_capturing() else None  # noqa: E731
    lm.register_forward_hook(hook)
    sample = lambda: tiny.sample(with_graphs(lm), contexts, uniform)  # noqa: E731
    tiny.refuses(sample, "--no-cuda_graphs", "zero")


def test_a_batch_whose_cache_takes_too_much_memory_has_no_graph(fake_graphs, capsys):
    unpadding.say_once.cache_clear()
    lm, uniform = tiny.make_lm(), tiny.uniform(LENGTH, 4)
    decoder = with_graphs(lm)
    numbers = 2 * 3 * (8 + LENGTH) * lm.config.n_embd  # keys and values of three responses
    decoder.graphs.limit = lm.config.n_layer * (4 * numbers + 8)
    for rows, graphs in ((4, 0), (3, 1), (4, 1)):
        contexts = tiny.make_contexts([5, 3, 8, 8][:rows], 8)
        plain = tiny.sample(decoding.Decoder(lm, LENGTH), contexts, uniform[:, :rows])
        assert torch.equal(plain, tiny.sample(decoder, contexts, uniform[:, :rows]))
        assert len(fake_graphs) == graphs
    assert capsys.readouterr().out.count("lower --rollout_batch_size") == 1


def test_a_larger_batch_moves_the_memory_of_the_graphs(fake_graphs):
    lm = tiny.make_lm()
    decoder = with_graphs(lm)
    for n, width in ((3, 8), (5, 6), (3, 8), (2, 11), (5, 8), (3, 8)):
        contexts = tiny.make_contexts([width, 3, 5, 1, 2][:n], width)
        uniform = tiny.uniform(LENGTH, n)
        plain = tiny.sample(decoding.Decoder(lm, LENGTH), contexts, uniform)
        assert torch.equal(plain, tiny.sample(decoder, contexts, uniform))
        with torch.no_grad():
            _ = [weight.mul_(1.5) for weight in lm.parameters()]
    keys = decoder.graphs.kept["0 keys"]
    assert keys.shape[0] == 5 and keys.shape[2] == 11 + LENGTH


def test_sliding_windows_linear_layers_falcon_shards_and_cpus_have_no_graphs(fake_graphs):
    """Also where the weights of FSDP2 are gathered, as when sft.py samples."""
    for kind in ("mistral", "falcon", "falcon_alibi", "qwen3_5_text", "lfm2", "granitemoehybrid"):
        assert not with_graphs(tiny.make_lm(kind)).graphs
    lm = tiny.make_lm()
    lm.base_model.unshard = lambda: None  # as an FSDPModule
    assert not with_graphs(lm).graphs
    assert not decoding.Decoder(tiny.make_lm(), LENGTH, cuda_graphs=True).graphs


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_G4_generate_samples_what_a_loop_without_a_cache_does(kind):
    lm, tokens = tiny.make_lm(kind), CONTEXTS
    torch.manual_seed(0)
    for _ in range(LENGTH):
        mask = tokens != tiny.PAD
        with torch.no_grad():
            logits = next_logits(lm, tokens, mask.cumsum(dim=1) - mask.long())
        new = torch.multinomial((logits / 0.7).softmax(dim=-1), num_samples=1)
        tokens = torch.cat([tokens, new], dim=1)
    torch.manual_seed(0)
    found = decoding.generate(decoding.Decoder(lm, LENGTH), CONTEXTS, tiny.PAD, 0.7)
    assert torch.equal(found, tokens[:, -LENGTH:])
