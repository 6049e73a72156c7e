"""Stored bytes equal those of bitsandbytes, for a whole weight and for uneven shards of its rows."""

import weakref
from itertools import pairwise
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes import functional
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lit_fsdp.profiling.memory_trace import MemoryTrace
from lit_fsdp.quantization import groups
from lit_fsdp.quantization import quantize as quantization
from lit_fsdp.quantization.groups import multiply_groups
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
    with pytest.raises(ValueError, match=r"^quantization: got torch.float64 to compute with: expected torch.float32, "):
        dequantize(codes, absmax, nested, settings, torch.float64)


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
def test_gradients_are_those_of_the_dense_weight(settings: Quantization) -> None:
    weight = make_weight(rows=8, columns=128)
    dense = dequantize(*store(weight, settings), settings, torch.float32).double()
    x = torch.randn(4, dense.shape[1], generator=torch.Generator().manual_seed(1), requires_grad=True)
    bias = torch.zeros(dense.shape[0], requires_grad=True)
    y = multiply(x, *store(weight, settings), settings, bias=bias)
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
    y = multiply(x, *store(make_weight(8, 128), settings), settings)
    assert len(made) == (settings.type == "int8")  # bitsandbytes multiplies 4-bit weights by itself
    assert all(dense() is None for dense in made)
    node: Any = y.grad_fn
    kept = [t for t in tree_leaves((vars(node), node.saved_tensors)) if isinstance(t, Tensor)]
    assert any(t.dtype == torch.uint8 for t in kept)
    assert all(t.numel() < 8 * 128 for t in kept if t.is_floating_point())


def test_a_weight_without_rows_here_costs_nothing() -> None:
    for settings in (*SETTINGS, Quantization(type="int8")):
        codes, absmax = quantize_rows(torch.empty(0, 512), settings)
        assert (len(codes), len(absmax)) == (0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type": "nf8"}, "quantization.type: got 'nf8': expected one of nf4, fp4 or int8"),
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_int8_weight_takes_its_dense_size_and_little_more(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, (rows, columns) = Quantization(type="int8"), (768, 512)
    codes, absmax, _ = stored = store(make_weight(rows, columns), settings)
    whole = (codes.view(torch.int8).float() * (absmax.view(torch.float32) / 127)).to(dtype)
    for part in (100 * columns, quantization.INT8_PART):
        monkeypatch.setattr(quantization, "INT8_PART", part)
        assert torch.equal(dequantize(*stored, settings, dtype), whole)
    x = torch.randn(4, columns, dtype=dtype, requires_grad=True)
    with MemoryTrace(nn.Identity(), [], plan=(), device=torch.device("cpu")) as trace:
        trace.add_inputs({"codes": codes})
        trace.begin_phase("forward")
        y = multiply(x, *stored, settings)
        trace.begin_phase("backward")
        y.sum().backward()
    assert trace.finish().peak.num_bytes - codes.numel() < 1.03 * rows * columns * dtype.itemsize


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("settings", [*SETTINGS[:4], Quantization(type="int8")], ids=str)
def test_groups_are_multiplied_by_their_own_matrices(
    settings: Quantization, is_transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrices = [store(make_weight(192, 384) * (i + 1), settings) for i in range(3)]
    codes, absmax, nested = (None if parts[0] is None else torch.stack(parts) for parts in zip(*matrices, strict=True))  # type: ignore[arg-type]
    dense = [dequantize(*matrix, settings, torch.float32).double() for matrix in matrices]
    dense = [matrix.T if is_transposed else matrix for matrix in dense]  # [out, in]
    ends = [3, 3, 10]  # none of the second
    x = torch.randn(10, dense[0].shape[1], generator=torch.Generator().manual_seed(1), requires_grad=True)
    expected = torch.cat(
        [x.detach().double()[a:b] @ m.T for m, (a, b) in zip(dense, pairwise([0, *ends]), strict=True)]
    )
    expected_grad = torch.cat([2 * expected[a:b] @ m for m, (a, b) in zip(dense, pairwise([0, *ends]), strict=True)])
    found = []
    whole = groups.GROUPS_PART
    for given, part in ((ends, whole), (torch.tensor(ends, dtype=torch.int32), whole), (torch.tensor(ends).int(), 1)):
        monkeypatch.setattr(groups, "GROUPS_PART", part)
        x.grad = None
        y = multiply_groups(x, given, codes, absmax, nested, settings, is_transposed=is_transposed)  # type: ignore[arg-type]
        y.square().sum().backward()
        assert x.grad is not None
        assert torch.allclose(y.double(), expected, atol=1e-6)
        assert torch.allclose(x.grad.double(), expected_grad, atol=1e-5)
        found.append(y.detach())
    assert torch.equal(found[1], found[2])


def test_matrices_of_groups_are_dequantized_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, num, rows, columns = Quantization(), 4, 1024, 256
    part = num * columns * 256
    monkeypatch.setattr(groups, "GROUPS_PART", part)
    matrices = [store(make_weight(rows, columns), settings) for _ in range(num)]
    stored: Any = [torch.stack(parts) for parts in zip(*matrices, strict=True)]  # type: ignore[arg-type]
    x = torch.randn(8, columns, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([2, 4, 6, 8], dtype=torch.int32)
    with MemoryTrace(nn.Identity(), [], plan=(), device=torch.device("cpu")) as trace:
        trace.add_inputs(dict(enumerate(stored)))
        trace.begin_phase("forward")
        y = multiply_groups(x, ends, *stored, settings)
        trace.begin_phase("backward")
        y.sum().backward()
    added = trace.finish().peak.num_bytes - sum(tensor.numel() for tensor in stored)
    assert 2 * part < added < 1.5 * 2 * part  # codes and maxima of the part besides; all would be twice that
