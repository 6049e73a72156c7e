"""Long sequences: tokens are split over ranks, and attention exchanges them for heads.

Note [Ulysses]: everything in a transformer but attention looks at one token at a time, so each rank of a sequence
group takes a slice of every row. Before attention an all-to-all hands each rank all tokens of some of the heads, after
it another one hands the tokens back. Activations shrink by the size of the group; weights, rows and masks do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lit_fsdp.sharding.mesh import Mesh, build_sequence_mesh

# Told of every exchange: called with the bytes of a rank and the number of ranks, returns what is called at its end.
Watcher = Callable[[int, int], Callable[[], None]]
_WATCHERS: list[Watcher] = []


@dataclass(frozen=True, kw_only=True)
class SequenceGroup:
    """The ranks that share the tokens of the same rows.

    Args:
        group: Of these ranks alone.
        size: How many they are.
        rank: Which of them this is; it has the ``rank``-th slice of each row.
    """

    group: dist.ProcessGroup
    size: int
    rank: int

    def get_slice(self, values: Tensor) -> Tensor:
        """Return this rank's slice of values [batch, length, ...], whose length divides by the size."""
        return values.chunk(self.size, dim=1)[self.rank].contiguous()

    def scatter_heads(self, *states: Tensor) -> tuple[Tensor, ...]:
        """Exchange tokens for heads, in one all-to-all where they have one dtype. Has a gradient.

        Args:
            states: Each [batch, heads, own tokens, width]; heads divide by the size.

        Returns:
            Each [batch, own heads, all tokens, width].
        """
        if len({state.dtype for state in states}) > 1:
            return tuple(heads for state in states for heads in self.scatter_heads(state))
        n = self.size
        shapes = [(state.shape[0], state.shape[1] // n, *state.shape[2:]) for state in states]
        parts = [  # [to rank, batch x heads x tokens x width]
            state.unflatten(1, (n, -1)).transpose(0, 1).reshape(n, -1) for state in states
        ]
        received = _exchange(self.group, torch.cat(parts, 1))
        widths = [part.shape[1] for part in parts]
        return tuple(
            part.reshape(n, *shape).permute(1, 2, 0, 3, 4).flatten(2, 3)
            for part, shape in zip(received.split(widths, 1), shapes, strict=True)
        )

    def gather_heads(self, states: Tensor) -> Tensor:
        """Exchange heads for tokens, back again. Has a gradient.

        Args:
            states: [batch, all tokens, own heads, width].

        Returns:
            [batch, own tokens, all heads, width].
        """
        parts = states.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()  # [to rank, batch, tokens, ...]
        return _exchange(self.group, parts).permute(1, 2, 0, 3, 4).flatten(2, 3)


def build_sequence_group(mesh: Mesh, **options: Any) -> SequenceGroup | None:
    """Return the ranks that share the tokens of this rank's rows, ``None`` if it has its own. All ranks must call it.

    Args:
        mesh: How the ranks are arranged.
        options: Of :func:`lit_fsdp.sharding.mesh.build_sequence_mesh`.
    """
    if mesh.sequence == 1:
        return None
    made = build_sequence_mesh(mesh, **options)
    return SequenceGroup(group=made.get_group(), size=made.size(), rank=made.get_local_rank())


def count_shared_heads(num_key_value_heads: int, size: int) -> int:
    """Return how often key and value heads are repeated so that each rank of a group gets as many."""
    return size // gcd(num_key_value_heads, size)


@contextmanager
def watch_exchanges(watcher: Watcher) -> Iterator[None]:
    """Have ``watcher`` told of every exchange of this process."""
    _WATCHERS.append(watcher)
    try:
        yield
    finally:
        _WATCHERS.remove(watcher)


class _AllToAll(torch.autograd.Function):
    """Sends the r-th part of a tensor to the r-th rank of a group; its own inverse, and so its own gradient."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, parts: Tensor) -> Tensor:
        ctx.group = group
        return _send(group, parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, _send(ctx.group, grads[0].contiguous())


def _exchange(group: dist.ProcessGroup, parts: Tensor) -> Tensor:
    received: Tensor = _AllToAll.apply(group, parts)  # type: ignore[no-untyped-call]
    return received


def _send(group: dist.ProcessGroup, parts: Tensor) -> Tensor:
    received = torch.empty_like(parts)
    ends = [watcher(parts.nbytes, len(parts)) for watcher in _WATCHERS]
    dist.all_to_all_single(received, parts, group=group)
    for end in ends:
        end()
    return received
