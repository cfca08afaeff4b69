#!/bin/sh
# Trains with `srun -n 3`, one process per rank, under a SLURM of one machine that this script starts and ends.
# Run as root with slurm-wlm and munge installed, in the repository: sh tests/slurm.sh PYTHON FOLDER
set -eu
python=$1 folder=$2 host=$(hostname -s)
command -v srun slurmctld slurmd munged >/dev/null || { echo "skipped: slurm-wlm and munge are not installed"; exit 0; }
[ "$(id -u)" = 0 ] || { echo "skipped: slurmd runs as root only"; exit 0; }
mkdir -p "$folder/state" "$folder/spool" "$folder/munge"
chmod 711 "$folder/munge"
head -c 64 /dev/urandom > "$folder/munge/key"
chmod 400 "$folder/munge/key"
cat > "$folder/slurm.conf" <<CONF
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=26817
SlurmdPort=26818
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:8
CONF
export SLURM_CONF="$folder/slurm.conf"
munged --foreground --force --key-file="$folder/munge/key" --socket="$folder/munge/socket" \
    --pid-file="$folder/munge/pid" --log-file="$folder/munge/log" --seed-file="$folder/munge/seed" & munged=$!
slurmctld -D -L "$folder/slurmctld.log" 2>/dev/null & slurmctld=$!
slurmd -D -L "$folder/slurmd.log" 2>/dev/null & slurmd=$!
trap 'kill $slurmd $slurmctld $munged; wait' EXIT
until sinfo -h -o %t 2>/dev/null | grep -q idle; do sleep 0.5; done
train="$python -m stagewright train --model vgg-small --placement 0:0-1.0:2 --batch 8 --steps 4 --runs $folder/runs"
srun --ntasks=3 --overcommit --kill-on-bad-exit $train --export "$folder/srun.safetensors"
$train --export "$folder/alone.safetensors" > /dev/null
cmp "$folder/srun.safetensors" "$folder/alone.safetensors" && echo "the same weights"
