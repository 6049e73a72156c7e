"""Bytes of this rank by what they are for: parameters, gathered parameters, gradients, optimizer state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter

from lit_fsdp.sharding.torch_internals import get_shard, iterate_sharded, list_gathered, list_unreduced_gradients
from lit_fsdp.sharding.wrap import Unit, find_around

# From what stays longest to what comes and goes.
Kind = Literal["parameters", "optimizer_state", "gradients", "gathered", "communication", "activations", "rest"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def iterate_states(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()
) -> Iterator[tuple[Kind, str, Tensor]]:
    """Yield the tensors of this rank that outlive a step: their kind, whose they are by name, and themselves.

    Parameters and buffers, gradients (those that are not reduced yet as well), gathered parameters, optimizer
    state. DTensors are yielded as this rank's part.
    """
    names: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters():
        names[parameter] = name
        yield "parameters", name, _get_local(parameter)
        if parameter.grad is not None:
            yield "gradients", name, _get_local(parameter.grad)
    for name, buffer in model.named_buffers():
        yield "parameters", name, _get_local(buffer)
    for _, sharded in iterate_sharded(model):
        name = names.get(get_shard(sharded), "")
        for tensor in list_gathered(sharded):
            yield "gathered", name, tensor
        for gradient in list_unreduced_gradients(sharded):
            yield "gradients", name, _get_local(gradient)
    for optimizer in optimizers:
        for owner, state in optimizer.state.items():
            for tensor in tree_iter(state):
                if isinstance(tensor, Tensor):
                    yield "optimizer_state", names.get(owner, ""), _get_local(tensor)


def measure_states(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = (), *, device: torch.device | None = None
) -> dict[Kind, int]:
    """Return the bytes of the tensors of ``iterate_states`` by kind, of those on ``device`` if it is given.

    Memory that several share is counted once.
    """
    seen: set[int] = set()
    num_bytes: dict[Kind, int] = defaultdict(int)
    for kind, _, tensor in iterate_states(model, optimizers):
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and (device is None or is_on(tensor, device)):
            seen.add(storage._cdata)
            num_bytes[kind] += storage.nbytes()
    return dict(num_bytes)


def name_units(model: nn.Module, plan: Sequence[Unit]) -> dict[str, str]:
    """Return the name of the unit that holds each parameter and buffer, by the name of these.

    Buffers of the root are left out, and those whose memory several units share.
    """
    names = {name: label_unit(unit) for unit in plan for name in unit.parameters}
    modules = {name: label_unit(unit) for unit in plan for name in unit.names if name}
    holders: dict[int, dict[str, str]] = defaultdict(dict)  # of each memory: its buffers, and the unit of each
    for name, buffer in model.named_buffers(remove_duplicate=False):
        around = find_around(name, modules)
        holders[_get_local(buffer).untyped_storage()._cdata][name] = "" if around is None else modules[around]
    for units in holders.values():
        if len(set(units.values())) == 1:
            names.update((name, unit) for name, unit in units.items() if unit)
    return names


def label_unit(unit: Unit) -> str:
    """Return what a unit is called in tables: the names of its modules."""
    return " + ".join(name or "(root)" for name in unit.names)


def is_on(tensor: Tensor, device: torch.device) -> bool:
    """Return whether a tensor lies on a device; without an index, on any of its type."""
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def _get_local(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
