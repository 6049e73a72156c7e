"""What connects the ranks, measured: time and bandwidth of each collective by size, and a line through them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
import torch
import torch.distributed as dist

from lit_fsdp.profiling.clock import Clock
from lit_fsdp.sharding.gloo_collectives import choose_collectives
from lit_fsdp.sharding.low_bit import LowBitAllGather, LowBitReduceScatter
from lit_fsdp.sharding.torch_internals import AllGather, ReduceScatter

Collective = Literal["all_gather", "reduce_scatter", "all_reduce"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
# What a step is measured by: those of FSDP2, all of the layers that ``mesh.tensor`` splits together, and those in which
# the ranks of ``mesh.sequence`` exchange tokens for heads.
Traffic = Literal[Collective, "tensor", "all_to_all"]
TRAFFIC: tuple[Traffic, ...] = (*COLLECTIVES, "tensor", "all_to_all")
# What ``sharding.gather_bits`` and ``reduce_bits`` put in place of two of them, with their rounding.
LowBit = Literal["gather_bits_8", "reduce_bits_16", "reduce_bits_8"]
Measured = Literal[Collective, LowBit]
MEASURED: tuple[Measured, ...] = (*COLLECTIVES, *get_args(LowBit))
_ELEMENT_BYTES = 4  # of float32, in which everything is sent here


def count_wire_bytes(collective: Traffic | LowBit, num_bytes: int, num_ranks: int) -> float:
    """Return what a rank has to send for a collective, whatever the algorithm: "bus bytes".

    As nccl-tests defines it (``doc/PERFORMANCE.md``): of the full size, (n-1)/n to gather, to reduce and scatter, or
    from all to all, twice that to all-reduce. Divided by the time it is the bus bandwidth, which can be compared with
    that of a link.
    ``num_bytes`` is the full size: what comes out of a gather, what goes into a reduction.
    """
    return (2 if collective == "all_reduce" else 1) * (num_ranks - 1) / num_ranks * num_bytes


def count_full_bytes(comm: AllGather | ReduceScatter | None, full: torch.Tensor, num_ranks: int) -> int:
    """Return what a communication of FSDP2 sends for a buffer, at full size."""
    if isinstance(comm, LowBitAllGather | LowBitReduceScatter):
        return comm.count_bytes(full, num_ranks)
    return full.nbytes


@dataclass(frozen=True, kw_only=True)
class Timing:
    """A collective of one size."""

    collective: Measured
    num_bytes: int  # that are sent, at full size: fewer than were asked for with fewer bits
    seconds: float  # median over its repeats, mean over the ranks
    seconds_low: float  # the shortest of all repeats and ranks
    seconds_high: float
    num_ranks: int

    @property
    def bus_gb_s(self) -> float:
        """The bus bandwidth, see ``count_wire_bytes``."""
        return count_wire_bytes(self.collective, self.num_bytes, self.num_ranks) / self.seconds / 1e9


@dataclass(frozen=True, kw_only=True)
class Line:
    """The time of a collective as ``alpha_s + wire bytes / bandwidth``."""

    alpha_s: float  # the latency: what a collective takes however little it sends
    bandwidth_gb_s: float  # the bus bandwidth of large ones, in 1e9 bytes
    # The largest difference to what was measured, of that; ``None`` of two sizes, which any line meets
    worst_pct: float | None


def measure_fabric(sizes: Sequence[int], *, num_repeats: int, device: torch.device, num_nodes: int) -> list[Timing]:
    """Time every collective at every size, as a run uses it. All ranks of the default process group must call it.

    Repeats follow each other directly, on the same memory, after a few that do not count. Sizes are full ones in
    bytes of float32, rounded up so that all ranks get equal parts. ``num_nodes`` is over how many the ranks are spread.
    """
    gather, reduce = choose_collectives(dist.get_world_size(), num_nodes) if device.type == "cpu" else (None, None)
    calls: dict[Measured, Callable[[torch.Tensor], int]] = {
        "all_gather": partial(_gather, gather),
        "reduce_scatter": partial(_reduce_scatter, reduce),
        "all_reduce": _all_reduce,
        "gather_bits_8": partial(_gather, LowBitAllGather()),
        "reduce_bits_16": partial(_reduce_scatter, LowBitReduceScatter(16)),
        "reduce_bits_8": partial(_reduce_scatter, LowBitReduceScatter(8)),
    }
    return [
        _time_collective(collective, calls[collective], size, num_repeats, device)
        for collective in MEASURED
        for size in sorted(sizes)
    ]


def fit_line(timings: Sequence[Timing]) -> Line | None:
    """Fit latency and bandwidth to timings of one collective, by least squares of relative errors.

    Relative, as otherwise the largest size would decide alone, and the latency would be noise. Fewer than two sizes
    give ``None``, and so do times that do not grow with the size.
    """
    if len({timing.num_bytes for timing in timings}) < 2 or timings[0].num_ranks < 2:
        return None
    seconds = np.array([timing.seconds for timing in timings])
    wire = np.array([count_wire_bytes(t.collective, t.num_bytes, t.num_ranks) for t in timings])
    rows = np.stack([1 / seconds, wire / seconds], axis=1)
    scale = np.abs(rows).max(axis=0)  # else one column is a million times the other
    alpha_s, seconds_per_byte = np.linalg.lstsq(rows / scale, np.ones(len(rows)), rcond=None)[0] / scale
    if alpha_s < 0:  # no latency is negative: the line through the origin
        alpha_s, seconds_per_byte = 0.0, rows[:, 1].sum() / (rows[:, 1] ** 2).sum()
    if seconds_per_byte <= 0:
        return None
    errors = np.abs((alpha_s + wire * seconds_per_byte) / seconds - 1)
    return Line(
        alpha_s=float(alpha_s),
        bandwidth_gb_s=float(1e-9 / seconds_per_byte),
        worst_pct=float(100 * errors.max()) if len(errors) > 2 else None,
    )


def _time_collective(
    collective: Measured, call: Callable[[torch.Tensor], int], size: int, num_repeats: int, device: torch.device
) -> Timing:
    num_ranks = dist.get_world_size()
    full = torch.zeros(num_ranks, max(-(-size // (num_ranks * _ELEMENT_BYTES)), 1), device=device)
    num_bytes, clock = call(full), Clock(device)
    for _ in range(2):  # the first has made connections
        call(full)
    _wait_for_all(device)
    marks = [clock.mark()]
    for _ in range(num_repeats):
        call(full)
        marks.append(clock.mark())
    seconds = [clock.measure_s(begin, end) for begin, end in pairwise(marks)]
    medians, lows, highs = _gather_seconds([statistics.median(seconds), min(seconds), max(seconds)], device)
    return Timing(
        collective=collective,
        num_bytes=num_bytes,
        seconds=statistics.fmean(medians),
        seconds_low=min(lows),
        seconds_high=max(highs),
        num_ranks=num_ranks,
    )


def _gather(comm: AllGather | None, full: torch.Tensor) -> int:
    """Gather into [ranks, numbers], of which a row is this rank's, as FSDP2 does; return the bytes, at full size."""
    own = full[dist.get_rank()]
    if comm is None:
        dist.all_gather_single(full.view(-1), own)
    else:
        comm(full.view(-1), own, _get_world())
    return count_full_bytes(comm, full, dist.get_world_size())


def _reduce_scatter(comm: ReduceScatter | None, full: torch.Tensor) -> int:
    """Reduce and scatter [ranks, numbers], likewise, into memory of its own."""
    own = torch.empty_like(full[0])
    if comm is None:
        dist.reduce_scatter_single(own, full.view(-1), op=dist.ReduceOp.AVG)
    else:
        comm(own, full.view(-1), _get_world(), dist.ReduceOp.AVG)
    return count_full_bytes(comm, full, dist.get_world_size())


def _all_reduce(full: torch.Tensor) -> int:
    dist.all_reduce(full)
    return full.nbytes


def _get_world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _wait_for_all(device: torch.device) -> None:
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gather_seconds(own: list[float], device: torch.device) -> list[list[float]]:
    """Return for each number of this rank those of all ranks."""
    row = torch.tensor(own, dtype=torch.float64, device=device)
    table = torch.empty(dist.get_world_size() * len(own), dtype=torch.float64, device=device)
    dist.all_gather_single(table, row)
    return table.view(-1, len(own)).T.tolist()
