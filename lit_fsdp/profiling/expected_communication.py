"""How many collectives an optimizer step takes, and how many bytes they have, from the plan alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lit_fsdp.sharding.mixed_precision import MixedPrecision
from lit_fsdp.sharding.shard import Sharding
from lit_fsdp.sharding.wrap import Unit


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """Collectives of one optimizer step on one rank.

    Args:
        gathers: All-gathers of parameters.
        reduce_scatters: Of gradients, over the shards.
        all_reduces: Of gradients, between replicas.
    """

    gathers: int
    reduce_scatters: int
    all_reduces: int


@dataclass(frozen=True, kw_only=True)
class UnitBytes:
    """The bytes of one unit: what each of its collectives has, and all of them in a step.

    Sizes are full ones: what comes out of a gather, and what goes into a reduction.

    Args:
        unit: Its name.
        gather: Of one all-gather.
        reduce_scatter: Of one reduce-scatter.
        all_reduce: Of one all-reduce.
        gather_step: Of all its all-gathers in a step.
        reduce_scatter_step: Of all its reduce-scatters.
        all_reduce_step: Of all its all-reduces.
    """

    unit: str
    gather: int
    reduce_scatter: int
    all_reduce: int
    gather_step: int
    reduce_scatter_step: int
    all_reduce_step: int


def predict_collectives(
    plan: Sequence[Unit],
    sharding: Sharding,
    *,
    num_replicas: int = 1,
    num_micro_batches: int = 1,
    num_shards: int | None = None,
) -> Collectives:
    """Count the collectives of one optimizer step.

    Each micro-batch gathers every unit for forward, and again for backward where it was resharded between. A
    head and the root are not, see ``shard_model``, and neither are units that backward never reaches: frozen ones
    before the first that trains. An idle unit is never gathered. Activation checkpointing adds none: the recomputed
    forward runs while the unit is gathered for backward.

    Args:
        plan: The units in the order of forward, from ``plan_units``.
        sharding: What happens between their uses.
        num_replicas: Copies of the model.
        num_micro_batches: Accumulated in a step.
        num_shards: Over how many ranks each copy is split; left out, over several. One has nothing to gather.
    """
    counts = [
        _count_calls(uses, sharding, num_shards or 2, num_replicas, num_micro_batches)
        for uses in _list_uses(plan, sharding)
    ]
    return Collectives(
        gathers=sum(c.gathers for c in counts),
        reduce_scatters=sum(c.reduce_scatters for c in counts),
        all_reduces=sum(c.all_reduces for c in counts),
    )


def predict_bytes(
    model: nn.Module,
    plan: Sequence[Unit],
    sharding: Sharding,
    mixed_precision: MixedPrecision,
    *,
    num_shards: int,
    num_replicas: int = 1,
    num_micro_batches: int = 1,
) -> list[UnitBytes]:
    """Return the bytes of each unit in one optimizer step, counted as in ``predict_collectives``.

    Rows of a parameter are filled up until all shards have equally many. Floating parameters are gathered in the
    dtype of compute, others (4-bit codes) as they are; gradients are reduced in the dtype of reduction. All parameters
    that train are taken to get a gradient in every step.

    Args:
        model: The root of the plan, sharded or not, its parameters in the storage dtype.
        plan: Its units.
        sharding: What happens between their uses.
        mixed_precision: All dtypes, as of ``strategy.precision_plugin.mixed_precision``.
        num_shards: Over how many ranks each copy is split.
        num_replicas: Copies of the model.
        num_micro_batches: Accumulated in a step.
    """
    parameters = dict(model.named_parameters())
    policy = mixed_precision.build_policy()
    predicted = []
    for uses in _list_uses(plan, sharding):
        count = _count_calls(uses, sharding, num_shards, num_replicas, num_micro_batches)
        gather = scatter = 0
        for name in uses.unit.parameters:
            parameter = parameters[name]
            rows, *rest = parameter.shape
            numel = -(-rows // num_shards) * num_shards * torch.Size(rest).numel()
            dtype = policy.param_dtype if parameter.is_floating_point() else None
            dtype = dtype or parameter.dtype
            gather += numel * dtype.itemsize
            scatter += numel * (policy.reduce_dtype or dtype).itemsize if parameter.requires_grad else 0
        reduced = scatter // num_shards
        predicted.append(
            UnitBytes(
                unit=" + ".join(name or "(root)" for name in uses.unit.names),
                gather=gather if count.gathers else 0,
                reduce_scatter=scatter if count.reduce_scatters else 0,
                all_reduce=reduced if count.all_reduces else 0,
                gather_step=gather * count.gathers,
                reduce_scatter_step=scatter * count.reduce_scatters,
                all_reduce_step=reduced * count.all_reduces,
            )
        )
    return predicted


@dataclass(frozen=True, kw_only=True)
class _Uses:
    """How often a unit that has parameters is gathered in a micro-batch; never, if it is idle."""

    unit: Unit
    gathers: int


def _list_uses(plan: Sequence[Unit], sharding: Sharding) -> Iterator[_Uses]:
    filled = [unit for unit in plan if unit.num_params]
    is_resharded = sharding.reshard_after_forward is not False
    first = next((i for i, unit in enumerate(filled) if unit.num_trainable), len(filled))
    for i, unit in enumerate(filled):
        is_gathered_again = is_resharded and i >= first and unit.kind in ("block", "embedding")
        yield _Uses(unit=unit, gathers=0 if unit.kind == "idle" else 2 if is_gathered_again else 1)


def _count_calls(
    uses: _Uses, sharding: Sharding, num_shards: int, num_replicas: int, num_micro_batches: int
) -> Collectives:
    reductions = 0 if not uses.unit.num_trainable else 1 if sharding.no_sync else num_micro_batches
    return Collectives(
        gathers=uses.gathers * num_micro_batches if num_shards > 1 else 0,
        reduce_scatters=reductions if num_shards > 1 else 0,
        all_reduces=reductions if num_replicas > 1 else 0,
    )
