"""What callbacks read off a run: its metrics, and the memory of its ranks."""

from __future__ import annotations

import resource
from pathlib import Path

import torch
from lightning.pytorch import Trainer

_GIB = 2**30


def read_metric(trainer: Trainer, name: str) -> float | None:
    """Return what was last logged under a name, in a step or over an epoch."""
    metrics = trainer.callback_metrics
    value = metrics.get(name, metrics.get(f"{name}_step"))
    return None if value is None else float(value)


def read_peak_gib(device: torch.device) -> float:
    """Return the peak of this rank: allocated by torch on the GPU, resident for a process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    # Of /proc where it is told: ru_maxrss starts at the peak of the process that started this one.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / _GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB
