"""Storage, compute and reduction dtypes, and the loss scaling that float16 needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map_only

from lit_fsdp.adapters.layers import iterate_adapters
from lit_fsdp.sharding.grad_clipping import group_gradients

DType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class MixedPrecision:
    """In which dtype parameters are kept, computed with and reduced; ``null`` is the one before.

    Under a strategy ``null`` is what the Trainer's ``precision`` says, if that says anything: ``bf16-mixed`` reduces in
    float32.

    Args:
        storage_dtype: Of the sharded parameters and the optimizer state. ``null`` keeps that of the model.
        param_dtype: Of the gathered parameters and of the compute. ``null`` is the storage dtype.
        reduce_dtype: Of the gradient reduction. ``null`` is the compute dtype.
        output_dtype: Floating outputs of a unit are cast to it. ``null`` leaves them.
        cast_forward_inputs: Cast floating inputs of a unit, and of layers of torch in modules of your own, to
            ``param_dtype``.
    """

    storage_dtype: DType | None = None
    param_dtype: DType | None = None
    reduce_dtype: DType | None = None
    output_dtype: DType | None = None
    cast_forward_inputs: bool = True

    @property
    def needs_loss_scaling(self) -> bool:
        """Whether gradients are in float16, where small ones would become zero."""
        return "float16" in (self.param_dtype, self.reduce_dtype, self.storage_dtype)

    def override(self, other: MixedPrecision | None) -> MixedPrecision:
        """Return these dtypes with those that ``other`` sets explicitly."""
        changed = () if other is None else vars(other).items() - vars(MixedPrecision()).items()
        return replace(self, **dict(changed))

    def build_policy(self) -> MixedPrecisionPolicy:
        """Return what ``fully_shard`` takes."""
        return MixedPrecisionPolicy(
            param_dtype=_to_dtype(self.param_dtype),
            # Of none given, torch 2.15 takes the dtype of the parameters, and older ones that of the compute.
            reduce_dtype=_to_dtype(self.reduce_dtype or self.param_dtype),
            output_dtype=_to_dtype(self.output_dtype),
            cast_forward_inputs=self.cast_forward_inputs,
        )


# Lightning's names of Trainer(precision=...).
PRECISIONS: dict[str, MixedPrecision] = {
    "32-true": MixedPrecision(),
    "bf16-true": MixedPrecision(storage_dtype="bfloat16", param_dtype="bfloat16", reduce_dtype="float32"),
    "bf16-mixed": MixedPrecision(storage_dtype="float32", param_dtype="bfloat16", reduce_dtype="float32"),
    "16-mixed": MixedPrecision(storage_dtype="float32", param_dtype="float16", reduce_dtype="float32"),
}


def read_precision(precision: str) -> MixedPrecision:
    """Translate Lightning's name of a precision; some have no meaning under FSDP2, or would not train."""
    if precision in PRECISIONS:
        return PRECISIONS[precision]
    near = "16-mixed or bf16-true" if precision == "16-true" else "32-true"
    raise ValueError(f"precision: got {precision!r}: expected one of {', '.join(PRECISIONS)}; nearest: {near}")


def cast_parameters(model: nn.Module, mixed_precision: MixedPrecision, *, keep: Iterable[nn.Parameter] = ()) -> None:
    """Cast floating parameters to the storage dtype, in place, before sharding.

    Buffers keep theirs: rotary frequencies or norm statistics in bf16 change results for no memory. So do the
    parameters in ``keep``, such as adapters with a dtype of their own.
    """
    dtype = _to_dtype(mixed_precision.storage_dtype)
    if dtype is None:
        return
    kept = {id(parameter) for parameter in keep}
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype and id(parameter) not in kept:
            parameter.data = parameter.data.to(dtype)


# The layers that torch runs in one dtype only, by their own forward: a subclass may cast as it likes.
_IN_ONE_DTYPE = {
    layer.forward
    for layer in (
        *(nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
        *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        *(nn.LSTM, nn.GRU, nn.RNN, nn.GRUCell, nn.RNNCell),
        *(nn.MultiheadAttention, nn.LayerNorm, nn.GroupNorm, nn.PReLU),
    )
}


def cast_inputs(model: nn.Module, param_dtype: torch.dtype | None) -> None:
    """Let layers that compute in 16 bits take floating inputs of another dtype, as they do under autocast.

    Such as noise that a step draws in float32: units cast what they are given, and nothing casts what is made inside
    them. torch refuses such inputs, so what works without this stays as it is: masks of attention, which it takes in
    float32, do too. Classes of Transformers and adapters cast by themselves, and adapters without hooks compute in
    fewer operations.
    """
    callers = [module for module in model.modules() if not type(module).__module__.startswith("transformers.")]
    adapted = {part for _, adapter in iterate_adapters(model) for part in adapter.modules()}
    for layer in dict.fromkeys((model, *(child for caller in callers for child in caller.children()))):
        weight = next((weight for weight in layer._parameters.values() if weight is not None), None)
        # Scripted modules have no forward in their class.
        if weight is None or layer in adapted or getattr(type(layer), "forward", None) not in _IN_ONE_DTYPE:
            continue
        if (param_dtype or weight.dtype) in (torch.bfloat16, torch.float16):
            layer.register_forward_pre_hook(_cast_to_weights, with_kwargs=True)


def _cast_to_weights(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    weight = next(weight for weight in layer._parameters.values() if weight is not None)
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and args[0].dtype == weight.dtype:
        return None
    if not weight.is_meta and torch.is_autocast_enabled(weight.device.type):  # which has rules of its own
        return None
    cast = partial(tree_map_only, Tensor, lambda value: value.to(weight.dtype) if value.is_floating_point() else value)
    if isinstance(layer, nn.MultiheadAttention):
        names = ("query", "key", "value")
        return (*cast(args[:3]), *args[3:]), {n: cast(value) if n in names else value for n, value in kwargs.items()}
    return cast(args), cast(kwargs)


class ShardedGradScaler(torch.amp.GradScaler):
    """A gradient scaler under which all ranks skip a step if one of them has an infinite gradient.

    Every rank sees only its shard of a gradient. Without agreement one would skip what the others step.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, *_: Any
    ) -> dict[torch.device, Tensor]:
        # Private, seen in torch 2.13: its scalers refuse plain tensors beside DTensors.
        found = found_inf.clone()
        for gradients in group_gradients(p for group in optimizer.param_groups for p in group["params"]):
            device = gradients[0].device
            local_found = torch.zeros_like(found, device=device)
            # Waits: the kernel of gradients in host memory reads the number at once.
            scale = inv_scale.to(device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, local_found, scale)
            found = torch.maximum(found, local_found.to(found.device))
        if dist.is_initialized():
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return {found.device: found}


def _to_dtype(name: DType | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)
