"""A Trainer that never trains, and GPUs that need not be there: for modules that are planned or traced."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from typing_extensions import override

from lit_fsdp.strategy.processes import count_devices


class PlannedTrainer(Trainer):
    """For what modules ask of theirs while they build a model and its optimizer."""

    @property
    @override
    def estimated_stepping_batches(self) -> int | float:
        """A number that schedules take, without a look at the data."""
        return self.max_steps if self.max_steps > 0 else 1_000_000


class PlannedGpu(CUDAAccelerator):
    """GPUs that need not be there: settings are checked, and dtypes chosen, as with real ones."""

    @staticmethod
    @override
    def parse_devices(devices: Any) -> Any:
        return list(range(count_devices(devices) or 1))

    @staticmethod
    @override
    def is_available() -> bool:
        return True
