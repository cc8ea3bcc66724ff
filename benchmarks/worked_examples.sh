#!/usr/bin/env bash
# The runs and pictures of docs/your-experiment.md; needs models/arithmetic/sft. SEEDS="1" for fewer.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PYTHONPATH=.
folder=runs/worked_$(date +%Y%m%d-%H%M%S)
mkdir -p "$folder"
for name in tools stale vine curriculum; do
  cp rloo.py "$folder/$name.py" && patch --fuzz=0 "$folder/$name.py" diffs/$name.diff
done
cp ppo.py "$folder/two_lambdas.py" && patch --fuzz=0 "$folder/two_lambdas.py" diffs/two_lambdas.diff

cat > "$folder/calculator.py" << 'PYTHON'
def add(contexts, responses):
    """The sum that each context asks for."""
    return [f"={sum(map(int, x.rstrip('=').split('+')))}" for x in contexts]
PYTHON
cat > "$folder/with_calls.py" << 'PYTHON'
"""Solutions of which one in ten calls the calculator."""
import json
import random

rng = random.Random(0)
for line in open("data/arithmetic/solutions.jsonl"):
    row = json.loads(line)
    if rng.random() < 0.1:
        total = sum(map(int, row["prompt"].rstrip("=").split("+")))
        row["completion"] = f"?={total}"
    print(json.dumps(row))
PYTHON
python "$folder/with_calls.py" > "$folder/solutions.jsonl"
python sft.py --task arithmetic --base_model models/arithmetic/sft --num_epochs 1 --lr 1e-3 \
  --query_dataset "$folder/solutions.jsonl" --output_dir "$folder/sft" --run_name "${folder#runs/}/sft_run"

run() { # script, name, flags
  python "$1" --task arithmetic --total_episodes 4096 --eval_every 4 --seed "$seed" \
    --run_name "${folder#runs/}/$2_$seed" --output_dir "$folder/$2_$seed/model" "${@:3}"
}
for seed in ${SEEDS:-1 2}; do
  with=(--base_model "$folder/sft" --tool_fn "$folder/calculator.py:add")
  run rloo.py rloo
  run "$folder/tools.py" tool "${with[@]}"
  run "$folder/tools.py" no_tool "${with[@]}" --tool_calls 0
  run "$folder/stale.py" lag_4 --sampler_lag 4
  run "$folder/stale.py" lag_4_unweighted --sampler_lag 4 --min_weight 1 --max_weight 1
  run "$folder/vine.py" vine --vine_samples 2
  run "$folder/curriculum.py" curriculum --num_queries 1024 --total_episodes 8192
  run rloo.py few --num_queries 1024 --total_episodes 8192
  run "$folder/two_lambdas.py" lambdas --lam_alpha 0.5
  run ppo.py ppo
done

draw() { # picture, metrics, label=runs …
  python tools/curves.py "${@:3}" --out "benchmarks/results/worked_$1.png" --metrics $2
}
draw tools "eval/scores eval/tool_share eval/response_length" \
  "tool=$folder/tool_?" "no answers=$folder/no_tool_?"
draw stale "eval/scores objective/kl ppo/val/weight" "RLOO=$folder/rloo_?" \
  "4 updates old=$folder/lag_4_?" "4 updates old, no weights=$folder/lag_4_unweighted_?"
draw vine "eval/scores eval/kl objective/advantage_std" "RLOO=$folder/rloo_?" \
  "VinePPO=$folder/vine_?"
draw curriculum "eval/scores objective/scores objective/frac_reward_zero_std" \
  "RLOO=$folder/few_?" "curriculum=$folder/curriculum_?"
draw lambdas "eval/scores eval/kl ppo/val/var_explained" "PPO=$folder/ppo_?" \
  "two λ=$folder/lambdas_?"
