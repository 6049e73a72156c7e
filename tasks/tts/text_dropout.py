"""Training without text now and then, for models that are guided when they speak."""

from __future__ import annotations

from typing import Any

import numpy as np

from lit_fsdp.tasks.loading import ResumableLoader
from lit_fsdp.tasks.tts.families.family import Family
from lit_fsdp.tasks.tts.layout import Batch


class TextDropout:
    """Takes the text from some rows of training batches.

    Which ones is drawn by seed, epoch and place in the epoch, so they are the same at any number of ranks and workers,
    and after a resume.

    Args:
        loader: Whose batches they are.
        family: Knows what a missing text is.
        share: Of the rows.
    """

    def __init__(self, loader: ResumableLoader, family: Family, share: float) -> None:
        sampler: Any = loader.sampler
        self.sampler, self.family, self.share = sampler, family, share

    def __call__(self, batch: Batch, place: tuple[int, int]) -> Batch:
        """Return the batch, of which some rows have no text.

        Args:
            batch: From ``Family.collate``.
            place: Epoch, and samples of all ranks before the batch.
        """
        epoch, seen = place
        begin = seen + self.sampler.rank * self.sampler.batch_size
        numbers = range(begin, begin + self.sampler.batch_size)
        drawn = [np.random.default_rng([self.sampler.seed, epoch, i]).random() for i in numbers]
        return self.family.drop_texts(batch, [row for row, value in enumerate(drawn) if value < self.share])
