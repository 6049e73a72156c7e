"""Sees that all ranks run out of batches together where no loader knows its length, without a collective."""

from __future__ import annotations

import torch.distributed as dist

from lit_fsdp.strategy.roll_call import get_store, wait_until


def note_batch(name: str, run: int, index: int, timeout_s: float, *, is_last: bool) -> None:
    """Tell the other ranks, before a step, which batch this one begins; with the last one, wait for them.

    Takes microseconds for all but the last batch. To be called before the step, as ranks that disagree which batch is
    the last one differ in what they do with it: they would wait for each other, or reduce what does not belong
    together.

    Args:
        name: Of the loader, such as ``train_dataloader``.
        run: Which pass over it this is.
        index: Of the batch, from 0.
        timeout_s: How long to wait for the other ranks.
        is_last: Whether the loader of this rank has no more.

    Raises:
        ValueError: Another rank has more batches, or had fewer.
        RuntimeError: Another rank did not come to this batch in time.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = get_store(f"batches_of_{name}")
    store.set(str(rank), f"{run} {index} {int(is_last)}")
    if not is_last:
        return
    for other in range(world_size):
        found: list[tuple[int, ...]] = []

        def has_come(other: int = other, found: list[tuple[int, ...]] = found) -> bool:
            if not store.check([str(other)]):
                return False
            found[:] = [tuple(map(int, store.get(str(other)).split()))]
            its_run, its_index, has_ended = found[0]
            return (its_run, its_index) >= (run, index) or (its_run == run and bool(has_ended))

        if not wait_until(has_come, timeout_s):
            raise RuntimeError(f"{name}: rank {other} did not come to batch {index + 1} within timeout_s {timeout_s:g}")
        _, its_index, has_ended = found[0]
        if found[0] != (run, index, 1):
            short, long, count = (other, rank, its_index) if has_ended and its_index < index else (rank, other, index)
            raise ValueError(
                f"{name}: rank {short} ran out of data after {count + 1} batches, rank {long} has more: sharded models "
                "need as many on each; cut or repeat the data of each rank to the same number of batches"
            )
