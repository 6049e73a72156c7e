"""Gradient norm and clipping over sharded, replicated and offloaded gradients.

``torch.nn.utils.clip_grad_norm_`` (seen in torch 2.13) refuses plain tensors beside DTensors and two meshes, and takes
the norm in the dtype of the gradients. Its DTensor operations cost a tenth of the time of a small model's step; so do
public ways to the local part of each gradient and to its mesh, which is why private ones are read here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from lit_fsdp.sharding.torch_internals import to_local


@torch.no_grad()
def compute_grad_norm(parameters: Iterable[Tensor], known: Mapping[Tensor, Tensor] | None = None) -> Tensor:
    """Return the 2-norm of all gradients together as one float32 number, the same on every rank.

    One all-reduce of one number for each mesh the parameters are sharded over. All ranks must call it.

    Args:
        parameters: Those with a gradient count.
        known: By parameter, what ``compute_norms`` gives for this rank's part of its gradient.
    """
    known = known or {}
    groups: dict[Any, list[tuple[Tensor, Tensor | None]]] = {}
    mesh: Any = None
    placements: tuple[Placement, ...] = ()
    found: list[tuple[Tensor, Tensor | None]] = []
    place: torch.device | None = None  # of the gradient before, as that of the next one is mostly the same
    for parameter in parameters:
        if (gradient := parameter.grad) is None:
            continue
        local, spec = gradient, None
        if isinstance(gradient, DTensor):
            local, spec = gradient._local_tensor, gradient._spec
        own = (None, ()) if spec is None else (spec.mesh, spec.placements)
        if local.device != place or own[0] is not mesh or own[1] != placements:
            (mesh, placements), place = own, local.device
            found = groups.setdefault((mesh, placements, place), [])
        found.append((local, known.get(parameter)))
    devices = [place if mesh is None else torch.device(mesh.device_type) for mesh, _, place in groups]
    total = torch.zeros((), dtype=torch.float32, device=devices[-1] if devices else "cpu")
    for (mesh, placements, _), gradients in groups.items():
        part = torch.zeros_like(total)
        if filled := [pair for pair in gradients if pair[0].numel()]:  # small ones have no row on some ranks
            rest = iter(compute_norms([gradient for gradient, norm in filled if norm is None]))
            norms = torch.stack([next(rest) if norm is None else norm for _, norm in filled])
            part = norms.square().sum().to(total)  # one number, not one for each gradient in host memory
        for dim, placement in enumerate(placements):
            if not placement.is_replicate():  # is_shard() knows nothing of rows that two dimensions share
                dist.all_reduce(part, group=mesh.get_group(dim))
        total = total + part
    return total.sqrt()


@torch.no_grad()
def compute_norms(gradients: list[Tensor]) -> Sequence[Tensor]:
    """Return the 2-norm of each tensor of one device, in float32; in float64 if there are such tensors."""
    dtype = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32  # torch narrows none
    return torch._foreach_norm(gradients, 2.0, dtype=dtype) if gradients else ()


def clip_grad_norm(
    parameters: Iterable[Tensor],
    max_norm: float,
    *,
    norm: Tensor | None = None,
    scale: Callable[[Iterable[Tensor], Tensor], None] | None = None,
) -> Tensor:
    """Scale gradients in place so that their common norm is at most ``max_norm``; return the norm before.

    The formula is that of ``torch.nn.utils.clip_grad_norm_``. Nothing waits for the device. A limit of ``inf`` only
    measures. A norm that is known already is not computed again. ``scale`` is called in place of ``scale_gradients``.
    """
    _refuse_not_positive(max_norm)
    parameters = list(parameters)
    if norm is None:
        norm = compute_grad_norm(parameters)
    if not math.isinf(max_norm):
        (scale or scale_gradients)(parameters, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@torch.no_grad()
def clip_grad_value(parameters: Iterable[Tensor], max_value: float) -> None:
    """Limit every gradient element to the range from ``-max_value`` to ``max_value``, in place."""
    _refuse_not_positive(max_value)
    for gradients in group_gradients(parameters):
        torch._foreach_clamp_min_(gradients, -max_value)
        torch._foreach_clamp_max_(gradients, max_value)


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply every gradient by a number that may be on another device, in place."""
    for gradients in group_gradients(parameters):
        # By a number of another dtype, a GPU multiplies one gradient after the other (seen in torch 2.11). Those of 16
        # bits are left to that, as rounding the number to theirs would change them more.
        dtype = torch.promote_types(gradients[0].dtype, torch.float32)
        torch._foreach_mul_(gradients, factor.to(gradients[0].device, dtype))


@torch.no_grad()
def group_gradients(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return this rank's part of each gradient, those of one device and dtype together."""
    groups: dict[Any, list[Tensor]] = {}
    for gradient in _list_gradients(parameters):
        local = to_local(gradient)
        groups.setdefault((local.device, local.dtype), []).append(local)
    return list(groups.values())


def _refuse_not_positive(limit: float) -> None:
    if not limit > 0:
        raise ValueError(f"gradient clipping to {limit}: expected above 0")


def _list_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
