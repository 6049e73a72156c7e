"""Lightning's callbacks that unfreeze parameters in the middle of a run, when such a run is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from torch import nn

from lit_fsdp.adapters.layers import clean_name
from lit_fsdp.sharding.shard import reshard


def restore_groups(trainer: pl.Trainer, module: nn.Module, meta: Mapping[str, Any]) -> None:
    """Add the groups of parameters to optimizers that a callback had added to those of a checkpoint, unfrozen.

    To be called before the optimizers' states are loaded. Lightning restores callbacks before ``on_fit_start``, where
    this one adds its groups; a sharded checkpoint can only be loaded after that. Nor does Lightning unfreeze them
    again, seen in 2.6.6: such a run under DDP goes on with them frozen.

    Args:
        trainer: Has the optimizers by now.
        module: Sharded.
        meta: Of the checkpoint. What is restored here is taken out, so that it is not restored again.
    """
    states = meta.get("callbacks", {})
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, BaseFinetuning) or callback.state_key not in states:
            continue
        counts = [len(optimizer.param_groups) for optimizer in trainer.optimizers]
        callback.load_state_dict(_rename(deepcopy(states.pop(callback.state_key)), module))
        callback.on_fit_start(trainer, trainer.lightning_module)
        added = [
            parameter
            for optimizer, count in zip(trainer.optimizers, counts, strict=True)
            for group in optimizer.param_groups[count:]
            for parameter in group["params"]
        ]
        if added and isinstance(callback, BackboneFinetuning):
            callback.make_trainable(module.backbone)  # also norms that it keeps out of the optimizer
        for parameter in added:
            parameter.requires_grad_(True)
        reshard(module)


def _rename(state: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """Let a state name parameters as this run does, whatever its activation checkpointing."""
    names = {clean_name(name): name for name, _ in module.named_parameters()}
    for groups in state.get("internal_optimizer_metadata", {}).values():
        for group in groups:
            group["params"] = [names.get(clean_name(name), name) for name in group["params"]]
    return state
