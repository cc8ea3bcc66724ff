"""Scores of a reward model that a server has, as a reward function.

    export REWARD_URL=http://gpu-2:8000/score
    python ppo.py --task tldr --reward_fn tools/remote_reward.py:score

The server gets {"queries": [...], "responses": [...]} by POST and answers {"scores": [...]}, one
number for each response, in their order. docs/ppo.md has one that serves a classifier.
"""

import os

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

BATCH_SIZE = 64  # responses per request
TIMEOUT = 300.0  # seconds, for each answer
RETRIES = Retry(
    total=5,
    backoff_factor=0.5,  # waits of 0, 1, 2, 4 and 8 seconds
    status_forcelist=(429, 502, 503, 504),
    allowed_methods=None,  # POST, too: a score has no side effects
)


def score(queries: list[str], responses: list[str]) -> list[float]:
    """The server's score of each response."""
    url = os.environ.get("REWARD_URL")
    if not url:
        raise ValueError("REWARD_URL is not set; export REWARD_URL=http://HOST:8000/score")
    scores: list[float] = []
    with requests.Session() as session:
        session.mount("http://", HTTPAdapter(max_retries=RETRIES))
        session.mount("https://", HTTPAdapter(max_retries=RETRIES))
        for i in range(0, len(responses), BATCH_SIZE):
            part = slice(i, i + BATCH_SIZE)
            texts = {"queries": queries[part], "responses": responses[part]}
            answer = session.post(url, json=texts, timeout=TIMEOUT)
            answer.raise_for_status()
            found = answer.json()["scores"]
            if len(found) != len(texts["responses"]):  # the next batch's scores would move up
                raise ValueError(f"{url}: {len(found)} scores of {len(texts['responses'])} texts")
            scores += found
    return scores
