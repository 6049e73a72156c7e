"""What a training step will take of each GPU, of the host and of the network, before anything is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lit_fsdp.checkpoint.writer import list_left_out
from lit_fsdp.planning.closed_form.engine import StepEstimate, estimate_step
from lit_fsdp.planning.closed_form.overrides import list_untraced
from lit_fsdp.planning.estimate import (
    Hardware,
    describe_model,
    estimate_step_time,
    measure_batch,
)
from lit_fsdp.planning.needed_memory import compute_allocator_bytes, count_outside_bytes
from lit_fsdp.planning.planned_step import PlannedStep
from lit_fsdp.planning.step_parts import Exchange, NoEstimateError, Ranks, Replay
from lit_fsdp.planning.timing.step_time import StepTime
from lit_fsdp.planning.trace.exact_trace import trace_step, unfold_step
from lit_fsdp.profiling.expected_communication import Collectives, UnitBytes, estimate_bytes, estimate_collectives
from lit_fsdp.profiling.flops import Flops
from lit_fsdp.profiling.memory_log import StepMemory
from lit_fsdp.quantization.layers import count_weights, iterate_quantized
from lit_fsdp.sharding.mesh import MeshSizes
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.wrap import Unit, count_rank_bytes, count_shard_bytes, plan_module


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A training step, planned."""

    memory: StepMemory  # of the rank with the largest shards
    allocator_bytes: int  # what the allocator must get for it
    outside_bytes: int  # of CUDA, cuBLAS and NCCL
    replay: Replay | None  # of a traced step: where ``allocator_bytes`` are from
    ranks: Ranks
    num_replicas: int
    num_shards: int
    num_split: int  # ranks that share the layers, ``mesh.tensor``
    communication: Sequence[UnitBytes]
    collectives: Collectives
    exchanges: Sequence[Exchange]  # of ranks that work on the same rows
    num_micro_batches: int
    num_weights: int  # those of quantized layers and of adapters included
    num_trained: int
    num_trained_here: int  # of these, what a rank holds
    staged_bytes: int  # of host memory of a rank, for the copy that ``async_save`` writes
    quantized_bytes: int  # of the parameters that are stored as 4 or 8 bits, a part of ``parameters``
    engine: str  # that the memory was found with
    closed_form_bytes: int | None  # its peak, whatever the engine; ``None`` if it has no rules for the step
    flops: Flops
    time: StepTime | None  # on the hardware that was named
    activations: Mapping[str, int]  # by the closed form: bytes at the peak by the part of the model that made them
    notes: Sequence[str]

    @property
    def needed_bytes(self) -> int:
        """The memory that a GPU must have: with headroom, and what lies outside of the allocator."""
        return self.allocator_bytes + self.outside_bytes

    @property
    def headroom(self) -> float:
        """How many times all tensors the allocator must get."""
        return self.allocator_bytes / max(self.memory.peak.num_bytes, 1)

    @property
    def is_offloaded(self) -> bool:
        """Whether the shards are in host memory."""
        return "parameters" in self.memory.host_by_kind

    def sum_communication(self) -> dict[str, int]:
        """Return the bytes of each kind of collective in a step of one rank."""
        return {
            "gather": sum(unit.gather_step for unit in self.communication),
            "reduce_scatter": sum(unit.reduce_scatter_step for unit in self.communication),
            "all_reduce": sum(unit.all_reduce_step for unit in self.communication),
            **{name: sum(sizes) for name, sizes in self.sizes_of_exchanges.items()},
        }

    @property
    def sizes_of_exchanges(self) -> dict[str, list[int]]:
        """The bytes of each: ``all_to_all`` of tokens and heads, ``tensor`` of split layers, whatever its kind."""
        found: dict[str, list[int]] = {}
        for exchange in self.exchanges:
            name = exchange.kind if exchange.kind == "all_to_all" else "tensor"
            found.setdefault(name, []).append(exchange.num_bytes)
        return found


_UNFOLDED = "few blocks were traced, and repeated to the depth of the model; --exact true traces all"
_CONVOLUTIONS = "convolutions ({num}): what cuDNN's algorithms take beside the tensors is not counted; it can be much"
_NOT_REPLAYED = "allocations of repeated blocks cannot be told apart, so nothing was replayed; --exact true does"


def plan_step(step: PlannedStep, *, exact: bool, hardware: Hardware | None = None) -> Plan:
    """Plan a step, with the closed form where that has rules for it.

    One that was traced is of no other use afterwards. Without the module's ``measure_batch``, or with an optimizer of
    its own, there is no time, and a note says so.

    Raises:
        ConfigError: It cannot be traced, and has to be.
    """
    settings, notes = step.strategy.settings, list(step.notes)
    sizes = step.ranks.resolve(settings.mesh)
    replicas, shards = sizes.replicate, sizes.num_shards
    counts = {"num_shards": shards, "num_replicas": replicas, "num_micro_batches": step.num_micro_batches}
    units, dtypes = plan_module(step.module, settings.wrap), step.strategy.precision_plugin.mixed_precision
    weights, convolutions = count_weights(step.module), _note_convolutions(step.module)
    num_trained = sum(weights[name] for name, p in step.module.named_parameters() if p.requires_grad)
    quantized_bytes = _count_quantized(step.module, shards)
    # Before a trace shards the module, but of layers that are split only that knows the parts.
    communication: Sequence[UnitBytes] = estimate_bytes(step.module, units, settings.sharding, dtypes, **counts)
    written_bytes, num_trained_here = _count_written(step, units, shards), _count_trained(step, shards)
    common: dict[str, Any] = {"ranks": step.ranks, "num_micro_batches": step.num_micro_batches}
    estimate, model, micro_batch, reason = None, None, None, ""
    try:
        micro_batch = measure_batch(step.module, step.batch)
        model = describe_model(step.module, step.strategy)
        estimate = estimate_step(model, settings, micro_batch, device_type=step.device_type, **common)
    except NoEstimateError as error:
        reason = str(error)
        notes.append(f"no closed form, so the step was traced: {reason}")
    if unseen := list_untraced(step.module):
        notes.append(f"left out: what {', '.join(unseen)} of the task does, which no engine follows")
    traced = trace_step(step) if exact else unfold_step(step) if estimate is None else None
    if traced is not None:
        notes += [_UNFOLDED] * traced.is_unfolded + [_NOT_REPLAYED] * (traced.replay is None)
    cost = estimate or traced
    assert cost is not None
    if cost.split_units:
        communication, written_bytes = cost.split_units, _count_written(step, units, shards)
        num_trained_here = _count_trained(step, shards)
    time = None
    if hardware is not None and model is not None and micro_batch is not None:
        time = estimate_step_time(model, settings, hardware, cost, micro_batch=micro_batch, **common)
        notes += [*time.notes, *_list_untimed(settings, sizes, hardware)]
    elif hardware is not None:
        notes.append(f"no time of a step: {reason}")
    return Plan(
        memory=(traced or cost).memory,
        allocator_bytes=compute_allocator_bytes(traced or cost),
        outside_bytes=count_outside_bytes(sizes),
        replay=(traced or cost).replay,
        ranks=step.ranks,
        num_replicas=replicas,
        num_shards=shards,
        num_split=sizes.tensor,
        communication=communication,
        collectives=estimate_collectives(units, settings.sharding, **counts),
        exchanges=() if traced is None else traced.exchanges,
        num_micro_batches=step.num_micro_batches,
        num_weights=sum(weights.values()),
        num_trained=num_trained,
        num_trained_here=num_trained_here,
        staged_bytes=written_bytes + _get_optimizer_bytes(cost.memory) if step.strategy.async_save else 0,
        quantized_bytes=quantized_bytes,
        engine="closed form" if traced is None else "exact trace",
        closed_form_bytes=None if estimate is None else estimate.peak.num_bytes,
        flops=cost.flops,
        activations={} if estimate is None else _split_activations(estimate),
        time=time,
        notes=[*notes, *convolutions, *_list_notes(settings, cost.flops)],
    )


def _list_notes(settings: Settings, flops: Flops) -> Iterator[str]:
    if flops.uncounted:
        yield f"FLOPs: none are known of {', '.join(flops.uncounted)}"
    if settings.compile is not None:
        yield "compile is left out: compiled blocks keep fewer activations, which no plan can see"
    if settings.float8 is not None:
        needed = "" if settings.float8.emulate else "; it needs GPUs of compute capability 8.9 or more"
        yield f"float8: time and memory are those without it{needed}"
    if settings.cpu_offload is not None:
        yield "offload: shards, gradients and optimizer state are in host memory, where the optimizer runs"
        if settings.cpu_offload.overlap_optimizer:
            yield "overlap_optimizer: host memory of gradients on their way is left out: up to those of two units"
    if settings.activation_checkpointing.offload:
        yield "activation_checkpointing.offload: the time leaves out copies of inputs, which run beside compute"


def _note_convolutions(module: LightningModule) -> list[str]:
    """Return a note on convolutions whose windows overlap: those of patches are products."""
    kinds = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
    num = sum(isinstance(child, kinds) and child.kernel_size != child.stride for child in module.modules())
    return [_CONVOLUTIONS.format(num=num)] if num else []


def _split_activations(estimate: StepEstimate) -> dict[str, int]:
    peak = estimate.peak
    rest = peak.by_kind["activations"] - sum(peak.activations.values())
    return {**peak.activations, **({"tables, masks and temporaries": rest} if rest else {})}


def _count_written(step: PlannedStep, units: Sequence[Unit], num_shards: int) -> int:
    """Return the bytes of one rank's parameters in a checkpoint, before anything is sharded."""
    left_out = list_left_out(step.module, step.strategy.checkpoint_format, step.strategy.save_frozen)
    written = (replace(u, parameters=tuple(n for n in u.parameters if n not in left_out)) for u in units)
    return sum(count_shard_bytes(step.module, unit, num_shards) for unit in written)


def _count_trained(step: PlannedStep, num_shards: int) -> int:
    """Return how many trainable parameters a rank holds: of layers that are split, its parts of them."""
    trained = (p for p in step.module.parameters() if p.requires_grad)
    return sum(count_rank_bytes(p, num_shards) // p.element_size() for p in trained)


def _get_optimizer_bytes(memory: StepMemory) -> int:
    return memory.host_by_kind.get("optimizer_state") or max(memory.by_kind["optimizer_state"])


def _list_untimed(settings: Settings, sizes: MeshSizes, hardware: Hardware) -> Iterator[str]:
    has_fewer_bits = bool(settings.sharding.gather_bits or settings.sharding.reduce_bits)
    if sizes.num_shards > 1 and has_fewer_bits and not hardware.links.has_rounding:
        yield "the time leaves out rounding for sharding.gather_bits and reduce_bits"


def _count_quantized(module: LightningModule, num_shards: int) -> int:
    """Return the bytes of codes and scales of one rank, before anything is sharded."""
    total = 0
    for _, layer in iterate_quantized(module):
        for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
            if tensor.dtype == torch.uint8:
                rows, *others = tensor.shape
                total += (ceil(rows / num_shards) if isinstance(tensor, torch.nn.Parameter) else rows) * prod(others)
    return total
