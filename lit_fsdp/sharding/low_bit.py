"""Collectives of FSDP2 that send fewer bits: gathers of parameters in 8, reduce-scatters of gradients in 16 or 8.

Note [Blocks]: in 8 bits, each piece that one rank sends to another is cut into blocks of 256 numbers, the last one
filled up. A block takes 260 bytes: the largest absolute value in float32, and for each number its share of that as an
integer from -127 to 127. So no number is off by more than ``absmax / 254`` of its block, and rounding in float32. A
block with an infinite number or NaN holds no finite one afterwards: what looks for these still finds them. Blocks
follow the buffer of a unit, over the borders of its parameters.

Note [Equal on all ranks]: a rank reads its own part of a gather from what it has sent to the others, rounded too.
Otherwise ranks would compute with different weights. The shards, which the optimizer updates, are never rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from typing_extensions import override

from lit_fsdp.sharding.torch_internals import AllGather, ReduceScatter
from lit_fsdp.sharding.wrap import Unit

GatherBits = Literal[8]
ReduceBits = Literal[16, 8]
BLOCK_SIZE = 256
_ABSMAX_BYTES = 4
_BLOCK_BYTES = _ABSMAX_BYTES + BLOCK_SIZE
_LEVELS = 127
# So many numbers are rounded or read at once: what that takes besides is some 40 MB, however large the unit is.
_PART = 2**22
_ROUNDING_BYTES = 9  # a number as it was, filled up, its share of the largest, and its code
_WATCHERS: list[Callable[[Tensor], None]] = []  # told of every tensor that sums of gradients are written to


def count_packed_bytes(num_values: int, bits: GatherBits | ReduceBits) -> int:
    """Return what a piece of so many numbers takes on the wire, see Note [Blocks]."""
    return 2 * num_values if bits == 16 else -(-num_values // BLOCK_SIZE) * _BLOCK_BYTES


def compare_crossing(bits: ReduceBits, num_ranks: int, ranks_per_node: int) -> float:
    """Return what a node sends to others for a reduction, as a multiple of what float32 sends there.

    A ring crosses the border of a node once, with ``(N - 1) / N`` of all numbers. From all to all, each of its ``R``
    ranks sends every rank elsewhere a part: ``R (N - R) / N``. 0 where all ranks are on one node.
    """
    own = min(num_ranks, ranks_per_node)
    width = 16 if bits == 16 else 8 * _BLOCK_BYTES / BLOCK_SIZE
    return own * (num_ranks - own) / (num_ranks - 1) * width / 32 if num_ranks > 1 else 0.0


def count_gather_scratch(num_values: int, num_ranks: int) -> int:
    """Return the most memory that ``LowBitAllGather`` takes at a time besides FSDP2's buffers, in bytes, on a rank.

    ``num_values`` are what each rank gives.
    """
    packed = count_packed_bytes(num_values, 8)
    rounding = packed + _ROUNDING_BYTES * _count_part(1, num_values)
    return max(rounding, (1 + num_ranks) * packed + 4 * _count_part(num_ranks, num_values))


def count_reduce_scratch(num_values: int, num_ranks: int, bits: ReduceBits) -> int:
    """Return the same for ``LowBitReduceScatter``, where each rank gets ``num_values``."""
    sent = num_ranks * count_packed_bytes(num_values, bits)
    if bits == 16:
        return 2 * sent
    part = _count_part(num_ranks, num_values)
    return sent + max(sent, _ROUNDING_BYTES * part, 4 * part)


def quantize_blocks(values: Tensor) -> Tensor:
    """Round pieces of floating numbers, [pieces, numbers], to bytes, [pieces, blocks, 260]."""
    packed = values.new_empty((len(values), -(-values.shape[1] // BLOCK_SIZE), _BLOCK_BYTES), dtype=torch.uint8)
    for rows, columns, blocks in _list_parts(values):
        part = values[rows, columns].float()
        part = F.pad(part, (0, -part.shape[1] % BLOCK_SIZE)).unflatten(1, (-1, BLOCK_SIZE))
        low, high = part.aminmax(dim=-1, keepdim=True)
        absmax = torch.maximum(high, -low)
        codes = (part / absmax.where(absmax > 0, 1.0)).mul_(_LEVELS).round_().to(torch.int8)
        packed[rows, blocks, :_ABSMAX_BYTES] = absmax.view(torch.uint8)
        packed[rows, blocks, _ABSMAX_BYTES:] = codes.view(torch.uint8)
    return packed


def dequantize_blocks(packed: Tensor, out: Tensor) -> None:
    """Write what ``quantize_blocks`` has rounded into ``out``, [pieces, numbers]."""
    for rows, columns, blocks in _list_parts(out):
        out[rows, columns] = _read_blocks(packed[rows, blocks])[:, : out[rows, columns].shape[1]]


class LowBitAllGather(AllGather):
    """Gathers parameters as 8-bit blocks; see Note [Equal on all ranks]. It is over when it returns."""

    def __init__(self, bits: GatherBits = 8) -> None:
        self.bits = bits

    @override
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        own = quantize_blocks(input_tensor.view(1, -1))
        packed = own.new_empty((group.size(), *own.shape[1:]))
        dist.all_gather_single(packed.view(-1), own.view(-1), group=group)
        dequantize_blocks(packed, output_tensor.view(group.size(), -1))

    def count_bytes(self, output_tensor: Tensor, num_ranks: int) -> int:
        """Return what is gathered instead of ``output_tensor``, at full size."""
        return num_ranks * count_packed_bytes(output_tensor.numel() // num_ranks, self.bits)


class LowBitReduceScatter(ReduceScatter):
    """Sends each rank its part of the gradients in bfloat16 or as 8-bit blocks; each adds up what it got in float32.

    The part that a rank keeps is rounded like those that it sends: the sum does not depend on who adds it up.
    """

    def __init__(self, bits: ReduceBits) -> None:
        self.bits = bits

    @override
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"sharding.reduce_bits: got {self.bits} with {op}: expected a sum or a mean; leave it out")
        pieces = input_tensor.view(group.size(), -1)
        # As bytes: gloo does not exchange bfloat16.
        packed = pieces.to(torch.bfloat16).view(torch.uint8) if self.bits == 16 else quantize_blocks(pieces)
        received = torch.empty_like(packed)
        dist.all_to_all_single(received.view(-1), packed.view(-1), group=group)
        del packed
        for watcher in _WATCHERS:
            watcher(output_tensor)
        output_tensor.zero_()
        for rows, columns, blocks in _list_parts(pieces):
            part = output_tensor[columns]
            if self.bits == 16:
                part += received.view(torch.bfloat16)[rows, columns].sum(0, dtype=torch.float32)
            else:
                part += _read_blocks(received[rows, blocks]).sum(0)[: len(part)]
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())

    def count_bytes(self, input_tensor: Tensor, num_ranks: int) -> int:
        """Return what is exchanged for ``input_tensor``, at full size."""
        return num_ranks * count_packed_bytes(input_tensor.numel() // num_ranks, self.bits)


@contextmanager
def watch_sums(watcher: Callable[[Tensor], None]) -> Iterator[None]:
    """Have ``watcher`` told of what each reduce-scatter of this process will fill, which no operator of torch tells."""
    _WATCHERS.append(watcher)
    try:
        yield
    finally:
        _WATCHERS.remove(watcher)


def check_bits(gather_bits: int | None, reduce_bits: int | None) -> None:
    """Raise a ``ValueError`` for numbers of bits that there are not."""
    if gather_bits not in (None, 8):
        raise ValueError(f"sharding.gather_bits: got {gather_bits}: expected 8, or null for all bits")
    if reduce_bits not in (None, 16, 8):
        raise ValueError(f"sharding.reduce_bits: got {reduce_bits}: expected 16 (bfloat16), 8, or null for all bits")


def check_gathered(parameters: Mapping[str, Tensor], units: Iterable[Unit], policy: MixedPrecisionPolicy) -> None:
    """Raise a ``ValueError`` for units that cannot be gathered in 8 bits: rounding would change quantized weights."""
    for unit in units:
        own = {name: parameters[name] for name in unit.parameters if parameters[name].ndim and unit.kind != "idle"}
        for name, parameter in own.items():
            if not parameter.is_floating_point():
                raise describe_quantized(f"{name}, which holds quantized weights ({_name(parameter.dtype)})")
        dtypes = {policy.param_dtype or parameter.dtype: name for name, parameter in own.items()}
        if len(dtypes) > 1:
            found = " and ".join(f"{name} in {_name(dtype)}" for dtype, name in list(dtypes.items())[:2])
            raise ValueError(
                f"sharding.gather_bits: got 8, and one unit gathers {found}, together as bytes, which cannot be "
                "rounded; set mixed_precision.param_dtype, or leave it out"
            )


def describe_quantized(what: str) -> ValueError:
    """Return the error for gathers of quantized weights in 8 bits; ``what`` has them."""
    return ValueError(
        f"sharding.gather_bits: got 8 with {what}: rounding would change the bytes of quantized weights, which are few "
        "already; leave it out (sharding.reduce_bits can stay)"
    )


def check_reduced(
    bits: ReduceBits, parameters: Mapping[str, Tensor], units: Iterable[Unit], policy: MixedPrecisionPolicy
) -> None:
    """Raise a ``ValueError`` if gradients are not float32 when they are reduced: sums would be rounded."""
    trained = {n: parameters[n] for unit in units for n in unit.parameters if parameters[n].requires_grad}
    for name, parameter in trained.items():
        dtype = policy.reduce_dtype or policy.param_dtype or parameter.dtype
        if parameter.ndim and dtype != torch.float32:
            raise ValueError(
                f"sharding.reduce_bits: got {bits}, and the gradient of {name} is reduced in {_name(dtype)}, which "
                "would round the sum as well; set mixed_precision.reduce_dtype to float32"
            )


def _list_parts(values: Tensor) -> list[tuple[slice, slice, slice]]:
    """Return parts of [pieces, numbers] to work on one after another: their pieces, numbers and blocks."""
    num_pieces, num_values = values.shape
    width = min(max(num_values, 1), _PART)
    height = _PART // width
    return [
        (
            slice(i, i + height),
            slice(j, min(j + width, num_values)),
            slice(j // BLOCK_SIZE, -(-min(j + width, num_values) // BLOCK_SIZE)),
        )
        for i in range(0, num_pieces, height)
        for j in range(0, num_values, width)
    ]


def _count_part(num_pieces: int, num_values: int) -> int:
    """Return how many numbers, filled up, the largest of ``_list_parts`` has."""
    width = min(max(num_values, 1), _PART)
    return min(num_pieces, _PART // width) * -(-width // BLOCK_SIZE) * BLOCK_SIZE


def _read_blocks(packed: Tensor) -> Tensor:
    """Return the numbers of some blocks, [pieces, blocks, 260], as [pieces, numbers] in float32."""
    absmax = packed[..., :_ABSMAX_BYTES].view(torch.float32)
    codes = packed[..., _ABSMAX_BYTES:].view(torch.int8)
    return (codes * (absmax / _LEVELS)).flatten(1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
