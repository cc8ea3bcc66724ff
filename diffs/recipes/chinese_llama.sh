#!/usr/bin/env bash
# ChineseLLaMA: a critic from the reward model with a larger learning rate (X1), which learns alone
#     at first (X6).
# Source: The 7B model of Zheng et al. 2023, arXiv 2307.04964; kl_coef from 0.05 to 0.2. Its code,
#     github.com/OpenLMLab/MOSS-RLHF, has 0.1, and starts the critic from the reward model.
# Differs: Its number of updates of the critic alone is not known here; 50 is Qwen's. Scores are
#     normalized once (R3), not divided by a running standard deviation.
# Synthetic: diffs/recipes/chinese_llama.sh --task synthetic --lr 3e-4 --value_warmup_updates 5
#     --critic_from models/synthetic/train_reward
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ ! -e chinese_llama.py ]; then  # an existing one may have your changes
  folder=$(mktemp -d)
  cp ppo.py "$folder/chinese_llama.py"
  for name in separate_critic value_warmup; do
    patch --quiet --fuzz=0 "$folder/chinese_llama.py" "diffs/$name.diff"
  done
  mv "$folder/chinese_llama.py" . && rm -r "$folder"
fi
flags=(
  --num_ppo_epochs 4 --lr 5e-7 --critic_lr_ratio 3.3 --kl_coef 0.1 --kl_target None
  --value_warmup_updates 50
)
${LAUNCH:-python} chinese_llama.py "${flags[@]}" "$@"
