"""How long an optimizer step takes: compute, what communication adds to it, and the optimizer.

Note [Step time]: arithmetic on what is counted elsewhere, in about a millisecond.

- Compute: FLOPs as executed, over what products reach of the peak (``get_product_share``, and 0.85 of that in a model);
  and what other operators and the copies of collectives move, over the bandwidth of the memory. The second is why
  GPUs whose peak is high for their memory reach less of it.
- Communication: each collective of each unit by ``time_collective``; with offload, copies to and from the host.
- Overlap: units follow each other as in FSDP2. In forward the next unit is gathered while one computes. In backward
  the next is gathered and the gradients of the last one are reduced, one after the other, as both use the same links.
  Before a unit's gradients are copied for sending, those that may be on their way at once are waited for.
  What compute has to wait for is exposed, and so is all that ranks of the same rows send each other
  (``mesh.sequence``, ``mesh.tensor``), as the next operator needs it. Collectives beside compute still cost it
  ``contention`` of their time, as they take multiprocessors and memory bandwidth from it: 0.4, or 0.8 where they go
  through host memory.
- Optimizer: what it reads and writes of the shard, over the bandwidth of the memory that is in. Where it runs beside
  compute (``cpu_offload.overlap_optimizer``), what the last backward and the next forward do not hide.

How these numbers were found, and how exact the result is: docs/speed_model.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

from lit_fsdp.optim.factory import Optimizer
from lit_fsdp.planning.step_parts import Exchange
from lit_fsdp.planning.timing.hardware import Gpu, get_product_share
from lit_fsdp.planning.timing.links import (
    Interconnect,
    arrange_groups,
    time_collective,
    time_exchange,
    time_low_bit,
)
from lit_fsdp.profiling.expected_communication import UnitBytes
from lit_fsdp.profiling.flops import Flops
from lit_fsdp.sharding.low_bit import GatherBits, ReduceBits
from lit_fsdp.sharding.wrap import Unit

MODEL_SHARE = 0.85  # of what a single large product reaches, for all products of a model
_MEMORY_SHARE = 0.8  # of the bandwidth on data sheets
CONTENTION, CONTENTION_THROUGH_HOST = 0.4, 0.8
_HOST_GB_S = 50.0  # of the memory of a node, for all its ranks: two channels of DDR5, or a few of DDR4
_ARRIVING_SHARE = 0.25  # of what an update reads and writes of the host: gradients are scaled and their norms taken
_COMPILED_SHARE = 0.4  # of the bytes that other operators move, what is left when they are fused


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The time of an optimizer step, estimated.

    Args:
        compute_s: Forward, backward and what is computed again, undisturbed.
        exposed_s: What communication adds to compute.
        optimizer_s: Of the optimizer and gradient clipping, as far as nothing runs beside them.
        by_collective: The seconds of communication by kind; ``host_copy`` are those of offload.
        num_ranks: How many there are.
        tokens: Of a rank in a step.
        tokens_per_gather: Of a rank in a micro-batch.
        model_flops: Of a rank in a step, see Note [FLOPs].
        peak_tflops: Of its GPU, in the dtype of compute.
        gpu_name: Of what it was estimated for.
        other_s: Of a step besides all that, where it was measured: waiting for data, logging.
        notes: What was assumed.
    """

    compute_s: float
    exposed_s: float
    optimizer_s: float
    by_collective: Mapping[str, float]
    num_ranks: int
    tokens: int
    tokens_per_gather: int
    model_flops: int
    peak_tflops: float
    gpu_name: str
    other_s: float = 0.0
    notes: Sequence[str] = ()

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.exposed_s + self.optimizer_s + self.other_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Of one rank."""
        return self.tokens / self.step_s

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return self.tokens_per_s_per_gpu * self.num_ranks

    @property
    def mfu_pct(self) -> float:
        """Model FLOPs, in percent of what the peak could do in that time."""
        return 100 * self.model_flops / (self.step_s * self.peak_tflops * 1e12)

    @property
    def bound(self) -> Literal["compute", "link", "optimizer"]:
        """What takes longest. A faster GPU hardly helps where it is the link."""
        if self.compute_s >= max(self.communication_s, self.optimizer_s):
            return "compute"
        return "link" if self.communication_s >= self.optimizer_s else "optimizer"

    @property
    def communication_s(self) -> float:
        """Of all collectives, and of copies with offload."""
        return sum(self.by_collective.values())

    @property
    def crossover_tokens(self) -> float:
        """Tokens of a micro-batch below which communication takes longer than compute, so that it cannot hide."""
        return self.tokens_per_gather * self.communication_s / self.compute_s


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a rank does in an optimizer step.

    Args:
        flops: Of all micro-batches.
        plan: The units, as given to ``estimate_bytes``.
        units: What that returned.
        tokens: Of a micro-batch.
        moved_bytes: As of ``StepEstimate``.
        num_micro_batches: Accumulated in a step.
        update_bytes: Of ``count_update_bytes``.
        update_flops: Of products of the optimizer.
        update_exchanges: What ranks send each other for them.
        offloaded_bytes: Its shards, where they are in host memory: copied up for each gather, gradients down.
        overlaps_update: ``cpu_offload.overlap_optimizer``, for an optimizer that can.
        regather_ranks: ``reshard_after_forward``, where that is a number of ranks.
        is_compiled: Whether blocks are compiled, so that less is moved.
        num_reduce_buffers: ``sharding.reduce_scatter_max_input_buffers``.
        gather_bits: ``sharding.gather_bits``.
        reduce_bits: ``sharding.reduce_bits``: gradients go from all to all.
        exchanges: Of all micro-batches: what ranks that work on the same rows send each other.
    """

    flops: Flops
    plan: Sequence[Unit]
    units: Sequence[UnitBytes]
    tokens: int
    moved_bytes: int
    num_micro_batches: int = 1
    update_bytes: int = 0
    update_flops: int = 0
    update_exchanges: Sequence[Exchange] = ()
    offloaded_bytes: int = 0
    overlaps_update: bool = False
    regather_ranks: int | None = None
    is_compiled: bool = False
    num_reduce_buffers: int = 1
    gather_bits: GatherBits | None = None
    reduce_bits: ReduceBits | None = None
    exchanges: Sequence[Exchange] = ()

    def __post_init__(self) -> None:
        for name in ("tokens", "num_micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}: expected 1 or more")


@dataclass(frozen=True, kw_only=True)
class MeasuredSpeed:
    """What a rank did in steps of this model that were measured, in place of figures of its GPU.

    Args:
        flops_per_s: In forward and backward, of those that were executed, with all that is computed beside products
            and without waiting for other ranks.
        update_bytes_per_s: Of the optimizer and clipping, of what ``count_update_bytes`` counts; with its products.
        other_s: Of a step besides: waiting for data, logging.
    """

    flops_per_s: float
    update_bytes_per_s: float
    other_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a step runs on.

    Args:
        gpu: Of every rank.
        links: Between them: from ``parse_links``, or ``choose_links`` where the user says nothing.
        num_shards: Ranks that share one copy of the model.
        num_replicas: Copies of the model.
        num_split: Neighbouring ranks that hold parts of each layer, ``mesh.tensor``.
        ranks_per_node: Ranks of each node.
        dtype: That is computed in, as ``Gpu.get_peak_tflops`` takes it.
        efficiency: Share of the peak that products reach in the model, instead of what is usual on this GPU.
        contention: What a second of hidden communication costs compute, instead of what is usual.
        speed: That was measured, instead of what is usual on this GPU.
    """

    gpu: Gpu
    links: Interconnect
    num_shards: int
    num_replicas: int = 1
    num_split: int = 1
    ranks_per_node: int
    dtype: str = "bfloat16"
    efficiency: float | None = None
    contention: float | None = None
    speed: MeasuredSpeed | None = None

    def __post_init__(self) -> None:
        if self.efficiency is not None and not 0 < self.efficiency <= 1.1:
            raise ValueError(f"efficiency: got {self.efficiency}: expected a share of the peak, above 0 and up to 1.1")
        if self.contention is not None and not 0 <= self.contention <= 1:
            raise ValueError(f"contention: got {self.contention}: expected a share of the time of collectives, 0 to 1")
        if self.speed is None and self.gpu.get_peak_tflops(self.dtype) is None:
            raise ValueError(f"precision: {self.gpu.name} has no tensor cores for {self.dtype}; use float16 or float32")

    @property
    def product_tflops(self) -> float:
        """What products reach in the model."""
        share = self.efficiency or MODEL_SHARE * get_product_share(self.gpu)
        return share * self.peak_tflops

    @property
    def peak_tflops(self) -> float:
        """Of the GPU, in the dtype of compute; what was measured, where that has no peak."""
        peak = self.gpu.get_peak_tflops(self.dtype)
        if peak is None:
            assert self.speed is not None
            return self.speed.flops_per_s / 1e12
        return peak

    @property
    def memory_gb_s(self) -> float:
        """What operators reach of the bandwidth of its memory."""
        return _MEMORY_SHARE * self.gpu.bandwidth_gb_s

    @property
    def hidden_cost(self) -> float:
        """What a second of hidden communication costs compute."""
        if self.contention is not None:
            return self.contention
        links = [link for link in (self.links.intra, self.links.inter) if link is not None]
        if any(link.is_blocking for link in links):
            return 1.0
        return CONTENTION_THROUGH_HOST if self.links.intra.is_through_host else CONTENTION


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
        num_gathers: In how many it is gathered for forward.
        is_regathered: Whether backward gathers it again.
    """

    share: float
    gather: float
    regather: float
    reduce_scatter: float
    all_reduce: float
    copy_up: float
    copy_down: float
    num_reductions: int
    num_gathers: int
    is_regathered: bool

    @property
    def forward(self) -> float:
        """All that has to be done before its forward."""
        return self.copy_up + self.gather

    @property
    def before_backward(self) -> float:
        """All that has to be done before its backward."""
        return (self.copy_up + self.regather) * self.is_regathered


def estimate_time(work: Workload, machine: Machine) -> StepTime:
    """Estimate the time of an optimizer step, see Note [Step time].

    Raises:
        ValueError: ``links`` says nothing of a network, and ranks are on several nodes.
    """
    compute = _time_compute(work, machine)
    times = time_units(work, machine)
    by_collective = _sum_kinds(times, work.num_micro_batches)
    communication = sum(by_collective.values())
    forward_share = work.flops.forward / max(work.flops.hardware, 1)
    exchanged = _time_exchanges(work.exchanges, machine)
    waits = compute_waits(times, compute, forward_share, work.num_micro_batches, work.num_reduce_buffers)
    update_gb_s = _HOST_GB_S / machine.ranks_per_node if work.offloaded_bytes else machine.memory_gb_s
    products_s = work.update_flops / (machine.product_tflops * 1e12)
    if machine.speed is not None:  # with the products, which the ranks share as they do the bytes
        update_gb_s, products_s = machine.speed.update_bytes_per_s / 1e9, 0.0
    update = work.update_bytes / update_gb_s / 1e9 + products_s
    update += sum(_time_exchanges(work.update_exchanges, machine).values())
    if work.overlaps_update:
        once = compute / work.num_micro_batches
        update = _expose_update(update, once * forward_share, once * (1 - forward_share), num_units=len(times))
    return StepTime(
        compute_s=compute,
        exposed_s=waits + machine.hidden_cost * max(communication - waits, 0.0) + sum(exchanged.values()),
        optimizer_s=update,
        by_collective={**by_collective, **exchanged},
        num_ranks=machine.num_replicas * machine.num_shards * machine.num_split,
        tokens=work.tokens * work.num_micro_batches,
        tokens_per_gather=work.tokens,
        model_flops=work.flops.model,
        peak_tflops=machine.peak_tflops,
        gpu_name=machine.gpu.name,
        other_s=0.0 if machine.speed is None else machine.speed.other_s,
        notes=_list_notes(work, machine),
    )


def time_units(work: Workload, machine: Machine) -> list[UnitTimes]:
    """Return the units in the order of forward. The root is first: it is gathered before all others.

    Compute is shared out by parameters; embeddings have none.
    """
    near = (machine.ranks_per_node, machine.num_split)
    shard, replica = arrange_groups(machine.num_replicas, machine.num_shards, *near)
    regather = arrange_groups(1, work.regather_ranks or machine.num_shards, *near)[0]
    filled = [unit for unit in work.plan if unit.num_params]
    num_computed = sum(unit.num_params for unit in filled if unit.kind not in ("embedding", "idle"))
    host_link_gb_s = machine.gpu.host_link_gb_s
    copied = work.offloaded_bytes / sum(unit.num_params for unit in filled) / host_link_gb_s / 1e9
    links, times = machine.links, []
    time_gather, time_reduction = partial(time_collective, "all_gather"), partial(time_collective, "reduce_scatter")
    if work.gather_bits is not None:
        time_gather = partial(time_low_bit, "gather_bits_8")
    if work.reduce_bits is not None:
        time_reduction = partial(time_low_bit, "reduce_bits_16" if work.reduce_bits == 16 else "reduce_bits_8")
    for unit, size in zip(filled, work.units, strict=True):
        is_regathered = size.num_gathers > work.num_micro_batches
        times.append(
            UnitTimes(
                share=0.0 if unit.kind in ("embedding", "idle") else unit.num_params / num_computed,
                gather=time_gather(size.gather, shard, links),
                regather=time_gather(size.gather, regather, links),
                reduce_scatter=time_reduction(size.reduce_scatter, shard, links),
                all_reduce=time_collective("all_reduce", size.all_reduce, replica, links),
                copy_up=0.0 if unit.kind == "idle" else copied * unit.num_params,
                copy_down=size.reduced / host_link_gb_s / 1e9 if work.offloaded_bytes else 0.0,
                num_reductions=size.num_reductions,
                num_gathers=size.num_gathers - is_regathered * work.num_micro_batches,
                is_regathered=is_regathered,
            )
        )
    order = sorted(range(len(filled)), key=lambda i: filled[i].kind != "root")
    return [times[i] for i in order]


def compute_waits(
    times: Sequence[UnitTimes],
    compute: float,
    forward_share: float,
    num_micro_batches: int,
    num_reduce_buffers: int = 1,
) -> float:
    """Return the seconds of a step in which compute waits for communication.

    ``compute`` are the seconds of a step, of which ``forward_share`` are in forward. The gradients of
    ``num_reduce_buffers`` units may be on their way at once.
    """
    forward, backward = (compute * share / num_micro_batches for share in (forward_share, 1 - forward_share))
    num_reductions = max((unit.num_reductions for unit in times), default=0)
    total = max((unit.num_gathers for unit in times), default=0) * _wait_in_forward(times, forward)
    total += num_reductions * _wait_in_backward(times, backward, num_reduce_buffers)
    return total + (num_micro_batches - num_reductions) * _wait_in_backward(times, backward)


def count_update_bytes(plan: Sequence[Unit], optimizer: Optimizer, *, num_shards: int, itemsize: int) -> int:
    """Return what the optimizer and gradient clipping read and write of a rank's shard in a step.

    ``itemsize`` are the bytes of a trainable number.
    """
    # Clipping reads gradients twice and writes them once; the step reads both, and writes parameters.
    numbers = 3 + 3
    if optimizer.name == "adamw":
        per_number = (numbers + 4) * itemsize
    elif optimizer.name == "adafactor":
        per_number = (numbers + 3) * itemsize  # three passes more, for the means of rows, columns and the update
    elif optimizer.name == "muon":
        per_number = (numbers + 2) * itemsize + 8  # the direction in bfloat16, written and read before and after
    else:
        per_number = numbers * itemsize + 4  # two bytes, read and written
    return per_number * sum(unit.num_trainable for unit in plan) // num_shards


def _expose_update(update: float, forward: float, backward: float, *, num_units: int) -> float:
    """Return what compute waits of an update beside the last backward and the next forward of a step.

    Gradients are scaled and measured beside the former, clipped and stepped beside the latter. Nothing is beside the
    end of the last unit's gradients and the step of the first unit.
    """
    arriving = _ARRIVING_SHARE * update
    exposed = max(arriving - backward, 0.0) + max(update - arriving - forward, 0.0)
    return min(exposed + update / num_units, update)


def _time_compute(work: Workload, machine: Machine) -> float:
    if machine.speed is not None:
        return work.flops.hardware / machine.speed.flops_per_s
    moved = work.moved_bytes * (_COMPILED_SHARE if work.is_compiled else 1.0)
    # Gathered parameters are copied out of the buffer, gradients into one in the dtype of reduction.
    moved += sum(2 * unit.gather_step + 1.5 * unit.reduce_scatter_step for unit in work.units)
    return work.flops.hardware / (machine.product_tflops * 1e12) + moved / (machine.memory_gb_s * 1e9)


def _sum_kinds(times: Sequence[UnitTimes], num_micro_batches: int) -> dict[str, float]:
    """Return the seconds of a step in each kind of communication."""
    again = {unit: num_micro_batches * unit.is_regathered for unit in times}
    sums = {
        "all_gather": sum(unit.num_gathers * unit.gather + again[unit] * unit.regather for unit in times),
        "reduce_scatter": sum(unit.num_reductions * unit.reduce_scatter for unit in times),
        "all_reduce": sum(unit.num_reductions * unit.all_reduce for unit in times),
        "host_copy": sum(
            (unit.num_gathers + again[unit]) * unit.copy_up + unit.num_reductions * unit.copy_down for unit in times
        ),
    }
    return {kind: seconds for kind, seconds in sums.items() if seconds}


def _time_exchanges(exchanges: Sequence[Exchange], machine: Machine) -> dict[str, float]:
    """Return the seconds of a step in what neighbouring ranks send each other, by kind."""
    found: dict[str, float] = {}
    for exchange, count in Counter(exchanges).items():
        group = arrange_groups(1, exchange.num_ranks, machine.ranks_per_node)[0]
        if exchange.kind == "all_to_all":
            name, seconds = "all_to_all", time_exchange(exchange.num_bytes, group, machine.links)
        else:
            assert exchange.kind != "tensor"
            name, seconds = "tensor", time_collective(exchange.kind, exchange.num_bytes, group, machine.links)
        found[name] = found.get(name, 0.0) + count * seconds
    return found


def _wait_in_forward(times: Sequence[UnitTimes], compute: float) -> float:
    waits = times[0].forward
    for unit, following in pairwise(times):
        waits += max(following.forward - unit.share * compute, 0.0)
    return waits


def _wait_in_backward(times: Sequence[UnitTimes], compute: float, num_buffers: int = 0) -> float:
    """Return the waits of one backward, last unit first; without buffers nothing is reduced.

    Compute and the link each have a clock. What is on the link goes one after the other.
    """
    waits = now = link = times[-1].before_backward
    on_their_way: list[float] = []  # when the gradients of a unit are reduced
    for i in range(len(times) - 1, -1, -1):
        gathered = now
        if i and (following := times[i - 1].before_backward):
            link = gathered = max(link, now) + following
        now += times[i].share * compute
        is_full = len(on_their_way) >= num_buffers > 0
        copied_at = max(now, on_their_way.pop(0)) if is_full else now
        if num_buffers and times[i].num_reductions:
            reduced = max(link, copied_at) + times[i].reduce_scatter
            on_their_way.append(reduced)  # what comes after that has buffers of its own
            link = reduced + times[i].all_reduce + times[i].copy_down
        waits += max(copied_at, gathered) - now
        now = max(copied_at, gathered)
    return waits + max(link - now, 0.0)


def _list_notes(work: Workload, machine: Machine) -> list[str]:
    if machine.speed is None:
        share = machine.product_tflops / machine.peak_tflops
        notes = [f"speed: products reach {100 * share:.0f} % of the peak of {machine.gpu.name}"]
    else:
        notes = [f"speed: as measured: {machine.speed.flops_per_s / 1e12:.3g} TFLOP/s with all that is not a product"]
    if machine.num_replicas * machine.num_shards > 1 or work.offloaded_bytes:
        notes.append(f"speed: a second of hidden communication costs compute {machine.hidden_cost:.2f} s")
    if machine.num_replicas * machine.num_shards > 1:
        notes += machine.links.notes
    if work.offloaded_bytes:
        notes.append(
            f"speed: offload: {machine.gpu.host_link_gb_s:.0f} GB/s between a GPU and its host, {_HOST_GB_S:.0f} GB/s "
            "of memory for the optimizers of a node"
        )
    return notes
