"""An order of rows in which those of like lengths follow each other, so that batches need little padding.

Note [Length groups]: rows are drawn in a random order as ever. Pools of them, one after the other, are sorted by
length and cut into groups, and all groups are shuffled. What a batch is does not enter, so the order is the same at
any number of ranks, and a place in it is what Note [Global order] says. Group sizes are such that the batches that
all ranks compute at the same time mostly lie in one group.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_GROUP = 64  # rows: the batches of most runs, all ranks together, divide it
_GROUPS_OF_POOL = 50
_FEWEST_GROUPS, _FEWEST_POOLS = 8, 2  # of an epoch: with fewer, its order would be that of lengths


def choose_group_size(num_rows: int, step_size: int | None = None) -> int:
    """Return how many rows of like lengths follow each other.

    Args:
        num_rows: Of an epoch.
        step_size: Rows of an optimizer step, where it is set and so the same for any number of ranks.
    """
    size = min(_GROUP, max(1, num_rows // _FEWEST_GROUPS))
    return max(1, size // step_size) * step_size if step_size else 1 << (size.bit_length() - 1)


def group_by_length(order: torch.Tensor, lengths: Ints, group_size: int, generator: torch.Generator) -> torch.Tensor:
    """Return rows in groups of like lengths, in each group the short ones first.

    Args:
        order: All rows, shuffled.
        lengths: Of each row, by its number.
        group_size: From ``choose_group_size``.
        generator: Draws the order of the groups.
    """
    num_groups = len(order) // group_size
    grouped, rest = order.split([num_groups * group_size, len(order) - num_groups * group_size])
    pool_size = group_size * max(1, min(_GROUPS_OF_POOL, num_groups // _FEWEST_POOLS))
    groups = _sort_pools(grouped, lengths, pool_size).view(num_groups, group_size)
    groups = groups[torch.randperm(num_groups, generator=generator)]
    # Of the end, rows that fill no batch are left out: rolled, these are not the longest ones of every epoch.
    shift = int(torch.randint(max(1, len(rest)), (), generator=generator))
    return torch.cat([groups.flatten(), _sort_pools(rest, lengths, group_size).roll(shift)])


def _sort_pools(order: torch.Tensor, lengths: Ints, pool_size: int) -> torch.Tensor:
    """Return rows, of which each so many that follow each other are sorted by length."""
    return order[torch.from_numpy(np.lexsort((lengths[order.numpy()], np.arange(len(order)) // pool_size)))]


def bundle_by_length(lengths: Ints, max_padded: int, seed: int) -> list[Ints]:
    """Return rows in bundles of like lengths, each as many as fit when all are padded to their longest.

    Args:
        lengths: Of each row, none above ``max_padded``.
        max_padded: Largest number of rows times longest length.
        seed: Decides which of rows of the same length come together.
    """
    order = np.lexsort((np.random.default_rng(seed).random(len(lengths)), lengths))
    bundles: list[list[int]] = []
    for row in order.tolist():
        if bundles and (len(bundles[-1]) + 1) * lengths[row] <= max_padded:  # the longest so far
            bundles[-1].append(row)
        else:
            bundles.append([row])
    return [np.array(bundle) for bundle in bundles]


def compute_efficiency(lengths: Ints, batch_size: int, multiple_of: int = 1) -> float:
    """Return the share of tokens in padded batches; the rest is padding.

    Args:
        lengths: Of the rows, in their order.
        batch_size: Rows in a batch, all of which are padded to its longest.
        multiple_of: The length of a batch is rounded up to a multiple of this.
    """
    begins = np.arange(0, len(lengths), batch_size)
    longest = -(-np.maximum.reduceat(lengths, begins) // multiple_of) * multiple_of
    return float(lengths.sum() / (longest @ np.diff(begins, append=len(lengths))))
