"""A stand-in for a vLLM server: it answers as the real one in vllm_server.json did."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

RECORDED = json.loads(Path(__file__).with_suffix(".json").read_text())["exchanges"]
INFO, RELOADED, FIXED, ENDED, TOO_LONG, NO_FOLDER, DEAD = RECORDED
FAILURES = {  # of a stand-in, by what they do with its answer
    "400": lambda answer: (TOO_LONG["status"], TOO_LONG["answer"]),
    "no folder": lambda answer: (NO_FOLDER["status"], NO_FOLDER["answer"]),
    "dead": lambda answer: (DEAD["status"], DEAD["answer"]),
    "gone": lambda answer: 1 / 0,  # the connection ends without an answer
    "left out": lambda answer: answer["choices"].pop() and None,
    "cut off": lambda answer: answer["choices"][1]["token_ids"].pop() and None,
}


class StandIn(BaseHTTPRequestHandler):
    """Samples from the weights that it was given last; `change(body, answer)` makes it fail. As the
    real one, it keeps a tied head that is not in the files; with `stale`, one that is, too."""

    lm = None
    stale = False
    log_message = lambda *words: None

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        self.asked.append(body)
        said = next(x for x in RECORDED if x["path"] == self.path)
        assert body.keys() <= (said["body"] or {}).keys()
        status = said["status"]
        answer = json.loads(json.dumps(said["answer"]))
        if said is RELOADED:
            self.reload(Path(body["kwargs"]["weights_path"]))
        if said is FIXED and self.lm:
            answer["choices"] = [self.sample(body, number) for number in range(body["n"])]
        status, answer = self.change(body, answer) or (status, answer)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    do_GET = do_POST

    def reload(self, folder):
        old = self.lm
        lm = AutoModelForCausalLM.from_pretrained(folder)
        head = folder / "lm_head.safetensors"
        is_tied = lm.config.tie_word_embeddings
        if self.stale and old or is_tied and not head.exists():
            lm.lm_head.weight = (old or lm).lm_head.weight
        elif is_tied:
            lm.lm_head.weight = torch.nn.Parameter(load_file(head)["lm_head.weight"])
        type(self).lm = lm

    @torch.no_grad()
    def sample(self, body, number):
        tokens = []
        logprobs = []
        stop = body["stop_token_ids"]
        generator = torch.Generator().manual_seed(body["seed"] + number)
        while len(tokens) < body["max_tokens"] and (not tokens or tokens[-1] not in stop):
            logits = self.lm(torch.tensor([body["prompt"] + tokens])).logits[0, -1]
            logps = (logits / body["temperature"]).log_softmax(dim=0)
            tokens.append(int(torch.multinomial(logps.exp(), 1, generator=generator)))
            logprobs.append(float(logps[tokens[-1]]))
        changes = dict(token_ids=tokens, logprobs=dict(token_logprobs=logprobs))
        return FIXED["answer"]["choices"][0] | changes


def serve(change=lambda body, answer: None, **state):
    """Start a stand-in. Returns its url and the list of what it is asked."""
    state |= dict(asked=[], change=staticmethod(change))
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (StandIn,), state))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}", state["asked"]
