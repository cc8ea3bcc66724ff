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

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REPLY = {"role": "user", "content": "Larger."}


def ask(contexts, responses):
    """The user's second message, the same to all."""
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
    tokenizer.add_special_tokens({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})
    tokenizer.chat_template = CHATML
    config = AutoConfig.from_pretrained(base, vocab_size=len(tokenizer), n_embd=64, n_layer=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(f"{folder}/random")
    tokenizer.save_pretrained(f"{folder}/random")
    rng = random.Random(0)
    with open(f"{folder}/dialogues.jsonl", "w") as file:
        for game in range(4000):
            prompt = [{"role": "user", "content": f"Game {game}."}]
            first, second = ({"role": "assistant", "content": str(rng.randrange(10))} for _ in "12")
            print(json.dumps({"prompt": prompt, "completion": [first, REPLY, second]}), file=file)
