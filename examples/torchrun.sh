#!/usr/bin/env bash
# Trains one configuration with torchrun: on this machine, or on several that can reach the first.
#
#   bash examples/torchrun.sh configs/quickstart.yaml
#   NPROC_PER_NODE=2 bash examples/torchrun.sh configs/quickstart.yaml    # without GPUs: the number of processes
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 bash examples/torchrun.sh configs/quickstart.yaml    # and NODE_RANK=1 on the other
#   NNODES=1:4 MASTER_ADDR=node0 bash examples/torchrun.sh configs/quickstart.yaml    # elastic: on each node that is there
#
# Checkpoints need a folder that all machines share: start it there. Run it again, and it continues from the last checkpoint.
# docs/several_machines.md says what happens when ranks or nodes are lost, and come back.
set -euo pipefail
config=$1
shift

if [[ ${NNODES:-1} == *:* ]]; then
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # else ranks do not meet after a change of nodes
    nodes=(--rdzv-backend=c10d --rdzv-endpoint="${MASTER_ADDR:-127.0.0.1}:${MASTER_PORT:-29400}" --rdzv-id="${RUN_ID:-lit_fsdp}"
        --rdzv-conf=last_call_timeout=15)
    restarts=${MAX_RESTARTS:-100}
else
    nodes=(--node-rank="${NODE_RANK:-0}" --master-addr="${MASTER_ADDR:-127.0.0.1}" --master-port="${MASTER_PORT:-29500}")
    restarts=${MAX_RESTARTS:-0}
fi

exec torchrun --nnodes="${NNODES:-1}" --nproc-per-node="${NPROC_PER_NODE:-gpu}" --max-restarts="$restarts" "${nodes[@]}" \
    -m lit_fsdp fit --config "$config" --ckpt_path last "$@"
