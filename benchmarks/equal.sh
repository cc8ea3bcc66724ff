#!/usr/bin/env bash
# Algorithms at equal settings: `benchmarks/equal.sh arithmetic` (needs models/arithmetic/sft) or
# `synthetic` (needs the demo's models). Two runs side by side, a core each; JOBS=1 for one.
# Started again, it skips finished runs. SEEDS="1 2" for fewer.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PYTHONPATH=.
mkdir -p runs && cp ppo.py rloo.py runs/
cat > runs/coin_flip.py << 'PYTHON'
import random
COIN = random.Random(1)
def score(queries, responses): return [float(COIN.getrandbits(1)) for _ in responses]
PYTHON
for name in cispo dapo dr_grpo grpo gspo lora_rloo reinforce_plus_plus; do
  cp rloo.py runs/$name.py && patch --fuzz=0 runs/$name.py diffs/$name.diff
done
cp train_reward.py runs/dpo.py && patch --fuzz=0 runs/dpo.py diffs/dpo.diff

run() { # name, script, flags
  [ ! -e "runs/$1/curves.png" ] || return 0 # it is written at the end of a run
  rm -rf "runs/$1"
  while (($(jobs -rp | wc -l) >= ${JOBS:-2})); do wait -n; done
  python "runs/$2.py" --run_name "$1" --output_dir "runs/$1/model" "${@:3}" &
}

arithmetic() {
  local scripts='ppo rloo grpo dr_grpo reinforce_plus_plus' script beta seed
  local task='--task arithmetic --total_episodes 4096 --gold_fn data.answers:exact_match'
  local coin='--kl_coef 0.01 --reward_fn runs/coin_flip.py:score --unfinished_score 0.5'
  for seed in ${SEEDS:-1 2 3 4 5 6 7 8 9 10}; do
    for script in $scripts; do
      for beta in 0 0.01 0.03 0.1; do
        run arithmetic_${script}_${beta}_$seed $script $task --seed $seed --kl_coef $beta
      done
      ((seed > 3)) || run arithmetic_${script}_random_$seed $script $task $coin --seed $seed
    done
  done
  wait
  for seed in 1 2; do # as many episodes as in the presets
    for script in ppo rloo; do
      for beta in 0.01 0.1; do
        run long_${script}_${beta}_$seed $script $task --seed $seed --kl_coef $beta \
          --total_episodes 16384
      done
    done
  done
  wait
  for script in $scripts; do
    for beta in 0 0.01 0.03 0.1 random; do
      all+=("$script $beta=runs/arithmetic_${script}_${beta}_*")
    done
    shown+=("$script=runs/arithmetic_${script}_0.01_*")
  done
  for script in ppo rloo; do
    for beta in 0.01 0.1; do all+=("$script $beta long=runs/long_${script}_${beta}_*"); done
  done
  shown+=("random rewards=runs/arithmetic_*_random_*")
}

synthetic() {
  local scripts='rloo cispo dapo dr_grpo grpo gspo lora_rloo reinforce_plus_plus' script seed
  local task='--task synthetic --total_episodes 2048 --num_ppo_epochs 2 --num_minibatches 2'
  declare -A more=([lora_rloo]='--lr 5e-3')
  more[grpo]='--lr 5e-4 --kl_coef 0.1 --kl_target None --max_grad_norm 1'
  for seed in ${SEEDS:-1 2}; do
    for script in $scripts; do
      run patches_${script}_$seed $script $task --seed $seed ${more[$script]:---lr 5e-4}
    done
    run dpo_$seed dpo --task synthetic --seed $seed
  done
  wait
  for seed in ${SEEDS:-1 2}; do # held-out metrics of DPO's policies, which learn nothing here
    run patches_dpo_$seed rloo --task synthetic --seed $seed --total_episodes 128 --lr 0 \
      --base_model runs/dpo_$seed/model --ref_model models/synthetic/sft
  done
  wait
  for script in $scripts; do shown+=("$script=runs/patches_${script}_*"); done
  all=("${shown[@]}" "dpo=runs/patches_dpo_*")
}

all=() shown=()
"$1" # defines the curves of the CSV, and those of the picture
declare -A out=([arithmetic]=arithmetic [synthetic]=patches)
metrics='objective/gold_score objective/kl objective/entropy'
python tools/curves.py "${all[@]}" --out runs/${out[$1]}.png --metrics eval/gold_score eval/kl
python tools/curves.py "${shown[@]}" --out benchmarks/results/${out[$1]}.png --metrics $metrics
mv runs/${out[$1]}.csv benchmarks/results/
