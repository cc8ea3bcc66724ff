#!/usr/bin/env bash
# RLOO without one detail at a time, on the synthetic task, at its default of one step an update; needs the demo's models.
# Two runs at a time. Five seeds; other ones with SEEDS="6 7".
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
stamp=$(date +%Y%m%d-%H%M%S)
differences='(differences.sum(dim=1) / (args.rloo_k - 1)).flatten()'
runs=()

changed() { # name, script, text, what replaces it: a copy of the script, made anew each time
  python - "$@" <<'PYTHON'
import sys

name, script, old, new = sys.argv[1:]
text = open(f"{script}.py").read()
assert text.count(old) == 1, f"{old!r} is not in {script}.py once"
open(f"{name}.py", "w").write(text.replace(old, new))
PYTHON
}
run() { # label, script, flags; for each seed
  local pids=() seed name
  for seed in ${SEEDS:-1 2 3 4 5}; do
    name=ablation_${1// /_}_${seed}_$stamp
    python "$2.py" --task synthetic --seed "$seed" --run_name "$name" \
      --output_dir "runs/$name/model" "${@:3}" &
    pids+=($!)
    runs+=("$1=runs/$name")
    if [ ${#pids[@]} -ge "${WORKERS:-2}" ]; then wait "${pids[0]}"; pids=("${pids[@]:1}"); fi
  done
  for pid in "${pids[@]}"; do wait "$pid"; done
}

changed no_baseline rloo "return $differences" "return rewards.flatten()"
changed batch_baseline rloo "return $differences" "return (rewards - rewards.mean()).flatten()"
# The mean reward of all updates before this one (Ahmadian et al. 2024, section 3.2)
changed average_baseline rloo "    differences = rewards[:, None]" \
  "    means = vars(compute_advantages).setdefault('means', [])
    baseline = np.mean(means) if means else 0.0
    means.append(rewards.mean().item())
    return (rewards - baseline).flatten()
    differences = rewards[:, None]"
changed pytorch_adam rloo "optimizer = AdamTF(" "optimizer = torch.optim.Adam("
# The reward model as training leaves it: gain 1 and bias 0, before and after
changed plain_reward train_reward "    model.gain.fill_(1 / std)
    model.bias.fill_(-mean / std)
" ""
[ -e models/synthetic/plain_reward ] || python plain_reward.py --task synthetic \
  --run_name ablation_reward_$stamp --output_dir models/synthetic/plain_reward

run "all details" rloo
run "A1 PyTorch's Adam" pytorch_adam
run "G5 constant learning rate" rloo --no-anneal_lr
run "R3 gain 1 and bias 0" rloo --reward_model models/synthetic/plain_reward
run "P8 no KL penalty" rloo --kl_coef 0 --kl_target None
run "P11 fixed kl_coef" rloo --kl_target None
run "L3 no baseline" no_baseline
run "L3 mean of the batch" batch_baseline
run "L3 mean of earlier updates" average_baseline
run "K = 2" rloo --rloo_k 2
metrics="eval/scores eval/gold_score eval/kl objective/gold_score objective/kl objective/advantage_std"
python tools/curves.py "${runs[@]}" --out benchmarks/results/rloo_ablations.png --metrics $metrics
rm no_baseline.py batch_baseline.py average_baseline.py pytorch_adam.py plain_reward.py
