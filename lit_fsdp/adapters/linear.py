"""Linear layers with an adapter that compute peft's sum in fewer operations.

Note [Adapter in one function]: peft's ``Linear.forward`` makes ``base(x) + scaling * B(A(dropout(x)))`` of two modules,
a product with a number and a sum, each with tensors of the size of the output, in forward and again in backward. Here
it is two products, of which the second adds to what the base layer returned. On a fast card a step of QLoRA waits for
the host, and so for how many operations there are. Where the base layer is a frozen one that we know, its product is in
the same function, so that in backward one product adds to the other, too.

Matrices that are stored in another dtype than they are computed with are cast where they are used, if ``compute_dtype``
is set: one rank needs no unit of FSDP2 for them. All else, such as DoRA or biases, goes peft's way.

Importing this file imports peft: see Note [peft starts CUDA] in ``layers.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from typing_extensions import override

from lit_fsdp.adapters.layers import ADAPTER, iterate_adapters
from lit_fsdp.quantization.layers import QuantizedLinear
from lit_fsdp.quantization.quantize import is_recorded, multiply_once, take_dense


class AdaptedLinear(Linear):
    """A linear layer of peft with one adapter; see Note [Adapter in one function].

    Attributes:
        compute_dtype: Of the adapter, if it is cast here; else that of what is gathered or stored.
    """

    compute_dtype: torch.dtype | None = None

    @override
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return [..., out] for ``x`` [..., in]."""
        if args or kwargs or self.disable_adapters or self.merged or not self.is_plain() or self._calls_parts():
            return super().forward(x, *args, **kwargs)
        down, up = (part.weight for part in self._get_parts())
        scaling: float = self.scaling[ADAPTER]
        dtype = self.compute_dtype or down.dtype
        # By device, which may be meta, of which torch has no autocast to ask for.
        is_cast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
        is_one_dtype = x.dtype == dtype and not is_cast
        if is_one_dtype and not torch.compiler.is_compiling() and self.takes_base():
            return _AddToBase.apply(x, self.base_layer, down, up, scaling)  # type: ignore[no-untyped-call]
        result: Tensor = self.base_layer(x)
        dropout = self.lora_dropout[ADAPTER]
        if type(dropout) is not nn.Identity:
            x = dropout(x)
        if is_one_dtype and result.dtype == dtype:
            if torch.compiler.is_compiling():  # a compiler merges by itself
                return _add_products(result, x, down, up, scaling)[0]
            return _AddProducts.apply(x, result, down, up, scaling)  # type: ignore[no-untyped-call]
        added = linear(linear(x.to(dtype), down.to(dtype)), up.to(dtype))
        return (result + added * scaling).to(result.dtype)

    def is_plain(self) -> bool:
        """Whether the adapter is nothing but two matrices."""
        return (
            not self.lora_variant
            and self.active_adapter in (ADAPTER, [ADAPTER])
            and all(part is not None and part.bias is None for part in self._get_parts())
        )

    def takes_base(self) -> bool:
        """Whether the product of the base layer can be part of the function of the adapter."""
        base: Any = self._modules["base_layer"]
        if type(base) not in (nn.Linear, QuantizedLinear) or _has_hooks(base):
            return False
        if type(self.lora_dropout._modules[ADAPTER]) is not nn.Identity:
            return False
        # As attributes: FSDP1 has plain tensors there in backward, which are no parameters of the module.
        given = (parameter for parameter in (base.weight, base.bias) if parameter is not None)
        return not any(parameter.requires_grad or isinstance(parameter, DTensor) for parameter in given)

    def _get_parts(self) -> tuple[Any, Any]:
        # Not as attributes, of which each takes a microsecond: this is asked several times for each layer and step.
        modules: Any = self._modules
        return modules["lora_A"]._modules.get(ADAPTER), modules["lora_B"]._modules.get(ADAPTER)

    def _calls_parts(self) -> bool:
        """Whether the modules of the matrices must be called: a hook of somebody, or of FSDP2, which gathers."""
        for part in self._get_parts():
            if type(part) is not nn.Linear or isinstance(part.weight, DTensor):
                if self.compute_dtype is None:  # else there is nothing to gather
                    return True
            elif _has_hooks(part):
                return True
        return False


def take_over(model: nn.Module) -> None:
    """Make the linear layers of peft inside a model such layers, in place."""
    for _, layer in iterate_adapters(model):
        if type(layer) is Linear and not layer.fan_in_fan_out:
            layer.__class__ = AdaptedLinear


def _has_hooks(module: nn.Module) -> bool:
    # Private, seen in torch 2.13: all that ``nn.Module.__call__`` would do for this module besides ``forward``.
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


class _AddToBase(torch.autograd.Function):
    """``base(x) + scaling * x A^T B^T`` of a frozen layer; see ``_AddProducts``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: nn.Linear, down: Tensor, up: Tensor, scaling: float) -> Tensor:
        ctx.scaling, ctx.base, weight = scaling, base, None
        has_backward = ctx.needs_input_grad[0]
        if isinstance(base, QuantizedLinear):
            # Not saved for backward: FSDP2 frees the storage of what it has gathered, and fills it again.
            ctx.stored = base.get_stored("weight")
            bias: Any = base.bias
            bias = None if bias is None else bias.to(x.dtype)
            result = multiply_once(x, ctx.stored, base.quantization, bias, base.kept, has_backward=has_backward)
        else:
            weight = base.weight if has_backward else None
            result = linear(x, base.weight, base.bias)
        added, low = _add_products(result, x, down, up, scaling, in_place=not is_recorded())
        ctx.save_for_backward(x, low, down, up, weight)
        return added

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads  # [..., out]
        x, low, down, up, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_low, grad_down, grad_up = _compute_gradients(rows, x, low, (down, up), ctx)
        grad_x = None
        if ctx.needs_input_grad[0]:
            if weight is None:
                weight = take_dense(ctx.stored, ctx.base.quantization, ctx.base.kept, grad.dtype)
            grad_x = rows @ weight
            # Not addmm_, which counters of FLOPs do not know.
            grad_x = torch.addmm(grad_x, grad_low, down.to(grad.dtype), out=grad_x).view(x.shape)
        return grad_x, None, grad_down, grad_up, None


class _AddProducts(torch.autograd.Function):
    """``result + scaling * x A^T B^T``; matrices are cast in forward and again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, result: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
        added, low = _add_products(result, x, down, up, scaling)
        ctx.save_for_backward(x, low, down, up)
        ctx.scaling = scaling
        return added

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads  # [..., out]
        x, low, down, up = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_low, grad_down, grad_up = _compute_gradients(rows, x, low, (down, up), ctx)
        grad_x = (grad_low @ down.to(grad.dtype)).view(x.shape) if ctx.needs_input_grad[0] else None
        return grad_x, grad, grad_down, grad_up, None


def _add_products(
    result: Tensor, x: Tensor, down: Tensor, up: Tensor, scaling: float, *, in_place: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the sum [..., out], and ``x A^T`` [rows, r]."""
    low = x.reshape(-1, x.shape[-1]) @ down.to(x.dtype).t()
    rows = result.reshape(-1, result.shape[-1])
    added = torch.addmm(rows, low, up.to(x.dtype).t(), alpha=scaling, out=rows if in_place else None)
    # No view, which models could not change in place after it came out of a function.
    return torch.ops.aten._unsafe_view(added, result.shape), low


def _compute_gradients(
    rows: Tensor, x: Tensor, low: Tensor, matrices: tuple[Tensor, Tensor], ctx: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of ``low`` and of both matrices from that of the sum, [rows, out]."""
    down, up = matrices
    grad_low = (rows @ up.to(rows.dtype)).mul_(ctx.scaling)
    grad_up = (rows.t() @ low).mul_(ctx.scaling).to(up.dtype) if ctx.needs_input_grad[3] else None
    grad_down = (grad_low.t() @ x.reshape(-1, x.shape[-1])).to(down.dtype) if ctx.needs_input_grad[2] else None
    return grad_low, grad_down, grad_up
