#!/bin/sh
# Trains examples/gpt over two machines, a stage on each, by torchrun. Give it on both, with the address of the first:
#
#   sh examples/torchrun/train.sh 10.0.0.1 0 text.txt      on the first machine
#   sh examples/torchrun/train.sh 10.0.0.1 1 text.txt      on the second
#
# The run folder must be one that both see: RUNS=/shared/runs. A torchrun that is given --max-restarts 3 continues after a
# fault from the newest checkpoint (--checkpoint-minutes).
set -eu
host=$1 machine=$2
shift 2
exec torchrun --nnodes 2 --node-rank "$machine" --nproc-per-node 1 --master-addr "$host" --master-port 29500 \
    -m stagewright run examples/gpt/engine.py --placement 0:0.1:0 --mode stale --runs "${RUNS:-runs}" -- "$@"
