#!/bin/bash
# Train on several nodes with Slurm. When the time of the job is over, the run is saved and the job requeued.
#
#     sbatch --nodes=4 --gpus-per-node=8 --time=12:00:00 train.sh enwik8-large --out /shared/large
#
# The arguments are those of `longspan train`. Every node runs one torchrun, with one process per GPU, or with
# one process if the job has no GPUs. The run folder and LONGSPAN_HOME (corpora) must be on a file system that
# all nodes share.
#
#SBATCH --job-name=longspan
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
# SIGTERM to this script, this many seconds before the time is over.
#SBATCH --signal=B:TERM@120

# This script runs on the first node of the job. Each job has a port of its own.
rendezvous="$(hostname):$((20000 + SLURM_JOB_ID % 10000))"

srun torchrun \
    --nnodes="$SLURM_JOB_NUM_NODES" \
    --nproc-per-node="${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$rendezvous" \
    --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" \
    -m longspan train --or-resume "$@" &
training=$!

save_and_requeue() {
    scancel --signal=TERM "$SLURM_JOB_ID.0" # to torchrun on every node, which ends its processes
    wait "$training"
    scontrol requeue "$SLURM_JOB_ID"
}
trap save_and_requeue TERM

wait "$training"
