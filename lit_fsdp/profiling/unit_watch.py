"""Which units of a model put out or were given something that is no number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lit_fsdp.sharding.wrap import Wrap, plan_module


class UnitWatch:
    """Keeps the sum of what each unit puts out while ``is_on``: finite only if all of it is.

    Costs one pass over the output of each unit and a number of memory; nothing waits for the device.

    Args:
        model: Whose FSDP units are looked at; of a model that is not sharded, those that it would have.
    """

    def __init__(self, model: nn.Module) -> None:
        self.units = find_units(model)
        self.is_on = False
        self._sums: dict[str, Tensor] = {}
        self._handles: list[Any] = []

    def open(self) -> None:
        """Begin to see outputs. Not of compiled units, which would be compiled once more."""
        self._handles = [module.register_forward_hook(self._make_hook(name)) for name, module in self.units.items()]

    def close(self) -> None:
        """See no outputs any more."""
        while self._handles:
            self._handles.pop().remove()

    def take_sums(self) -> dict[str, Tensor]:
        """Return the sums since the last call by unit, in the order in which the units ran first."""
        sums, self._sums = self._sums, {}
        return sums

    def list_bad_gradients(self) -> list[str]:
        """Return the units of which some gradient is not finite, as far as this rank has it. Waits for the device."""
        return [name for name, module in self.units.items() if _has_bad_gradient(module)]

    def _make_hook(self, name: str) -> Callable[..., None]:
        def add(_module: nn.Module, _args: Any, output: Any) -> None:
            if not self.is_on:
                return
            found = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point())
            if (tensor := next(found, None)) is not None:
                total = _to_local(tensor.detach()).sum(dtype=torch.float32)  # in float16 it could overflow
                self._sums[name] = self._sums[name] + total if name in self._sums else total

        return add


def find_units(model: nn.Module) -> dict[str, nn.Module]:
    """Return the FSDP units of a model but the root, or what ``Wrap()`` would make units."""
    modules = dict(model.named_modules())
    if sharded := [name for name, module in modules.items() if name and isinstance(module, FSDPModule)]:
        return {name: modules[name] for name in sharded}
    return {name: modules[name] for unit in plan_module(model, Wrap()) for name in unit.names if name}


def _has_bad_gradient(module: nn.Module) -> bool:
    gradients = (_to_local(p.grad) for p in module.parameters() if p.grad is not None)
    return not all(bool(gradient.isfinite().all()) for gradient in gradients)


def _to_local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
