#!/usr/bin/env bash
# PPO and RLOO, three seeds each, at the same number of episodes, the two side by side on a core each; needs the demo's models.
# TASK=synthetic_eos METRIC=objective/response_length for the EOS form; SEEDS="$(seq -s ' ' 10)" for ten seeds.
set -euo pipefail
cd "$(dirname "$0")/.."
task=${TASK:-synthetic}
export OMP_NUM_THREADS=1
stamp=$(date +%Y%m%d-%H%M%S)
runs=()
for seed in ${SEEDS:-1 2 3}; do
  for script in ppo rloo; do
    name=bench_${task}_${script}_${seed}_$stamp
    python $script.py --task $task --seed $seed --run_name $name --output_dir runs/$name/model &
    runs+=("$(echo $script | tr a-z A-Z)=runs/$name")
  done
  wait
done
metrics="objective/scores objective/gold_score objective/kl objective/kl_coef ${METRIC:-objective/rlhf_reward} objective/entropy"
python tools/curves.py "${runs[@]}" --out benchmarks/results/$task.png --metrics $metrics
