"""Optimizers that were built before sharding, which replaces the parameters they hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_fsdp.weights.shard_writer import get_local_shard

# By id of the parameter before sharding: itself, the module that holds it, and its name there. All weak: only an
# optimizer may keep the memory of an unsharded parameter.
_Places = dict[int, tuple["ref[Tensor]", "ref[nn.Module]", str]]
_PLACES: WeakKeyDictionary[nn.Module, _Places] = WeakKeyDictionary()


def remember_parameters(model: nn.Module) -> None:
    """Note where the parameters are, for ``rebind_optimizers``. Before sharding."""
    _PLACES[model] = {
        id(parameter): (ref(parameter), ref(module), name)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
    }


def rebind_optimizers(model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Give optimizers that were built before sharding the sharded parameters; groups and state stay.

    Without it they would step parameters that no forward uses.

    Raises:
        ValueError: An optimizer holds a parameter that the model does not have, so it would train nothing.
    """
    present = {id(parameter) for parameter in model.parameters()}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for i, old in enumerate(group["params"]):
                if id(old) in present:
                    continue
                new = _find_new(model, old)
                if new is None:
                    raise ValueError(
                        f"configure_optimizers: optimizer {number} ({type(optimizer).__name__}) holds a parameter of "
                        f"shape {tuple(old.shape)} that the module does not have: it would train nothing; build the "
                        "optimizer in configure_optimizers, from self.parameters()"
                    )
                group["params"][i] = new  # in place: LBFGS keeps the list
                if old in optimizer.state:  # such as the sums that Adagrad begins with
                    state: Any = optimizer.state.pop(old)
                    optimizer.state[new] = {key: _shard_state(value, old, new) for key, value in state.items()}


def _find_new(model: nn.Module, old: Tensor) -> nn.Parameter | None:
    parameter, module, name = _PLACES.get(model, {}).get(id(old), (None, None, ""))
    # An id is given again once its owner is gone.
    if parameter is None or module is None or parameter() is not old:
        return None
    return dict(holder.named_parameters(recurse=False)).get(name) if (holder := module()) is not None else None


@torch.no_grad()
def _shard_state(value: Any, old: Tensor, new: Tensor) -> Any:
    """Return this rank's rows of a tensor of the state that has the shape of its parameter; all else as it is."""
    if not isinstance(value, Tensor) or value.shape != old.shape or not value.ndim:
        return value
    sharded = torch.zeros_like(new, dtype=value.dtype)
    first, local = get_local_shard(sharded)
    local.copy_(value[first : first + len(local)])
    return sharded
