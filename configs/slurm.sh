#!/usr/bin/env bash
# Two nodes of eight GPUs under Slurm. Preempted (with a grace time), or five minutes before its time is up, the run
# writes a checkpoint and ends; the job is queued again under its number and resumes.
#     sbatch configs/slurm.sh ppo.py --task tldr
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -u
export WORLD_SIZE="$SLURM_NTASKS" MASTER_PORT="${MASTER_PORT:-29500}" ACCELERATE_MIXED_PRECISION=bf16
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
# sharded: export ACCELERATE_USE_FSDP=true FSDP_VERSION=2 FSDP_AUTO_WRAP_POLICY=TRANSFORMER_BASED_WRAP

trap : USR1 TERM # ignored here: they are for the run, which ends with exit code 143
# a process for each GPU and no launcher in between, so that signals reach every one of them
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --gpu-bind=none bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec python "$@"' - "$@" --run_name "slurm-$SLURM_JOB_ID" --resume auto --save_every 20
code=$?
if [ "$code" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
