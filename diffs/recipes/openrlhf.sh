#!/usr/bin/env bash
# OpenRLHF: a critic from the reward model at nine times the learning rate (X1), clipped gradients
#     and a cosine schedule (X8), a KL penalty by the estimator k1 (X3), no whitening of rewards,
#     clipped scores (X2), one epoch per batch.
# Source: Hu et al. 2024, arXiv 2405.11143, and version 0.5.2: the defaults of train_ppo.py, loss.py
#     and ppo_trainer.py.
# Differs: Scores are normalized once (R3); there only with --normalize_reward. Its losses are means
#     over the tokens of each response, then over responses; here over all tokens. It whitens
#     advantages once over the batch, here each minibatch. It writes an end token over an unfinished
#     response, which keeps its score; here it scores -1 (X9). Later versions have other defaults.
# Synthetic: diffs/recipes/openrlhf.sh --task synthetic --batch_size 128 --lr 1e-4 --warmup_updates
#     1 --critic_from models/synthetic/train_reward
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ ! -e openrlhf.py ]; then  # an existing one may have your changes
  folder=$(mktemp -d)
  cp ppo.py "$folder/openrlhf.py"
  for name in separate_critic schedule adamw; do
    patch --quiet --fuzz=0 "$folder/openrlhf.py" "diffs/$name.diff"
  done
  mv "$folder/openrlhf.py" . && rm -r "$folder"
fi
flags=(
  --batch_size 512 --num_minibatches 4 --num_ppo_epochs 1 --temperature 1 --lr 1e-6 --decay cosine
  --min_lr_ratio 0.1 --warmup_updates 59 --critic_lr_ratio 9 --adam_eps 1e-8 --adam_beta2 0.95
  --weight_decay 0 --max_grad_norm 1 --vf_coef 1 --kl_coef 0.01 --kl_target None
  --clip_score 10 --no-whiten_rewards
)
${LAUNCH:-python} openrlhf.py "${flags[@]}" "$@"
