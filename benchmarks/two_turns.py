"""Two turns in chat form: the policy says a digit, the user asks for a larger one, it says another.

    python benchmarks/two_turns.py FOLDER      # a random model with ChatML, dialogues of random digits

docs/your-experiment.md has the commands that train on it, with `ask` and `score`.
"""

import json
import random
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

START, END = "<|im_start|>", "<|im_end|>"
REPLY = f"\n{START}user\nLarger.{END}\n{START}assistant\n"


def ask(contexts, responses):
    """The user's second message and what begins the next answer, the same to all."""
    return [REPLY] * len(responses)


def score(queries, responses):
    """1 if the second number is larger than the first; the names of the roles are in the text."""
    lines = [response.split("\n") for response in responses]
    digits = [(x[0], x[-1]) if len(x) == 5 else ("?", "?") for x in lines]
    return [float(x.isdecimal() and y.isdecimal() and y > x) for x, y in digits]


if __name__ == "__main__":
    folder, base = sys.argv[1], Path(__file__).parents[1] / "data" / "synthetic" / "model"
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"bos_token": START, "eos_token": END})
    config = AutoConfig.from_pretrained(base, vocab_size=len(tokenizer), n_embd=64, n_layer=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(f"{folder}/random")
    tokenizer.save_pretrained(f"{folder}/random")
    rng = random.Random(0)
    with open(f"{folder}/dialogues.jsonl", "w") as file:
        for game in range(4000):
            prompt = f"{START}user\nGame {game}.{END}\n{START}assistant\n"
            first, second = (f"{rng.randrange(10)}{END}" for _ in "12")
            print(json.dumps({"prompt": prompt, "completion": first + REPLY + second}), file=file)
