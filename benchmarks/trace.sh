#!/usr/bin/env bash
# The weights that 20 updates of ppo and rloo, 101 steps of train_reward and 88 of sft end with, on one process and on two, as
# hashes: what a change that is meant to change nothing has to leave alone. Needs the weights of both synthetic tasks.
#     benchmarks/trace.sh OUT [PROJECT]     # PROJECT: another checkout, such as the one before the change
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
out=$1 project=${2:-$here}
mkdir -p "$out" && cd "$out"
export OMP_NUM_THREADS=1 ACCELERATE_USE_CPU=true PYTHONPATH=$project HF_DATASETS_CACHE=$PWD/cache
for processes in 1 2; do
  run() {  # name, script, flags
    name=$1_$processes script=$2 && shift 2
    torchrun --standalone --nproc_per_node $processes "$project/$script.py" "$@" --run_name "$name" --output_dir "w_$name" > "$name.log"
  }
  for task in synthetic synthetic_eos; do
    models=$here/models/$task
    for script in ppo rloo; do
      run ${script}_$task $script --task $task --base_model "$models/sft" --reward_model "$models/train_reward" --total_episodes 2560
    done
  done
  run train_reward train_reward --task synthetic --base_model "$here/models/synthetic/sft" --num_labels 800
  run sft sft --task synthetic --num_epochs 1 --num_queries 8000
done
python - <<'PY'
import glob, hashlib
from safetensors.numpy import load_file

for path in sorted(glob.glob("w_*/model.safetensors")):
    digest = hashlib.sha256()
    for name, value in sorted(load_file(path).items()):
        digest.update(name.encode() + value.tobytes())
    print(digest.hexdigest()[:16], path.split("/")[0][2:])
PY
