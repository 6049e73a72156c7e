"""Muon on sharded parameters, with AdamW for those that are no matrices of blocks, as one optimizer.

Muon steps a matrix along its momentum with all singular values made about 1, for which it needs the whole matrix. Note
[One rank computes]: of as many matrices as there are ranks, each rank gets one whole from the others in bfloat16, in
which it is computed with anyway, and gives everyone their rows of the result. So ranks share the products, none holds
more than one whole matrix, and a step has the bits that it has on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lit_fsdp.optim.sharded_optimizer import ShardOptimizer, make_zeros, read_steps
from lit_fsdp.sharding.torch_internals import to_local
from lit_fsdp.sharding.wrap import Wrap, plan_module

# Of the polynomial a x + b x^3 + c x^5, and the least norm that is divided by: https://kellerjordan.github.io/posts/muon
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5
_MIN_NORM = 1e-7
# A step then has about the root mean square of one of AdamW, whose rates and decay fit: arXiv:2502.16982, 2.2.
_RMS_OF_ADAMW = 0.2
MAX_STACK = 2**26  # so many numbers of stacked matrices are computed with at once, or one matrix
_T = TypeVar("_T")


def list_hidden_matrices(module: nn.Module) -> set[nn.Parameter]:
    """Return what Muon is for: weight matrices and stacks of them in blocks, not embeddings, convolutions or tables.

    ``module`` may be sharded. Blocks are those that ``wrap.policy: auto`` finds, whatever the units are.
    """
    blocks = [name for unit in plan_module(module, Wrap()) if unit.kind == "block" for name in unit.names]
    modules = dict(module.named_modules())
    return {
        parameter
        for name in blocks
        for owner in modules[name].modules()
        if not isinstance(owner, nn.Embedding | nn.Conv1d | nn.ConvTranspose1d)
        for key, parameter in owner.named_parameters(recurse=False)
        if _is_hidden_matrix(key, parameter)
    }


def _is_hidden_matrix(key: str, parameter: nn.Parameter) -> bool:
    """Tell products' weights from tables and biases, by name where a shape does not tell."""
    if parameter.ndim == 2:
        return "weight" in key
    return parameter.ndim == 3 and min(parameter.shape[1:]) > 1 and "bias" not in key


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return matrices, [n, m] or [count, n, m], with singular values of about 1, in bfloat16.

    Five iterations of Newton and Schulz, as in ``torch.optim.Muon``: values end between 0.7 and 1.2. Matrices that are
    in bfloat16 already are written over.
    """
    a, b, c = _COEFFICIENTS
    add_product = torch.addmm if matrices.ndim == 2 else torch.baddbmm
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.bfloat16()
    x = x.mT if is_tall else x
    norm = x.norm() if x.ndim == 2 else torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x.div_(norm.clamp(min=_MIN_NORM))
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def count_work(shapes: Sequence[torch.Size], num_ranks: int) -> tuple[int, list[int]]:
    """Return the FLOPs of a rank in a step, in the mean, and the bytes that it puts into each exchange."""
    flops = sum(map(_count_flops, shapes)) // num_ranks
    split = [shape for shape in shapes if len(shape) == 2] if num_ranks > 1 else []
    batches = _batch(split, lambda shape: shape.numel(), num_ranks)
    sizes = [2 * sum(shape.numel() for shape in batch) // num_ranks for batch in batches]  # in bfloat16
    return flops, [size for size in sizes for _ in range(2)]


def _batch(matrices: Iterable[_T], count: Callable[[_T], int], num_ranks: int) -> list[list[_T]]:
    """Return which matrices are stepped together, by their numbers of elements: neighbours take about as long."""
    ordered = sorted(matrices, key=count, reverse=True)
    return [ordered[i : i + num_ranks] for i in range(0, len(ordered), num_ranks)]


def _count_flops(shape: torch.Size) -> int:
    """Return the FLOPs of ``orthogonalize``: in each iteration two products with the long side, and one without."""
    short, long = sorted(shape[-2:])
    return torch.Size(shape[:-2]).numel() * _NUM_ITERATIONS * 2 * (2 * short * short * long + short**3)


@dataclass(frozen=True)
class _Work:
    """A matrix in a step: what this rank holds of it, and its settings."""

    parameter: Tensor
    state: dict[str, Tensor]
    group: dict[str, Any]

    @property
    def is_split(self) -> bool:
        """Whether rows of a matrix are on several ranks; stacks have whole matrices there."""
        return self.parameter.ndim == 2 and bool(_list_splits(self.parameter))

    def make_direction(self) -> Tensor:
        """Update the momentum of this rank's rows; return what is to be orthogonalized."""
        local, momentum = to_local(self.state["momentum_buffer"]), self.group["momentum"]
        gradient = to_local(self.parameter.grad).to(local.dtype)  # type: ignore[arg-type]
        local.lerp_(gradient, 1 - momentum)
        direction = gradient.lerp(local, momentum).bfloat16()
        # Products are for the GPU, wherever the shards are.
        return (
            direction.to(self.parameter.device_mesh.device_type) if isinstance(self.parameter, DTensor) else direction
        )

    def step(self, direction: Tensor) -> None:
        """Step this rank's rows."""
        local, lr = to_local(self.parameter), self.group["lr"]
        rate = lr * (_RMS_OF_ADAMW * max(self.parameter.shape[-2:]) ** 0.5)
        local.mul_(1 - lr * self.group["weight_decay"])
        local.add_(direction.view(local.shape).to(local.device), alpha=-rate)


class Muon(ShardOptimizer):
    """``torch.optim.Muon`` with ``adjust_lr_fn="match_rms_adamw"`` on shards, and AdamW in one, to the same bits.

    Matrices keep one number for each element, in their dtype; what AdamW steps keeps two. See Note [One rank computes].

    Args:
        params: Groups of parameters, sharded over dimension 0 or whole. Those of a group with ``is_hidden`` are
            matrices, or stacks of them over dimension 0; AdamW steps the others.
        lr: Learning rate, as for AdamW.
        momentum: Decay of the running mean of the gradients of matrices (Nesterov's).
        betas: Of AdamW.
        eps: Of AdamW.
        weight_decay: Decoupled, as in ``torch.optim.AdamW``.

    Raises:
        ValueError: A parameter is sharded over another dimension, or among those of ``is_hidden`` and no matrix.
    """

    _hidden: Mapping[Tensor, bool] = MappingProxyType({})  # of a copy, too

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-4,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "is_hidden": False})

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"] if self.param_groups[-1]["is_hidden"] else ():
            if parameter.ndim not in (2, 3):
                raise ValueError(
                    f"Muon: got a parameter of shape {tuple(parameter.shape)}: expected a matrix or a stack"
                )
            if len(dims := _list_splits(parameter)) > 1:
                raise ValueError(f"Muon: got rows split over dimensions {dims} of the mesh: expected one, as in FSDP2")

    @override
    def update(self, work: list[tuple[Tensor, dict[str, Any]]]) -> None:
        by_place: dict[Any, list[_Work]] = {}
        for parameter, group in work:
            state = self.count_step(parameter)
            if not self._is_hidden(parameter):
                _step_by_adamw(parameter, state, group)
                continue
            matrix = _Work(parameter, state, group)
            if matrix.is_split:
                assert isinstance(parameter, DTensor)
                by_place.setdefault((parameter.device_mesh, parameter.placements), []).append(matrix)
            else:
                _step_whole(matrix)
        for (mesh, _), matrices in by_place.items():
            (dim,) = _list_splits(matrices[0].parameter)
            for together in _batch(matrices, lambda matrix: matrix.parameter.numel(), mesh.size(dim)):
                _step_together(together, mesh.get_group(dim))

    @override
    def name_state(self, parameter: Tensor) -> list[str]:
        return ["momentum_buffer"] if self._is_hidden(parameter) else ["exp_avg", "exp_avg_sq"]

    @override
    def make_state(self, parameter: Tensor, like: Tensor) -> list[Tensor]:
        return [make_zeros(like, like.dtype) for _ in self.name_state(parameter)]

    def _is_hidden(self, parameter: Tensor) -> bool:
        if parameter not in self._hidden:  # added since, or others have taken its place
            self._hidden = {p: group["is_hidden"] for group in self.param_groups for p in group["params"]}
        return self._hidden[parameter]


def _list_splits(parameter: Tensor) -> list[int]:
    """Return over which dimensions of its mesh rows are on several ranks."""
    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh
    return [i for i, placement in enumerate(parameter.placements) if placement.is_shard() and mesh.size(i) > 1]


def _step_by_adamw(parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """Do the arithmetic of ``torch.optim.AdamW`` without ``fused``, which a dry run can trace without values."""
    (beta1, beta2), lr, num_steps = group["betas"], group["lr"], read_steps(state)
    local, exp_avg, exp_avg_sq = (to_local(part) for part in (parameter, state["exp_avg"], state["exp_avg_sq"]))
    gradient = to_local(parameter.grad).to(local.dtype)  # type: ignore[arg-type]
    local.mul_(1 - lr * group["weight_decay"])
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    size = (exp_avg_sq.sqrt() / (1 - beta2**num_steps) ** 0.5).add_(group["eps"])
    local.addcdiv_(exp_avg, size, value=-lr / (1 - beta1**num_steps))


def _step_whole(work: _Work) -> None:
    direction = work.make_direction()
    if direction.ndim == 2:
        work.step(orthogonalize(direction))
        return
    for part in direction.split(max(MAX_STACK // max(direction[:1].numel(), 1), 1)):
        part.copy_(orthogonalize(part))
    work.step(direction)


def _step_together(works: Sequence[_Work], group: dist.ProcessGroup) -> None:
    """Step up to as many matrices as there are ranks, each with one of them, see Note [One rank computes]."""
    rank, num_ranks = group.rank(), group.size()
    own = works[rank].parameter.shape if rank < len(works) else torch.Size([0, 0])
    rows = -(-own[0] // num_ranks)  # of each rank but the last ones, which may have less or none
    own_sizes = [max(min(rows, own[0] - i * rows), 0) * own[1] for i in range(num_ranks)]
    sizes = [to_local(work.parameter).numel() for work in works] + [0] * (num_ranks - len(works))
    received = _exchange(torch.cat([work.make_direction().flatten() for work in works]), sizes, own_sizes, group)
    received = orthogonalize(received.view(own)).reshape(-1) if own.numel() else received
    returned = _exchange(received, own_sizes, sizes, group)
    for work, rows_of_it in zip(works, returned.split(sizes), strict=False):
        work.step(rows_of_it)


def _exchange(
    sent: Tensor, sizes: Collection[int], received_sizes: Collection[int], group: dist.ProcessGroup
) -> Tensor:
    received = sent.new_empty(sum(received_sizes))
    width = sent.element_size()
    # As bytes: gloo does not exchange bfloat16.
    dist.all_to_all_single(
        received.view(torch.uint8),
        sent.view(torch.uint8),
        [width * size for size in received_sizes],
        [width * size for size in sizes],
        group=group,
    )
    return received
