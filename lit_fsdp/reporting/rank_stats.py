"""Numbers of all ranks, put together without any rank waiting for another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor

from lit_fsdp.sharding.mesh import make_group


@dataclass(frozen=True, kw_only=True)
class Spread:
    """One number over all ranks."""

    values: tuple[float, ...]  # that of each rank, in the order of ranks

    def divide_by(self, other: Spread) -> list[float]:
        """Return the quotient on each rank, 0 where the other number is 0."""
        return [a / b if b else 0.0 for a, b in zip(self.values, other.values, strict=True)]

    @property
    def low(self) -> float:
        """The smallest."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The largest."""
        return max(self.values)

    @property
    def mean(self) -> float:
        """Their mean."""
        return sum(self.values) / len(self.values)

    @property
    def low_rank(self) -> int:
        """The first rank that has the smallest."""
        return self.values.index(self.low)

    @property
    def high_rank(self) -> int:
        """The first rank that has the largest."""
        return self.values.index(self.high)


Exchanged: TypeAlias = tuple[dict[str, Spread], Any]  # with the tag that they were sent off with


class AsyncRankStats:
    """Puts numbers of all ranks together, in the background.

    ``start`` sends this rank's numbers off over gloo, in host memory, and returns at once; ``finish`` waits for
    them. Between two steps of training, where ``finish`` comes a step later, nothing is left to wait for: so numbers
    of an interval are logged one interval later. All ranks must make the same calls, with the same names.
    """

    def __init__(self, trainer: Trainer, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._world_size = trainer.world_size
        self._group = _get_group(trainer)
        self._pending: dist.Work | None = None
        self._all: Tensor | None = None  # [ranks, names] in float64
        self._tag: Any = None

    def start(self, values: Mapping[str, float], tag: Any = None) -> None:
        """Send this rank's numbers off, one for each name. ``finish`` gives ``tag`` back, such as their step."""
        assert self._pending is None, "finish comes before the next start"
        own = torch.tensor([[values[name] for name in self.names]], dtype=torch.float64, device="cpu")
        self._tag = tag
        if self._group is None:
            self._all = own
            return
        self._all = torch.empty(self._world_size, len(self.names), dtype=torch.float64, device="cpu")
        self._pending = dist.all_gather_single(self._all, own, group=self._group, async_op=True)

    def exchange(self, values: Mapping[str, float], tag: Any = None) -> Exchanged | None:
        """Return the numbers that were sent off last, and send the next ones off."""
        found = self.finish()
        self.start(values, tag)
        return found

    def finish(self) -> Exchanged | None:
        """Return the numbers of all ranks that were sent off last, and their tag; ``None`` if there are none."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        if self._all is None:
            return None
        columns = self._all.T.tolist()
        self._all = None
        spreads = {name: Spread(values=tuple(column)) for name, column in zip(self.names, columns, strict=True)}
        return spreads, self._tag


def gather_over_ranks(trainer: Trainer, values: Mapping[str, float]) -> dict[str, Spread]:
    """Return numbers of all ranks by name, and wait for them. All ranks must call it with the same names."""
    stats = AsyncRankStats(trainer, list(values))
    stats.start(values)
    found = stats.finish()
    assert found is not None
    return found[0]


def _get_group(trainer: Trainer) -> dist.ProcessGroup | None:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    # One for all callbacks, which call in the same order on all ranks.
    return make_group("statistics", getattr(trainer.strategy, "timeout_s", None))
