"""Adafactor on sharded parameters.

A matrix keeps one statistic for each row and one for each column instead of one for each element. Rows lie on one
rank, columns are spread over all, so column statistics, and the norms by which a step is scaled, are sums over
ranks. They are added up for all parameters at once: two all-reduces a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lit_fsdp.optim.sharded_optimizer import ShardOptimizer, make_zeros, read_steps
from lit_fsdp.sharding.torch_internals import to_local

_EPS2 = 1e-3  # least scale of a parameter: else one that starts at zero would stay there


@dataclass(frozen=True)
class _Work:
    """A parameter in a step: what this rank holds of it, and its settings."""

    parameter: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    group: dict[str, Any]

    @property
    def has_split_columns(self) -> bool:
        """Whether the elements of a column are on several ranks."""
        return self.parameter.ndim == 2 and isinstance(self.parameter, DTensor)


class Adafactor(ShardOptimizer):
    """Adafactor with the formula of ``torch.optim.Adafactor``, which cannot step DTensors.

    A matrix of n x m keeps n + m float32 numbers. No running mean of the gradient. Statistics are float32, also of
    bf16 parameters. Two all-reduces a step for each mesh and device parameters are on: of one number for each column
    of each matrix, and of one number for each parameter.

    Args:
        params: Parameters, sharded over dimension 0 or whole, or groups of them.
        lr: Largest step relative to the root mean square of a parameter.
        weight_decay: Decoupled, as in ``torch.optim.AdamW``.

    Raises:
        ValueError: A parameter is sharded over another dimension.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @override
    def update(self, work: list[tuple[Tensor, dict[str, Any]]]) -> None:
        by_place: dict[Any, list[_Work]] = {}
        for parameter, group in work:
            gradient = to_local(parameter.grad).to(_choose_dtype(parameter))  # type: ignore[arg-type]
            place = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
            by_place.setdefault((place, gradient.device), []).append(
                _Work(parameter, gradient, self.count_step(parameter), group)
            )
        for together in by_place.values():
            _step_together(together)

    @override
    def name_state(self, parameter: Tensor) -> list[str]:
        return ["row_var", "col_var"] if parameter.ndim > 1 else ["variance"]

    @override
    def make_state(self, parameter: Tensor, like: Tensor) -> list[Tensor]:
        dtype = _choose_dtype(parameter)
        if like.ndim < 2:
            return [make_zeros(like, dtype)]
        row_var = make_zeros(like[..., :1], dtype)  # [..., rows, 1]
        if like.ndim > 2:
            return [row_var, make_zeros(like[..., :1, :], dtype)]
        # The same on all ranks.
        return [row_var, torch.zeros(1, like.shape[1], dtype=dtype, device=to_local(like).device)]


def _choose_dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _step_together(works: list[_Work]) -> None:
    """Step parameters that are sharded in the same way."""
    sums = [_update_rows(work) for work in works]
    totals = _sum_over_shards(sums, works)
    for work, total in zip(works, totals, strict=True):
        _update_columns(work, total)
    norms = [_compute_update(work, total).square().sum().view(1) for work, total in zip(works, totals, strict=True)]
    norms = _sum_over_shards(norms, works)
    for work, total, norm in zip(works, totals, norms, strict=True):
        _apply_update(work, total, norm)


def _sum_over_shards(parts: list[Tensor], works: list[_Work]) -> list[Tensor]:
    """Return each part summed over the ranks among which the parameters are split."""
    total, parameter = torch.cat(parts), works[0].parameter
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        summed = total.to(mesh.device_type)  # the parameter may be in host memory
        for dim, placement in enumerate(parameter.placements):
            if placement.is_shard():
                dist.all_reduce(summed, group=mesh.get_group(dim))
        total = summed.to(total.device)
    return list(total.split([len(part) for part in parts]))


def _update_rows(work: _Work) -> Tensor:
    """Update what lies on this rank; return this rank's part of what does not.

    The sum of squares of the parameter; of a matrix also the sum of its row statistics, and of the squares in each
    column.
    """
    squares, share = work.gradient.square(), _compute_share(work)
    parts = [to_local(work.parameter).to(squares.dtype).square().sum().view(1)]
    if "variance" in work.state:
        to_local(work.state["variance"]).lerp_(squares, share)
        return parts[0]
    row_var = to_local(work.state["row_var"])
    row_var.lerp_(squares.mean(-1, keepdim=True), share)
    if work.has_split_columns:
        return torch.cat([*parts, row_var.sum().view(1), squares.sum(0)])
    to_local(work.state["col_var"]).lerp_(squares.mean(-2, keepdim=True), share)
    return parts[0]


def _update_columns(work: _Work, total: Tensor) -> None:
    if work.has_split_columns:
        work.state["col_var"].lerp_(total[2:] / work.parameter.shape[0], _compute_share(work))


def _compute_update(work: _Work, total: Tensor) -> Tensor:
    """Return the step before its length is limited; computed twice rather than kept for all parameters."""
    eps = torch.finfo(work.parameter.dtype).eps
    if "variance" in work.state:
        estimate = to_local(work.state["variance"]).clone()
    else:
        row_var, col_var = to_local(work.state["row_var"]), to_local(work.state["col_var"])
        is_split = work.has_split_columns
        row_mean = total[1] / work.parameter.shape[0] if is_split else row_var.mean(-2, keepdim=True)
        estimate = (row_var @ col_var).div_(row_mean.clamp(min=eps))
    return estimate.clamp_(min=eps * eps).rsqrt_().mul_(work.gradient)


def _apply_update(work: _Work, total: Tensor, update_norm: Tensor) -> None:
    num_elements, lr, local = work.parameter.numel(), work.group["lr"], to_local(work.parameter)
    scale = (total[0] / num_elements).sqrt().clamp(min=_EPS2) * min(lr, read_steps(work.state) ** -0.5)
    limit = (update_norm[0] / num_elements).sqrt().clamp(min=1.0)
    local.mul_(1 - lr * work.group["weight_decay"])
    local.add_(_compute_update(work, total).mul_(-scale / limit).to(local.dtype))


def _compute_share(work: _Work) -> float:
    """Return how much of a statistic this step makes up."""
    return float(read_steps(work.state) ** -0.8)
