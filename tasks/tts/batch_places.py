"""What a training batch gets by its place in the epoch: the counts of its whole step, and rows without their text."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from lit_fsdp.tasks.loading import ResumableLoader
from lit_fsdp.tasks.tts.families.family import Family, SpeechOutput
from lit_fsdp.tasks.tts.utterance import Batch


def count_step(batch: Batch, output: SpeechOutput, trainer: Any) -> Tensor:
    """Return the numbers of tokens and frames [2] of the whole step; see Note [Loss of speech]. All ranks must call it.

    Raises:
        ValueError: Batches are accumulated and say nothing of it.
    """
    if "step_counts" in batch:
        return batch["step_counts"]
    if trainer.accumulate_grad_batches > 1:
        raise ValueError(
            f"trainer.accumulate_grad_batches: got {trainer.accumulate_grad_batches}: batches say nothing of the step "
            "they are part of; add step_counts (tokens and frames of all its micro-batches and ranks), as SpeechData "
            "does, or set 1"
        )
    counts = torch.stack([output.num_tokens, output.num_frames])
    if dist.is_initialized():
        dist.all_reduce(counts)
    return counts


class StepCounts:
    """Gives each micro-batch the numbers of talker tokens and frames in its whole step, over all ranks.

    The data is in one order that all ranks know, so nothing is exchanged for it; see Note [Loss of speech].

    Args:
        loader: Whose batches they are.
        num_frames: Of each sample.
        num_rows: Of each sample, where it may be several rows.
        trainer: Says how many micro-batches are a step, and at which batch an epoch ends.
        predicts_ends: Whether the second number has the ends, too.
    """

    def __init__(
        self,
        loader: ResumableLoader,
        num_frames: NDArray[np.int64],
        num_rows: NDArray[np.int64],
        trainer: Any,
        *,
        predicts_ends: bool = False,
    ) -> None:
        sampler: Any = loader.sampler
        self.predicts_ends = predicts_ends
        self.sampler, self.num_frames, self.num_rows, self.trainer = sampler, num_frames, num_rows, trainer
        self._order: tuple[int, NDArray[np.int64]] | None = None

    def __call__(self, batch: Batch, place: tuple[int, int]) -> Batch:
        """Return the batch with ``step_counts`` [2]."""
        epoch, seen = place
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.asarray(self.sampler.draw_order(epoch))
        size, order = self.sampler.global_batch_size, self._order[1]
        num_batches = self.sampler.num_batches
        limit = getattr(self.trainer, "num_training_batches", None)
        if isinstance(limit, int) and limit > 0:
            num_batches = min(num_batches, limit)
        # As Lightning counts them, also where a resumed epoch goes on with another batch size.
        done = self.sampler.num_batches - self.sampler.count_batches_left(seen)
        # Asked each time: GradientAccumulationScheduler changes it between epochs.
        accumulate = getattr(self.trainer, "accumulate_grad_batches", 1)
        first = done // accumulate * accumulate
        last = min(first + accumulate, num_batches)
        samples = order[max(seen - (done - first) * size, 0) : seen + (last - done) * size]
        frames, rows = int(self.num_frames[samples].sum()), int(self.num_rows[samples].sum())
        num_ends = rows if self.predicts_ends else 0
        return {**batch, "step_counts": torch.tensor([frames + rows, frames + num_ends])}


class TextDropout:
    """Takes the text from some rows of training batches.

    Which ones is drawn by seed, epoch and place in the epoch, so they are the same at any number of ranks and workers,
    and after a resume.

    Args:
        loader: Whose batches they are.
        family: Knows what a missing text is.
        share: Of the rows.
        num_rows: Of each sample, where it may be several rows.
    """

    def __init__(self, loader: ResumableLoader, family: Family, share: float, num_rows: NDArray[np.int64]) -> None:
        sampler: Any = loader.sampler
        self.sampler, self.family, self.share, self.num_rows = sampler, family, share, num_rows

    def __call__(self, batch: Batch, place: tuple[int, int]) -> Batch:
        """Return the batch, of which some rows have no text.

        Args:
            batch: From ``Family.collate``.
            place: Epoch, and samples of all ranks before the batch.
        """
        epoch, seen = place
        part = self.sampler.find_part(epoch, seen)
        sizes = self.num_rows[self.sampler.list_samples(epoch, seen)].tolist()
        numbers = zip(range(part.start, part.stop), sizes, strict=True)
        drawn = [np.random.default_rng([self.sampler.seed, epoch, i]).random(size) for i, size in numbers]
        return self.family.drop_texts(batch, np.flatnonzero(np.concatenate(drawn) < self.share).tolist())
