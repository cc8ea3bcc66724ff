"""A reward model on another machine; here, a server on 127.0.0.1 that is not always well."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests
from urllib3.util import Retry

from tools import remote_reward

QUERIES = ["query 0", "query 1", "query 2", "query 3", "query 4"]
RESPONSES = ["a", "bb", "ccc", "dddd", "eeeee"]


@pytest.fixture
def server(monkeypatch):
    """`statuses` are those of the next answers, `wait` the seconds before each, `seen` the texts."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.seen.append(texts)
            time.sleep(server.wait)
            scores = [len(text) for text in texts["responses"]][server.missing :]
            body = json.dumps({"scores": scores}).encode()
            self.send_response(server.statuses.pop(0))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.statuses, server.wait, server.missing, server.seen = [200] * 3, 0.0, 0, []
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("REWARD_URL", f"http://127.0.0.1:{server.server_port}/score")
    monkeypatch.setattr(remote_reward, "BATCH_SIZE", 2)
    yield server
    server.shutdown()
    server.server_close()


def test_scores_come_in_order_and_in_batches(server):
    assert remote_reward.score(QUERIES, RESPONSES) == [1, 2, 3, 4, 5]
    first, second, third = server.seen
    assert first["responses"] == ["a", "bb"] and second["responses"] == ["ccc", "dddd"]
    assert third == dict(queries=["query 4"], responses=["eeeee"])


def test_a_busy_server_is_asked_again(server):
    server.statuses = [503, 503, 200]
    assert remote_reward.score(QUERIES[:2], RESPONSES[:2]) == [1, 2]
    assert len(server.seen) == 3


def test_a_slow_server_ends_in_a_timeout(server, monkeypatch):
    monkeypatch.setattr(remote_reward, "TIMEOUT", 0.1)
    monkeypatch.setattr(remote_reward, "RETRIES", Retry(total=0))
    server.wait = 1.0
    with pytest.raises(requests.Timeout, match="127.0.0.1"):
        remote_reward.score(QUERIES, RESPONSES)


def test_too_few_numbers_are_an_error(server):
    server.missing = 1
    with pytest.raises(ValueError, match="1 scores of 2 texts"):
        remote_reward.score(QUERIES, RESPONSES)


def test_a_server_that_is_gone_and_an_address_that_is_not_set_are_errors(server, monkeypatch):
    monkeypatch.setattr(remote_reward, "RETRIES", Retry(total=0))
    server.shutdown()
    server.server_close()
    with pytest.raises(requests.ConnectionError, match="127.0.0.1"):
        remote_reward.score(QUERIES, RESPONSES)
    monkeypatch.delenv("REWARD_URL")
    with pytest.raises(ValueError, match="REWARD_URL"):
        remote_reward.score(QUERIES, RESPONSES)
