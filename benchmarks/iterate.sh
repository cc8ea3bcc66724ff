#!/usr/bin/env bash
# Two rounds of sample → label → reward model → policy on the synthetic task, with its judge as the labeler.
# Needs models/synthetic/sft, which stays the reference of the KL penalty. SEED=2 for another seed.
set -euo pipefail
cd "$(dirname "$0")/.."
seed=${SEED:-1}
name=iterate_${seed}_$(date +%Y%m%d-%H%M%S)
out=runs/$name
mkdir -p $out
sft=$(realpath models/synthetic/sft)
policy=$sft
for round in 1 2; do
  python tools/sample.py $policy --out $out/samples_$round.jsonl --queries 1024 \
    --first $((1024 * round - 768)) --seed $seed$round
  python - $out/samples_$round.jsonl $out/labels_$round.jsonl $seed << 'EOF'
import json, random, sys
from data.synthetic.judge import gold_score, human_choice

rng = random.Random(int(sys.argv[3]))
with open(sys.argv[1]) as samples, open(sys.argv[2], "w") as labels:
    for row in map(json.loads, samples):  # a person would read and answer here
        scores = gold_score([row["query_text"]] * len(row["texts"]), row["texts"])
        labels.write(json.dumps(row | {"best": human_choice(scores, rng)}) + "\n")
EOF
  python train_reward.py --task synthetic --base_model $sft --policy_model $policy \
    --label_dataset $out/labels_$round.jsonl --num_labels 896 --seed $seed \
    --run_name ${name}_reward_$round --output_dir $out/reward_$round
  python rloo.py --task synthetic --base_model $policy --ref_model $sft --seed $seed \
    --reward_model $out/reward_$round --total_episodes 2048 \
    --run_name ${name}_policy_$round --output_dir $out/policy_$round
  policy=$out/policy_$round
done
for before in $sft $out/policy_1; do
  python tools/winrate.py $policy $before
done
