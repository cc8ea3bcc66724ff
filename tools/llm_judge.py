"""A chat model as the judge of two summaries, for tools/winrate.py.

    JUDGE=Qwen/Qwen2.5-7B-Instruct python tools/winrate.py models/tldr/ppo data \\
        --query_dataset trl-lib/tldr@validation --queries 1000 --judge tools/llm_judge.py:prefer

JUDGE is a folder or a hub name. Judges prefer what stands first: winrate.py asks in both orders and
takes the mean. Other texts than summaries need another PROMPT, in a copy of this file.
"""

import functools
import os
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = """Which of the following summaries does a better job of summarizing the most important \
points in the given forum post, without including unimportant or irrelevant details? A good summary \
is both precise and concise.

{query}

Summary A:
{a}

Summary B:
{b}

Answer with one letter: A, B, or C if both are equally good."""
LETTERS = {"A": 1.0, "B": 0.0, "C": 0.5}  # a tie counts half


@functools.cache
def load() -> tuple[Any, Any]:
    """The judge's tokenizer and model."""
    name = os.environ["JUDGE"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lm: Any = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    return AutoTokenizer.from_pretrained(name), lm.to(device).eval()


@torch.no_grad()
def prefer(queries: list[str], a: list[str], b: list[str]) -> list[float]:
    """The probability that a is better, from those of the letters as the first token of an answer.

    One prompt at a time: there is no padding, and a long post needs no batch that fits it.
    """
    tokenizer, lm = load()
    letters = [tokenizer.encode(x, add_special_tokens=False)[-1] for x in LETTERS]
    values, found, shares = torch.tensor([*LETTERS.values()]).double(), [], []
    for query, first, second in zip(queries, a, b, strict=True):
        text = PROMPT.format(query=query.strip(), a=first.strip(), b=second.strip())
        messages = [{"role": "user", "content": text}]
        tokens = tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=True,
            enable_thinking=False,  # of Qwen3 and others: the first token would be no letter
            return_tensors="pt",
            return_dict=True,
        )
        logits = lm(**tokens.to(lm.device), logits_to_keep=1).logits[0, -1]
        probs = logits.double().softmax(dim=0).cpu()[letters]
        found.append((probs @ values / probs.sum()).item())
        shares.append(probs.sum().item())
    print(f"the judge's first token is A, B or C with probability {sum(shares) / len(found):.2f}")
    return found
