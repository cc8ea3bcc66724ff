#!/usr/bin/env bash
# ChineseLLaMA: a critic from the reward model at three times the learning rate (X1), top-p sampling
#     (X7), warm-up and then an inverse square root, clipped gradients (X8), scores divided by their
#     running standard deviation, no whitening (X14), one step per batch.
# Source: train_ppo_zh.sh, config_ppo.py and ppo_trainer.py of github.com/OpenLMLab/MOSS-RLHF, the
#     code of Zheng et al. 2023, arXiv 2307.04964. kl_coef is 0.1 there, in its English script 0.01,
#     by default 0.02; the paper has 0.05 to 0.2, and 1.65e-6 for the critic.
# Differs: Scores are normalized once, too (R3). No penalty for repetition (1.1 there).
#     Log-probabilities are at the temperature of sampling (P1), there at 1. Policy and critic clip
#     a norm each, there one of both; the critic's epsilon is 1e-8 there. Warm-up starts at a
#     hundredth of the learning rate, there at a tenth. A response without an end scores -1 (X9);
#     there it keeps its score.
# Synthetic: diffs/recipes/chinese_llama.sh --task synthetic --total_episodes 4096 --batch_size 32
#     --lr 5e-4 --warmup_updates 13 --eval_every 80 --critic_from models/synthetic/train_reward
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ ! -e chinese_llama.py ]; then  # an existing one may have your changes
  folder=$(mktemp -d)
  cp ppo.py "$folder/chinese_llama.py"
  for name in separate_critic schedule adamw sampling scale_scores; do
    patch --quiet --fuzz=0 "$folder/chinese_llama.py" "diffs/$name.diff"
  done
  mv "$folder/chinese_llama.py" . && rm -r "$folder"
fi
flags=(
  --total_episodes 14000 --batch_size 14 --num_minibatches 1 --num_ppo_epochs 1 --temperature 0.8
  --top_p 0.9 --lr 5e-7 --critic_lr_ratio 3 --decay inverse_sqrt --warmup_updates 100
  --adam_eps 1e-6 --adam_beta2 0.95 --weight_decay 0 --max_grad_norm 1 --vf_coef 1 --kl_coef 0.1
  --kl_target None --no-whiten_rewards --no-whiten_advantages
)
${LAUNCH:-python} chinese_llama.py "${flags[@]}" "$@"
