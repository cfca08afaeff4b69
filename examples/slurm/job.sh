#!/bin/sh
#SBATCH --job-name=stages
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --signal=TERM@120
# Trains examples/gpt over two nodes of four GPUs, a stage of four replicas on each: sbatch examples/slurm/job.sh text.txt
#
# One task per rank. Every task must see all GPUs of its node, since device 2 of a placement is GPU 2. Slurm ends the job
# with SIGTERM two minutes before its time is over: a checkpoint is saved, and --resume RUN continues.
set -eu
srun --kill-on-bad-exit --gpu-bind=none \
    stagewright run examples/gpt/engine.py --placement "${PLACEMENT:-0:0-3.1:0-3}" --mode stale --runs "${RUNS:-runs}" -- "$@"
