"""How many collectives an optimizer step takes, and how many bytes they have, from the plan alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import Tensor, nn

from lit_fsdp.profiling.memory import label_unit
from lit_fsdp.sharding.low_bit import count_packed_bytes
from lit_fsdp.sharding.mixed_precision import MixedPrecision
from lit_fsdp.sharding.shard import Sharding, is_gathered_again
from lit_fsdp.sharding.tensor_parallel import get_split_shape
from lit_fsdp.sharding.wrap import Unit


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """Collectives of one optimizer step on one rank."""

    gathers: int  # all-gathers of parameters
    reduce_scatters: int  # of gradients, over the shards
    all_reduces: int  # of gradients, between replicas


@dataclass(frozen=True, kw_only=True)
class UnitBytes:
    """The bytes of one unit: what each of its collectives has, and all of them in a step.

    Sizes are full ones: what comes out of a gather, and what goes into a reduction.
    """

    unit: str
    gather: int  # of one all-gather
    reduce_scatter: int  # of one reduce-scatter
    all_reduce: int  # of one all-reduce
    gather_step: int  # of all its all-gathers in a step
    reduce_scatter_step: int  # of all its reduce-scatters
    all_reduce_step: int  # of all its all-reduces
    reduced: int  # what comes out of a reduction: this rank's gradients
    num_gathers: int  # in a step; one rank has them too, as copies to it
    num_reductions: int  # the same, as copies from it


def estimate_collectives(
    plan: Sequence[Unit],
    sharding: Sharding,
    *,
    num_replicas: int = 1,
    num_micro_batches: int = 1,
    num_shards: int = 2,
) -> Collectives:
    """Count the collectives of one optimizer step.

    Each micro-batch gathers every unit for forward, and again for backward where it was resharded between. A head and
    the root are not, see ``shard_model``, and neither are units that backward never reaches: frozen ones before the
    first trainable one. Embeddings are not either: their backward adds up rows, and reads no weight. An idle unit is
    never gathered. Activation checkpointing adds none: the recomputed forward runs while the unit is gathered for
    backward. Without ``reshard_after_backward`` only the first micro-batch gathers.

    Args:
        plan: The units in the order of forward, from ``plan_units``.
        sharding: What happens between their uses.
        num_replicas: Copies of the model.
        num_micro_batches: Accumulated in a step.
        num_shards: Over how many ranks each copy is split. One has nothing to gather; above, the number is the same.
    """
    calls = list(_count_calls(plan, sharding, num_micro_batches))
    reductions = sum(reductions for _, _, reductions in calls)
    return Collectives(
        gathers=sum(gathers for _, gathers, _ in calls) if num_shards > 1 else 0,
        reduce_scatters=reductions if num_shards > 1 else 0,
        all_reduces=reductions if num_replicas > 1 else 0,
    )


def estimate_bytes(
    model: nn.Module,
    plan: Sequence[Unit],
    sharding: Sharding,
    mixed_precision: MixedPrecision,
    *,
    num_shards: int,
    num_replicas: int = 1,
    num_micro_batches: int = 1,
) -> list[UnitBytes]:
    """Return the bytes of each unit in one optimizer step, counted as in ``estimate_collectives``.

    Gradients are reduced in the dtype of reduction. Every trainable parameter is taken to get a gradient in every step.
    The parameters of ``model`` are in the storage dtype, sharded or not.
    """
    parameters = dict(model.named_parameters())
    policy = mixed_precision.build_policy()
    predicted = []
    for unit, gathers, reductions in _count_calls(plan, sharding, num_micro_batches):
        # Those of no dimension are on all ranks, and not gathered.
        own = [parameters[name] for name in unit.parameters if parameters[name].ndim]
        gather = count_gathered_bytes(own, policy.param_dtype, num_shards)
        if sharding.gather_bits is not None:
            num_values = sum(pad_numel(p, num_shards) for p in own) // num_shards
            gather = num_shards * count_packed_bytes(num_values, sharding.gather_bits)
        trained = [p for p in own if p.requires_grad]
        scatter = reduced = count_gathered_bytes(trained, policy.reduce_dtype, num_shards)
        shard = reduced // num_shards
        if sharding.reduce_bits is not None:
            num_values = sum(pad_numel(p, num_shards) for p in trained) // num_shards
            scatter = num_shards * count_packed_bytes(num_values, sharding.reduce_bits)
        predicted.append(
            UnitBytes(
                unit=label_unit(unit),
                gather=gather if gathers and num_shards > 1 else 0,
                reduce_scatter=scatter if reductions and num_shards > 1 else 0,
                all_reduce=shard if reductions and num_replicas > 1 else 0,
                gather_step=gather * gathers if num_shards > 1 else 0,
                reduce_scatter_step=scatter * reductions if num_shards > 1 else 0,
                all_reduce_step=shard * reductions if num_replicas > 1 else 0,
                reduced=shard,
                num_gathers=gathers,
                num_reductions=reductions,
            )
        )
    return predicted


def count_gathered_bytes(parameters: Iterable[Tensor], param_dtype: torch.dtype | None, num_shards: int = 1) -> int:
    """Return the bytes of parameters when they are gathered for compute in ``param_dtype``; ``None`` is that of each.

    Their gradients have as many, when they are reduced in it. Parameters are in the storage dtype, and split over
    ``num_shards`` ranks; one adds no padding.
    """
    return sum(pad_numel(p, num_shards) * get_gather_dtype(p, param_dtype).itemsize for p in parameters)


def get_gather_dtype(parameter: Tensor, param_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a parameter is gathered: that of compute, but 4-bit and 8-bit codes as they are."""
    return param_dtype if param_dtype is not None and parameter.is_floating_point() else parameter.dtype


def pad_numel(parameter: Tensor, num_shards: int) -> int:
    """Return the elements of a parameter with its rows filled up, so that all shards have equally many."""
    rows, *rest = get_split_shape(parameter) or (1,)
    return ceil(rows / num_shards) * num_shards * prod(rest)


def _count_calls(plan: Sequence[Unit], sharding: Sharding, num_micro_batches: int) -> Iterator[tuple[Unit, int, int]]:
    """Yield every unit that has parameters, with how often it is gathered and reduced in a step."""
    filled = [unit for unit in plan if unit.num_params]
    first = next((i for i, unit in enumerate(filled) if unit.num_trainable), len(filled))
    for i, unit in enumerate(filled):
        is_twice = i >= first and is_gathered_again(unit, sharding)
        gathers = 0 if unit.kind == "idle" else 2 if is_twice else 1
        reductions = 0 if not unit.num_trainable else 1 if sharding.no_sync else num_micro_batches
        yield unit, gathers * (num_micro_batches if sharding.reshard_after_backward else 1), reductions
