#!/bin/bash
# A job of Slurm: the master on its first node, and on each node a daemon and a command that trains.
#
#     sbatch --nodes=4 deploy/slurm.sh python train.py
#
# The command finds its daemon by WANCOLL_SOCKET. Several training processes of a node are its business:
# bash -c 'for gpu in 0 1 2 3; do CUDA_VISIBLE_DEVICES=$gpu python train.py & done; wait'
# A node that is lost is evicted, and the others go on, but for the first one: the job ends with it.
# Where the master is not wanted there, run it elsewhere, and submit with WANCOLL_JOIN set: then none is started.
# Without Slurm it runs all on this machine, for a try.
#SBATCH --job-name=wancoll
#SBATCH --ntasks-per-node=1
#SBATCH --no-kill
set -euo pipefail

[ $# -gt 0 ] || { echo "usage: sbatch --nodes=N $0 COMMAND [ARGUMENT...]" >&2; exit 2; }
wancoll=${WANCOLL:-wancoll} # the command, the same on all nodes
export wancoll

# One node: its daemon, then the command.
node() {
    local folder daemon state=0
    folder=$(mktemp -d)
    export WANCOLL_SOCKET=$folder/run/peer.sock
    "$wancoll" peer --state "$folder/keys" &
    daemon=$!
    # What is the daemon's option would be the command's, too.
    unset WANCOLL_JOIN WANCOLL_MASTER
    until [ -S "$WANCOLL_SOCKET" ]; do
        kill -0 "$daemon" 2>/dev/null || { echo "$0: the daemon of $(hostname) has ended" >&2; return 1; }
        sleep 0.1
    done
    "$@" || state=$?
    kill "$daemon" 2>/dev/null || true
    wait "$daemon" || true
    rm -rf "$folder"
    return "$state"
}
export -f node

folder=$(mktemp -d)
master=
trap '[ -z "$master" ] || { kill "$master" 2>/dev/null; wait "$master"; } || true; rm -rf "$folder"' EXIT

if [ -z "${WANCOLL_JOIN:-}" ]; then
    port=$((20000 + ${SLURM_JOB_ID:-$$} % 10000)) # jobs may share a node
    # Its first line is a token, which is not for the job's log.
    "$wancoll" master --secure --listen "*:$port" --state "$folder/keys" --journal "$folder/journal.sqlite" >/dev/null &
    master=$!
    until WANCOLL_JOIN=$("$wancoll" token create --expires 0 --state "$folder/keys" --master "127.0.0.1:$port" 2>&-); do
        kill -0 "$master" 2>/dev/null || { echo "$0: the master has ended" >&2; exit 1; }
        sleep 0.2
    done
    # In the environment, since other users can read a command's options.
    export WANCOLL_JOIN WANCOLL_MASTER
    WANCOLL_MASTER=$(hostname):$port
fi

launch=()
[ -z "${SLURM_JOB_ID:-}" ] || launch=(srun --kill-on-bad-exit=0 --wait=0 --export=ALL)
# In the background, so that a signal is not kept until all is over.
"${launch[@]}" bash -c 'node "$@"' node "$@" &
wait $!
