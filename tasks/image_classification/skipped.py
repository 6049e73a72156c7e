"""Images that could not be decoded: named on the rank that met them, counted over all ranks."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_fsdp.tasks.loading import PADDING


class SkippedImages:
    """Counts the bad images of each stage: ``train``, ``val``, ``test`` and ``predict``."""

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}  # of the last epoch of each stage, over all ranks
        self._named: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._decoded: Counter[str] = Counter()

    def add(self, stage: str, batch: Mapping[str, Any]) -> None:
        """Name the bad images of a batch, each once in a run."""
        for problem in batch.get("problems", ()):
            if problem not in self._named:
                self._named.add(problem)
                warnings.warn(f"skipped: {problem}", stacklevel=2)
            self._counts[stage] += 1
        index = batch.get("index")  # of evaluation, where some rows only fill up a batch
        num_rows = len(batch["labels"]) if index is None else sum(i != PADDING for i in index)
        self._decoded[stage] += num_rows - len(batch.get("problems", ()))

    def finish(self, stage: str, trainer: Trainer) -> int:
        """Return how many there were since the last time on all ranks, which must all call it.

        Raises:
            ValueError: An epoch of training or evaluation had no others.
        """
        counts = [self._counts.pop(stage, 0), self._decoded.pop(stage, 0)]
        sums = trainer.strategy.reduce(torch.tensor(counts, device=trainer.strategy.root_device), reduce_op="sum")
        assert isinstance(sums, Tensor)
        total, num_decoded = sums.tolist()
        self.totals[stage] = total
        if total and not num_decoded and stage != "predict" and not trainer.sanity_checking:
            raise ValueError(
                f"{stage}: none of {total:,} images could be decoded; see the warnings for why, or set bad_images to "
                "error"
            )
        if total:
            rank_zero_warn(f"{stage}: images that could not be decoded, and count nowhere: {total:,}")
        return total
