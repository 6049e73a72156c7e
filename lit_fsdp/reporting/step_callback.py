"""What callbacks that act once a step have in common, however many micro-batches a step has."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class StepCallback(Callback):
    """A callback whose ``on_step_end`` runs after each optimizer step, and not after the other micro-batches.

    Attributes:
        first_step: ``global_step`` when training began: after a resume, not 0.
        last_step: The step that ended last.
    """

    first_step = last_step = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.first_step = self.last_step = trainer.global_step

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step != self.last_step:
            self.last_step = trainer.global_step
            self.on_step_end(trainer, pl_module)

    def on_step_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Act on the step that has just ended, ``last_step``."""

    def on_preemption(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put together what ranks have measured: a preempted run ends here, on all ranks after the same step."""
