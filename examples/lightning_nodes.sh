#!/usr/bin/env bash
# Trains one configuration on several nodes without torchrun: Lightning starts the ranks of each node, for each GPU one.
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 bash examples/lightning_nodes.sh configs/quickstart.yaml    # on node0
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=node0 bash examples/lightning_nodes.sh configs/quickstart.yaml    # on the other
#
# Checkpoints need a folder that all machines share: start it there. Run it again, and it continues from the last checkpoint.
# Nothing starts a rank again that has failed: examples/torchrun.sh does.
set -euo pipefail
config=$1
shift

export MASTER_ADDR=${MASTER_ADDR:?the name or address of the first node} NODE_RANK=${NODE_RANK:?0 on the first node, then 1, 2, ...}
export MASTER_PORT=${MASTER_PORT:-29500} # the same on every node
exec python -m lit_fsdp fit --config "$config" --ckpt_path last --trainer.num_nodes "${NNODES:?how many nodes}" "$@"
