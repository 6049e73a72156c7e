"""Counts what a training step computes, and the memory traffic of all that is no product."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_iter
from typing_extensions import override

from lit_fsdp.profiling.flops import FlopCounter, has_formula
from lit_fsdp.quantization.quantize import count_hidden_bytes

_ELSEWHERE = ("fsdp", "c10d", "_c10d_functional", "profiler", "higher_order", "prim")  # not of the model
_NOTHING = ("aten.empty", "aten.new_empty", "aten._unsafe_view", "aten.detach", "aten.lift_fresh")  # of no values


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
        if not self.is_counting:
            return func(*args, **(kwargs or {}))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is not NotImplemented:
            self.moved_bytes += _count_moved(func, args, kwargs or {}, out)
        return out


def _count_moved(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    if has_formula(func):
        return count_hidden_bytes(func, args, kwargs)
    if func.namespace in _ELSEWHERE or func.is_view or str(func).startswith(_NOTHING):
        return 0
    tensors = {id(tensor): tensor for tensor in tree_iter((args, kwargs, out)) if isinstance(tensor, Tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
