#!/usr/bin/env bash
# InstructGPT: a critic from the reward model (X1), pretraining gradients (X4), an average of the
#     policy (X5), warm-up and then a constant learning rate (X8), one epoch per batch.
# Source: Ouyang et al. 2022, arXiv 2203.02155, appendices C.4 and E.9.
# Differs: The learning rate of the policy is not published. It is 5e-6 here, as the value
#     function's of 175B, which is fixed (9e-6 for 1.3B and 6B, where runs above 8.05e-6 without ptx
#     diverged). The critic has the size of the reward model, not of a 6B model. The pretraining
#     texts are those of --ptx_dataset. Rewards are normalized on samples of the policy (R3); there
#     a bias gives the labelers' demonstrations a mean of 0. A response without an end scores -1
#     (X9), which the paper does not mention.
# Synthetic: diffs/recipes/instructgpt.sh --task synthetic --total_episodes 4096 --batch_size 128
#     --lr 5e-4 --warmup_updates 2 --ptx_ratio 1 --critic_from models/synthetic/train_reward
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ ! -e instructgpt.py ]; then  # an existing one may have your changes
  folder=$(mktemp -d)
  cp ppo.py "$folder/instructgpt.py"
  for name in separate_critic ptx ema schedule adamw; do
    patch --quiet --fuzz=0 "$folder/instructgpt.py" "diffs/$name.diff"
  done
  mv "$folder/instructgpt.py" . && rm -r "$folder"
fi
flags=(
  --total_episodes 256000 --batch_size 512 --num_minibatches 8 --num_ppo_epochs 1 --temperature 1
  --lr 5e-6 --no-anneal_lr --warmup_updates 10 --adam_beta2 0.95 --weight_decay 0
  --kl_coef 0.02 --kl_target None --ptx_coef 27.8 --ptx_ratio 8 --ema_decay 0.992
)
${LAUNCH:-python} instructgpt.py "${flags[@]}" "$@"
