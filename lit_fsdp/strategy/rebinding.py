"""What knew the parameters before sharding, which replaces them: their own attributes, optimizers, lists of modules."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lit_fsdp.errors import join_names
from lit_fsdp.weights.shard_writer import get_local_shard


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A parameter before sharding. Weak: only an optimizer may keep the memory of an unsharded one."""

    parameter: ref[Tensor]
    module: ref[nn.Module]
    name: str
    attributes: dict[str, Any]
    has_hooks: bool

    def find_new(self) -> nn.Parameter | None:
        module = self.module()
        return None if module is None else dict(module.named_parameters(recurse=False)).get(self.name)


_PLACES: WeakKeyDictionary[nn.Module, dict[int, _Place]] = WeakKeyDictionary()  # by id of the parameter


def remember_parameters(model: nn.Module) -> None:
    """Note where the parameters are, and what their users gave them. Before sharding."""
    _PLACES[model] = {
        id(parameter): _Place(
            parameter=ref(parameter),
            module=ref(module),
            name=name,
            attributes=dict(vars(parameter)),
            has_hooks=bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks),
        )
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
    }


def warn_of_hooks(model: nn.Module) -> None:
    """Name the parameters that are, or will be once they have values, others than those with hooks. After sharding."""
    lost = set()
    for place in _PLACES[model].values():
        new = place.find_new() if place.has_hooks else None
        if new is not None and (new.is_meta or new is not place.parameter()):
            lost.add(id(new))
    if hooked := [name for name, parameter in model.named_parameters() if id(parameter) in lost]:
        rank_zero_warn(
            f"hooks on {join_names(hooked)} do not outlive sharding: change gradients in on_before_optimizer_step"
        )


def warn_of_lists(model: nn.Module) -> None:
    """Name the plain containers that hold what is no parameter of the model any more. After sharding.

    Some modules keep theirs up to date, as ``nn.LSTM`` does.
    """
    present = {id(parameter) for parameter in model.parameters()}
    modules = model.named_modules()
    listed = [f"{name}.{key}".lstrip(".") for name, module in modules for key in _find_stale(module, present)]
    if listed:
        rank_zero_warn(
            f"{join_names(listed)}: parameters in plain lists stay as they were before sharding, so what reads them "
            "there does not see them train; use nn.ParameterList"
        )


def _find_stale(module: nn.Module, present: set[int]) -> list[str]:
    """Return the attributes that are plain containers of parameters which the model does not have."""
    plain = {key: value for key, value in vars(module).items() if isinstance(value, list | tuple | dict)}
    plain.pop("_parameters", None)  # a ScriptModule has none
    items = {key: value.values() if isinstance(value, dict) else value for key, value in plain.items()}
    return [
        key
        for key, values in items.items()
        if any(isinstance(value, nn.Parameter) and id(value) not in present for value in values)
    ]


def keep_attributes(model: nn.Module) -> None:
    """Give sharded parameters the attributes that their users gave them, such as ``_no_weight_decay``."""
    for place in _PLACES.get(model, {}).values():
        if place.attributes and (new := place.find_new()) is not None:
            vars(new).update({key: value for key, value in place.attributes.items() if key not in vars(new)})


def rebind_optimizers(model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Give optimizers that were built before sharding the sharded parameters; groups and state stay.

    Without it they would step parameters that no forward uses.

    Raises:
        ValueError: An optimizer holds a parameter that the model does not have, so it would train nothing; also in an
            attribute of its own.
    """
    present = {id(parameter) for parameter in model.parameters()}
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for i, old in enumerate(group["params"]):
                if id(old) in present:
                    continue
                place = _find_place(model, old)
                new = None if place is None else place.find_new()
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
        others = {key: value for key, value in vars(optimizer).items() if key not in ("param_groups", "state")}
        for key, value in others.items():
            held = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            if any(id(tensor) not in present and _find_place(model, tensor) is not None for tensor in held):
                raise ValueError(
                    f"configure_optimizers: optimizer {number} ({type(optimizer).__name__}) holds parameters from "
                    f"before sharding in its attribute {key}, so it would not train them; build the optimizer in "
                    "configure_optimizers, from self.parameters()"
                )


def _find_place(model: nn.Module, old: Tensor) -> _Place | None:
    place = _PLACES.get(model, {}).get(id(old))
    # An id is given again once its owner is gone.
    return place if place is not None and place.parameter() is old else None


@torch.no_grad()
def _shard_state(value: Any, old: Tensor, new: Tensor) -> Any:
    """Return this rank's rows of a tensor of the state that has the shape of its parameter; all else as it is."""
    if not isinstance(value, Tensor) or value.shape != old.shape or not value.ndim:
        return value
    sharded = torch.zeros_like(new, dtype=value.dtype)
    first, local = get_local_shard(sharded)
    local.copy_(value[first : first + len(local)])
    return sharded
