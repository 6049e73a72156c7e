"""Parameters of no dimension, such as CLIP's ``logit_scale``, which ``fully_shard`` refuses: every rank keeps a copy.

For optimizers, clipping and checkpoints they are replicated DTensors, so that they mix with the sharded ones. To the
code of the model they are plain tensors, whose gradient is averaged over ranks as FSDP2 averages the others.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate


def replicate_scalars(model: nn.Module, mesh: DeviceMesh) -> set[nn.Parameter]:
    """Replace the parameters of no dimension, which are the same on all ranks; return what they became."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    placements = [Replicate()] * mesh.ndim
    for module in model.modules():
        own = {n: p for n, p in module.named_parameters(recurse=False, remove_duplicate=False) if not p.ndim}
        for name, parameter in own.items():
            if parameter not in made:
                value = DTensor.from_local(parameter.detach(), mesh, placements, run_check=False)
                made[parameter] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            module.register_parameter(name, made[parameter])
        if own:
            kind: Any = type(module)
            module.__class__ = _read_plainly(kind, tuple(own))
    return set(made.values())


@cache
def _read_plainly(kind: Any, names: tuple[str, ...]) -> Any:
    """Return a class like ``kind``, with attributes that are the plain tensors of these parameters."""
    return type(
        kind.__name__, (kind,), {"__module__": kind.__module__, **{n: property(_make_reader(n)) for n in names}}
    )


def _make_reader(name: str) -> Any:
    def read(module: nn.Module) -> Tensor | None:
        # Not through the class, whose attribute this is.
        parameter: Any = dict(module.named_parameters(recurse=False, remove_duplicate=False)).get(name)
        if not isinstance(parameter, DTensor):
            return parameter
        value = parameter.to_local()
        average: Any = _AverageGradient.apply
        # Without a gradient it is the memory itself, which models limit in place.
        return average(value, parameter.device_mesh) if value.requires_grad and torch.is_grad_enabled() else value

    return read


class _AverageGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, mesh: DeviceMesh) -> Tensor:
        ctx.mesh = mesh
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone()
        for group in ctx.mesh.get_all_groups():
            dist.all_reduce(gradient, group=group)
        return gradient / ctx.mesh.size(), None
