#!/bin/bash
# One volunteer per node of a Slurm job: sbatch --export=ALL,ENTRY=/ip4/203.0.113.7/tcp/4000/... deploy/slurm.sh
#SBATCH --job-name=swarm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@60
#SBATCH --requeue
set -eu
: "${ENTRY:?the address of a peer of the run, or an invite}"
RUN=${RUN:-cluster}
# Slurm sends SIGTERM a minute before the end: volunteers leave the run, so that nobody waits for them.
trap 'kill -TERM "$job"; wait "$job"' TERM
srun --kill-on-bad-exit=0 \
  torchrun --standalone --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" --no-python \
  swarm join "$ENTRY" --run "$RUN" --identity new --yes --no-lan &
job=$!
wait "$job"
