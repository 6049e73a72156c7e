"""Tells Ray Train how a run does and where its checkpoints are, from inside a worker of Ray."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lit_fsdp.checkpoint.latest import find_last_checkpoint
from lit_fsdp.checkpoint.remote import Location, locate
from lit_fsdp.reporting.metrics import find_checkpoint_folder
from lit_fsdp.strategy.lightning_internals import leave_signals_alone

POINTER = "checkpoint.json"


class RayReport(Callback):
    """Report metrics to Ray Train after each validation, epoch and checkpoint, and name the checkpoint.

    Ray's checkpoint is a pointer of one small file. The checkpoint itself stays where ``ModelCheckpoint`` has written
    it, which also removes old ones: put it into a folder that all machines share. ``find_reported_checkpoint`` returns
    it in workers that Ray has started again.

    Reports are barriers of all workers. ``Preemption`` has no effect beside it: in a worker of Ray, ``fit`` does not
    run in the main thread, which gets the signals. So micro-batches do not begin with Lightning's question whether a
    rank got one, either, for whose answer a GPU would be waited for.
    """

    def __init__(self) -> None:
        self._is_due = False
        self._reported: Location | None = None
        self._undo: Callable[[], None] | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        try:
            import ray.train

            ray.train.get_context().get_world_rank()
        except (ImportError, RuntimeError) as error:
            raise ValueError("callbacks: got RayReport outside of a worker of Ray Train: leave it out") from error
        if stage == "fit" and self._undo is None:
            self._undo = leave_signals_alone(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_due = False
        self._folder = find_checkpoint_folder(trainer)
        self._reported = self._find(trainer)  # of an earlier run, or what this one goes on from

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._is_due = True

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_due = not trainer.sanity_checking

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_due = True

    @override
    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        # Here, as ModelCheckpoint comes after all other callbacks in the hooks before.
        if self._is_due:
            self._report(trainer)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report(trainer)  # the last checkpoint is complete now, also with async_save

    def _report(self, trainer: Trainer) -> None:
        from ray.train import Checkpoint, report

        self._is_due = False
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        metrics |= {"step": trainer.global_step, "epoch": trainer.current_epoch}
        found = self._find(trainer)
        with TemporaryDirectory() if found != self._reported else nullcontext() as folder:
            checkpoint = None
            if folder is not None:
                told = {"path": str(found), "folder": str(self._folder.resolve()), "step": trainer.global_step}
                Path(folder, POINTER).write_text(json.dumps(told))
                checkpoint = Checkpoint.from_directory(folder)
            self._reported = found
            report(metrics, checkpoint)

    def _find(self, trainer: Trainer) -> Location | None:
        return find_last_checkpoint([self._folder], report=lambda _: None) if trainer.is_global_zero else None


def find_reported_checkpoint() -> str | None:
    """Return the newest complete checkpoint of a run that Ray has started again, for ``ckpt_path``.

    ``None`` in a first start, and where none was reported. To be called in a worker. Only the folder in which the run
    saves is looked at: the checkpoint that was reported last may be removed by now.
    """
    from ray.train import get_checkpoint

    if (pointer := get_checkpoint()) is None:
        return None
    with pointer.as_directory() as folder:
        place = locate(json.loads(Path(folder, POINTER).read_text())["folder"])
    found = find_last_checkpoint([place], report=lambda _: None)
    return None if found is None else str(found)
