#!/bin/sh
#SBATCH --job-name=silodp
#SBATCH --time=01:00:00
#SBATCH --signal=B:TERM@60
# A silo as a job of a scheduler: it answers the requests that lie in IN, and ends; docs/couriers.md. It may be killed at
# any moment: a request stays in IN until its answer lies in OUT, and the next job gives the answer that this one would.
#
# sbatch job.sh PUBLIC FOLDER OUT IN    in the folder of folder_courier.py, or with its path in COURIER
set -eu
public=$1 folder=$2 out=$3 in=$4

# SLURM executes a copy of this script, so the courier is not looked for beside it.
courier=${COURIER:-folder_courier.py}
ls "$in"/*.request > /dev/null 2>&1 || exit 0
place=$(mktemp -d) # on this machine: file systems of a cluster have no sockets
silodp silo "$public" "$folder" --socket "$place/silo.sock" &
silo=$!
trap 'kill "$silo" 2> /dev/null || true; wait "$silo" || true; rm -rf "$place"' EXIT
trap 'exit 143' TERM INT
until [ -S "$place/silo.sock" ]; do
    kill -0 "$silo" 2> /dev/null || { wait "$silo"; exit 1; } # its log says why
    sleep 1
done
# In the background, since a shell hears a signal only while it waits.
python "$courier" silo "$place/silo.sock" "$out" "$in" --once &
wait "$!"
