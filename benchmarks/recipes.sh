#!/usr/bin/env bash
# ppo.py and the recipes on the synthetic task by the commands of their headers, one run after the
# other; needs the demo's models. Once more with SEEDS="4 5" for other seeds.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
stamp=$(date +%Y%m%d-%H%M%S)
runs=()
for seed in ${SEEDS:-1 2 3}; do
  for recipe in ppo diffs/recipes/*.sh "diffs/recipes/instructgpt.sh --ptx_coef 1"; do
    label=$(echo "$recipe" | sed "s|diffs/recipes/||; s|\.sh||")
    name=$(echo "recipes_${label}_${seed}_$stamp" | tr " " _)
    if [ "$recipe" = ppo ]; then
      command="python ppo.py --task synthetic"
    else  # the header's command
      command="$(sed -n "/^# Synthetic: /,/^set /p" ${recipe% --ptx*} | sed "/^set /d; s/^# *//; s/^Synthetic: //" | tr "\n" " ") ${recipe#*.sh}"
    fi
    $command --seed $seed --run_name $name --output_dir runs/$name/model
    runs+=("$label=runs/$name")
  done
done
metrics="objective/scores objective/gold_score objective/kl objective/rlhf_reward ppo/policy/approxkl_avg ppo/val/var_explained"
python tools/curves.py "${runs[@]}" --out benchmarks/results/recipes.png --metrics $metrics
