"""Parameters, gradients and optimizer state in host memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy


@dataclass(frozen=True, kw_only=True)
class CPUOffload:
    """Keep each rank's shards of parameters, gradients and optimizer state in host memory.

    The GPU then holds one or two gathered units and the activations. Every step copies each shard up twice and
    its gradient down once, and the optimizer runs on the CPU.

    Args:
        pin_memory: Lock the host memory, so that copies overlap with compute. Pinned memory cannot be swapped
            out; turn it off where the host has little. By default on with a GPU and off without.
    """

    pin_memory: bool | None = None


def build_offload_policy(cpu_offload: CPUOffload | None, device: torch.device) -> OffloadPolicy:
    """Return what ``fully_shard`` takes for a model that computes on this device."""
    if cpu_offload is None:
        return OffloadPolicy()
    if cpu_offload.pin_memory and device.type != "cuda":
        raise ValueError(
            f"cpu_offload.pin_memory: got true: pinning needs a GPU, and the run is on {device.type}; leave it out"
        )
    pin_memory = device.type == "cuda" if cpu_offload.pin_memory is None else cpu_offload.pin_memory
    return CPUOffloadPolicy(pin_memory=pin_memory)
