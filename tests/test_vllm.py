"""diffs/vllm.diff and a stand-in for vLLM, which answers as a real server did (vllm_server.json)."""

import json
import math
import os
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest
import tiny
import torch
from safetensors.torch import load_file
from test_diffs import ROOT, apply
from transformers import AutoModelForCausalLM

from machinery import cli
from utils import TokenIds

RECORDED = json.loads(Path(__file__).with_name("vllm_server.json").read_text())["exchanges"]
INFO, RELOADED, FIXED, ENDED, TOO_LONG, NO_FOLDER, DEAD = RECORDED


class StandIn(BaseHTTPRequestHandler):
    """Answers what the real server did, for tokens and weights of its own; `change` spoils it.

    With `tied`, it keeps the head of the first weights, as vLLM does.
    """

    lm, tied, log_message = None, False, lambda *words: None

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "null")
        said = next(x for x in RECORDED if x["path"] == self.path)
        assert (body and body.keys()) == (said["body"] and said["body"].keys())
        self.asked.append(body)
        answer = json.loads(json.dumps(said["answer"]))
        if said is RELOADED:
            self.reload(Path(body["kwargs"]["weights_path"]))
        if said is FIXED and self.lm:
            answer["choices"] = [self.sample(body, i) for i in range(body["n"])]
        status, answer = self.change(body, answer) or (said["status"], answer)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer, separators=(",", ":")).encode())

    do_GET = do_POST

    def reload(self, folder):
        old, lm = self.lm, AutoModelForCausalLM.from_pretrained(folder)
        head = load_file(folder / "lm_head.safetensors")["lm_head.weight"]
        head = old.lm_head.weight if old and self.tied else torch.nn.Parameter(head)
        lm.lm_head.weight = head  # not that of the embeddings any more
        type(self).lm = lm

    @torch.no_grad()
    def sample(self, body, number):
        tokens, logprobs = [], []
        generator = torch.Generator().manual_seed(body["seed"] + number)
        while len(tokens) < body["max_tokens"] and tokens[-1:] != body["stop_token_ids"] or not tokens:
            logits = self.lm(torch.tensor([body["prompt"] + tokens])).logits[0, -1]
            logps = (logits / body["temperature"]).log_softmax(dim=0)
            tokens.append(int(torch.multinomial(logps.exp(), 1, generator=generator)))
            logprobs.append(float(logps[tokens[-1]]))
        return FIXED["answer"]["choices"][0] | dict(token_ids=tokens, logprobs=dict(token_logprobs=logprobs))


@pytest.fixture
def serve():
    """A function that starts a stand-in; it returns its url and what it is asked."""
    servers = []

    def serve(change=lambda body, answer: None, **state):
        asked = []
        kind = type("Kind", (StandIn,), dict(asked=asked, change=staticmethod(change)) | state)
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), kind))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}", asked

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="session")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("patched") / "mine.py"
    path.write_text((ROOT / "rloo.py").read_text())
    assert apply(path, "vllm")
    return tiny.load_script(path)


def settings(script, url, **changes):
    """Six updates of 4 queries with 2 responses each, and 4 evaluations of 4 queries."""
    values = vars(conftest.settings("rloo", **changes)) | dict(vllm_url=url, run_name="run")
    return script.Args(**values)


@pytest.mark.parametrize(("exchange", "ends"), [(FIXED, False), (ENDED, True)])
def test_what_the_real_server_said_is_what_is_sampled(exchange, ends, script, serve):
    """It sampled the end token, which ends a response only in EOS tasks."""
    url, asked = serve(lambda body, answer: (200, exchange["answer"]))
    task = tiny.make_task(response_length=6, eos_task=ends, truncate_after=0)
    args = tiny.make_args(task, script, rloo_k=2, vllm_url=url)
    contexts = torch.tensor([[tiny.WORDS, 17, 30, 22]]).repeat(2, 1)
    inputs = contexts, TokenIds(tiny.WORDS, 0, [], []), args, torch.Generator()
    responses, logprobs = script.sample_in_batches(*inputs)
    (body,), own = asked, ("seed", "cache_salt", "temperature")
    assert {k: x for k, x in body.items() if k not in own}.items() <= exchange["body"].items()
    for i, choice in enumerate(exchange["answer"]["choices"]):
        tokens = choice["token_ids"]
        assert 0 in tokens and (tokens.index(0) + 1 == len(tokens)) == ends
        assert responses[i].tolist() == tokens + [tiny.WORDS] * (responses.shape[1] - len(tokens))
        found = logprobs[i, : len(tokens)].tolist()
        assert found == pytest.approx(choice["logprobs"]["token_logprobs"])


@pytest.mark.parametrize("eos", [False, True])
def test_L6_the_server_has_the_weights_of_each_update_and_samples_k_times(eos, script, serve, home):
    """The head is tied. The same flags give the same run, though not another seed."""
    lm = AutoModelForCausalLM.from_pretrained("task/model")
    lm.lm_head.weight.data[lm.config.eos_token_id] *= 10 * eos or 1  # some responses end
    lm.save_pretrained("task/model")
    form = dict(truncate_token="<|endoftext|>", truncate_after=0, eos_task=True) if eos else {}
    (url, asked), (other, _) = serve(), serve()
    script.main(settings(script, url, **form))
    lines = conftest.read_metrics("run")
    assert len(lines) == 6 and lines[-1]["objective/kl"] > 0
    for line in lines:
        assert line["objective/sampling_gap"] < 1e-5
        assert line["ppo/val/weight_truncated"] == 0
        assert (line["objective/response_length"] < 5) == eos
    sampled = [x for x in asked if x and "seed" in x]
    assert [x["n"] for x in sampled] == 3 * (4 * [1] + 8 * [2]) + 4 * [1]
    assert len({x["seed"] for x in sampled if x["n"] == 2}) == 24
    script.main(replace(settings(script, other, **form), run_name="again"))
    assert conftest.without_times(lines) == conftest.without_times(conftest.read_metrics("again"))


def test_a_server_that_keeps_the_old_head_ends_the_run(script, serve, home):
    url, asked = serve(tied=True)
    tiny.refuses(lambda: script.main(settings(script, url)), url, "objective/sampling_gap grew")
    assert sum("method" in (x or ()) for x in asked) > 2  # it begins with the right head


def cut_off(body, answer):
    answer["choices"][-1]["token_ids"].pop()
    answer["choices"][-1]["logprobs"]["token_logprobs"].pop()


FAILURES = {
    "400": lambda *x: (TOO_LONG["status"], TOO_LONG["answer"]),
    "dead": lambda *x: (DEAD["status"], DEAD["answer"]),
    "gone": lambda *x: 1 / 0,  # the connection ends without an answer
    "one too few": lambda body, answer: answer["choices"].pop() and None,
    "cut off": cut_off,
    "no folder": lambda *x: (NO_FOLDER["status"], NO_FOLDER["answer"]),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_server_that_fails_ends_the_run_in_one_sentence_and_nothing_is_lost(
    failure, script, serve, home
):
    """In the third update. The run resumes with another server."""
    reloads = 0

    def change(body, answer):
        nonlocal reloads
        is_reload = "method" in (body or ())
        reloads += is_reload
        if reloads > 3 and is_reload == (failure == "no folder"):  # the first: an evaluation
            return FAILURES[failure](body, answer)

    (url, _), (other, _) = serve(change), serve()
    args = settings(script, url, eval_every=50)
    tiny.refuses(lambda: script.main(args), f"--vllm_url {url}")
    run = cli.rescues[-1].__self__
    assert run.rescue().startswith("2 of 6 updates are saved")
    run.close()
    (saved,) = Path("runs/run/checkpoints").iterdir()
    script.main(replace(args, run_name=None, resume=str(saved), vllm_url=other))
    assert [line["step"] for line in conftest.read_metrics("run")] == [*range(6)]
