"""Whether a run can step its optimizer beside the next forward: nobody may look at weights or gradients meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lit_fsdp.optim.overlapped_steps import OverlappedSteps, describe_whole
from lit_fsdp.sharding.shard import find_roots

_KNOWN = ("lit_fsdp.", "lightning.", "torch.")  # torch has made what fully_shard makes of a class


def overlap_optimizer(module: pl.LightningModule, optimizers: Sequence[Optimizer]) -> OverlappedSteps:
    """Begin to step a sharded module's optimizer beside compute, as far as nobody would notice.

    What the optimizer or somebody's hooks rule out is said in one line: gradients are then received beside backward,
    and the optimizer steps as without.
    """
    why = next(_list_obstacles(module, optimizers), None)
    if why is not None:
        rank_zero_warn(f"cpu_offload.overlap_optimizer: {why}; the optimizer steps between backward and forward")
    return OverlappedSteps(find_roots(module), is_deferred=why is None)


def _list_obstacles(module: pl.LightningModule, optimizers: Sequence[Optimizer]) -> Iterator[str]:
    if not module.automatic_optimization:
        yield "manual optimization may use weights right after a step"
    if len(optimizers) != 1:
        yield f"{len(optimizers)} optimizers"
    for optimizer in optimizers:
        if (why := describe_whole(optimizer)) is not None:
            yield why
    callbacks: list[pl.Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
    for hooked in (module, *callbacks):
        if _may_read_weights(hooked):
            hint = "" if getattr(hooked, "reads_weights", False) else ", unless it says reads_weights = False"
            yield f"{_get_name(hooked)} may use weights or gradients in its hooks{hint}"


def _may_read_weights(hooked: Any) -> bool:
    if isinstance(said := getattr(hooked, "reads_weights", None), bool):
        return said
    bases = type(hooked).__mro__
    own = bases[: next(i for i, base in enumerate(bases) if base in (pl.LightningModule, pl.Callback))]
    return isinstance(hooked, LambdaCallback) or any(not base.__module__.startswith(_KNOWN) for base in own)


def _get_name(hooked: Any) -> str:
    return next(base.__name__ for base in type(hooked).__mro__ if not base.__module__.startswith("torch."))


def get_overlapped_steps(strategy: Any) -> OverlappedSteps | None:
    """Return what receives the gradients of a run beside its backward, if anything does."""
    steps = getattr(strategy, "overlapped_steps", None)
    return steps if isinstance(steps, OverlappedSteps) else None
