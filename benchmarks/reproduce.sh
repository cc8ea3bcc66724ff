#!/usr/bin/env bash
# OpenAI's sentiment and descriptiveness: reward model and policy, ten seeds, one run per GPU, and
# their curves over the published ones. Needs eight GPUs and the hub. Started again, it resumes runs
# from their checkpoints and skips finished ones:  SEEDS="1 2 3" GPUS=4 benchmarks/reproduce.sh
# Published curves are optional: on Weights & Biases, open the projects lm-human-preferences
# (OpenAI's code) and lm_human_preference_details (2023) of openrlbenchmark. Export the charts of
# the task's runs as CSV, over Step (updates), to published/<task>/openai*.csv and 2023*.csv.
set -euo pipefail
cd "$(dirname "$0")/.."
jobs=() pids=() failed='' gpus=${GPUS:-8}

run() { # script, task, seed, flags
  local name=reproduce_$2_$1_$3 how
  [ ! -e "runs/$name/curves.png" ] || return 0 # it is written at the end of a run
  how=(--run_name "$name")
  if compgen -G "runs/$name/checkpoints/*.safetensors" > /dev/null; then how=(--resume "runs/$name")
  elif [ -e "runs/$name" ]; then mv "runs/$name" "runs/stopped_${name}_$(date +%s)"; fi
  how+=(--output_dir "runs/$name/model" --save_every 100 --tf32)
  echo "+ CUDA_VISIBLE_DEVICES=$gpu python $1.py --task $2 --seed $3 ${*:4} ${how[*]}"
  python "$1.py" --task "$2" --seed "$3" "${@:4}" "${how[@]}" 2>&1 | sed -u "s/^/$name: /"
}

for task in sentiment descriptiveness; do
  for seed in ${SEEDS:-1 2 3 4 5 6 7 8 9 10}; do jobs+=("$task $seed"); done
done
for ((gpu = 0; gpu < gpus; gpu++)); do
  for ((i = gpu; i < ${#jobs[@]}; i += gpus)); do
    read -r task seed <<< "${jobs[i]}"
    export CUDA_VISIBLE_DEVICES=$gpu reward=runs/reproduce_${task}_train_reward_$seed/model
    run train_reward "$task" "$seed" || exit
    ACCELERATE_MIXED_PRECISION=bf16 run ppo "$task" "$seed" --reward_model "$reward" || exit
  done &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || failed=yes; done
[ ! $failed ] || { echo "a run failed; see above, then start this again" >&2; exit 1; }

names=(ppo/objective/score=objective/scores ppo/{ppo/,}loss/value=ppo/loss/value_avg)
for name in kl kl_coef entropy; do names+=("ppo/objective/$name=objective/$name"); done
for task in sentiment descriptiveness; do
  sources=("PPO=runs/reproduce_${task}_ppo_*")
  for label in OpenAI 2023; do
    files="published/$task/${label,,}*.csv"
    if compgen -G "$files" > /dev/null; then sources+=("$label=$files"); else
      echo "$files is missing: the picture of $task has no curves of $label"; fi
  done
  set -- tools/curves.py "${sources[@]}" --out "benchmarks/results/reproduce_$task.png" \
    --names "${names[@]}" --episodes_per_step OpenAI=512 2023=512
  echo "+ python $*" && python "$@"
done
