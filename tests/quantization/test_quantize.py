"""Stored bytes equal those of bitsandbytes, for a whole weight and for uneven shards of its rows."""

import weakref
from itertools import pairwise
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes import functional
from torch import Tensor, nn

from lit_fsdp.quantization import quantize as quantization
from lit_fsdp.quantization.quantize import (
    BLOCK_SIZES,
    Quantization,
    compress_absmax,
    dequantize,
    dequantize_shard,
    multiply,
    quantize_rows,
)

SETTINGS = [
    Quantization(type=kind, block_size=size, double_quant=double)
    for kind in ("nf4", "fp4")
    for size in (64, 128)
    for double in (False, True)
]

KINDS = [Quantization(), Quantization(type="fp4", double_quant=False), Quantization(type="int8")]


def make_weight(rows: int = 7, columns: int = 512, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(rows, columns, generator=generator).mul_(0.02).to(dtype)


def store(weight: Tensor, settings: Quantization) -> tuple[Tensor, Tensor, Tensor | None]:
    """Quantize a whole weight to what a layer holds."""
    codes, absmax = quantize_rows(weight, settings)
    if settings.is_double:
        return codes, *compress_absmax(absmax)
    return codes, absmax.view(torch.uint8), None


def quantize_stock(weight: Tensor, settings: Quantization) -> tuple[Tensor, functional.QuantState]:
    return functional.quantize_4bit(
        weight, blocksize=settings.block_size, quant_type=settings.type, compress_statistics=settings.is_double
    )


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_bytes_are_those_of_bitsandbytes(settings: Quantization, dtype: torch.dtype) -> None:
    weight = make_weight(dtype=dtype)
    expected, state = quantize_stock(weight, settings)
    codes, absmax, nested = store(weight, settings)
    assert torch.equal(codes.view(-1), expected.view(-1))
    if nested is None:
        assert torch.equal(absmax.view(torch.float32).view(-1), state.absmax)
    else:
        assert torch.equal(absmax.view(-1), state.absmax)
        assert torch.equal(nested.view(torch.float32), torch.cat([state.state2.absmax, state.offset.view(1)]))
    whole = dequantize(codes, absmax, nested, settings, dtype)
    assert torch.equal(whole, functional.dequantize_4bit(expected, state))


@pytest.mark.parametrize("settings", [*SETTINGS, Quantization(type="int8")], ids=str)
@pytest.mark.parametrize("cuts", [(0, 7), (0, 3, 7), (0, 1, 1, 6, 7)])
def test_shards_of_rows_hold_the_bytes_of_the_whole(settings: Quantization, cuts: tuple[int, ...]) -> None:
    weight = make_weight()
    whole, whole_absmax = quantize_rows(weight, settings)
    parts = [quantize_rows(weight[a:b], settings) for a, b in pairwise(cuts)]
    assert torch.equal(torch.cat([codes for codes, _ in parts]), whole)
    assert torch.equal(torch.cat([absmax for _, absmax in parts]), whole_absmax)
    codes, absmax, nested = store(weight, settings)
    dense = dequantize(codes, absmax, nested, settings, torch.float32)
    for a, b in pairwise(cuts):
        assert torch.equal(dequantize_shard(codes[a:b], absmax[a:b], nested, settings, first=a), dense[a:b])


def test_int8_holds_the_bytes_of_linear8bitlt() -> None:
    weight = make_weight()
    codes, absmax, nested = store(weight, Quantization(type="int8"))
    expected, scales, _ = functional.int8_vectorwise_quant(weight.half())
    assert nested is None
    assert torch.equal(codes.view(torch.int8), expected)
    assert torch.equal(absmax.view(torch.float32).view(-1), scales.float())
    error = dequantize(codes, absmax, None, Quantization(type="int8"), torch.float32) - weight
    assert float((error.abs() / weight.abs().amax(dim=1, keepdim=True)).max()) <= 0.5 / 127 + 1e-3


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_multiplying_equals_the_stock_layer_in_value_and_gradient(settings: Quantization) -> None:
    weight = make_weight()
    packed, state = quantize_stock(weight, settings)
    bias = nn.Parameter(torch.ones(7))
    results: list[tuple[Tensor, ...]] = []
    for is_ours in (True, False):
        x = torch.randn(3, 5, 512, generator=torch.Generator().manual_seed(1), requires_grad=True)
        if is_ours:
            y = multiply(x, *store(weight, settings), settings, bias=bias)
        else:
            y = bnb.matmul_4bit(x, packed, quant_state=state, bias=bias)  # type: ignore[attr-defined]
        y.square().sum().backward()
        assert x.grad is not None
        results.append((y.detach(), x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    "settings", [Quantization(), Quantization(type="fp4", double_quant=False), Quantization(type="int8")]
)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_gradients_are_those_of_the_dense_weight(settings: Quantization, is_transposed: bool) -> None:
    weight = make_weight(rows=8, columns=128)
    dense = dequantize(*store(weight, settings), settings, torch.float32).double()
    dense = dense.T if is_transposed else dense  # [out, in]
    x = torch.randn(4, dense.shape[1], generator=torch.Generator().manual_seed(1), requires_grad=True)
    bias = torch.zeros(dense.shape[0], requires_grad=True)
    y = multiply(x, *store(weight, settings), settings, bias=bias, is_transposed=is_transposed)
    y.square().sum().backward()
    assert x.grad is not None
    assert bias.grad is not None
    expected = x.detach().double() @ dense.T
    assert torch.allclose(y.double(), expected, atol=1e-6)
    assert torch.allclose(x.grad.double(), 2 * expected @ dense, atol=1e-5)
    assert torch.allclose(bias.grad.double(), 2 * expected.sum(0), atol=1e-5)


@pytest.mark.parametrize(
    "settings", [Quantization(type="int8"), Quantization(), Quantization(type="fp4", double_quant=False)]
)
def test_no_dense_weight_is_kept_for_backward(settings: Quantization, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []

    def dequantize_watched(*args: Any) -> Tensor:
        dense = dequantize(*args)
        made.append(weakref.ref(dense))
        return dense

    monkeypatch.setattr(quantization, "dequantize", dequantize_watched)
    x = torch.randn(4, 128, requires_grad=True)
    y = multiply(x, *store(make_weight(8, 128), settings), settings, is_transposed=False)
    assert len(made) == (settings.type == "int8")  # bitsandbytes multiplies 4-bit weights by itself
    assert all(dense() is None for dense in made)
    assert y.grad_fn is not None
    assert all(t is None or t.numel() < 8 * 128 for t in getattr(y.grad_fn, "tensors", ()))


def test_a_weight_without_rows_here_costs_nothing() -> None:
    for settings in (*SETTINGS, Quantization(type="int8")):
        codes, absmax = quantize_rows(torch.empty(0, 512), settings)
        assert (len(codes), len(absmax)) == (0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 48}, "quantization.block_size: got 48: expected one of 32, 64"),
        ({"type": "int8", "double_quant": True}, "quantization.double_quant: not used by type int8"),
        ({"type": "int8", "block_size": 128}, "quantization.block_size: not used by type int8"),
    ],
)
def test_settings_without_a_kernel_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Quantization(**options).check()


def test_every_block_size_counts_its_blocks() -> None:
    for size in BLOCK_SIZES:
        assert Quantization(block_size=size).count_blocks(8192) == 8192 // size
    with pytest.raises(ValueError, match="rows of 100 weights do not divide into blocks of 64"):
        Quantization().count_blocks(100)
