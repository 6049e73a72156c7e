"""Sees that all ranks run out of batches together: sharded models wait for each other in every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lit_fsdp.sharding.mesh import gather_objects
from lit_fsdp.strategy.lightning_internals import get_evaluation_loop, has_no_batch, is_of_unknown_length
from lit_fsdp.strategy.roll_call import get_store, wait_until

_passes = count()  # of this process over loaders, the same on all ranks: a second fit must not read words of the first


class EvenBatches(ParallelStrategy):
    """A strategy that refuses loaders of which one rank has more batches than another.

    Loaders that know their length are compared before their first batch, others by ``note_batch``.
    """

    timeout_s: float
    _passes: dict[str, int]

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._check_even("train_dataloader", [self._trainer.num_training_batches], self._trainer.fit_loop)

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        trainer = self._trainer
        counts = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        self._check_even("val_dataloader", counts, get_evaluation_loop(trainer))

    @override
    def on_test_start(self) -> None:
        super().on_test_start()
        self._check_even("test_dataloader", self._trainer.num_test_batches, self._trainer.test_loop)

    @override
    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._check_even("predict_dataloader", self._trainer.num_predict_batches, self._trainer.predict_loop)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        loop = self._trainer.fit_loop
        if batch_idx == 0 and self._trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
            self._check_even("train_dataloader", [self._trainer.num_training_batches], loop)
        is_last = loop.epoch_loop.batch_progress.is_last_batch and not self._is_last_step
        self._note_batch("train_dataloader", loop, batch_idx, is_last=is_last, epoch=self._trainer.current_epoch)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._note_evaluated("val_dataloader", get_evaluation_loop(self._trainer))
        return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        self._note_evaluated("test_dataloader", self._trainer.test_loop)
        return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._note_evaluated("predict_dataloader", self._trainer.predict_loop)
        return super().predict_step(*args, **kwargs)

    def _note_evaluated(self, name: str, loop: Any) -> None:
        progress = loop.batch_progress
        self._note_batch(name, loop, progress.current.ready - 1, is_last=progress.is_last_batch)

    def _note_batch(self, name: str, loop: Any, index: int, *, is_last: bool, epoch: int = 0) -> None:
        if self.world_size > 1 and is_of_unknown_length(loop):
            note_batch(name, (self._passes[name], epoch), index, self.timeout_s, is_last=is_last)

    @property
    def _is_last_step(self) -> bool:
        """Whether training ends with the batch that begins, on all ranks: no matter then which of them has more."""
        trainer, module = self._trainer, self.lightning_module
        assert module is not None
        # A rank whose data ends would validate, the others not.
        if trainer.max_steps < 0 or trainer.enable_validation:
            return False
        num_left = trainer.max_steps - trainer.global_step
        if not module.automatic_optimization:
            return num_left <= len(trainer.optimizers)  # most often each of them steps once a batch
        num_begun = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return num_left <= 1 and num_begun % trainer.accumulate_grad_batches == 0

    def _check_even(self, name: str, num_batches: Sequence[int | float], loop: Any) -> None:
        """Refuse loaders of which one rank has more batches: it would wait for others to gather parameters with it."""
        if self.world_size == 1:
            return
        self._passes = {**getattr(self, "_passes", {}), name: next(_passes)}
        counts = gather_objects([0] if has_no_batch(loop) else list(num_batches))
        for by_rank in zip(*counts, strict=False):
            if min(by_rank) != max(by_rank):
                most = max(by_rank) if max(by_rank) < math.inf else "some"
                # Lightning's sampler gives each rank as many rows by repeating some, but not where it predicts.
                hint = "leave trainer.use_distributed_sampler on, or cut or pad the longer ones"
                if name == "predict_dataloader":
                    hint = "pad the data to a number of rows that the ranks share evenly, and drop what was added"
                raise ValueError(
                    f"{name}: got {min(by_rank)} batches on one rank and {most} on another: sharded models "
                    f"need as many on each; {hint}"
                )

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer


def note_batch(name: str, run: tuple[int, int], index: int, timeout_s: float, *, is_last: bool) -> None:
    """Tell the other ranks, before a step, which batch this one begins; with the last one, wait for them.

    Takes microseconds for all but the last batch. To be called before the step, as ranks that disagree which batch is
    the last one differ in what they do with it: they would wait for each other, or reduce what does not belong
    together.

    Args:
        name: Of the loader, such as ``train_dataloader``.
        run: Which pass over it this is: its number in this process, and the epoch.
        index: Of the batch, from 0.
        timeout_s: How long to wait for the other ranks.
        is_last: Whether the loader of this rank has no more.

    Raises:
        ValueError: Another rank has more batches, or had fewer.
        RuntimeError: Another rank did not come to this batch in time.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = get_store(f"batches_of_{name}")
    store.set(str(rank), f"{run[0]} {run[1]} {index} {int(is_last)}")
    if not is_last:
        return
    for other in range(world_size):
        found: list[tuple[int, ...]] = []

        def has_come(other: int = other, found: list[tuple[int, ...]] = found) -> bool:
            if not store.check([str(other)]):
                return False
            found[:] = [tuple(map(int, store.get(str(other)).split()))]
            *its_run, its_index, has_ended = found[0]
            return (*its_run, its_index) >= (*run, index) or (tuple(its_run) == run and bool(has_ended))

        if not wait_until(has_come, timeout_s):
            raise RuntimeError(f"{name}: rank {other} did not come to batch {index + 1} within timeout_s {timeout_s:g}")
        *_, its_index, has_ended = found[0]
        if found[0] != (*run, index, 1):
            short, long, count = (other, rank, its_index) if has_ended and its_index < index else (rank, other, index)
            raise ValueError(
                f"{name}: rank {short} ran out of data after {count + 1} batches, rank {long} has more: sharded models "
                "need as many on each; cut or repeat the data of each rank to the same number of batches"
            )
