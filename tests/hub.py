"""A hub on 127.0.0.1 for the real client, with small stand-ins of what the tasks name."""

import hashlib
import http.server
import json
import re
import threading
import time
from urllib.parse import parse_qs, unquote, urlsplit

import datasets
import formats
import tiny
from transformers import AutoTokenizer

API = re.compile(r"/api/(models|datasets)/(.+?)(?:/(revision|tree|paths-info)/([^/]+)/?(.*))?")
FILE = re.compile(r"/(datasets(?=/))?/?(.+?)(/resolve)/([^/]+)/(.+)")
OLD = {"gpt2": "openai-community/gpt2"}  # redirected
CARD = "---\nconfigs:\n- config_name: {0}\n  data_files:\n  - split: train\n    path: {0}/train-*\n---\n"


def describe(path, folder):
    kind = "file" if path.is_file() else "directory"
    name = path.relative_to(folder).as_posix()
    return dict(type=kind, oid="0" * 40, size=path.stat().st_size, path=name)


class Handler(http.server.BaseHTTPRequestHandler):
    """What huggingface_hub 2.4 and datasets 5.2 ask for."""

    protocol_version = "HTTP/1.1"

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = urlsplit(self.path)
        found = API.fullmatch(unquote(url.path)) or FILE.fullmatch(unquote(url.path))
        if not found:
            return self.refuse("RepoNotFound")
        kind, name, what, revision, rest = found.groups()
        time.sleep(self.server.delay)
        self.server.delay = 0.0
        if name in OLD:
            return self.send(307, Location=self.path.replace(f"/{name}", f"/{OLD[name]}", 1))
        commits = sorted((self.server.root / (kind or "models") / name).glob("0*"))
        if not commits:
            return self.refuse("RepoNotFound")
        folder = commits[-1]
        if revision not in (None, "main"):
            folder = folder.with_name(revision)
        if not folder.is_dir():
            return self.refuse("RevisionNotFound")
        path, commit = folder / (rest or ""), dict(X_Repo_Commit=folder.name)
        if what == "/resolve" and path.is_file():
            content = path.read_bytes()
            return self.send(200, content, ETag=hashlib.sha256(content).hexdigest(), **commit)
        if what in (None, "revision"):
            info = dict(id=name, sha=folder.name, siblings=[], tags=[], private=False)
            return self.send(200, json.dumps(info).encode(), **commit)
        paths = path.rglob("*") if "recursive=true" in url.query else path.glob("*")
        if what == "paths-info":
            names = parse_qs(body.decode()).get("paths", json.loads(body)["paths"])
            paths = (folder / name for name in names)
        rows = [describe(path, folder) for path in paths if path.exists()]
        if what == "/resolve" or not rows:
            return self.refuse("EntryNotFound", **commit)
        self.send(200, json.dumps(rows).encode(), **commit)

    do_GET = do_HEAD = do_POST = answer

    def refuse(self, error, **headers):
        self.send(404, X_Error_Code=error, X_Error_Message="none", **headers)

    def send(self, code, body=b"", **headers):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if self.command != "HEAD" else b"")

    def log_message(self, *words):
        pass


class Hub(http.server.ThreadingHTTPServer):
    """Serves `root/<models or datasets>/<owner>/<name>/<commit>/`; `main` is the last commit."""

    def __init__(self, root):
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.delay = 0.0  # seconds before the next answer
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def commit(self, kind, name, number=1):
        folder = self.root / kind / name / f"{number:040x}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def publish(hub):
    """All models and data sets that the tasks name, in their published forms (formats.py)."""
    gpt2 = formats.gpt2_tokenizer()
    folder = hub.commit("models", "openai-community/gpt2")  # no pad; 1,024 positions
    tiny.make_lm(vocab=50257, positions=1024).save_pretrained(folder)
    gpt2.save_pretrained(folder)
    for name, kind, more in (  # more ids than the tokenizer has; a tied head and ChatML
        ("EleutherAI/pythia-1b-deduped", "gpt_neox", dict(positions=2048)),
        ("Qwen/Qwen2.5-0.5B-Instruct", "qwen2", dict(positions=2048, tie_word_embeddings=True)),
    ):
        folder = hub.commit("models", name)
        tiny.make_lm(kind, vocab=tiny.WORDS + 11, **more).save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(tiny.write_tokenizer(folder))
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.save_pretrained(folder)
    labels = formats.oai_labels(gpt2) * 2
    parts = "sentiment/offline_5k descriptiveness/offline_5k cnndm/online_45k tldr/online_45k"
    for part in parts.split():
        folder = hub.commit("datasets", "vwxyzjn/lm-human-preferences")
        formats.write_rows(folder / f"{part}.json", labels)
    books = [{"text": "usually , he would be tearing around the living room , playing ."}]
    for name, part, rows in (
        ("SamuelYang/bookcorpus", "data", books),
        ("abisee/cnn_dailymail", "3.0.0", formats.CNNDM),
        ("dim/tldr_17_50k", "data", formats.TLDR_17),
        ("trl-lib/tldr", "data", formats.TLDR),
        ("trl-lib/tldr-preference", "data", formats.TLDR_PREFERENCE),
        ("openai/gsm8k", "main", formats.GSM8K),
    ):
        folder, first = hub.commit("datasets", name), next(iter(rows[0]))
        rows = [row | {first: f"{i} {row[first]}"} for i in range(96 // len(rows)) for row in rows]
        datasets.Dataset.from_list(rows).to_parquet(folder / part / "train-00000-of-00001.parquet")
        if part != "data":
            (folder / "README.md").write_text(CARD.format(part))
