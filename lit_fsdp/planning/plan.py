"""What a training step will take of each GPU, of the host and of the network, before anything is there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_fsdp.planning.step_time import StepTime
from lit_fsdp.profiling.expected_communication import Collectives, UnitBytes
from lit_fsdp.profiling.flops import Flops
from lit_fsdp.profiling.memory import KINDS, Kind
from lit_fsdp.profiling.memory_trace import StepMemory

# Of published runs, what the allocator held over what tensors took, median; see docs/planning.md.
HEADROOM = 1.15
OUTSIDE_BYTES = 2**30  # of the CUDA context and NCCL, which belong to no allocator: half to one GiB
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks that a step is planned for.

    Args:
        num_nodes: How many nodes.
        per_node: Ranks of each.
        num_replicas: Copies of the model.
        num_shards: Ranks that share one copy.
    """

    num_nodes: int
    per_node: int
    num_replicas: int
    num_shards: int

    @property
    def world_size(self) -> int:
        """All of them."""
        return self.num_nodes * self.per_node


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Whether a step fits a device.

    Args:
        device_bytes: Memory of the device.
        needed_bytes: Peak of the tensors with headroom, and what lies outside of the allocator.
    """

    device_bytes: int
    needed_bytes: int

    @property
    def left_bytes(self) -> int:
        """What is left of the device; below 0, what is missing."""
        return self.device_bytes - self.needed_bytes

    @property
    def fits(self) -> bool:
        """Whether it does."""
        return self.left_bytes >= 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A training step, planned.

    Args:
        memory: Of the rank with the largest shards.
        ranks: That take part.
        traffic: Bytes of each unit in an optimizer step.
        collectives: Their number in an optimizer step.
        num_micro_batches: Accumulated in a step.
        num_weights: Of the model, those of quantized layers and of adapters included.
        num_trained: How many of them train.
        quantized_bytes: Of the parameters that are stored as 4 or 8 bits, a part of ``parameters``.
        engine: What the memory was found with.
        closed_form_bytes: The peak that the closed form says, whatever the engine; ``None`` if it has no rules for it.
        flops: Of a step, likewise.
        time: Of a step, on the hardware that was named; ``None`` without, or without a closed form.
        activations: Bytes at the peak by the part of the model that made them, likewise; empty without.
        notes: What to know about the numbers.
    """

    memory: StepMemory
    ranks: Ranks
    traffic: Sequence[UnitBytes]
    collectives: Collectives
    num_micro_batches: int
    num_weights: int
    num_trained: int
    quantized_bytes: int
    engine: str
    closed_form_bytes: int | None = None
    flops: Flops | None = None
    time: StepTime | None = None
    activations: Mapping[str, int] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def sum_traffic(self) -> dict[str, int]:
        """Return the bytes of each kind of collective in a step of one rank."""
        return {
            "gather": sum(unit.gather_step for unit in self.traffic),
            "reduce_scatter": sum(unit.reduce_scatter_step for unit in self.traffic),
            "all_reduce": sum(unit.all_reduce_step for unit in self.traffic),
        }

    def fit_into(self, device_bytes: int) -> Fit:
        """Return whether the step fits a device of this memory, with headroom."""
        return Fit(device_bytes=device_bytes, needed_bytes=find_needed_bytes(self.memory.peak.num_bytes))


def find_needed_bytes(peak_bytes: int) -> int:
    """Return what a device must have for tensors of so many bytes."""
    return round(peak_bytes * HEADROOM) + OUTSIDE_BYTES


def describe_plan(plan: Plan, device_bytes: int | None) -> dict[str, Any]:
    """Return the numbers for programs, as documented in docs/planning.md.

    Args:
        plan: The step.
        device_bytes: Memory of the device, where it is known.
    """
    peak, ranks = plan.memory.peak, plan.ranks
    described: dict[str, Any] = {
        "version": 1,
        "engine": plan.engine,
        "ranks": {
            "world_size": ranks.world_size,
            "nodes": ranks.num_nodes,
            "devices": ranks.per_node,
            "replicas": ranks.num_replicas,
            "shards": ranks.num_shards,
        },
        "micro_batches": plan.num_micro_batches,
        "model": {"weights": plan.num_weights, "trained": plan.num_trained},
        "memory": {
            "peak_bytes": peak.num_bytes,
            "peak_phase": peak.phase,
            "peak_unit": peak.unit,
            "peak_bytes_by_kind": _fill(peak.by_kind),
            "peak_bytes_by_unit": {unit: dict(kinds) for unit, kinds in peak.by_unit.items()},
            "largest_bytes_by_kind": {kind: max(values) for kind, values in plan.memory.by_kind.items()},
            "quantized_bytes": plan.quantized_bytes,
            "peak_activation_bytes_by_part": dict(plan.activations),
        },
        "host": {"bytes_by_kind": dict(plan.memory.host_by_kind), "bytes": sum(plan.memory.host_by_kind.values())},
        "traffic": {
            "bytes_per_step": plan.sum_traffic(),
            "collectives_per_step": {
                "gather": plan.collectives.gathers,
                "reduce_scatter": plan.collectives.reduce_scatters,
                "all_reduce": plan.collectives.all_reduces,
            },
            "units": [vars(unit) for unit in plan.traffic],
        },
        "closed_form_peak_bytes": plan.closed_form_bytes,
        "flops": None if plan.flops is None else {"model": plan.flops.model, "hardware": plan.flops.hardware},
        "time": None if plan.time is None else describe_time(plan.time),
        "device": None,
        "notes": list(plan.notes),
    }
    if device_bytes is not None:
        fit = plan.fit_into(device_bytes)
        described["device"] = {
            "memory_bytes": device_bytes,
            "needed_bytes": fit.needed_bytes,
            "left_bytes": fit.left_bytes,
            "fits": fit.fits,
            "headroom_factor": HEADROOM,
            "outside_bytes": OUTSIDE_BYTES,
        }
    return described


def describe_time(time: StepTime) -> dict[str, Any]:
    """Return the numbers for programs."""
    return {
        "step_s": time.step_s,
        "compute_s": time.compute_s,
        "communication_s": time.communication_s,
        "exposed_communication_s": time.exposed_s,
        "optimizer_s": time.optimizer_s,
        "communication_s_by_collective": dict(time.by_collective),
        "tokens_per_s": time.tokens_per_s,
        "tokens_per_s_per_gpu": time.tokens_per_s_per_gpu,
        "mfu_pct": time.mfu_pct,
        "bound": time.bound,
        "crossover_tokens": time.crossover_tokens,
    }


def parse_memory(text: str) -> int:
    """Translate a memory size with a unit into bytes.

    Raises:
        ValueError: It has no unit that is known, or is not above 0.
    """
    found = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if found is None or found[2].lower() not in units:
        raise ValueError(
            f"device_memory: got {text!r}: expected a number and one of {', '.join(_UNITS)}, such as 16GiB"
        )
    num_bytes = round(float(found[1]) * units[found[2].lower()])
    if num_bytes < 1:
        raise ValueError(f"device_memory: got {text!r}: expected more than nothing, such as 16GiB")
    return num_bytes


def choose_unit(num_bytes: int) -> tuple[int, str]:
    """Return the bytes of the unit that shows a number and all below it best, and its name."""
    return (2**30, "GiB") if num_bytes >= 2**28 else (2**20, "MiB")


def _fill(by_kind: Mapping[Kind, int]) -> dict[str, int]:
    return {kind: by_kind.get(kind, 0) for kind in KINDS}
