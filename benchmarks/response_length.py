"""Does memory grow with the longest possible response? Peak of a training micro-batch, by length.

    python benchmarks/response_length.py

Responses of an EOS task end after 4 tokens, whatever `--response_length` allows. A small Llama with
a vocabulary of 49,152; GB of resident memory above what the process had before, in a new process
each. CPU, one thread.
"""

import resource
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
VOCAB = 49_152


def peak(response_length: int, sequences: int) -> float:
    """GB that one forward and backward pass of ppo.py's policy takes."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from ppo import PolicyAndValue

    torch.set_num_threads(1)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    config = LlamaConfig(**sizes, vocab_size=VOCAB, max_position_embeddings=1024)
    policy = PolicyAndValue(AutoModelForCausalLM.from_config(config), VOCAB, temperature=0.7)
    contexts = torch.randint(0, VOCAB, (sequences, 16))
    responses = torch.full((sequences, response_length), VOCAB)  # padding
    responses[:, :4] = 5
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    logprobs, _, values = policy(contexts, responses)
    (logprobs.sum() + values.sum()).backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e6


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(peak(int(sys.argv[1]), int(sys.argv[2])))
        sys.exit()
    print("sequences  response_length   GB")
    for sequences in (8, 16):
        for length in (40, 512):
            command = [sys.executable, __file__, str(length), str(sequences)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            print(f"{sequences:9}  {length:15}  {float(done.stdout.split()[-1]):.3f}")
