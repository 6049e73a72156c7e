"""Layers with an adapter compute what peft's do, and on one rank cast their own matrices."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import build_language_model, to_full
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.adapters.layers import clean_name, iterate_adapters, switch_off_adapters
from lit_fsdp.adapters.linear import AdaptedLinear
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.quantization import quantize
from lit_fsdp.quantization.layers import quantize_model
from lit_fsdp.quantization.quantize import KeepDequantized, Quantization
from lit_fsdp.sharding.shard import Sharding, shard_model
from lit_fsdp.sharding.wrap import Wrap, plan_units
from lit_fsdp.weights.load import init_weights, materialize
from ranks import run_ranks

WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def build_layer(lora: LoRA, *, bias: bool = False, dtype: torch.dtype = torch.float32) -> AdaptedLinear:
    torch.manual_seed(0)
    holder = nn.Sequential(nn.Linear(24, 40, bias=bias, dtype=dtype))
    add_adapters(holder, lora)
    ((_, layer),) = iterate_adapters(holder)
    with torch.no_grad():
        for part in (layer.lora_A, layer.lora_B):
            part["default"].weight.normal_()
    assert isinstance(layer, AdaptedLinear)
    return layer


def run(forward: Callable[..., Tensor], layer: nn.Module, *sizes: int, width: int = 24) -> list[Tensor]:
    """Return the output, and the gradients of the input and of all that trains; drawn anew, and the same each time."""
    layer.zero_grad()
    torch.manual_seed(1)
    dtype = next(parameter.dtype for parameter in layer.parameters() if parameter.requires_grad)
    x = torch.randn(*sizes, width, dtype=dtype, requires_grad=True)
    y = forward(layer, x)
    (y.float().square().mean()).backward()
    gradients = [p.grad for p in (x, *layer.parameters()) if p.requires_grad and p.grad is not None]
    return [y.detach(), *gradients]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("lora", "bias", "sizes"),
    [
        (LoRA(r=4, alpha=6), False, (2, 7)),
        (LoRA(r=4, alpha=6, dropout=0.3), True, (5,)),
        (LoRA(r=3, alpha=6, use_rslora=True), True, (2, 3, 5)),
        (LoRA(r=4, alpha=6), True, ()),
    ],
)
def test_outputs_and_gradients_are_those_of_peft(
    lora: LoRA, bias: bool, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    layer = build_layer(lora, bias=bias, dtype=dtype)
    layer.to(dtype)
    assert layer.is_plain()
    found, truth = run(AdaptedLinear.forward, layer, *sizes), run(Linear.forward, layer, *sizes)
    assert len(found) == len(truth) == 4
    for one, other in zip(found, truth, strict=True):
        assert one.dtype == other.dtype == dtype
        error = float((one - other).abs().max() / other.abs().max())
        assert error <= (1e-6 if dtype == torch.float32 else 2e-2)


aten = torch.ops.aten
SAVED = (aten.mm, aten.addmm, aten.linear, torch.ops.bitsandbytes.gemm_4bit)
BASES = {"dense": None, "nf4": Quantization(), "fp4": Quantization(type="fp4"), "int8": Quantization(type="int8")}


def build_over(base: str, *, bias: bool, dtype: torch.dtype) -> AdaptedLinear:
    """Return a frozen layer [64, 40] of one kind with an adapter."""
    torch.manual_seed(0)
    settings = BASES[base]
    with torch.device("meta"):
        holder = nn.Sequential(nn.Linear(64, 40, bias=bias, dtype=dtype))
    if settings is not None:
        quantize_model(holder, settings)
    add_adapters(holder, LoRA(r=4, alpha=6, dtype="float32" if dtype == torch.float32 else "bfloat16"))
    materialize(holder, torch.device("cpu"))
    init_weights(holder, 3)
    ((_, layer),) = iterate_adapters(holder)
    nn.init.normal_(layer.lora_B["default"].weight)
    assert isinstance(layer, AdaptedLinear)
    return layer


class Record(TorchDispatchMode):
    """Counts operators by name, and sees them as selective recomputation does."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("base", BASES)
def test_a_frozen_layer_is_part_of_the_function_of_its_adapter(base: str, dtype: torch.dtype, bias: bool) -> None:
    layer = build_over(base, bias=bias, dtype=dtype)
    calls: list[str] = []

    def forward(layer: Any, x: Tensor) -> Tensor:
        return layer(x)  # type: ignore[no-any-return]

    def checkpointed(layer: Any, x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=False)  # type: ignore[no-any-return]

    def selective(layer: Any, x: Tensor) -> Tensor:
        # What is saved here must not be changed in place.
        contexts = partial(create_selective_checkpoint_contexts, [op.default for op in SAVED])
        return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]

    def kept(layer: Any, x: Tensor) -> Tensor:
        contexts = lambda: (nullcontext(), KeepDequantized())  # noqa: E731
        return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]

    def hooked(layer: Any, x: Tensor) -> Tensor:
        handle = layer.base_layer.register_forward_hook(lambda *_: calls.append(base))
        assert not layer.takes_base()
        y: Tensor = layer(x)
        handle.remove()
        return y

    assert layer.takes_base()
    truth = run(Linear.forward, layer, 2, 7, width=64)
    found = run(forward, layer, 2, 7, width=64)
    assert len(found) == len(truth) == 4
    for way in (found, run(hooked, layer, 2, 7, width=64)):
        for one, other in zip(way, truth, strict=True):
            assert one.dtype == other.dtype == dtype
            assert float((one - other).abs().max() / other.abs().max()) <= (1e-6 if dtype == torch.float32 else 2e-2)
    assert calls == [base]
    for another in (checkpointed, selective, kept):
        same = run(another, layer, 2, 7, width=64)
        assert all(torch.equal(one, other) for one, other in zip(same, found, strict=True)), another
    assert getattr(layer.base_layer, "kept", []) == []
    with Record() as record:
        assert torch.equal(run(forward, layer, 2, 7, width=64)[0], found[0])
    assert record.counts["bitsandbytes.gemm_4bit"] == (base in ("nf4", "fp4"))


def test_a_kept_weight_is_dequantized_once_for_recomputation_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, counts = build_over("nf4", bias=False, dtype=torch.float32), []
    for keeps in (False, True):
        calls: list[Any] = []
        original = quantize.dequantize
        monkeypatch.setattr(quantize, "dequantize", lambda *given, o=original, c=calls: (c.append(1), o(*given))[1])
        contexts = lambda k=keeps: (nullcontext(), KeepDequantized() if k else nullcontext())  # noqa: E731
        run(lambda layer, x, c=contexts: checkpoint(layer, x, use_reentrant=False, context_fn=c), layer, 7, width=64)
        monkeypatch.undo()
        counts.append(len(calls))
    assert counts == [3, 2]


def test_what_comes_out_may_be_changed_in_place() -> None:
    for base in BASES:
        layer = build_over(base, bias=True, dtype=torch.float32)
        for forward in (AdaptedLinear.forward, Linear.forward):
            found = run(lambda layer, x, f=forward: f(layer, x).clamp_(-0.5, 0.5), layer, 2, 7, width=64)
            truth = run(lambda layer, x, f=forward: f(layer, x).clamp(-0.5, 0.5), layer, 2, 7, width=64)
            assert all(torch.equal(one, other) for one, other in zip(found, truth, strict=True))


def test_autocast_on_a_cpu_goes_the_way_of_peft() -> None:
    layer = build_over("dense", bias=False, dtype=torch.float32)

    def cast(forward: Any) -> Any:
        def call(layer: Any, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return forward(layer, x)  # type: ignore[no-any-return]

        return call

    found, truth = (run(cast(way), layer, 2, 7, width=64) for way in (AdaptedLinear.forward, Linear.forward))
    for one, other in zip(found, truth, strict=True):
        assert one.dtype == other.dtype
        assert float((one - other).abs().max() / other.abs().max()) <= 2e-2


def test_an_input_without_a_gradient_gets_none_and_a_second_derivative_is_refused() -> None:
    layer = build_over("dense", bias=False, dtype=torch.float32)
    x = torch.randn(3, 64)
    layer(x).square().mean().backward()
    found = [p.grad for p in layer.parameters() if p.requires_grad]
    layer.zero_grad()
    Linear.forward(layer, x).square().mean().backward()
    truth = [p.grad for p in layer.parameters() if p.requires_grad]
    for one, other in zip(found, truth, strict=True):
        assert one is not None
        assert other is not None
        assert float((one - other).abs().max() / other.abs().max()) <= 1e-6
    x.requires_grad_(True)
    (gradient,) = torch.autograd.grad(layer(x).square().mean(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("base", BASES)
def test_shapes_are_found_without_memory(base: str) -> None:
    layer = build_over(base, bias=True, dtype=torch.float32).to("meta")
    x = torch.empty(2, 7, 64, device="meta", requires_grad=True)
    y = layer(x)
    assert y.is_meta
    assert y.shape == (2, 7, 40)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_a_base_that_trains_is_called() -> None:
    layer = build_over("dense", bias=True, dtype=torch.float32)
    layer.base_layer.bias.requires_grad_(True)
    assert not layer.takes_base()
    gradients = run(AdaptedLinear.forward, layer, 2, 7, width=64)
    truth = run(Linear.forward, layer, 2, 7, width=64)
    assert len(gradients) == len(truth) == 5  # with that of the bias
    for one, other in zip(gradients, truth, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_gradients_are_those_of_finite_differences() -> None:
    layer = build_layer(LoRA(r=2, alpha=3)).double()
    trained = {n: p for n, p in layer.named_parameters() if p.requires_grad}
    x = torch.randn(2, 3, 24, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, *matrices: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(trained, matrices, strict=True)), x)  # type: ignore[no-any-return]

    assert torch.autograd.gradcheck(call, (x, *trained.values()))


def test_matrices_stored_in_float32_are_cast_for_what_is_computed() -> None:
    layer = build_layer(LoRA(r=4), dtype=torch.bfloat16)
    layer.compute_dtype = torch.bfloat16
    assert {p.dtype for p in layer.parameters() if p.requires_grad} == {torch.float32}
    torch.manual_seed(1)
    x = torch.randn(6, 24, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    compiled = torch.compile(layer, backend="eager")(x)
    for one in (y, compiled):
        assert one.dtype == torch.bfloat16
        grads = torch.autograd.grad(one.float().sum(), [p for p in layer.parameters() if p.requires_grad])
        assert {g.dtype for g in grads} == {torch.float32}
    truth = build_layer(LoRA(r=4)).float()
    truth.load_state_dict(layer.state_dict())
    expected = truth(x.float()).detach()
    for one in (y, compiled):
        assert float((one.detach() - expected).abs().max() / expected.abs().max()) <= 2e-2


def test_what_else_is_asked_of_a_layer_goes_the_way_of_peft() -> None:
    layer = build_layer(LoRA(r=4))
    x = torch.randn(3, 24)
    seen: list[Any] = []
    handle = layer.lora_A["default"].register_forward_hook(lambda *given: seen.append(given[2]))
    hooked = layer(x)
    assert len(seen) == 1
    layer.compute_dtype = torch.float32  # as one rank sets it
    layer(x)
    assert len(seen) == 2
    handle.remove()
    assert torch.allclose(layer(x), hooked, atol=1e-6)
    assert len(seen) == 2
    of_backward: list[Any] = []
    handle = layer.lora_B["default"].register_full_backward_hook(lambda *given: of_backward.append(given[2]))
    layer(x).sum().backward()
    handle.remove()
    layer(x).sum().backward()
    assert len(of_backward) == 1
    with switch_off_adapters(layer):
        assert torch.equal(layer(x), layer.base_layer(x))
    before = layer(x)
    layer.merge()
    assert torch.allclose(layer(x), before, atol=1e-5)
    assert torch.equal(layer(x), layer.base_layer(x))
    assert not build_layer(LoRA(r=4, use_dora=True)).is_plain()


def train(*, leaves_whole: bool, no_sync: bool = False) -> dict[str, Tensor]:
    """Return losses and adapters of three steps in bfloat16, of the same rows on every rank."""
    model: Any = build_language_model("llama", **WIDE)
    quantize_model(model, Quantization(double_quant=False))
    add_adapters(model, LoRA(r=4))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    shard_model(
        model,
        plan_units(model, Wrap()),
        mesh=mesh,
        sharding=Sharding(no_sync=no_sync),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        offload_policy=OffloadPolicy(),
        leaves_whole=leaves_whole,
    )
    materialize(model, torch.device("cpu"))
    init_weights(model, 3)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    is_left = leaves_whole and not no_sync and dist.get_world_size() == 1
    assert {isinstance(p, DTensor) for p in trained.values()} == {not is_left}
    assert {layer.compute_dtype for _, layer in iterate_adapters(model)} == {torch.bfloat16 if is_left else None}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    found: dict[str, Tensor] = {}
    for step in range(3):
        ids = torch.randint(67, (2, 9), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = loss.detach()
    return found | {clean_name(n): to_full(p.detach()) for n, p in trained.items()}


def compare_ways(path: Path) -> None:
    ways = [train(leaves_whole=True), train(leaves_whole=False), train(leaves_whole=True, no_sync=True)]
    if dist.get_world_size() == 1:
        torch.save(ways[0], path)
    truth = torch.load(path)
    for way in ways:
        assert way.keys() == truth.keys()
        assert [name for name in truth if not torch.equal(way[name], truth[name])] == []


@pytest.mark.full
def test_one_rank_trains_to_the_bits_that_units_of_fsdp2_give(tmp_path: Path) -> None:
    for world_size in (1, 2):
        run_ranks(compare_ways, tmp_path / "truth.pt", world_size=world_size)
