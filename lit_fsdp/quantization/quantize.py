"""4-bit and 8-bit weights as rows of bytes, with the kernels of bitsandbytes.

Note [Rows of bytes]: a frozen weight [out, in] is stored as ordinary ``uint8`` tensors of ``out`` rows, one row per
output: its codes, and the maxima of its blocks. Blocks never cross a row, so a shard of rows is complete in itself,
may be of any number of rows, and moves between numbers of ranks like any other parameter. Only the second level of
double quantization, 4 bytes per 256 blocks, belongs to the weight as a whole; every rank keeps it in full.
Floating numbers are stored as their bytes too: nothing that casts a model changes them.

The formats are those of bitsandbytes, byte for byte: NF4 and double quantization of QLoRA (arXiv:2305.14314), FP4,
and the int8 weights of LLM.int8 (arXiv:2208.07339) with one maximum per row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

import torch
from torch import Tensor

from lit_fsdp.errors import check_choices, join_names
from lit_fsdp.quantization.kernels import is_loaded, load_kernels

# Of maxima that share one second-level maximum; bitsandbytes knows no other number.
NESTED_BLOCK_SIZE = 256
_STATE, _STATE_BYTES = "quant_state.bitsandbytes__", 256
_USER = "quantization"
_COMPUTED = (torch.float32, torch.bfloat16, torch.float16)
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
INT8_PART = 2**22  # weights in int8 that are dequantized at a time: 16 MiB in float32
# Up to so many rows, GPUs may multiply by 4-bit weights of so many and more, or of fewer, without dequantizing them
# first; seen in bitsandbytes 0.50.
FUSED_ROWS, FUSED_ROWS_SMALL, SMALL_WEIGHT = 512, 1536, 2**22
_IS_KEEPING: ContextVar[bool] = ContextVar("keep_dequantized", default=False)


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Keep frozen weights in 4 or 8 bits; they are computed with in the precision of the run.

    Args:
        type: ``nf4`` suits normally distributed weights best, ``fp4`` is a 4-bit float, ``int8`` takes twice the
            memory of these for a twentieth of the error.
        block_size: How many weights of a row share one maximum, for the 4-bit types: 64 takes 0.5 bits per weight
            for maxima (0.127 with ``double_quant``), 128 half of that and is less exact.
        double_quant: Keep these maxima in 8 bits as well. ``null`` does for the 4-bit types.
        skip_modules: Names of modules to leave as they are, in full, or their last part, or patterns such as
            ``*.layers.0.*``. ``null`` leaves the output head.
    """

    type: Literal["nf4", "fp4", "int8"] = "nf4"
    block_size: int = 64
    double_quant: bool | None = None
    skip_modules: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.skip_modules is not None:
            object.__setattr__(self, "skip_modules", tuple(self.skip_modules))  # YAML gives a list

    def check(self) -> None:
        """Refuse values for which there is no kernel, or which would be ignored."""
        check_choices(self, "quantization")
        if self.type == "int8" and (self.double_quant or self.block_size != Quantization.block_size):
            name = "double_quant" if self.double_quant else "block_size"
            raise ValueError(f"quantization.{name}: not used by type int8, which has one maximum per row; leave it out")
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(
                f"quantization.block_size: got {self.block_size}: expected one of {', '.join(map(str, BLOCK_SIZES))}"
            )

    @property
    def is_double(self) -> bool:
        """Whether maxima are kept in 8 bits."""
        return self.type != "int8" if self.double_quant is None else self.double_quant

    @property
    def codes_per_byte(self) -> int:
        """How many weights share a byte."""
        return 1 if self.type == "int8" else 2

    def count_blocks(self, num_columns: int) -> int:
        """Return the number of maxima of a row; refuse one that does not divide into blocks."""
        if self.type == "int8":
            return 1
        if num_columns % self.block_size:
            raise ValueError(f"rows of {num_columns} weights do not divide into blocks of {self.block_size}")
        return num_columns // self.block_size

    def count_nested_bytes(self, num_blocks: int) -> int:
        """Return the bytes of the second level of a weight with ``num_blocks`` blocks: its maxima and their mean."""
        return 4 * (-(-num_blocks // NESTED_BLOCK_SIZE) + 1)


def quantize_rows(rows: Tensor, settings: Quantization) -> tuple[Tensor, Tensor]:
    """Return codes ``uint8`` [rows, bytes] and absmax ``float32`` [rows, blocks] of weights [rows, in]."""
    num_rows, num_columns = rows.shape
    num_blocks = settings.count_blocks(num_columns)
    if not num_rows:
        codes = rows.new_empty(0, num_columns // settings.codes_per_byte, dtype=torch.uint8)
        return codes, rows.new_empty(0, num_blocks, dtype=torch.float32)
    if settings.type == "int8":
        # In float16, as Linear8bitLt does before.
        codes, absmax, _ = _load_functional().int8_vectorwise_quant(rows.to(torch.float16))
        return codes.view(torch.uint8), absmax.float().view(num_rows, 1)
    codes, state = _load_functional().quantize_4bit(
        rows.contiguous(), blocksize=settings.block_size, quant_type=settings.type, compress_statistics=False
    )
    return codes.view(num_rows, -1), state.absmax.view(num_rows, num_blocks)


def compress_absmax(absmax: Tensor) -> tuple[Tensor, Tensor]:
    """Return the second level of double quantization of the maxima of a whole weight, ``float32`` [rows, blocks].

    Codes ``uint8`` [rows, blocks], and the bytes of their absmax and of the mean [bytes].
    """
    flat = absmax.reshape(-1)
    mean = flat.mean()
    codes, state = _load_functional().quantize_blockwise(flat - mean, blocksize=NESTED_BLOCK_SIZE)
    return codes.view(absmax.shape), torch.cat([state.absmax, mean.view(1)]).view(torch.uint8)


def multiply(
    x: Tensor,
    codes: Tensor,
    absmax: Tensor,
    nested: Tensor | None,
    settings: Quantization,
    *,
    bias: Tensor | None = None,
    kept: list[Tensor] | None = None,
) -> Tensor:
    """Return ``x @ weight.T + bias`` [..., out], with a gradient for ``x`` and ``bias``.

    Keeps no dense weight, but for :class:`KeepDequantized`.

    Args:
        x: Floating [..., in]; the weight is dequantized to its dtype.
        codes: Of the weight, ``uint8`` [rows, bytes].
        absmax: Stored, ``uint8`` [rows, bytes].
        nested: The second level of double quantization, ``None`` without one.
        settings: How the weight was quantized.
        bias: [out].
        kept: A list for this weight, the same in each call; ``None`` where none is to be kept, and in compiled code.
    """
    if settings.type == "int8" or kept is not None:
        apply: Any = _Multiply.apply
        return apply(x, bias, (codes, absmax, nested), settings, kept)
    state = _build_state(codes, absmax, nested, x.dtype, settings)
    return load_kernels(_USER).matmul_4bit(x, codes.view(-1, 1), quant_state=state, bias=bias)


class KeepDequantized:
    """A context that lets products keep a weight that they dequantize in it until backward has used it.

    For what is computed a second time, right before its backward: then a weight is dequantized once for both. Only
    products whose ``x`` gets a gradient keep one, as no backward would come to let go of others. It is entered again
    where backward runs again over the same graph.
    """

    def __enter__(self) -> None:
        self._token = _IS_KEEPING.set(True)

    def __exit__(self, *_: object) -> None:
        _IS_KEEPING.reset(self._token)


def dequantize(
    codes: Tensor, absmax: Tensor, nested: Tensor | None, settings: Quantization, dtype: torch.dtype
) -> Tensor:
    """Return a weight [rows, columns] in ``dtype``; see :func:`multiply`. Of a weight on the meta device, its shape."""
    num_rows, num_columns = codes.shape[0], codes.shape[1] * settings.codes_per_byte
    if codes.is_meta or not num_rows:
        return codes.new_empty(num_rows, num_columns, dtype=dtype)
    if settings.type == "int8":
        dense = codes.new_empty(num_rows, num_columns, dtype=dtype)
        rows = max(1, INT8_PART // num_columns)
        parts = (tensor.split(rows) for tensor in (codes.view(torch.int8), absmax.view(torch.float32) / 127, dense))
        for part, scale, out in zip(*parts, strict=True):
            # Computed in float32 and cast as it is written: on a GPU inside the kernel, on a CPU in copies of the part.
            torch.mul(part, scale, out=out)
        return dense
    if dtype not in _COMPUTED:  # of others, the operator for CPUs returns what was in memory
        raise ValueError(f"quantization: got {dtype} to compute with: expected {join_names([*map(str, _COMPUTED)])}")
    load_kernels(_USER)
    # Its operators: the functions around them take a description of the weight, and to build one takes as long again.
    operators = torch.ops.bitsandbytes
    if nested is None:
        maxima = absmax.view(torch.float32).view(-1)
    else:
        values, book = nested.view(torch.float32), _get_code_book("dynamic", nested.device)
        maxima = operators.dequantize_blockwise(absmax.view(-1), values[:-1], book, NESTED_BLOCK_SIZE, torch.float32)
        maxima += values[-1]
    shape = (num_rows, num_columns)
    return cast(
        Tensor,
        operators.dequantize_4bit(codes.view(-1, 1), maxima, settings.block_size, settings.type, shape, dtype),
    )


def dequantize_shard(
    codes: Tensor, absmax: Tensor, nested: Tensor | None, settings: Quantization, *, first: int
) -> Tensor:
    """Return rows of a weight, ``float32``, from a shard that begins with row ``first`` of the weight.

    Codes and absmax are of these rows, as stored; ``nested``, the second level, is of the whole weight.
    """
    if nested is not None:
        num_rows, num_blocks = absmax.shape
        absmax = read_maxima(absmax, nested, (first, num_rows), (0, num_blocks), num_blocks).view(torch.uint8)
    return dequantize(codes, absmax, None, settings, torch.float32)


def read_maxima(
    codes: Tensor, nested: Tensor, rows: tuple[int, int], blocks: tuple[int, int], num_blocks: int
) -> Tensor:
    """Return maxima ``float32`` [..., rows, blocks] from their codes, and the second level [..., bytes].

    ``rows`` and ``blocks`` are the first of the weight and how many there are; a whole row has ``num_blocks``.
    """
    row, block = (torch.arange(first, first + num, device=codes.device) for first, num in (rows, blocks))
    places = (row[:, None] * num_blocks + block) // NESTED_BLOCK_SIZE
    values = nested.view(torch.float32)
    maxima: Tensor = _get_code_book("dynamic", codes.device)[codes.long()] * values[..., places]
    return maxima + values[..., -1:, None]


def requantize(weight: Tensor, settings: Quantization) -> Tensor:
    """Return what quantization makes of a whole weight [rows, columns], ``float32``."""
    return dequantize(*_quantize_whole(weight, settings), settings, torch.float32)


def pack_4bit(weight: Tensor, settings: Quantization) -> dict[str, Tensor]:
    """Return what bitsandbytes stores of a dense weight [rows, columns], by what follows its name.

    Of one on the meta device, shapes and dtypes.
    """
    key = f".{_STATE}{settings.type}"
    if weight.is_meta:
        num_blocks = weight.shape[0] * settings.count_blocks(weight.shape[1])
        parts = {
            "": weight.new_empty(weight.numel() // 2, 1, dtype=torch.uint8),
            key: weight.new_empty(_STATE_BYTES, dtype=torch.uint8),
            ".absmax": weight.new_empty(num_blocks, dtype=torch.uint8 if settings.is_double else torch.float32),
            ".quant_map": weight.new_empty(16, dtype=torch.float32),
        }
        if settings.is_double:
            num_nested = -(-num_blocks // NESTED_BLOCK_SIZE)
            parts[".nested_absmax"] = weight.new_empty(num_nested, dtype=torch.float32)
            parts[".nested_quant_map"] = weight.new_empty(256, dtype=torch.float32)
        return parts
    codes, absmax, nested = _quantize_whole(weight, settings)
    packed = _build_state(codes, absmax, nested, weight.dtype, settings).as_dict(packed=True)
    parts = {"": codes.view(-1, 1), **{f".{name}": part for name, part in packed.items()}}
    state = torch.full((_STATE_BYTES,), ord(" "), dtype=torch.uint8)  # JSON may end with spaces
    state[: len(parts[key])] = parts[key]
    return {**parts, key: state}


def _quantize_whole(weight: Tensor, settings: Quantization) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes, absmax as it is stored, and the second level."""
    codes, absmax = quantize_rows(weight, settings)
    return (codes, *compress_absmax(absmax)) if settings.is_double else (codes, absmax.view(torch.uint8), None)


def multiply_once(
    x: Tensor,
    stored: tuple[Tensor, Tensor, Tensor | None],
    settings: Quantization,
    bias: Tensor | None,
    kept: list[Tensor] | None,
    *,
    has_backward: bool,
) -> Tensor:
    """Return what :func:`multiply` does, without a graph; ``has_backward`` says that :func:`take_dense` will follow."""
    codes, absmax, nested = stored
    if kept is not None:
        kept.clear()  # of a step that broke off
    is_whole = settings.type == "int8" or _is_dequantized_whole(x, codes.numel() * settings.codes_per_byte)
    is_kept = kept is not None and is_whole and has_backward and _IS_KEEPING.get()
    # What records operators, to save what one returns or to count, gets the product as one. Else the way through
    # bitsandbytes to the same numbers is the longer one.
    if settings.type != "int8" and not is_kept and (is_recorded() or not is_whole):
        state = _build_state(codes, absmax, nested, x.dtype, settings)
        return load_kernels(_USER).matmul_4bit(x, codes.view(-1, 1), quant_state=state, bias=bias)
    weight = dequantize(codes, absmax, nested, settings, x.dtype)
    if is_kept:
        cast(list[Tensor], kept).append(weight)
    rows = torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), weight, bias)
    # No view, which models could not change in place after it came out of a function.
    product: Tensor = torch.ops.aten._unsafe_view(rows, (*x.shape[:-1], rows.shape[-1]))
    return product


def take_dense(
    stored: tuple[Tensor, Tensor, Tensor | None],
    settings: Quantization,
    kept: list[Tensor] | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the dense weight for the backward of a product: the one that was kept for it, or dequantized again."""
    return kept.pop().to(dtype) if kept else dequantize(*stored, settings, dtype)  # autocast computes in another one


def is_recorded() -> bool:
    """Whether something records all operators, as selective recomputation and counting of memory and FLOPs do."""
    return torch._C._len_torch_dispatch_stack() > 0  # private, seen in torch 2.13


class _Multiply(torch.autograd.Function):
    """Dequantizes in forward and again in backward, or once where it may keep the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        stored: tuple[Tensor, Tensor, Tensor | None],
        settings: Quantization,
        kept: list[Tensor] | None,
    ) -> Tensor:
        # Not saved for backward: FSDP frees the storage of what it has gathered, and fills it again.
        ctx.stored, ctx.settings, ctx.kept = stored, settings, kept
        if torch.compiler.is_compiling():  # only for int8, and never with kept weights
            # In one operator: a compiler would see that backward dequantizes again, and keep the dense weight for it.
            return multiply_int8(x, stored[0], stored[1], bias)
        return multiply_once(x, stored, settings, bias, kept, has_backward=ctx.needs_input_grad[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        (grad,) = grads  # [..., out]
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ take_dense(ctx.stored, ctx.settings, ctx.kept, grad.dtype)
        if ctx.needs_input_grad[1]:
            grad_bias = grad.flatten(0, -2).sum(0)
        return grad_x, grad_bias, None, None, None


def _is_dequantized_whole(x: Tensor, num_weights: int) -> bool:
    """Whether the product of bitsandbytes dequantizes the weight first, so that a kept one gives the same bits."""
    fused_rows = FUSED_ROWS_SMALL if num_weights < SMALL_WEIGHT else FUSED_ROWS
    return x.device.type == "cpu" or x.numel() // x.shape[-1] > fused_rows


@torch.library.custom_op("lit_fsdp::multiply_int8", mutates_args=())
def multiply_int8(x: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x @ weight.T + bias`` [..., out] for weights in int8, without a gradient: what compiled code calls."""
    return torch.nn.functional.linear(x, dequantize(codes, absmax, None, Quantization(type="int8"), x.dtype), bias)


@multiply_int8.register_fake
def _make_product(x: Tensor, codes: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], codes.shape[0])


def _build_state(
    codes: Tensor, absmax: Tensor, nested: Tensor | None, dtype: torch.dtype, settings: Quantization
) -> Any:
    """Describe a weight to bitsandbytes, whose backward dequantizes to the dtype named here."""
    common: dict[str, Any] = {
        "shape": torch.Size((codes.shape[0], codes.shape[1] * settings.codes_per_byte)),
        "code": _get_code_book(settings.type, codes.device),
        "blocksize": settings.block_size,
        "quant_type": settings.type,
        "dtype": dtype,
    }
    if nested is None:
        return _load_functional().QuantState(absmax=absmax.view(torch.float32).view(-1), **common)
    values = nested.view(torch.float32)
    second = _load_functional().QuantState(
        absmax=values[:-1],
        blocksize=NESTED_BLOCK_SIZE,
        code=_get_code_book("dynamic", nested.device),
        dtype=torch.float32,
    )
    return _load_functional().QuantState(absmax=absmax.view(-1), offset=values[-1], state2=second, **common)


def count_hidden_bytes(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return what an operator of bitsandbytes makes inside itself and frees again: a whole weight, dequantized.

    On CUDA above 512 tokens, of small weights above 1536 at the latest; seen in bitsandbytes 0.50. Others give 0.
    """
    # By identity, as this is asked of every operator that runs.
    if not is_loaded() or operator is not torch.ops.bitsandbytes.gemm_4bit.default:
        return 0
    x, _, (rows, columns), _, block_size, *_ = args
    maxima = 0 if kwargs.get("absmax_8bit") is None else 4 * rows * columns // block_size
    return rows * columns * x.element_size() + maxima


def prepare_tables(device: torch.device) -> None:
    """Make the tables of values that codes stand for, which are kept: not under fake tensors, which have none."""
    for kind in ("nf4", "fp4", "dynamic"):
        _get_code_book(kind, device)


def _load_functional() -> Any:
    return load_kernels(_USER).functional


# Compiled code takes the table as it is: it would look behind the cache and make one in each call.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _get_code_book(kind: str, device: torch.device) -> Tensor:
    """Return the values that codes stand for."""
    return _make_code_book(kind, device)


@cache
def _make_code_book(kind: str, device: torch.device) -> Tensor:
    if kind == "dynamic":
        return _load_functional().create_dynamic_map().to(device)
    return _load_functional().get_4bit_type(kind, device=device)
