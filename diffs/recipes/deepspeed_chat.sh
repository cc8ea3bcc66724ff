#!/usr/bin/env bash
# DeepSpeed-Chat: a critic from the reward model (X1), clipped scores (X2), an average of the policy
#     (X5), no answers of one token before the end token (X7), a cosine schedule (X8), no whitening
#     (X14), one epoch per batch, log-probabilities at temperature 1. Pretraining gradients (X4) are
#     an option of its trainer that this script of it leaves off: here `ptx` and --ptx_coef 27.8.
# Source: Yao et al. 2023, arXiv 2308.01320, its script for OPT-1.3B, ppo_trainer.py and
#     rlhf_engine.py, and its log: 16 processes with 4 prompts each, 477 updates of 64, in fp16, in
#     which some of the first steps are skipped, and with dropout in actor and critic
#     ("withDropout"). Today's script has --actor_dropout 0.0.
# Differs: Scores are normalized once (R3); there they are the reward model's own, so that 5 is
#     another bound. bf16 or fp32 here. Short answers are dropped there; here they are never
#     sampled. There padding is the end token: the reward is read before it, and it is in neither
#     loss. Its newer ppo_trainer.py adds the score one index later than the older one: at the end
#     token, not before it. Here reward, score and losses have the end token. Its generation samples
#     only where the model's generation config says so, and OPT's is greedy. Its critic keeps OPT's
#     dropout of 0.1. With `ptx`, its texts have an optimizer step of their own after the actor's;
#     here one step has both gradients. A response without an end scores -1 (X9); there it keeps its
#     score.
# Synthetic: diffs/recipes/deepspeed_chat.sh --task synthetic --total_episodes 4096 --batch_size 32
#     --lr 5e-4 --warmup_updates 13 --eval_every 80 --critic_from models/synthetic/train_reward
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ ! -e deepspeed_chat.py ]; then  # an existing one may have your changes
  folder=$(mktemp -d)
  cp ppo.py "$folder/deepspeed_chat.py"
  for name in separate_critic ema schedule adamw sampling; do
    patch --quiet --fuzz=0 "$folder/deepspeed_chat.py" "diffs/$name.diff"
  done
  mv "$folder/deepspeed_chat.py" . && rm -r "$folder"
fi
flags=(
  --total_episodes 30528 --batch_size 64 --num_minibatches 1 --num_ppo_epochs 1 --temperature 1
  --lr 9.65e-6 --critic_lr_ratio 0.518 --decay cosine --warmup_updates 100 --adam_eps 1e-8
  --adam_beta2 0.95 --weight_decay 0 --max_grad_norm 1 --kl_coef 0.1 --kl_target None
  --clip_score 5 --ema_decay 0.992 --vf_coef 1 --min_response_length 3 --no-whiten_rewards
  --no-whiten_advantages
)
${LAUNCH:-python} deepspeed_chat.py "${flags[@]}" "$@"
