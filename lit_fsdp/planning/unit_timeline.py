"""The seconds of the collectives of each FSDP unit, and how long compute waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lit_fsdp.planning.links import Group, Interconnect, time_collective
from lit_fsdp.profiling.expected_communication import UnitBytes
from lit_fsdp.sharding.wrap import Unit

HOST_COPY_GB_S = 20.0  # of a rank, between pinned memory and its GPU by PCIe 4 x16


@dataclass(frozen=True, kw_only=True)
class UnitTimes:
    """One unit: the seconds of each of its calls.

    Args:
        share: Of all compute.
        gather: Of its all-gather in forward.
        regather: In backward; 0 where it is still gathered.
        reduce_scatter: Of its gradients.
        all_reduce: Between replicas.
        copy_up: From host memory, before each gather.
        copy_down: Of gradients, after each reduction.
        num_reductions: In how many micro-batches of a step its gradients are reduced.
    """

    share: float
    gather: float
    regather: float
    reduce_scatter: float
    all_reduce: float
    copy_up: float
    copy_down: float
    num_reductions: int

    @property
    def is_regathered(self) -> bool:
        """Whether backward gathers it again."""
        return self.regather > 0

    @property
    def forward(self) -> float:
        """All that has to be done before its forward."""
        return self.copy_up + self.gather

    @property
    def before_backward(self) -> float:
        """All that has to be done before its backward."""
        return self.copy_up * self.is_regathered + self.regather

    @property
    def after_backward(self) -> float:
        """All that is done with its gradients."""
        return self.reduce_scatter + self.all_reduce + self.copy_down


def time_units(
    plan: Sequence[Unit],
    units: Sequence[UnitBytes],
    links: Interconnect,
    *,
    shard: Group,
    replica: Group,
    regather: Group,
    num_micro_batches: int,
    offloaded_bytes: int = 0,
) -> list[UnitTimes]:
    """Return the units in the order of forward. The root is first: it is gathered before all others.

    Compute is shared out by parameters; embeddings have none.

    Args:
        plan: As given to ``predict_bytes``.
        units: What that returned.
        links: Between the ranks.
        shard: Ranks that share a copy of the model.
        replica: Ranks that have the same shards of several copies.
        regather: Ranks that gather again in backward.
        num_micro_batches: Accumulated in a step.
        offloaded_bytes: This rank's shards, where they are in host memory.
    """
    filled = [unit for unit in plan if unit.num_params]
    num_computed = sum(unit.num_params for unit in filled if unit.kind not in ("embedding", "idle"))
    num_stored = sum(unit.num_params for unit in filled)
    copied = offloaded_bytes / num_stored / HOST_COPY_GB_S / 1e9
    times = []
    for unit, size in zip(filled, units, strict=True):
        is_regathered = size.gather > 0 and size.gather_step // size.gather > num_micro_batches
        # Without shards, or without replicas, one of the two is 0.
        once, step = max((size.reduce_scatter, size.reduce_scatter_step), (size.all_reduce, size.all_reduce_step))
        grads = size.reduce_scatter / shard.num_ranks / HOST_COPY_GB_S / 1e9
        times.append(
            UnitTimes(
                share=0.0 if unit.kind in ("embedding", "idle") else unit.num_params / num_computed,
                gather=time_collective("all_gather", size.gather, shard, links),
                regather=time_collective("all_gather", size.gather, regather, links) if is_regathered else 0.0,
                reduce_scatter=time_collective("reduce_scatter", size.reduce_scatter, shard, links),
                all_reduce=time_collective("all_reduce", size.all_reduce, replica, links),
                copy_up=0.0 if unit.kind == "idle" else copied * unit.num_params,
                copy_down=grads if offloaded_bytes else 0.0,
                num_reductions=step // once if once else 0,
            )
        )
    order = sorted(range(len(filled)), key=lambda i: filled[i].kind != "root")
    return [times[i] for i in order]


def sum_kinds(times: Sequence[UnitTimes], num_micro_batches: int) -> dict[str, float]:
    """Return the seconds of a step in each kind of communication.

    Args:
        times: Of the units.
        num_micro_batches: Accumulated in a step.
    """
    n = num_micro_batches
    sums = {
        "all_gather": sum(n * (unit.gather + unit.regather) for unit in times),
        "reduce_scatter": sum(unit.num_reductions * unit.reduce_scatter for unit in times),
        "all_reduce": sum(unit.num_reductions * unit.all_reduce for unit in times),
        "host_copy": sum(
            n * (1 + unit.is_regathered) * unit.copy_up + unit.num_reductions * unit.copy_down for unit in times
        ),
    }
    return {kind: seconds for kind, seconds in sums.items() if seconds}


def find_waits(times: Sequence[UnitTimes], compute: float, forward_share: float, num_micro_batches: int) -> float:
    """Return the seconds of a step in which compute waits for communication.

    Args:
        times: Of the units, in the order of forward.
        compute: Seconds of a step.
        forward_share: Of these, in forward.
        num_micro_batches: Accumulated in a step.
    """
    forward, backward = (compute * share / num_micro_batches for share in (forward_share, 1 - forward_share))
    num_reductions = max((unit.num_reductions for unit in times), default=0)
    total = num_micro_batches * _wait_in_forward(times, forward)
    total += num_reductions * _wait_in_backward(times, backward, is_reduced=True)
    return total + (num_micro_batches - num_reductions) * _wait_in_backward(times, backward, is_reduced=False)


def _wait_in_forward(times: Sequence[UnitTimes], compute: float) -> float:
    waits = times[0].forward
    for unit, following in pairwise(times):
        waits += max(following.forward - unit.share * compute, 0.0)
    return waits


def _wait_in_backward(times: Sequence[UnitTimes], compute: float, *, is_reduced: bool) -> float:
    """Return the waits of one backward, last unit first."""
    waits = times[-1].before_backward
    finished = 0.0  # of the unit before, whose gradients are on their way
    for i in range(len(times) - 1, -1, -1):
        beside = finished + (times[i - 1].before_backward if i else 0.0)
        waits += max(beside - times[i].share * compute, 0.0)
        finished = times[i].after_backward if is_reduced and times[i].num_reductions else 0.0
    return waits + finished
