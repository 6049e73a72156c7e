"""Products of rows, sorted into groups, with a matrix for each group, quantized or not: the experts of a mixture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lit_fsdp.quantization.quantize import Quantization, dequantize, read_maxima

GROUPS_PART = 2**26  # weights of all groups that are dequantized at a time: 128 MiB in 16 bits
_ROW_BYTES = 16  # kernels for groups want rows of whole ones


@dataclass(frozen=True, kw_only=True)
class LowRankMatrices:
    """What is added to the matrices of a weight, one of low rank for each group: ``scaling * b @ a``.

    Args:
        a: [groups, rank, in].
        b: [groups, out, rank].
        scaling: Of their product.
    """

    a: Tensor
    b: Tensor
    scaling: float


class GroupedExperts(nn.Module):
    """Experts of a mixture that multiply tokens in groups; mixed into the class of Transformers that they have.

    Tokens are sorted by expert and multiplied in groups, whatever ``experts_implementation`` says.
    """

    num_experts: int
    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool
    act_fn: Callable[[Tensor], Tensor]
    post_expert_norm: nn.Module
    _apply_gate: Callable[[Tensor], Tensor]

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        *,
        added: Mapping[str, LowRankMatrices] | None = None,
    ) -> Tensor:
        """Return [tokens, hidden] for states of that shape; experts and weights of each token are [tokens, k].

        No operator and no shape depends on which experts were chosen, and a GPU is not waited for. Where it has no
        kernel for groups, there is one wait, and the chosen experts are multiplied one by one: see
        ``has_grouped_product``. ``added`` holds, by name of a weight, what is added to it.
        """
        states = hidden_states.to(self.get_compute_dtype(hidden_states))
        is_grouped = has_grouped_product(states, self.list_widths())
        compute = self._compute if is_grouped else self._compute_one_by_one
        return compute(states, top_k_index, top_k_weights, added or {}).to(hidden_states.dtype)

    def get_compute_dtype(self, x: Tensor) -> torch.dtype:  # noqa: ARG002
        """Return what is multiplied in: that of the weights, also under autocast, as in Transformers."""
        weight: Tensor = self.get_parameter("down_proj")
        return weight.dtype

    def list_widths(self) -> list[int]:
        """Return how many numbers go into matrices, and come out."""
        return [size for p in self.parameters(recurse=False) if p.dim() == 3 for size in p.shape[1:]]

    def multiply(self, name: str, x: Tensor, ends: Tensor | list[int]) -> Tensor:
        """Return rows [rows, in], sorted by expert, times the matrix of their expert [rows, out]."""
        weight: Tensor = getattr(self, name)
        return multiply_dense_groups(x.to(weight.dtype), ends, weight if self.is_transposed else weight.mT)

    # Compiled code knows no sizes that it would have to wait for: it breaks here, and goes on behind.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _compute_one_by_one(self, *args: Any) -> Tensor:
        return self._compute(*args, is_grouped=False)

    def _compute(
        self,
        states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        added: Mapping[str, LowRankMatrices],
        *,
        is_grouped: bool = True,
    ) -> Tensor:
        num_tokens, top_k = top_k_index.shape
        experts, order = torch.sort(top_k_index.flatten())  # [tokens * k], as all below
        numbers = torch.arange(self.num_experts, device=experts.device)
        ends: Any = torch.searchsorted(experts, numbers, right=True, out_int32=True)  # [experts]
        if not is_grouped:
            ends = ends.tolist()
        activate: Any = self._apply_gate if self.has_gate else self.act_fn
        first = "gate_up_proj" if self.has_gate else "up_proj"
        x = self._project(first, states[order // top_k], experts, ends, added.get(first))
        x = self._project("down_proj", activate(x), experts, ends, added.get("down_proj"))
        if self.has_post_expert_norm:
            x = self.post_expert_norm(x)
        x = x * top_k_weights.flatten()[order, None]
        places = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        # A sum over k, not added into rows: it adds in float32, and in the same order each time.
        return x[places].view(num_tokens, top_k, x.shape[1]).sum(1)

    def _project(
        self, name: str, x: Tensor, experts: Tensor, ends: Tensor | list[int], added: LowRankMatrices | None
    ) -> Tensor:
        y = self.multiply(name, x, ends)
        if added is not None:
            y = y + multiply_low_rank(x.to(y.dtype), ends, added)
        return y + getattr(self, f"{name}_bias").to(y.dtype)[experts] if self.has_bias else y


def multiply_dense_groups(x: Tensor, ends: Tensor | list[int], matrices: Tensor) -> Tensor:
    """Return each group of rows times the matrix of its own [groups, in, out]; see :func:`multiply_groups`."""
    if not isinstance(ends, list):
        return torch.nn.functional.grouped_mm(x, matrices, offs=ends)
    spans = zip(pairwise([0, *ends]), matrices.unbind(), strict=True)
    return torch.cat([x[begin:end] @ matrix for (begin, end), matrix in spans])


def multiply_low_rank(x: Tensor, ends: Tensor | list[int], added: LowRankMatrices) -> Tensor:
    """Return each group of rows times what is added to the matrix of its own, in the dtype of ``x``."""
    a, b = added.a.to(x.dtype), added.b.to(x.dtype)
    missing = -a.shape[1] % (_ROW_BYTES // x.element_size())
    if missing and not isinstance(ends, list):  # zeros, so that any rank has rows that kernels take
        a, b = nn.functional.pad(a, (0, 0, 0, missing)), nn.functional.pad(b, (0, missing))
    low = multiply_dense_groups(x, ends, a.mT) * added.scaling
    return multiply_dense_groups(low, ends, b.contiguous().mT)


def multiply_groups(
    x: Tensor,
    ends: Tensor | list[int],
    codes: Tensor,
    absmax: Tensor,
    nested: Tensor | None,
    settings: Quantization,
    *,
    is_transposed: bool = False,
) -> Tensor:
    """Return each group of rows times the matrix of its own, transposed [rows, out]; with a gradient for ``x``.

    All matrices are dequantized together, a part of what comes out after another (see ``count_part``): forward as
    backward run the same operators whatever the sizes of the groups, and wait for none of them.

    Args:
        x: Floating [rows, in], one group after another.
        ends: The row behind each group, ``int32`` [groups]. A list where :func:`has_grouped_product` is false: then
            one matrix after another is dequantized.
        codes: Of the matrices, ``uint8`` [groups, rows of a matrix, bytes].
        absmax: Stored, ``uint8`` [groups, rows of a matrix, bytes].
        nested: The second level of double quantization [groups, bytes], ``None`` without one.
        settings: How the matrices were quantized, each for itself.
        is_transposed: The matrices are [in, out].
    """
    apply: Any = _MultiplyGroups.apply
    return apply(x, ends, (codes, absmax, nested), settings, is_transposed)


def has_grouped_product(x: Tensor, widths: Iterable[int]) -> bool:
    """Whether there is a kernel for groups that does not read their sizes on the host first.

    On GPUs only for ``bfloat16`` on compute capability 9 and 10, and for rows of whole 16 bytes: others run a loop
    inside ``grouped_mm``, with a synchronisation at each; seen in torch 2.13 to 2.15, drop when it is none. Nor is
    there a rule for compiled code but in ``bfloat16``; seen in torch 2.13.
    """
    if torch.compiler.is_compiling() and x.dtype != torch.bfloat16:
        return False
    if any(width * x.element_size() % _ROW_BYTES for width in widths):
        return False
    if x.device.type != "cuda":
        return x.device.type == "cpu"
    is_fast = torch.version.hip is None and torch.cuda.get_device_capability(x.device)[0] in (9, 10)
    return is_fast and x.dtype == torch.bfloat16


def count_part(num_matrices: int, num_in: int, num_out: int, settings: Quantization) -> int:
    """Return of how many outputs the matrices of all groups are dequantized at a time."""
    step = max(64, settings.block_size)  # blocks stay whole, and kernels want multiples of 16 bytes
    return min(num_out, max(step, GROUPS_PART // (num_matrices * num_in) // step * step))


class _MultiplyGroups(torch.autograd.Function):
    """Dequantizes in forward and again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        ends: Tensor | list[int],
        stored: tuple[Tensor, Tensor, Tensor | None],
        settings: Quantization,
        is_transposed: bool,
    ) -> Tensor:
        # As in _Multiply, not saved for backward. Ends are: where blocks are computed again, they are too.
        ctx.stored, ctx.settings, ctx.is_transposed = stored, settings, is_transposed
        ctx.ends = ends if isinstance(ends, list) else None
        ctx.save_for_backward(*([] if isinstance(ends, list) else [ends]))
        return _multiply_groups(x, ends, stored, settings, gives_rows=not is_transposed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (grad,) = grads  # [rows, out]
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        ends = ctx.ends if ctx.ends is not None else ctx.saved_tensors[0]
        grad_x = _multiply_groups(grad.contiguous(), ends, ctx.stored, ctx.settings, gives_rows=ctx.is_transposed)
        return grad_x, None, None, None, None


def _multiply_groups(
    x: Tensor,
    ends: Tensor | list[int],
    stored: tuple[Tensor, Tensor, Tensor | None],
    settings: Quantization,
    *,
    gives_rows: bool,
) -> Tensor:
    """Multiply; the outputs are the rows of the matrices, or else their columns."""
    codes, absmax, nested = stored
    num_matrices, num_rows, num_bytes = codes.shape
    num_columns = num_bytes * settings.codes_per_byte
    num_in, num_out = (num_columns, num_rows) if gives_rows else (num_rows, num_columns)
    result = x.new_empty(x.shape[0], num_out)
    if isinstance(ends, list):
        for i, (begin, end) in enumerate(pairwise([0, *ends])):
            if begin == end:
                continue
            second = None if nested is None else nested[i]
            weight = dequantize(codes[i], absmax[i], second, settings, x.dtype)
            result[begin:end] = x[begin:end] @ (weight.T if gives_rows else weight)
            del weight  # before the next is made
        return result
    size = count_part(num_matrices, num_in, num_out, settings)
    for first in range(0, num_out, size):
        last = min(first + size, num_out)
        rows, columns = ((first, last), (0, num_columns)) if gives_rows else ((0, num_rows), (first, last))
        # In one expression, so that no part is alive when the next is made.
        result[:, first:last] = torch.nn.functional.grouped_mm(
            x, _dequantize_part(stored, settings, rows, columns, x.dtype, is_turned=gives_rows), offs=ends
        )
    return result


def _dequantize_part(
    stored: tuple[Tensor, Tensor, Tensor | None],
    settings: Quantization,
    rows: tuple[int, int],
    columns: tuple[int, int],
    dtype: torch.dtype,
    *,
    is_turned: bool,
) -> Tensor:
    """Return these rows and columns of all matrices [matrices, rows, columns], or [matrices, columns, rows]."""
    codes, absmax, nested = stored
    per_byte, num_columns = settings.codes_per_byte, codes.shape[2] * settings.codes_per_byte
    num_blocks = settings.count_blocks(num_columns)
    width = num_columns // num_blocks
    first, last = columns[0] // width, -(-columns[1] // width)
    if nested is None:
        maxima = absmax.view(torch.float32)[:, slice(*rows), first:last]
    else:
        spans = (rows[0], rows[1] - rows[0]), (first, last - first)
        maxima = read_maxima(absmax[:, slice(*rows), first:last], nested, *spans, num_blocks)
    # The matrices below each other, as rows of one.
    part = codes[:, slice(*rows), columns[0] // per_byte : columns[1] // per_byte].flatten(0, 1)
    dense = dequantize(part.contiguous(), maxima.flatten(0, 1).contiguous().view(torch.uint8), None, settings, dtype)
    weights = dense.view(codes.shape[0], -1, columns[1] - columns[0])
    return weights.transpose(1, 2) if is_turned else weights
