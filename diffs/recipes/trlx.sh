#!/usr/bin/env bash
# trlX: only the upper two layers are trained, clipped scores (X2), AdamW (X8), no whitening of
#     rewards. Scores are not scaled by default (scale_reward "ignored"): its other values are
#     --scale_scores and --scale_scores --scale_by_first ("ref").
# Source: github.com/CarperAI/trlx, default_ppo_config() of trlx/data/default_configs.py: 100 epochs
#     of 128 rollouts.
# Differs: Scores are normalized once (R3); there they are those of any function. Advantages are
#     whitened over padding, too, there, on one process with n - 1. A response without an end scores
#     -1 (X9); there it keeps its score. Its value head has two layers, ours one. trlX shares the
#     frozen layers with the reference (hydra); here the reference is a whole copy. It trains
#     position embeddings, too. Its policy/sqrt_kl and policy/kl_per_token are roots of another KL:
#     k3 with the sign turned, pi / pi_ref - 1 - log(pi / pi_ref).
# Synthetic: diffs/recipes/trlx.sh --task synthetic --total_episodes 4096 --lr 5e-4
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ ! -e trlx.py ]; then  # an existing one may have your changes
  folder=$(mktemp -d)
  cp ppo.py "$folder/trlx.py"
  for name in freeze_layers adamw scale_scores; do
    patch --quiet --fuzz=0 "$folder/trlx.py" "diffs/$name.diff"
  done
  mv "$folder/trlx.py" . && rm -r "$folder"
fi
flags=(
  --total_episodes 12800 --batch_size 128 --num_minibatches 4 --num_ppo_epochs 4 --temperature 1
  --lr 3e-5 --no-anneal_lr --adam_eps 1e-8 --adam_beta2 0.95 --weight_decay 1e-6 --kl_coef 0.001
  --kl_target None --clip_score 10 --vf_coef 1 --no-whiten_rewards --unfrozen_layers 2
  --no-scale_scores
)
${LAUNCH:-python} trlx.py "${flags[@]}" "$@"
