"""The state of an optimizer, by parameter name: none of parameters that had no step yet."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim import Optimizer

KERNELS = ("foreach", "fused", "capturable")  # settings by which torch chooses some, whose results are alike


def collect_state(model: nn.Module, optimizer: Optimizer, options: StateDictOptions | None = None) -> dict[str, Any]:
    """Return the state of an optimizer, which stays as it is. All ranks must call it.

    Of one without any, torch makes a state by a step without gradients, which would count; seen in 2.13.
    """
    is_new = not optimizer.state and not optimizer.state_dict()["state"]  # of a wrapper, that of the inner one
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=options)
    if is_new:
        optimizer.state.clear()
    return {**state, "state": {}} if is_new and state else state


def make_loadable_state(
    model: nn.Module, optimizer: Optimizer, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """Return the state of an optimizer to load into; all ranks must call it. One without any gets zeros.

    Torch makes none where it finds gradients, and would then load nothing; seen in 2.13. Those here are an earlier
    run's.
    """
    if not optimizer.state:
        optimizer.zero_grad()
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=options)
    return state


def keep_kernels(own: Iterable[Mapping[str, Any]], loaded: Iterable[dict[str, Any]]) -> None:
    """Let loaded groups step with the kernels of this run: by these torch chooses where it counts steps."""
    for ours, theirs in zip(own, loaded, strict=True):
        theirs.update({name: ours[name] for name in KERNELS if name in ours})


def drop_state(optimizer: Optimizer, groups: Collection[dict[str, Any]], names: Collection[str]) -> None:
    """Let parameters begin as before their first step.

    Args:
        optimizer: Of them.
        groups: Its groups as ``get_optimizer_state_dict`` returns them: with the names of their parameters.
        names: Of those to begin anew.
    """
    named = [name for group in groups for name in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, parameter in zip(named, parameters, strict=True):
        if name in names:
            optimizer.state.pop(parameter, None)
