#!/usr/bin/env bash
# Llama 2: a critic with a transformer of its own (X1), AdamW, clipped gradients, a constant
#     learning rate (X8), one epoch per batch.
# Source: Touvron et al. 2023, arXiv 2307.09288. Its kl_coef is 0.01 for 7B and 13B, 0.005 for 34B
#     and 70B.
# Differs: One reward model, not two (helpfulness and safety); its scores are normalized once (R3).
#     What the critic starts from and the coefficient of its loss are not published: here the reward
#     model, and 1, so that its gradient is clipped at the norm of 1, too. PPO follows rejection
#     fine-tuning there (first run a copy of rloo.py with `raft`, then pass its model as
#     --base_model), for 200 to 400 iterations with early stopping: 204,800 episodes are the upper
#     end. A response without an end scores -1 (X9), which the paper does not mention.
# Synthetic: diffs/recipes/llama2.sh --task synthetic --total_episodes 4096 --batch_size 128 --lr
#     5e-4 --critic_from models/synthetic/train_reward
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ ! -e llama2.py ]; then  # an existing one may have your changes
  folder=$(mktemp -d)
  cp ppo.py "$folder/llama2.py"
  for name in separate_critic adamw; do
    patch --quiet --fuzz=0 "$folder/llama2.py" "diffs/$name.diff"
  done
  mv "$folder/llama2.py" . && rm -r "$folder"
fi
flags=(
  --total_episodes 204800 --batch_size 512 --num_minibatches 8 --num_ppo_epochs 1
  --lr 1e-6 --critic_lr_ratio 1 --no-anneal_lr --adam_beta2 0.95 --weight_decay 0.1
  --max_grad_norm 1 --vf_coef 1 --kl_coef 0.01 --kl_target None
)
${LAUNCH:-python} llama2.py "${flags[@]}" "$@"
