#!/usr/bin/env bash
# The demo's PPO alone, three at once, and beside four busy loops: wall and CPU seconds of three
# updates, with OpenMP's own waiting (alone: three at once take minutes), ours (machinery/__init__.py),
# sleeping at once, and one thread.
#   ./demo.sh && benchmarks/busy.sh 2>&1 | tee busy.txt     # 15 minutes; nothing else may run
set -euo pipefail
cd "$(dirname "$0")/.."
name=busy_$(date +%s)
TIMEFORMAT="%R wall %U user %S system"

updates() { # in a run of its own
    env "$2" python ppo.py --task synthetic --total_episodes 384 --run_name "${name}_$1" &> /dev/null
}

for round in 1 2 3; do
    for setting in GOMP_SPINCOUNT=30000000000 NONE=1 OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1; do
        echo -n "round $round, $setting, alone: "
        time updates "$round-$setting-alone" $setting
        if [ $setting = GOMP_SPINCOUNT=30000000000 ]; then
            continue
        fi
        echo -n "round $round, $setting, three at once: "
        time (for i in 1 2 3; do updates "$round-$setting-$i" $setting & done; wait)
    done
    loops=()
    for i in 1 2 3 4; do
        (while :; do :; done) &
        loops+=($!)
    done
    echo -n "round $round, beside four busy loops: "
    time updates "$round-beside" NONE=1
    kill "${loops[@]}"
    wait "${loops[@]}" 2> /dev/null || true
done
