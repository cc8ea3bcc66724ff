#!/usr/bin/env bash
# SFT → reward model → PPO → RLOO on the embedded task, without the hub: 5 minutes on two CPU cores.
set -euo pipefail
cd "$(dirname "$0")"
name=demo_$(date +%Y%m%d-%H%M%S)
run() { python "$@" | { grep --line-buffered -v "^next: " || true; }; }  # the next step follows
say() { printf "\n%s" "$@" $'\n'; }
say "1/4 SFT: a model of a million weights learns to write stories. Its loss falls (6.9 → 1.5)."
run sft.py --task synthetic --run_name ${name}_sft
say "2/4 reward model: it learns which of four stories a labeler preferred. Chance is an accuracy of" \
  "    0.25. The labels have noise: 0.68 is the best possible on held-out ones."
run train_reward.py --task synthetic --run_name ${name}_reward
say "3/4 PPO: scores (of the reward model) and gold_score (the true one, not trained on) rise." \
  "    kl: distance from the SFT model, in nats. rlhf_reward: scores - kl_coef * kl, the goal."
run ppo.py --task synthetic --run_name ${name}_ppo
say "4/4 RLOO: the same without a value function; each score is compared with those of three other" \
  "    responses to its query."
run rloo.py --task synthetic --run_name ${name}_rloo
python tools/curves.py PPO=runs/${name}_ppo RLOO=runs/${name}_rloo --out runs/$name.png
say "Curves of PPO and RLOO: runs/$name.png. What PPO's policy writes: runs/${name}_ppo/samples.jsonl." \
  "Next: \"Make it yours\" in README.md. Then docs/using.md."
