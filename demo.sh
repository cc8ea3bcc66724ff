#!/usr/bin/env bash
# sft → reward model → PPO → RLOO on the embedded task: a few minutes on two CPU cores, no hub. Ends with a picture.
set -euo pipefail
cd "$(dirname "$0")"
name=demo_$(date +%Y%m%d-%H%M%S)
python sft.py --task synthetic --run_name ${name}_sft
python train_reward.py --task synthetic --run_name ${name}_reward
python ppo.py --task synthetic --run_name ${name}_ppo
python rloo.py --task synthetic --run_name ${name}_rloo
python benchmarks/curves.py PPO=runs/${name}_ppo RLOO=runs/${name}_rloo --out runs/$name.png
echo "curves of PPO and RLOO: runs/$name.png"
