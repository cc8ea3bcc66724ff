"""A stand-in for a vLLM server: it answers as the real one in vllm_server.json did."""

import json
import threading
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

RECORDED = json.loads(Path(__file__).with_suffix(".json").read_text())["exchanges"]
INFO, RELOADED, FIXED, ENDED, TOO_LONG, NO_FOLDER, DEAD = RECORDED
REFUSALS = {"400": TOO_LONG, "no folder": NO_FOLDER, "dead": DEAD}
FAILURES = [*REFUSALS, "gone", "left out", "cut off"]


def fail(failure, answer):
    """What a stand-in does with its answer."""
    if failure in REFUSALS:
        return REFUSALS[failure]["status"], REFUSALS[failure]["answer"]
    if failure == "gone":
        raise ConnectionError  # ends the connection without an answer
    if failure == "left out":
        answer["choices"].pop()
    if failure == "cut off":
        answer["choices"][1]["token_ids"].pop()


class StandIn(BaseHTTPRequestHandler):
    """Samples from the weights that it was given last; `change(body, answer)` makes it fail. As the
    real one, it keeps a tied head that is not in the files; with `stale`, one that is, too."""

    lm = None
    stale = False

    def log_message(self, *words):
        """Print nothing."""

    def do_POST(self):
        length = int(self.headers["Content-Length"] or 0)
        body = json.loads(self.rfile.read(length) or "{}")
        self.asked.append(body)
        said = next(x for x in RECORDED if x["path"] == self.path)
        assert body.keys() <= (said["body"] or {}).keys()
        status = said["status"]
        answer = deepcopy(said["answer"])
        if said is RELOADED:
            self.reload(Path(body["kwargs"]["weights_path"]))
        if said is FIXED and self.lm:
            answer["choices"] = [self.sample(body, number) for number in range(body["n"])]
        changed = self.change(body, answer)
        if changed:
            status, answer = changed
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    do_GET = do_POST

    def reload(self, folder):
        old = self.lm
        lm = AutoModelForCausalLM.from_pretrained(folder)
        head = folder / "lm_head.safetensors"
        is_tied = lm.config.tie_word_embeddings
        if is_tied and head.exists() and not (self.stale and old):
            lm.lm_head.weight = torch.nn.Parameter(load_file(head)["lm_head.weight"])
        elif old and (is_tied or self.stale):
            lm.lm_head.weight = old.lm_head.weight
        type(self).lm = lm

    @torch.no_grad()
    def sample(self, body, number):
        tokens = []
        logprobs = []
        generator = torch.Generator().manual_seed(body["seed"] + number)
        for _ in range(body["max_tokens"]):
            logits = self.lm(torch.tensor([body["prompt"] + tokens])).logits[0, -1]
            logps = (logits / body["temperature"]).log_softmax(dim=0)
            token = torch.multinomial(logps.exp(), 1, generator=generator).item()
            tokens.append(token)
            logprobs.append(logps[token].item())
            if token in body["stop_token_ids"]:
                break
        choice = deepcopy(FIXED["answer"]["choices"][0])
        choice.update(token_ids=tokens, logprobs=dict(token_logprobs=logprobs))
        return choice


def serve(change=lambda body, answer: None, **state):
    """Start a stand-in. Returns its url and the list of what it is asked."""
    asked = []
    state.update(asked=asked, change=staticmethod(change))
    handler = type("Handler", (StandIn,), state)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}", asked
