"""Products of rows, sorted into groups, with a quantized matrix for each group: the experts of a mixture."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from lit_fsdp.quantization.quantize import Quantization, dequantize, read_maxima

GROUPS_PART = 2**26  # weights of all groups that are dequantized at a time: 128 MiB in 16 bits


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
    inside ``grouped_mm``, with a synchronisation at each; seen in torch 2.13 to 2.15, drop when it is none.
    """
    if any(width * x.element_size() % 16 for width in widths):
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
