"""Dtypes by name, and a loss scaler under which all ranks do the same."""

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from lit_fsdp.sharding.mixed_precision import (
    PRECISIONS,
    MixedPrecision,
    ShardedGradScaler,
    cast_inputs,
    cast_parameters,
    read_precision,
)
from lit_fsdp.strategy.precision_plugin import FSDP2Precision
from ranks import run_ranks


@pytest.mark.parametrize(
    ("name", "storage", "compute", "reduction", "is_scaled"),
    [
        ("32-true", None, None, None, False),
        ("bf16-true", torch.bfloat16, torch.bfloat16, torch.float32, False),
        ("bf16-mixed", torch.float32, torch.bfloat16, torch.float32, False),
        ("16-mixed", torch.float32, torch.float16, torch.float32, True),
    ],
)
def test_a_name_of_lightning_gives_these_dtypes(
    name: str, storage: Any, compute: Any, reduction: Any, is_scaled: bool
) -> None:
    precision = read_precision(name)
    policy = precision.build_policy()
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (compute, reduction, None)
    assert policy.cast_forward_inputs is True
    assert precision.needs_loss_scaling is is_scaled
    linear = nn.Linear(2, 2)
    cast_parameters(linear, precision)
    assert linear.weight.dtype == (storage or torch.float32)
    assert (FSDP2Precision(name, device_type="cpu").scaler is not None) is is_scaled


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("16-true", "16-mixed or bf16-true"), ("64-true", "32-true"), ("transformer-engine", "32-true")],
)
def test_a_precision_that_would_not_train_is_refused(name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"precision: got '{name}': .*bf16-mixed.*nearest: {nearest}"):
        FSDP2Precision(name)


def test_only_what_is_set_explicitly_wins() -> None:
    base = PRECISIONS["bf16-mixed"]
    assert base.override(None) == base
    assert base.override(MixedPrecision()) == base
    changed = base.override(MixedPrecision(reduce_dtype="bfloat16", cast_forward_inputs=False, output_dtype="float32"))
    assert changed == MixedPrecision(
        storage_dtype="float32",
        param_dtype="bfloat16",
        reduce_dtype="bfloat16",
        output_dtype="float32",
        cast_forward_inputs=False,
    )
    assert FSDP2Precision("32-true", MixedPrecision(param_dtype="float16"), "cpu").scaler is not None


def test_buffers_integers_ties_and_frozen_parameters_survive_the_cast() -> None:
    model = nn.Module()
    model.norm, model.a, model.b = nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    model.b.weight = model.a.weight
    model.codes = nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    model.norm.weight.requires_grad_(False)
    cast_parameters(model, MixedPrecision(storage_dtype="bfloat16"))
    assert model.a.weight is model.b.weight
    assert model.a.weight.dtype == model.norm.weight.dtype == torch.bfloat16
    assert model.codes.dtype == torch.uint8
    assert model.norm.running_mean.dtype == torch.float32
    assert (model.norm.weight.requires_grad, model.a.weight.requires_grad) == (False, True)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    cast_parameters(model, MixedPrecision())
    cast_parameters(model, MixedPrecision(storage_dtype="bfloat16"))
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (nn.Linear(6, 6), (torch.ones(2, 6),)),
        (nn.Bilinear(6, 6, 3), (torch.ones(2, 6), torch.ones(2, 6))),
        (nn.Conv2d(6, 3, 1), (torch.ones(2, 6, 4, 4),)),
        (nn.ConvTranspose1d(6, 3, 1), (torch.ones(2, 6, 4),)),
        (nn.LSTM(6, 3), (torch.ones(2, 6), (torch.ones(1, 3), torch.ones(1, 3)))),
        (nn.GRUCell(6, 3), (torch.ones(2, 6),)),
        (nn.MultiheadAttention(6, 2), (torch.ones(2, 6), torch.ones(2, 6), torch.ones(2, 6))),
        (nn.LayerNorm(6), (torch.arange(6.0),)),
        (nn.GroupNorm(2, 6), (torch.arange(12.0).view(2, 6),)),
        (nn.PReLU(6), (-torch.ones(2, 6),)),
        (nn.Embedding(6, 3), (torch.arange(3),)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_layers_in_16_bits_take_inputs_of_other_dtypes(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    layer = layer.to(torch.bfloat16)
    cast = tree_map_only(Tensor, lambda value: value.bfloat16() if value.is_floating_point() else value, inputs)
    expected = layer(*cast)
    cast_inputs(layer, None)
    torch.testing.assert_close(layer(*inputs), expected, rtol=0, atol=0)
    torch.testing.assert_close(layer(*cast), expected, rtol=0, atol=0)
    torch.testing.assert_close(deepcopy(layer)(*inputs), expected, rtol=0, atol=0)


def test_masks_of_attention_and_what_autocast_casts_stay_as_they_are() -> None:
    layer, mask = nn.MultiheadAttention(6, 2).bfloat16(), torch.tensor([[0.0, -1e9, 1e-3], [0.0, 0.0, -1e9]])
    rows = [torch.randn(n, 6).bfloat16() for n in (2, 3, 3)]
    options = {"attn_mask": mask, "need_weights": False}
    expected = layer(*rows, **options)[0]
    cast_inputs(layer, None)
    assert torch.equal(layer(*rows, **options)[0], expected)
    assert torch.equal(layer(*(row.float() for row in rows), **options)[0], expected)
    norm = nn.Linear(6, 6).bfloat16()
    seen: list[torch.dtype] = []
    cast_inputs(norm, None)
    norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        norm(torch.ones(2, 6))
    norm(torch.ones(2, 6))
    assert seen == [torch.float32, torch.bfloat16]


def build_sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))  # 5 rows and 1 row over 2 ranks
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def read_weights(model: nn.Module) -> list[Tensor]:
    return [p.full_tensor().clone() for p in model.parameters() if isinstance(p, DTensor)]


def backward(model: nn.Module, scaler: ShardedGradScaler | None) -> None:
    loss = model(torch.arange(6.0).view(2, 3) / 6).square().mean()
    (loss if scaler is None else scaler.scale(loss)).backward()


@pytest.mark.full
@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_one_bad_shard_makes_all_ranks_skip_the_step(bad_rank: int, value: float) -> None:
    def body() -> None:
        model, optimizer = build_sharded()
        before = read_weights(model)
        scaler = ShardedGradScaler("cpu", init_scale=1024.0)
        backward(model, scaler)
        grad = model[0].weight.grad  # type: ignore[union-attr]
        assert isinstance(grad, DTensor)
        if dist.get_rank() == bad_rank:
            grad.to_local()[0, 0] = value
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(a, b) for a, b in zip(read_weights(model), before, strict=True))
        assert scaler.get_scale() == 512.0
        assert not optimizer.state
        # and the next good step is taken by all
        optimizer.zero_grad()
        backward(model, scaler)
        scaler.step(optimizer)
        scaler.update()
        assert not any(torch.equal(a, b) for a, b in zip(read_weights(model), before, strict=True))

    run_ranks(body)


def test_scaled_steps_equal_unscaled_steps() -> None:
    def body() -> None:
        plain, plain_optimizer = build_sharded()
        model, optimizer = build_sharded()
        scaler = ShardedGradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for _ in range(4):
            for m, o, s in ((plain, plain_optimizer, None), (model, optimizer, scaler)):
                o.zero_grad()
                backward(m, s)
            plain_optimizer.step()
            scaler.step(optimizer)
            scaler.update()
            assert all(torch.equal(a, b) for a, b in zip(read_weights(model), read_weights(plain), strict=True))
        assert scaler.get_scale() == 2.0**12

    run_ranks(body)


def test_gradients_of_two_dtypes_and_of_no_parameter_at_all_are_unscaled() -> None:
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float16))
    unused = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([a, b, unused], lr=1.0)
    scaler.scale(a.sum() + b.float().sum()).backward()
    scaler.step(optimizer)
    assert [p.detach().tolist() for p in (a, b, unused)] == [[0, 0], [0, 0], [1, 1]]
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)  # nothing to step is no error


class Module(nn.Module):
    automatic_optimization = True


def test_hooks_and_clipping_see_unscaled_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = FSDP2Precision("16-mixed", device_type="cpu")
    weight = nn.Parameter(torch.tensor([3.0]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    model: Any = Module()
    seen: list[float] = []

    def closure() -> Tensor:
        loss = plugin.pre_backward((weight * 2).sum(), model)
        loss.backward()
        return loss.detach()

    def after(_model: Any, o: torch.optim.Optimizer) -> None:
        seen.append(float(weight.grad))  # type: ignore[arg-type]
        plugin.clip_grad_by_norm(o, 0.5)

    monkeypatch.setattr(plugin, "_after_closure", after)
    monkeypatch.setattr("lightning.pytorch.trainer.call._call_callback_hooks", lambda *_, **__: None)
    monkeypatch.setattr("lightning.pytorch.trainer.call._call_lightning_module_hook", lambda *_, **__: None)
    model.trainer = None
    plugin.optimizer_step(optimizer, model, closure)
    assert seen == [2.0]
    assert weight.item() == pytest.approx(2.5, abs=1e-5)
    plugin.optimizer_step(optimizer, model, lambda: None)  # a skipped batch
    assert seen == [2.0]
    restored = FSDP2Precision("16-mixed", device_type="cpu")
    assert restored.scaler is not None
    restored.load_state_dict({**plugin.state_dict(), "scale": 8.0})
    assert restored.scaler.get_scale() == 8.0
    assert FSDP2Precision("bf16-mixed").state_dict() == {}


@pytest.mark.parametrize("how", ["norm", "value"])
def test_gradients_that_are_clipped_before_the_step_are_clipped_as_they_will_be_in_it(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under manual optimization, where ``training_step`` calls ``clip_gradients``."""
    plugin = FSDP2Precision("16-mixed", device_type="cpu")
    weight = nn.Parameter(torch.tensor([3.0]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    model: Any = Module()
    monkeypatch.setattr(plugin, "_after_closure", lambda *_: None)
    monkeypatch.setattr("lightning.pytorch.trainer.call._call_callback_hooks", lambda *_, **__: None)
    monkeypatch.setattr("lightning.pytorch.trainer.call._call_lightning_module_hook", lambda *_, **__: None)
    model.trainer = None
    plugin.pre_backward((weight * 2).sum(), model).backward()
    getattr(plugin, f"clip_grad_by_{how}")(optimizer, 0.5)
    plugin.optimizer_step(optimizer, model, lambda: torch.zeros(()))
    assert weight.item() == pytest.approx(2.5, abs=1e-5)


def test_the_plugin_clips_shards_like_torch_clips_the_whole() -> None:
    def body() -> None:
        for how, limit in (("norm", 0.05), ("value", 0.01)):
            plugin = FSDP2Precision("32-true", device_type="cpu")
            model, optimizer = build_sharded()
            assert isinstance(model, FSDPModule)
            backward(model, None)
            grads = [p.grad.full_tensor() for p in model.parameters() if isinstance(p.grad, DTensor)]
            whole = [nn.Parameter(torch.zeros_like(g)) for g in grads]
            for p, g in zip(whole, grads, strict=True):
                p.grad = g
            if how == "norm":
                plugin.clip_grad_by_norm(optimizer, limit)
                torch.nn.utils.clip_grad_norm_(whole, limit)
            else:
                plugin.clip_grad_by_value(optimizer, limit)
                torch.nn.utils.clip_grad_value_(whole, limit)
            for p, q in zip(model.parameters(), whole, strict=True):
                assert isinstance(p.grad, DTensor)
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-6, atol=1e-8)

    run_ranks(body)
