"""Counts the floating-point operations of a training step, and the bytes that it moves, as they are executed.

Note [FLOPs]: matrix products, attention and convolutions are counted, a multiplication and an addition as two, with
the formulas of ``torch.utils.flop_counter``; norms, activations, softmax, embeddings and the optimizer are not, as is
usual. Attention counts as if it were not causal. *Model* FLOPs are those that forward and backward need, however they
are computed (appendix B of arXiv:2204.02311); *hardware* FLOPs are all that are executed, with what is computed again
in backward: by activation checkpointing, and the scores in fused attention, a fifth of its backward (exact where
queries and values have heads of the same size).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from typing_extensions import override

from lit_fsdp.quantization.quantize import count_hidden_bytes


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Floating-point operations of one rank; see Note [FLOPs]."""

    forward: int = 0
    backward: int = 0  # of backward alone
    recomputed: int = 0  # of what backward computes once more
    uncounted: tuple[str, ...] = ()  # operators outside of torch for which there is no formula, by name

    def __mul__(self, factor: float) -> Flops:
        """Return those of ``factor`` times the work."""
        counts = (int(count * factor) for count in (self.forward, self.backward, self.recomputed))
        forward, backward, recomputed = counts
        return Flops(forward=forward, backward=backward, recomputed=recomputed, uncounted=self.uncounted)

    @property
    def model(self) -> int:
        """What the model needs, without what is computed again."""
        return self.forward + self.backward

    @property
    def hardware(self) -> int:
        """What is executed."""
        return self.model + self.recomputed


class FlopCounter(TorchDispatchMode):
    """Counts inside its context, forward and backward apart.

    Operations on DTensors are counted as what they are on this rank. Every operation takes some microseconds more.
    Code of ``torch.compile`` is not seen, see :func:`is_compiled`. A backward with ``create_graph`` would be taken for
    recomputation.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sums = {"forward": 0, "backward": 0, "recomputed": 0}
        self._uncounted: set[str] = set()

    @property
    def flops(self) -> Flops:
        """What was counted so far."""
        return Flops(**self._sums, uncounted=tuple(sorted(self._uncounted)))

    @override
    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor runs it on local tensors, which come back here
        out = func(*args, **(kwargs or {}))
        operator = getattr(func, "overloadpacket", func)
        count = _get_formula(operator)
        if count is not None:
            total = int(count(*args, **(kwargs or {}), out_val=out))
            again = total // 5 if str(operator) in _FUSED_BACKWARD else 0
            self._sums[_get_phase()] += total - again
            self._sums["recomputed"] += again
        elif _is_foreign(str(operator)):
            self._uncounted.add(str(operator))
        return out


class WorkCounter(FlopCounter):
    """Counts FLOPs inside its context, and bytes.

    Bytes are those of the tensors that an operator reads and writes, whether they come from a cache or not, as if each
    ran by itself. Views move nothing; products and attention are left to their FLOPs, but for weights that they
    dequantize inside.

    Attributes:
        moved_bytes: So far.
        is_counting: False lets operators pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved_bytes = 0
        self.is_counting = True

    @override
    def __torch_dispatch__(self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        if not self.is_counting or func is torch.ops.prim.device.default:
            return func(*args, **(kwargs or {}))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is not NotImplemented:
            self.moved_bytes += _count_moved(func, args, kwargs or {}, out)
        return out


def is_compiled(model: nn.Module) -> bool:
    """Return whether some of a model is compiled, so that a counter would not see what it does."""
    # Private, seen in torch 2.13: what Module.compile sets. torch.compile wraps in a class of its own.
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"
        for module in model.modules()
    )


def _get_phase() -> str:
    # Private, both seen in torch 2.13. Backward runs without gradients but for what it computes again. There, an
    # autograd.Function switches them off too, but checkpoint's hooks on saved tensors are still in place.
    if torch._C._current_graph_task_id() == -1:
        return "forward"
    is_hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return "recomputed" if torch.is_grad_enabled() or is_hooked else "backward"


def _get_formula(operator: Any) -> Callable[..., int] | None:
    return flop_registry.get(operator) or _MORE.get(str(operator))


def _count_moved(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    if _get_formula(getattr(func, "overloadpacket", func)) is not None:
        return count_hidden_bytes(func, args, kwargs)
    if func.namespace in _ELSEWHERE or func.is_view or str(func).startswith(_WITHOUT_VALUES):
        return 0
    tensors = {id(tensor): tensor for tensor in tree_iter((args, kwargs, out)) if isinstance(tensor, Tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _is_foreign(name: str) -> bool:
    """Whether an operator could multiply matrices and be unknown: one of another package's kernels."""
    namespace, _, op = name.partition(".")
    if namespace == "bitsandbytes":
        return not op.startswith(("dequantize", "quantize", "int8_vectorwise", "int8_mm_dequant", "optimizer"))
    return "." in name and namespace not in _WITHOUT_PRODUCTS


# Namespaces that are no work of the model: collectives, profiling.
_ELSEWHERE = {"fsdp", "c10d", "_c10d_functional", "lit_fsdp_c10d", "profiler", "higher_order", "prim"}
_WITHOUT_PRODUCTS = _ELSEWHERE | {"aten", "prims", "symm_mem"}
_WITHOUT_VALUES = ("aten.empty", "aten.new_empty", "aten._unsafe_view", "aten.detach", "aten.lift_fresh")


def _count_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _count_attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


def _count_rows_times(x: Tensor, _weight: Tensor, shape: list[int], *_: Any, **__: Any) -> int:
    """``x`` [..., in] by a quantized weight of ``shape`` [out, in]."""
    return 2 * x.numel() * shape[0]


def _count_product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """[rows, inner] by [inner, columns], or groups of such: they share out rows, columns or the inner dimension."""
    num_groups = a.shape[0] if a.dim() > b.dim() else 1
    return 2 * a.numel() // num_groups * b.shape[-1]


def _count_transposed_product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """[rows, inner] by [columns, inner]."""
    return 2 * a.numel() * b.shape[0]


_FUSED_BACKWARD = {
    "aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "aten._scaled_dot_product_flash_attention_backward",
    "aten._scaled_dot_product_efficient_attention_backward",
    "aten._scaled_dot_product_cudnn_attention_backward",
    "aten._flash_attention_backward",
    "aten._efficient_attention_backward",
    "torch_attn._varlen_attn_backward",
}
# By name, as not all are loaded everywhere.
_MORE: dict[str, Callable[..., int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _count_attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _count_attention_backward,
    "aten._grouped_mm": _count_product,
    "aten._scaled_grouped_mm": _count_product,
    "aten._int_mm": _count_product,
    "bitsandbytes.gemm_4bit": _count_rows_times,
    "bitsandbytes.gemv_4bit": _count_rows_times,
    "bitsandbytes.int8_linear_matmul": _count_transposed_product,
    "bitsandbytes.int8_scaled_mm": _count_transposed_product,
}
