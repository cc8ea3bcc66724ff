#!/usr/bin/env bash
# sft → reward model → PPO → RLOO on the embedded task: a few minutes on two CPU cores, no hub. Ends with a picture.
set -euo pipefail
cd "$(dirname "$0")"
python sft.py --task synthetic --run_name demo_sft
python train_reward.py --task synthetic --run_name demo_reward
python ppo.py --task synthetic --run_name demo_ppo
python rloo.py --task synthetic --run_name demo_rloo
python benchmarks/plot.py --runs PPO=runs/demo_ppo RLOO=runs/demo_rloo --out runs/demo.png
echo "curves of PPO and RLOO: runs/demo.png"
