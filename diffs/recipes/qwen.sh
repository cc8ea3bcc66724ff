#!/usr/bin/env bash
# Qwen: a critic from the reward model (X1) that learns alone for 50 updates (X6), two responses to
#     each query, sampled by top-p (X7), scores normalized by running moments.
# Source: Bai et al. 2023, arXiv 2309.16609.
# Differs: Scores are normalized once, too (R3). The report names the running mean; that scores are
#     also divided by their running standard deviation is our reading of it. No pretraining gradient
#     (X4), whose coefficient is not published: `ptx` has it. A response without an end scores -1
#     (X9), which the report does not mention.
# Synthetic: diffs/recipes/qwen.sh --task synthetic --lr 2e-4 --value_warmup_updates 5 --critic_from
#     models/synthetic/train_reward
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ ! -e qwen.py ]; then  # an existing one may have your changes
  folder=$(mktemp -d)
  cp ppo.py "$folder/qwen.py"
  for name in separate_critic value_warmup sampling samples_per_query scale_scores; do
    patch --quiet --fuzz=0 "$folder/qwen.py" "diffs/$name.diff"
  done
  mv "$folder/qwen.py" . && rm -r "$folder"
fi
flags=(
  --num_ppo_epochs 4 --lr 1e-6 --critic_lr_ratio 5 --kl_coef 0.04 --kl_target None
  --cliprange_value 0.15 --value_warmup_updates 50 --top_p 0.9 --samples_per_query 2
  --shift_scores
)
${LAUNCH:-python} qwen.py "${flags[@]}" "$@"
