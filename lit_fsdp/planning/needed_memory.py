"""The memory that a GPU must have for a step: its tensors, what the allocator takes beside them, and CUDA and NCCL.

Note [Memory outside of tensors]: none of these numbers was measured on a GPU by us.

- The CUDA context with kernels that are loaded when they are first used, as since CUDA 11.7: about 300 to 400 MB are
  reported (pytorch/pytorch#107667, #109888), more where many kernels are used.
- NCCL for each communicator: 544 MB between two GPUs and 688 MB between more, on four A100 with NVLink
  (NVIDIA/nccl#964). It grows with channels, so with fast links, and hardly with ranks (NVIDIA/nccl#864).
- cuBLAS: torch 2.13 keeps a workspace for each handle and stream (``aten/src/ATen/cuda/CublasHandlePool.cpp``): 32 MiB
  on Hopper, 8.1 MiB on most others (``CUBLAS_WORKSPACE_CONFIG``). Forward and backward run in threads, and so with
  handles, of their own. The larger is counted for all.
"""

from __future__ import annotations

from lit_fsdp.planning.estimate import StepCost
from lit_fsdp.sharding.mesh import MeshSizes

_MIB = 2**20
HEADROOM = 1.15  # of published runs, what the allocator held over what tensors took, median; see docs/planning.md
CONTEXT_BYTES = 512 * _MIB
CUBLAS_BYTES = 2 * 32 * _MIB
_PAIR_BYTES, _GROUP_BYTES = 544 * _MIB, 688 * _MIB  # of a communicator of two ranks, and of more


def compute_needed_bytes(cost: StepCost, sizes: MeshSizes) -> int:
    """Return the memory that a GPU must have for a step."""
    return compute_allocator_bytes(cost) + count_outside_bytes(sizes)


def compute_allocator_bytes(cost: StepCost) -> int:
    """Return what the allocator must get of it: as replayed, else by a constant factor over all tensors."""
    return round(HEADROOM * cost.memory.peak.num_bytes) if cost.replay is None else cost.replay.least_bytes


def count_outside_bytes(sizes: MeshSizes) -> int:
    """Return what the CUDA context, cuBLAS and NCCL take, see Note [Memory outside of tensors]."""
    ranks = list_communicators(sizes)
    return CONTEXT_BYTES + CUBLAS_BYTES + sum(_PAIR_BYTES if num == 2 else _GROUP_BYTES for num in ranks)


def list_communicators(sizes: MeshSizes) -> list[int]:
    """Return the ranks of each communicator of NCCL that a rank is in.

    One of all ranks, which also sums target tokens and losses. It is that of a mesh with one dimension; where there
    are more, each has its own.
    """
    dims = [sizes.replicate, sizes.tensor]
    own = [size for size in (sizes.num_shards, *dims) if size > 1] if max(dims) > 1 else []
    world_size = sizes.replicate * sizes.num_shards * sizes.tensor
    return [num for num in (world_size, *own, sizes.sequence) if num > 1]
