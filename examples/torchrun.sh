#!/usr/bin/env bash
# Trains one configuration with torchrun: on this machine, or on several that can reach the first.
#
#   bash examples/torchrun.sh configs/quickstart.yaml
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 bash examples/torchrun.sh configs/quickstart.yaml    # and NODE_RANK=1 on the other
#
# Checkpoints need a folder that all machines share: start it there. Run it again, and it continues from the last checkpoint.
set -euo pipefail
config=$1
shift

exec torchrun \
    --nnodes="${NNODES:-1}" --node-rank="${NODE_RANK:-0}" --nproc-per-node="${NPROC_PER_NODE:-gpu}" \
    --master-addr="${MASTER_ADDR:-127.0.0.1}" --master-port="${MASTER_PORT:-29500}" \
    -m lit_fsdp fit --config "$config" --ckpt_path last "$@"
