"""How many collectives an optimizer step takes, from the plan alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lit_fsdp.sharding import Sharding
from lit_fsdp.units import Unit


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


def predict_collectives(
    plan: Sequence[Unit], sharding: Sharding, *, num_replicas: int = 1, num_micro_batches: int = 1
) -> Collectives:
    """Count the collectives of one optimizer step.

    Each micro-batch gathers every unit for forward, and again for backward where it was resharded between. A
    head and the root are not, see ``shard_model``, and neither are units that backward never reaches: frozen ones
    before the first that trains. Activation checkpointing adds none: the recomputed forward runs while the unit is
    gathered for backward.

    Args:
        plan: The units in the order of forward, from ``plan_units``.
        sharding: What happens between their uses.
        num_replicas: Copies of the model.
        num_micro_batches: Accumulated in a step.
    """
    filled = [unit for unit in plan if unit.num_params]
    is_resharded = sharding.reshard_after_forward is not False
    first = next((i for i, unit in enumerate(filled) if unit.num_trainable), len(filled))
    gathered_twice = [unit for unit in filled[first:] if is_resharded and unit.kind in ("block", "embedding")]
    trainable = [unit for unit in filled if unit.num_trainable]
    num_reductions = len(trainable) * (1 if sharding.hold_gradients else num_micro_batches)
    return Collectives(
        gathers=(len(filled) + len(gathered_twice)) * num_micro_batches,
        reduce_scatters=num_reductions,
        all_reduces=num_reductions if num_replicas > 1 else 0,
    )
