"""Linear layers with an adapter that compute peft's sum in fewer operations.

Note [Adapter in one function]: peft's ``Linear.forward`` makes ``base(x) + scaling * B(A(dropout(x)))`` of two modules,
a product with a number and a sum, each with tensors of the size of the output, in forward and again in backward. Here
it is two products, of which the second adds to what the base layer returned. On a fast card a step of QLoRA waits for
the host, and so for how many operations there are.

Matrices that are stored in another dtype than they are computed with are cast where they are used, if ``compute_dtype``
is set: one rank needs no unit of FSDP2 for them. All else, such as DoRA or biases, goes peft's way.

Importing this file imports peft: see Note [peft starts CUDA] in ``layers.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from typing_extensions import override

from lit_fsdp.adapters.layers import ADAPTER, iterate_adapters


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
        result: Tensor = self.base_layer(x)
        dropout = self.lora_dropout[ADAPTER]
        if type(dropout) is not nn.Identity:
            x = dropout(x)
        down: Any = self.lora_A[ADAPTER].weight
        up: Any = self.lora_B[ADAPTER].weight
        scaling: float = self.scaling[ADAPTER]
        dtype = self.compute_dtype or down.dtype
        if x.dtype == result.dtype == dtype and not torch.is_autocast_enabled():
            if torch.compiler.is_compiling():  # a compiler merges by itself
                return _add_products(result, x, down, up, scaling)[0]
            return _AddProducts.apply(result, x, down, up, scaling)  # type: ignore[no-untyped-call]
        added = linear(linear(x.to(dtype), down.to(dtype)), up.to(dtype))
        return (result + added * scaling).to(result.dtype)

    def is_plain(self) -> bool:
        """Whether the adapter is nothing but two matrices."""
        parts = self.lora_A, self.lora_B
        return (
            not self.lora_variant
            and self.active_adapter in (ADAPTER, [ADAPTER])
            and all(ADAPTER in part and part[ADAPTER].bias is None for part in parts)
        )

    def _calls_parts(self) -> bool:
        """Whether the modules of the matrices must be called: a hook of somebody, or of FSDP2, which gathers."""
        for part in (self.lora_A[ADAPTER], self.lora_B[ADAPTER]):
            if type(part) is not nn.Linear or isinstance(part.weight, DTensor):
                if self.compute_dtype is None:  # else there is nothing to gather
                    return True
            elif part._forward_hooks or part._forward_pre_hooks:
                return True
        return False


def take_over(model: nn.Module) -> None:
    """Make the linear layers of peft inside a model such layers, in place."""
    for _, layer in iterate_adapters(model):
        if type(layer) is Linear and not layer.fan_in_fan_out:
            layer.__class__ = AdaptedLinear


class _AddProducts(torch.autograd.Function):
    """``result + scaling * x A^T B^T``; matrices are cast in forward and again in backward."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, x: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
        added, low = _add_products(result, x, down, up, scaling)
        ctx.save_for_backward(x, low, down, up)
        ctx.scaling = scaling
        return added

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads  # [..., out]
        x, low, down, up = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        grad_low = (rows @ up.to(grad.dtype)).mul_(ctx.scaling)
        grad_x = grad_down = grad_up = None
        if ctx.needs_input_grad[3]:
            grad_up = (rows.t() @ low).mul_(ctx.scaling).to(up.dtype)
        if ctx.needs_input_grad[2]:
            grad_down = (grad_low.t() @ x.reshape(-1, x.shape[-1])).to(down.dtype)
        if ctx.needs_input_grad[1]:
            grad_x = (grad_low @ down.to(grad.dtype)).view(x.shape)
        return grad, grad_x, grad_down, grad_up, None


def _add_products(result: Tensor, x: Tensor, down: Tensor, up: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Return the sum [..., out], and ``x A^T`` [rows, r]."""
    low = x.reshape(-1, x.shape[-1]) @ down.to(x.dtype).t()
    rows = result.reshape(-1, result.shape[-1])
    return torch.addmm(rows, low, up.to(x.dtype).t(), alpha=scaling).view(result.shape), low
