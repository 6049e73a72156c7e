"""Images that could not be decoded: named on the rank that met them, counted over all ranks."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_warn


class SkippedImages:
    """Counts the bad images of each stage: ``train``, ``val``, ``test`` and ``predict``."""

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}  # of the last epoch of each stage, over all ranks
        self._counts: Counter[str] = Counter()

    def add(self, stage: str, batch: Mapping[str, Any]) -> None:
        """Name the bad images of a batch; each is named once."""
        for problem in batch.get("problems", ()):
            warnings.warn(f"skipped: {problem}", stacklevel=2)
            self._counts[stage] += 1

    def finish(self, stage: str, strategy: Strategy) -> int:
        """Return how many there were since the last time on all ranks, which must all call it."""
        own = torch.tensor(self._counts.pop(stage, 0), device=strategy.root_device)
        total = self.totals[stage] = int(strategy.reduce(own, reduce_op="sum"))
        if total:
            rank_zero_warn(f"{stage}: images that could not be decoded, and count nowhere: {total:,}")
        return total
