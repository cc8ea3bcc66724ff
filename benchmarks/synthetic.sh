#!/usr/bin/env bash
# Three seeds of PPO and RLOO at the same number of episodes; needs the demo's models. TASK=synthetic_eos for the EOS form.
set -euo pipefail
cd "$(dirname "$0")/.."
task=${TASK:-synthetic}
runs=()
for seed in 1 2 3; do
  for script in ppo rloo; do
    python $script.py --task $task --seed $seed --run_name bench_${task}_${script}_$seed --output_dir models/bench/${task}_${script}_$seed
    runs+=("$(echo $script | tr a-z A-Z)=runs/bench_${task}_${script}_$seed")
  done
done
metrics="objective/scores objective/gold_score objective/kl objective/kl_coef ${METRIC:-ppo/loss/value_avg} objective/entropy"
python benchmarks/plot.py --runs "${runs[@]}" --out benchmarks/$task.png --metrics $metrics
