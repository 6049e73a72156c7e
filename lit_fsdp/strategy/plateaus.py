"""Schedules that step by a metric, ``ReduceLROnPlateau``, when a run is resumed.

Lightning steps them after the hooks that save, at the end of a validation or an epoch. A resumed run leaves that out at
the end of the epoch that it goes on with, or fails, as its checkpoint holds no metrics; seen in Lightning 2.6.6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl

from lit_fsdp.strategy.lightning_internals import is_epoch_over, restore_metrics

PLATEAUS = "plateaus"  # in the metadata of a checkpoint


def note_plateaus(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the metrics that schedules step by, and which of these are still to be stepped at the end of the epoch."""
    found = [(i, config) for i, config in enumerate(trainer.lr_scheduler_configs) if config.reduce_on_plateau]
    if not found or not trainer.lightning_module.automatic_optimization:
        return {}
    metrics = trainer.callback_metrics
    known = [(i, config) for i, config in found if config.monitor in metrics]
    due = [
        i
        for i, config in known
        if config.interval == "epoch"
        and (trainer.current_epoch + 1) % config.frequency == 0
        and is_epoch_over(trainer, str(config.monitor))
    ]
    return {"metrics": {config.monitor: float(metrics[str(config.monitor)]) for _, config in known}, "due": due}


def restore_plateaus(trainer: pl.Trainer, noted: Mapping[str, Any]) -> None:
    """Let schedules go on by the metrics of a checkpoint; to be called once their state is restored."""
    metrics: Mapping[str, float] = noted.get("metrics", {})
    monitors = {config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau}
    restore_metrics(trainer, {name: value for name, value in metrics.items() if name in monitors})
    for i in noted.get("due", ()):
        if i < len(trainer.lr_scheduler_configs) and (config := trainer.lr_scheduler_configs[i]).monitor in metrics:
            trainer.lightning_module.lr_scheduler_step(config.scheduler, metrics[str(config.monitor)])
