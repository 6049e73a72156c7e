"""What callbacks read off a run: its metrics, and the memory of its ranks."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

_GIB = 2**30
_RECORDING: set[int] = set()  # who wants allocations noted
_PEAKS: dict[torch.device, int] = {}  # bytes, of the stretches that ended with take_peak_bytes


@runtime_checkable
class DropsSteps(Protocol):
    """A callback that may keep bad steps from the weights."""

    @property
    def has_dropped_last_step(self) -> bool:
        """Whether weights have not seen the last step, as it was bad."""


def has_dropped_last_step(trainer: Trainer) -> bool:
    """Return whether the last step was bad and kept from the weights, so that its loss says nothing of them."""
    return any(isinstance(c, DropsSteps) and c.has_dropped_last_step for c in trainer.callbacks)  # type: ignore[attr-defined]


def find_run_folder(trainer: Trainer, fallback_dir: str | None = None) -> Path:
    """Return where a run leaves what it writes. All ranks must call it, as ``log_dir`` is a broadcast.

    Args:
        trainer: Of the run.
        fallback_dir: Where to if the run has no folder of its own, which it has with TensorBoardLogger and
            CSVLogger; by default ``default_root_dir``.
    """
    folder = trainer.log_dir
    if fallback_dir is not None and not isinstance(trainer.logger, CSVLogger | TensorBoardLogger):
        return Path(fallback_dir)
    return Path(folder or trainer.default_root_dir)


def is_logging_step(trainer: Trainer) -> bool:
    """Return whether Lightning logs the step that has just ended."""
    interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by one of its connectors
    return interval > 0 and trainer.global_step % interval == 0


def is_trial(trainer: Trainer) -> bool:
    """Return whether this is a ``fast_dev_run``, which leaves no files."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]  # set by one of its connectors


def find_checkpoint_folder(trainer: Trainer) -> Path:
    """Return where checkpoints of a run lie. All ranks must call it."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            return Path(callback.dirpath)
    return find_run_folder(trainer) / "checkpoints"


def read_metric(trainer: Trainer, name: str) -> float | None:
    """Return what was last logged under a name, in a step or over an epoch."""
    metrics = trainer.callback_metrics
    value = metrics.get(name, metrics.get(f"{name}_step"))
    return None if value is None else float(value)


def reset_peak(device: torch.device) -> None:
    """Let ``read_peak_gib`` begin anew. No effect on the CPU, where the peak is that of the process."""
    _PEAKS.pop(device, None)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def take_peak_bytes(device: torch.device) -> int:
    """Return the peak of a GPU since the last call, and begin a new stretch; ``read_peak_gib`` is not changed."""
    peak = torch.cuda.max_memory_allocated(device)
    _PEAKS[device] = max(peak, _PEAKS.get(device, 0))
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def start_recording(owner: object) -> None:
    """Let CUDA's allocator note what it does, for a snapshot, as long as anyone wants it to."""
    _RECORDING.add(id(owner))
    torch.cuda.memory._record_memory_history()  # documented, though it has no public name yet


def stop_recording(owner: object) -> None:
    """End what ``start_recording`` began, unless somebody else still records."""
    if id(owner) in _RECORDING:
        _RECORDING.discard(id(owner))
        if not _RECORDING:
            torch.cuda.memory._record_memory_history(enabled=None)


def read_resident_bytes() -> int:
    """Return what this process has in host memory now."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE")


def read_peak_gib(device: torch.device) -> float:
    """Return the peak of this rank: allocated by torch on the GPU, resident for a process on the CPU."""
    if device.type == "cuda":
        return max(torch.cuda.max_memory_allocated(device), _PEAKS.get(device, 0)) / _GIB
    # Of /proc where it is told: ru_maxrss starts at the peak of the process that started this one.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / _GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB
