"""Which callbacks a run of the command line has without being asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint
from lightning.pytorch.callbacks.progress.progress_bar import ProgressBar as LightningProgressBar

from lit_fsdp.callbacks import (
    ClassReport,
    CommunicationLogger,
    MemoryLogger,
    OOMReport,
    Preemption,
    ProgressBar,
    RunReport,
    RunSummary,
    SpokenReport,
    StabilityMonitor,
    ThroughputLogger,
    WritePredictions,
)


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What decides on the callbacks.

    Args:
        command: ``fit``, ``validate``, ``test`` or ``predict``.
        run_root: Folder of all runs of this name.
        progress_bar: With the settings of the user.
        run_summary: Whether a table is printed at the end.
        monitoring: Whether the run is measured and ends in a report.
    """

    command: str
    run_root: Path
    progress_bar: ProgressBar
    run_summary: bool
    monitoring: bool


def choose_callbacks(defaults: Defaults, trainer: Mapping[str, Any], given: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks to add; one that is given replaces that of its class.

    Args:
        defaults: What decides.
        trainer: The settings of the Trainer.
        given: The user's callbacks.
    """
    chosen: list[Callback] = []
    is_trying = trainer["fast_dev_run"]
    if trainer["enable_progress_bar"] is not False and not _has(given, LightningProgressBar):
        chosen.append(defaults.progress_bar)
    if defaults.command == "predict" and not _has(given, WritePredictions):
        chosen.append(WritePredictions(fallback_dir=str(defaults.run_root)))
    if defaults.command == "fit" and not is_trying and not _has(given, Preemption):
        chosen.append(Preemption())
    if trainer["enable_checkpointing"] is not False and not is_trying and not _has(given, Checkpoint):
        # A copy would be a second full checkpoint.
        chosen.append(ModelCheckpoint(save_last="link"))
    if defaults.command != "predict" and defaults.monitoring and not _has(given, ClassReport):
        chosen.append(ClassReport(fallback_dir=str(defaults.run_root)))
    if defaults.command == "fit" and defaults.monitoring:
        chosen += [callback for callback in _build_monitoring(defaults) if not _has(given, type(callback))]
    if defaults.run_summary and not _has(given, RunSummary):
        chosen.append(RunSummary())  # after the tables of all others
    return chosen


def _build_monitoring(defaults: Defaults) -> list[Callback]:
    folder = str(defaults.run_root)
    return [
        StabilityMonitor(),
        MemoryLogger(fallback_dir=folder),
        CommunicationLogger(),
        ThroughputLogger(),
        OOMReport(fallback_dir=folder),
        SpokenReport(),
        RunReport(fallback_dir=folder),  # the last: it shows what the others have to say
    ]


def _has(callbacks: Sequence[Callback], kind: type[Callback]) -> bool:
    return any(isinstance(callback, kind) for callback in callbacks)
