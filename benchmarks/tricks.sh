#!/usr/bin/env bash
# Today's tricks on `arithmetic`, one at a time on top of GRPO: docs/experiments.md. Needs
# models/arithmetic/sft. `benchmarks/tricks.sh stale`: importance weights for an older sampler.
# Started again, it skips finished runs. SEEDS="1" for fewer.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PYTHONPATH=. TOKENIZERS_PARALLELISM=false
folder=runs/tricks
mkdir -p $folder
cat > $folder/coin_flip.py << 'PYTHON'
import random
COIN = random.Random(1)
def score(queries, responses): return [float(COIN.getrandbits(1)) for _ in responses]
PYTHON

make() { # name, patches; then sed's program
  cp rloo.py "$folder/$1.py"
  for patch in $2; do patch --quiet --fuzz=0 "$folder/$1.py" "diffs/$patch.diff"; done
  cp "$folder/$1.py" "$folder/$1.before"
  sed -i "${3:-}" "$folder/$1.py"
  [ -z "${3:-}" ] || ! cmp -s "$folder/$1.py" "$folder/$1.before" || { echo "$1: no change"; exit 1; }
}
for name in rloo; do make $name ''; done
for name in grpo gspo cispo sapo raft stale reinforce_plus_plus; do make $name $name; done
# Each is a line of a copy of grpo.py; token_mean is two:
make no_std grpo 's| / (rewards.std(dim=1, keepdim=True) + 1e-4)||'
make clip_higher grpo 's|1 + args.cliprange)$|1 + 0.28)|'
make dual_clip grpo \
  's|mean(torch.max(pg_losses, pg_losses_clipped))|mean(torch.max(pg_losses, pg_losses_clipped).minimum(3 * advantages.abs()))|'
make token_mean grpo 's|return (x.masked_fill(~old.mask, 0).*|return (x * old.mask).sum() / num_responses|
  s|advantages\[part\], minibatch_size, kl_coef|advantages[part], num_tokens, kl_coef|'
make overlong grpo \
  's|    return scores, cut, finished|    return scores - ((cut != ids.pad).sum(dim=1) - 18).clamp(0, 2) / 2, cut, finished|'
make entropy 'grpo entropy_rloo'
make dynamic dynamic_sampling 's|differences.sum(dim=2) / (args.rloo_k - 1)|differences.mean(dim=2) / (rewards.std(dim=1, keepdim=True) + 1e-4)|
  s|return x.sum() / num_responses|return (x.masked_fill(~old.mask, 0).sum(dim=1) / old.mask.sum(dim=1)).sum() / num_responses|
  s|log_ratio = (logprobs - old.logprobs).sum(dim=1)|advantages, log_ratio = advantages[:, None], logprobs - old.logprobs|'

jobs=$folder/jobs.txt
: > $jobs
run() { # name, script, flags
  [ -e "$folder/$1/curves.png" ] && return 0 # it is written at the end of a run
  rm -rf "$folder/$1"
  echo "$folder/$2.py --task arithmetic --run_name ${folder#runs/}/$1 --output_dir $folder/$1/model ${*:3}" >> $jobs
}

tricks() {
  local base='--total_episodes 1024 --num_ppo_epochs 2 --kl_coef 0 --eval_every 99' name seed
  local plain='grpo rloo no_std clip_higher token_mean dynamic dual_clip cispo sapo raft'
  for seed in ${SEEDS:-1 2 3}; do
    for name in $plain; do run ${name}_$seed $name $base --seed $seed; done
    run gspo_$seed gspo $base --seed $seed --cliprange 0.02 --cliprange_high 0.03
    run reinforce_plus_plus_baseline_$seed reinforce_plus_plus $base --seed $seed --rloo_k 4 --group_baseline
    run entropy_0.01_$seed entropy $base --seed $seed --entropy_coef 0.01
    run entropy_0.1_$seed entropy $base --seed $seed --entropy_coef 0.1
    run entropy_to_0.1_$seed entropy $base --seed $seed --entropy_target 0.1
    run raft_right_$seed raft $base --seed $seed --min_score 1
    run raft_any_$seed raft $base --seed $seed --no-select_best
    run overlong_$seed overlong $base --seed $seed --gold_fn data.answers:exact_match
    run random_$seed grpo $base --seed $seed --reward_fn $folder/coin_flip.py:score \
      --unfinished_score 0.5 --gold_fn data.answers:exact_match
  done
}

stale() {
  local base='--total_episodes 2048 --batch_size 64 --eval_every 99' lag seed
  for seed in ${SEEDS:-1 2}; do
    for lag in 1 4 16; do
      base="--total_episodes 2048 --batch_size 64 --eval_every 99 --seed $seed --sampler_lag $lag"
      run stale_${lag}_none_$seed stale $base --min_weight 1 --max_weight 1
      run stale_${lag}_sequence_truncate_$seed stale $base
      run stale_${lag}_sequence_mask_$seed stale $base --weight_cut mask --max_weight 3
      run stale_${lag}_token_truncate_$seed stale $base --weight_level token
      run stale_${lag}_token_mask_$seed stale $base --weight_level token --weight_cut mask \
        --min_weight 0.5 --max_weight 5
    done
  done
}

for table in ${@:-tricks}; do $table; done
python - $jobs << 'PYTHON' # forks, so that the libraries are imported once
import os, runpy, sys
import matplotlib.figure, torch, transformers
torch.set_num_threads(1)
for line in open(sys.argv[1]).read().splitlines():
    if os.fork() == 0:
        sys.argv = line.split()
        sys.path.insert(0, os.getcwd())
        runpy.run_path(sys.argv[0], run_name="__main__")
        os._exit(0)
    _, status = os.wait()
    print(os.waitstatus_to_exitcode(status), line, flush=True)
PYTHON

draw() { # picture, runs
  local shown=() name
  for name in $2; do shown+=("$name=$folder/${name}_[0-9]*"); done
  python tools/curves.py "${shown[@]}" --out "benchmarks/results/$1.png" \
    --metrics objective/scores ppo/policy/entropy_avg objective/kl
}
draw entropy 'grpo entropy_0.01 entropy_0.1 entropy_to_0.1'
draw tricks 'rloo grpo dynamic gspo raft no_std'
all=()
for name in $(ls $folder | sed -n 's/_[0-9]*$//p' | sort -u); do all+=("$name=$folder/${name}_[0-9]*"); done
python tools/curves.py "${all[@]}" --out $folder/all.png --metrics eval/scores eval/gold_score \
  eval/kl eval/response_length ppo/policy/entropy_avg ppo/policy/clipfrac_avg \
  ppo/policy/entropy_coef objective/scores ppo/val/weight_cut objective/sampling_gap
mv $folder/all.csv benchmarks/results/tricks.csv  # also of entropy.png
rm benchmarks/results/entropy.csv
