"""What callbacks read off a run and log: metrics, counts, steps and folders."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lit_fsdp.checkpoint.remote import Location, is_remote, locate, locate_local
from lit_fsdp.strategy.trainer_settings import count_steps_of_epochs, get_accumulation


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

    A run has a folder of its own with TensorBoardLogger and CSVLogger. Without, it is ``fallback_dir``, by default
    ``default_root_dir``.
    """
    folder = trainer.log_dir
    if fallback_dir is not None and not has_own_folder(trainer):
        return locate_local(fallback_dir)
    return locate_local(folder or trainer.default_root_dir)


def has_own_folder(trainer: Trainer) -> bool:
    """Return whether the logger of a run makes a folder that belongs to this run alone."""
    return isinstance(trainer.logger, CSVLogger | TensorBoardLogger)


def relative_to_here(path: str | Location) -> Location:
    """Return a path as seen from the current folder if it lies below, else as it is from the root."""
    if is_remote(path):
        return locate(path)
    path = Path(str(path)).absolute()
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def is_logging_step(trainer: Trainer) -> bool:
    """Return whether Lightning logs the step that has just ended."""
    interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by one of its connectors
    return interval > 0 and trainer.global_step % interval == 0


def count_planned_steps(trainer: Trainer) -> float:
    """Return at which step a run ends, infinity if it has no end, or data that does not know its length decides.

    Where epochs end a run that is resumed, those behind it may have had other steps than one has now, by other data or
    another global batch. They are known from when training starts. Lightning counts as if all epochs accumulated as
    the first one does.
    """
    steps = trainer.estimated_stepping_batches  # sets the data up
    if steps < 0:
        return math.inf
    max_epochs = trainer.max_epochs or 0
    is_counted = max_epochs > 0 and trainer.lightning_module.automatic_optimization
    if not is_counted or math.isinf(trainer.num_training_batches):
        return steps
    loop: Any = trainer.fit_loop
    epochs, batches = loop.epoch_progress.current, loop.epoch_loop.batch_progress.current
    first = epochs.processed
    begun = batches.processed if epochs.started > first else 0
    in_epoch = count_steps_of_epochs(trainer, first, first + 1)
    # Saved between the micro-batches of a step, it is yet to be made.
    made = in_epoch if begun >= trainer.num_training_batches else begun // get_accumulation(trainer, first)
    left = count_steps_of_epochs(trainer, min(first, max_epochs), max_epochs) - min(made, in_epoch)
    total = trainer.global_step + max(left, 0)
    return total if trainer.max_steps == -1 else min(total, trainer.max_steps)


def is_trial(trainer: Trainer) -> bool:
    """Return whether this is a ``fast_dev_run``, which leaves no files."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]  # set by one of its connectors


def find_checkpoint_folder(trainer: Trainer) -> Location:
    """Return where checkpoints of a run lie. All ranks must call it."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            return locate(callback.dirpath)
    return find_run_folder(trainer) / "checkpoints"


@dataclass(frozen=True, kw_only=True)
class Headline:
    """The metric that says best how good a model is: what summary and report begin with.

    Args:
        metric: Its name without the stage: ``top1_pct`` is logged as ``val/top1_pct``.
        mode: Whether small or large values are good, ``min`` or ``max``.
    """

    metric: str
    mode: str

    def choose_best(self, *points: Any) -> Any:
        """Return that of ``(step, value)`` with the best value, the first of equal ones."""
        return (min if self.mode == "min" else max)(points, key=lambda point: point[1])


def get_headline(module: LightningModule) -> Headline:
    """Return what a module names as ``headline_metric`` and ``headline_mode``, by default the loss.

    Raises:
        ValueError: The mode is neither ``min`` nor ``max``.
    """
    metric, mode = getattr(module, "headline_metric", "loss"), getattr(module, "headline_mode", "min")
    if mode not in ("min", "max"):
        raise ValueError(f"headline_mode: got {mode!r} in {type(module).__name__}: expected min or max")
    return Headline(metric=metric, mode=mode)


def read_metric(trainer: Trainer, name: str) -> float | None:
    """Return what was last logged under a name, in a step or over an epoch."""
    metrics = trainer.callback_metrics
    value = metrics.get(name, metrics.get(f"{name}_step"))
    return None if value is None else float(value)


def read_count(trainer: Trainer) -> tuple[str, float] | None:
    """Return what a task counts, tokens or samples, and how many all ranks have seen by now."""
    for unit in ("tokens", "samples"):
        if (count := read_metric(trainer, f"train/{unit}_seen")) is not None:
            return unit, count
    return None


def log_values(trainer: Trainer, values: Mapping[str, float], step: int) -> None:
    """Log values of a step that may be over, with every logger of the Trainer; none are no values."""
    for logger in trainer.loggers if values else ():
        logger.log_metrics(dict(values), step=step)
