"""Which random numbers Lightning's hooks draw: this rank's in steps, else those that all ranks have in common.

See Note [Two streams] in ``lit_fsdp/sharding/random_state.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lit_fsdp.sharding.mesh import DataRanks
from lit_fsdp.sharding.random_state import own_generators


class RandomStreams(ParallelStrategy):
    """A strategy whose steps draw from the stream of the rank."""

    @property
    def data_ranks(self) -> DataRanks:
        """Which rows are those of this rank; each has its own, unless a strategy says otherwise."""
        return DataRanks(count=self.world_size, index=self.global_rank)

    # From a checkpoint: until the first step, and until the training loader is there.
    _restore_own: Callable[[], None] | None = None
    _restore_common: Callable[[], None] | None = None

    def restore_random_later(self, own: Callable[[], None] | None, common: Callable[[], None] | None) -> None:
        """Call ``own`` before the first step, and ``common`` when the training loader was built, if given."""
        self._restore_own, self._restore_common = own, common

    @contextmanager
    def _own_generators(self) -> Iterator[None]:
        # Not when loading: what is drawn in between, as by a sampler, is not what was drawn after the checkpoint.
        if self._restore_own is not None:
            self._restore_own()
            self._restore_own = None
        with own_generators():
            yield

    @override
    def process_dataloader(self, dataloader: object) -> object:
        # Once the training loader was built, before anything is drawn from it.
        module = self.lightning_module
        if self._restore_common is not None and module is not None and module.trainer.training:
            self._restore_common()
            self._restore_common = None
        if isinstance(dataloader, DataLoader):
            if dataloader.num_workers and dataloader.worker_init_fn is None:
                # Torch seeds workers by a number that is drawn outside of steps: the same on all ranks.
                dataloader.worker_init_fn = partial(pl_worker_init_function, rank=self.data_ranks.index)
            elif not dataloader.num_workers and not isinstance(dataloader.dataset, IterableDataset):
                self._read_rows_in_own_stream(dataloader)
        return dataloader

    def _read_rows_in_own_stream(self, dataloader: Any) -> None:
        """Let rows be read in the stream of the rank, while the sampler goes on drawing from the common one.

        Rows that draw more or less than others, as random crops do, would lead the samplers of the ranks apart.
        """
        get_iterator = type(dataloader)._get_iterator  # private, seen in torch 2.13

        def get_iterator_in_two_streams() -> Any:
            iterator = get_iterator(dataloader)
            if not hasattr(iterator, "_dataset_fetcher"):  # a loader with an iterator of its own
                return iterator
            fetch = iterator._dataset_fetcher.fetch

            def fetch_in_own_stream(numbers: Any) -> Any:
                with self._own_generators():
                    return fetch(numbers)

            iterator._dataset_fetcher.fetch = fetch_in_own_stream
            return iterator

        dataloader._get_iterator = get_iterator_in_two_streams

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        with self._own_generators():  # users augment in its hooks
            return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._own_generators():
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._own_generators():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        with self._own_generators():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._own_generators():
            return super().predict_step(*args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        with self._own_generators():
            return super().optimizer_step(optimizer, closure, *args, **kwargs)
