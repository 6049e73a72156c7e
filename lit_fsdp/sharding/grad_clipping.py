"""Gradient norm and clipping over sharded, replicated and offloaded gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


# Without it, each to_local() would be a node for autograd: a tenth of the time of a small model's step.
@torch.no_grad()
def compute_grad_norm(parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the norm of all gradients together as one float32 number, the same on every rank.

    One all-reduce of one number for each mesh the parameters are sharded over. All ranks must call it.

    Args:
        parameters: Those without a gradient are left out.
        norm_type: Power of the norm; ``inf`` is the largest absolute value, where NaN counts as infinite.
    """
    groups = _group_by_place(parameters)
    is_max = math.isinf(norm_type)
    devices = [place if mesh is None else torch.device(mesh.device_type) for mesh, _, place in groups]
    device = devices[-1] if devices else torch.device("cpu")
    total = torch.zeros((), device=device)
    for (mesh, dims, _), gradients in groups.items():
        norms = torch.stack(_compute_norms(gradients, norm_type))
        # The largest of several ranks' numbers leaves out NaN (seen with gloo in torch 2.13), but never inf.
        part = norms.max().nan_to_num(nan=math.inf, posinf=math.inf) if is_max else (norms**norm_type).sum()
        part = part.to(device)  # one number, not one for each gradient in host memory
        for dim in dims:
            dist.all_reduce(part, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=mesh.get_group(dim))
        total = torch.maximum(total, part) if is_max else total + part
    return total if is_max else total ** (1.0 / norm_type)


def clip_grad_norm(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, *, norm: Tensor | None = None
) -> Tensor:
    """Scale gradients so that their common norm is at most ``max_norm``; return the norm before.

    The formula is that of ``torch.nn.utils.clip_grad_norm_``. Nothing waits for the device.

    Args:
        parameters: Whose gradients are scaled, in place.
        max_norm: Above 0; ``inf`` only measures.
        norm_type: Power of the norm.
        norm: The norm, where it is known already.

    Raises:
        ValueError: ``max_norm`` would turn gradients around or to zero.
    """
    _refuse_not_positive(max_norm)
    parameters = list(parameters)
    if norm is None:
        norm = compute_grad_norm(parameters, norm_type)
    if not math.isinf(max_norm):
        scale_gradients(parameters, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@torch.no_grad()
def clip_grad_value(parameters: Iterable[Tensor], max_value: float) -> None:
    """Limit every gradient element to the range from ``-max_value`` to ``max_value``, in place.

    Raises:
        ValueError: ``max_value`` is not above 0.
    """
    _refuse_not_positive(max_value)
    for gradients in _group_by_device(parameters).values():
        torch._foreach_clamp_min_(gradients, -max_value)
        torch._foreach_clamp_max_(gradients, max_value)


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply every gradient by a number that may be on another device, in place."""
    for device, gradients in _group_by_device(parameters).items():
        torch._foreach_mul_(gradients, factor.to(device))


def _refuse_not_positive(limit: float) -> None:
    if not limit > 0:
        raise ValueError(f"gradient clipping to {limit}: expected above 0")


def _group_by_device(parameters: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    groups: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            local = _to_local(gradient)
            groups.setdefault(local.device, []).append(local)
    return groups


def _group_by_place(parameters: Iterable[Tensor]) -> dict[tuple[Any, tuple[int, ...], torch.device], list[Tensor]]:
    """Return local gradients by mesh, dimensions of it that they are sharded over, and device."""
    groups: dict[tuple[Any, tuple[int, ...], torch.device], list[Tensor]] = {}
    sharded: dict[Any, tuple[int, ...]] = {}  # by placements, which are alike for most
    for parameter in parameters:
        if (gradient := parameter.grad) is None:
            continue
        if not isinstance(gradient, DTensor):
            groups.setdefault((None, (), gradient.device), []).append(gradient)
            continue
        local, placements = gradient.to_local(), gradient.placements
        if placements not in sharded:
            sharded[placements] = tuple(i for i, placement in enumerate(placements) if placement.is_shard())
        groups.setdefault((gradient.device_mesh, sharded[placements], local.device), []).append(local)
    return groups


def _compute_norms(gradients: list[Tensor], norm_type: float) -> list[Tensor]:
    # A rank may hold no row of a small parameter, and the largest of no values is an error.
    filled = [g for g in gradients if g.numel()]
    if not filled:
        return [torch.zeros((), device=gradients[0].device)]
    return list(torch._foreach_norm(filled, norm_type, dtype=torch.float32))


def _to_local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
