#!/usr/bin/env bash
# PPO, RLOO and GRPO on the arithmetic task, two runs side by side on a core each; needs models/arithmetic/sft.
# Three seeds of each; SEEDS="1 2" for fewer.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PYTHONPATH=.
stamp=$(date +%Y%m%d-%H%M%S) runs=()
mkdir -p runs && cp rloo.py runs/grpo.py && patch --fuzz=0 runs/grpo.py diffs/grpo.diff
for seed in ${SEEDS:-1 2 3}; do
  for script in ppo.py rloo.py runs/grpo.py; do
    label=$(basename $script .py) && name=bench_arithmetic_${label}_${seed}_$stamp
    python $script --task arithmetic --seed $seed --run_name $name --output_dir runs/$name/model &
    runs+=("${label^^}=runs/$name")
    if (($(jobs -rp | wc -l) == 2)); then wait -n; fi
  done
done
wait
metrics="eval/scores objective/scores objective/kl objective/entropy"
python benchmarks/curves.py "${runs[@]}" --out benchmarks/arithmetic.png --metrics $metrics
