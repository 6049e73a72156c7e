"""Parameters, gradients and optimizer state in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from lit_fsdp.sharding.wrap import Unit, count_rank_bytes, count_shard_bytes


@dataclass(frozen=True, kw_only=True)
class CPUOffload:
    """Keep each rank's shards of parameters, gradients and optimizer state in host memory.

    The GPU then holds one or two gathered units and the activations. Every micro-batch copies each shard up
    twice and its gradient down once, unless ``sharding`` keeps them, and the optimizer runs on the CPU.

    Args:
        pin_memory: Lock the host memory, so that copies overlap with compute. Pinned memory cannot be swapped
            out, and torch takes it in powers of two: up to twice as much for shards and gradients, which ``plan``
            counts. Turn it off where the host has little. By default on with a GPU and off without.
        overlap_optimizer: Receive, scale and measure gradients beside backward, and clip and step beside the next
            forward, unit by unit in a thread; see docs/memory.md. The result has the same bits. With one shard, copies
            to the GPU run beside compute too, which takes GPU memory for the shards of one unit. Callbacks and modules
            of your own have to say ``reads_weights = False``.
    """

    pin_memory: bool | None = None
    overlap_optimizer: bool = False


def build_offload_policy(cpu_offload: CPUOffload | None, device: torch.device) -> OffloadPolicy:
    """Return what ``fully_shard`` takes for a model that computes on this device."""
    if cpu_offload is None:
        return OffloadPolicy()
    if cpu_offload.pin_memory and device.type != "cuda":
        raise ValueError(
            f"cpu_offload.pin_memory: got true: pinning needs a GPU, and the run is on {device.type}; leave it out"
        )
    return CPUOffloadPolicy(pin_memory=_is_pinned(cpu_offload, device.type))


def count_pinned_rounding(
    model: nn.Module, cpu_offload: CPUOffload | None, *, num_shards: int, device_type: str
) -> tuple[int, int]:
    """Return what pinning adds to the first rank's shards and to their gradients in host memory, in bytes.

    FSDP2 pins each shard and each gradient on its own, and torch rounds each up to a power of two (2.13 to 2.15:
    ``PowerOf2Ceil`` in ATen/core/CachingHostAllocator.h). Optimizer state is not pinned.
    """
    if cpu_offload is None or not _is_pinned(cpu_offload, device_type):
        return 0, 0
    added = [(p, round_pinned(size) - size) for p in model.parameters() for size in [count_rank_bytes(p, num_shards)]]
    return sum(size for _, size in added), sum(size for parameter, size in added if parameter.requires_grad)


def count_staged_bytes(
    model: nn.Module, units: Sequence[Unit], cpu_offload: CPUOffload | None, *, num_shards: int, device_type: str
) -> int:
    """Return what shards that come from the host beside compute take of the device: those of the largest unit."""
    if cpu_offload is None or not cpu_offload.overlap_optimizer or num_shards > 1 or device_type == "cpu":
        return 0
    return max((count_shard_bytes(model, unit, num_shards) for unit in units), default=0)


def round_pinned(num_bytes: int) -> int:
    """Return what torch takes of the host for a pinned tensor: the next power of two."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def _is_pinned(cpu_offload: CPUOffload, device_type: str) -> bool:
    return device_type == "cuda" if cpu_offload.pin_memory is None else cpu_offload.pin_memory
