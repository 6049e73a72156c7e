"""Which callbacks and loggers a run of the command line has without being asked for."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.callbacks.progress.progress_bar import ProgressBar as LightningProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

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
from lit_fsdp.reporting.metrics import count_planned_steps
from lit_fsdp.strategy.lightning_internals import save_last_step

Verbosity = Literal["brief", "full"]


class LogInterval(Callback):
    """Log every step of a short run, and 50 steps of a longer one, at least: every 50th step at most.

    A logging step waits for the GPU, as its loss has to be known. So long runs keep Lightning's 50.
    """

    CHOICES = (50, 20, 10, 5, 2)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Settle it, as the number of steps is known."""
        num_steps = count_planned_steps(trainer)
        trainer.log_every_n_steps = next((n for n in self.CHOICES if 50 * n <= num_steps), 1)  # type: ignore[attr-defined]


class LastStep(Callback):
    """Save what was trained after the last save, where ``save_last`` is set or nothing was saved at all.

    Lightning 2.6.6 saves at the end only what was never saved, so that steps after the last validation would be lost.
    """

    def __init__(self) -> None:
        self._begin = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Note where the run begins: one that has nothing left to train saves nothing."""
        self._begin = trainer.global_step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Save."""
        if trainer.global_step > self._begin:
            save_last_step(trainer)


def choose_callbacks(
    given: Sequence[Callback],
    trainer: Mapping[str, Any],
    *,
    command: str,
    run_root: Path,
    progress_bar: ProgressBar,
    run_summary: bool,
    monitoring: bool,
    verbosity: Verbosity,
) -> list[Callback]:
    """Return the callbacks to add; one that is given replaces that of its class.

    Args:
        given: The user's callbacks.
        trainer: The settings of the Trainer.
        command: ``fit``, ``validate``, ``test`` or ``predict``.
        run_root: Folder of all runs of this name.
        progress_bar: With the settings of the user.
        run_summary: Whether a table is printed at the end.
        monitoring: Whether the run is measured and ends in a report.
        verbosity: Whether the tables of that report are printed, too.
    """
    folder = str(run_root)
    is_fit, is_trying = command == "fit", trainer["fast_dev_run"]
    has_checkpoints = trainer["enable_checkpointing"] is not False and not is_trying
    wanted: list[tuple[bool, type[Callback], Callback]] = [
        (trainer["enable_progress_bar"] is not False, LightningProgressBar, progress_bar),
        (command == "predict", WritePredictions, WritePredictions(fallback_dir=folder)),
        (is_fit and not is_trying, Preemption, Preemption()),
        (has_checkpoints, Checkpoint, ModelCheckpoint(save_last="link")),  # a copy would be a second full checkpoint
        (has_checkpoints and is_fit, LastStep, LastStep()),
        (is_fit and trainer["log_every_n_steps"] is None, LogInterval, LogInterval()),
        (monitoring and command != "predict", ClassReport, ClassReport(fallback_dir=folder)),
    ]
    # The last shows what the others have to say.
    measuring: list[Callback] = [StabilityMonitor(), MemoryLogger(fallback_dir=folder), CommunicationLogger()]
    measuring += [ThroughputLogger(), OOMReport(fallback_dir=folder), SpokenReport(), RunReport(fallback_dir=folder)]
    wanted += [(monitoring and is_fit, type(callback), callback) for callback in measuring]
    wanted.append((run_summary, RunSummary, RunSummary(verbose=verbosity == "full")))  # after the tables of all others
    # It saves no run that ends well.
    replacing = [other for other in given if not isinstance(other, OnExceptionCheckpoint)]
    return [
        callback
        for is_wanted, kind, callback in wanted
        if is_wanted and not any(isinstance(other, kind) for other in replacing)
    ]


def choose_loggers(trainer: Mapping[str, Any], run_root: Path) -> Any:
    """Return the loggers of a Trainer: those that are given, else files in the folder of the run.

    Args:
        trainer: The settings of the Trainer.
        run_root: Folder of all runs of this name.
    """
    if trainer["logger"] not in (None, True) or trainer["fast_dev_run"]:
        return trainer["logger"]
    folder, name = run_root.parent, run_root.name
    tensorboard = TensorBoardLogger(folder, name=name)
    # Left alone, the second logger would see the folder of the first and take the next number.
    return [tensorboard, CSVLogger(folder, name=name, version=tensorboard.version)]


def claim_folder(loggers: Sequence[CSVLogger | TensorBoardLogger]) -> None:
    """Make the folder of these loggers, with the next number where another run has taken theirs meanwhile.

    Lightning takes the first number without a folder, and makes that folder much later.
    """
    with suppress(OSError):  # check_log_folders says why
        Path(loggers[0].log_dir).parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                Path(loggers[0].log_dir).mkdir()
            except FileExistsError:
                number = int(loggers[0].version) + 1
                for logger in loggers:
                    logger._version = number  # private, seen in lightning 2.6.6
            else:
                return


def list_found(logger: CSVLogger | TensorBoardLogger) -> frozenset[Path]:
    """Return what a logger finds where it will write: its folder, those above it, and all that lies directly in it."""
    # Of a copy: a logger takes its number when it is first asked, and another may write before it.
    folder = Path(copy(logger).log_dir).resolve()
    inside = folder.iterdir() if folder.is_dir() else ()
    return frozenset((*filter(Path.exists, (folder, *folder.parents)), *inside))


def remove_unused_run(folder: Path, found: Collection[Path]) -> None:
    """Remove what loggers of this process began in a folder, and the folders made for it; all or nothing.

    What is not a logger's beginning, or another process wrote, was put there since: then everything stays.

    Args:
        folder: Of the run.
        found: What was there before, see ``list_found``; it stays.
    """
    folder = folder.resolve()
    if not folder.is_dir():
        return
    new = list(folder.iterdir() if folder in found else folder.rglob("*"))
    new = [path for path in new if path not in found]
    files = [path for path in new if not path.is_dir()]
    if not all(_is_beginning(path.name) for path in files):
        return
    for path in files:
        path.unlink()
    folders = sorted((path for path in new if path.is_dir()), reverse=True)
    for empty in (*folders, folder, *folder.parents):
        if empty in found or any(empty.iterdir()):
            return
        empty.rmdir()


def _is_beginning(name: str) -> bool:
    """Whether loggers begin with a file: the number of the process is in the name of TensorBoard's."""
    is_tensorboard = name.startswith("events.out.tfevents.") and f".{os.getpid()}." in name
    return is_tensorboard or name in ("hparams.yaml", "metrics.csv")
