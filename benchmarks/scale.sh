#!/usr/bin/env bash
# People's ratings at OpenAI's scale, on one GPU (docs/results.md, with human.sh's data and models):
#     benchmarks/scale.sh movie-ratings.tar.gz          # SCRIPT=rloo, EPISODES=1000000, FLAGS=--compile
# SFT, two reward models of 10,240 pairs, then PPO with everything else of `--task sentiment`. Each part is
# skipped if it is there; a policy resumes from its last checkpoint. metrics.jsonl grows by the update.
set -euo pipefail
archive=$(realpath "${1:?usage: benchmarks/scale.sh movie-ratings.tar.gz}")
cd "$(dirname "$0")/.."
export ACCELERATE_MIXED_PRECISION=bf16 HF_HUB_OFFLINE=1 PYTORCH_ALLOC_CONF=expandable_segments:True
export PAIRS=10240 # of human.py's reward models
data=runs/human_data policy=runs/human_sft/model script=${SCRIPT:-ppo}
[ -e models/smollm2 ] || python benchmarks/pretrained.py models/smollm2
[ -e $data ] || python benchmarks/human.py data "$archive"

run() { # name, script, flags
  [ ! -e "runs/$1/curves.png" ] || return 0 # it is written at the end of a run
  set -- "$2.py" --task sentiment --run_name "$1" --resume auto --output_dir "runs/$1/model" "${@:3}"
  echo "+ python $*"
  python "$@"
}

run human_sft sft --base_model models/smollm2 --query_dataset $data/texts.jsonl --num_heldout 64
for half in first second; do
  run human_${half}_$PAIRS train_reward --base_model models/smollm2 --policy_model $policy \
    --query_dataset $data/queries.jsonl --label_dataset $data/$half.jsonl --num_labels $PAIRS --num_heldout 0
done
# shellcheck disable=SC2086
run "scale_$script" "$script" --base_model $policy --query_dataset $data/queries.jsonl \
  --reward_model runs/human_first_$PAIRS/model --gold_fn benchmarks/human.py:true_score \
  --total_episodes "${EPISODES:-500000}" --eval_every 100 --save_every 200 ${FLAGS:-}
