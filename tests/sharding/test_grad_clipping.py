"""Norm and clipping of shards equal those of ``torch.nn.utils`` on the whole model."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import to_full
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lit_fsdp.sharding.grad_clipping import clip_grad_norm, clip_grad_value, compute_grad_norm, scale_gradients
from ranks import run_ranks

SHAPES = [(7, 5), (1, 9), (2,), (4, 3, 2), (1,), (13,)]  # some with fewer rows than ranks


def make_parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * 3
    parameters.append(nn.Parameter(torch.ones(3)))  # without a gradient
    return parameters


def shard_parameters(
    mesh: DeviceMesh, placements: Sequence[Placement], num_plain: int = 0
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return whole parameters, and the same sharded but for the last few."""
    whole, sharded = make_parameters(), []
    for i, parameter in enumerate(make_parameters()):
        if i >= len(SHAPES) - num_plain:
            sharded.append(parameter)
            continue
        assert parameter.grad is not None
        made = nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements))
        made.grad = distribute_tensor(parameter.grad, mesh, placements)
        sharded.append(made)
    return whole, sharded


def check(mesh: DeviceMesh, placements: Sequence[Placement], num_plain: int = 0) -> None:
    for max_norm in (0.5, 1e6):
        whole, sharded = shard_parameters(mesh, placements, num_plain)
        expected = torch.nn.utils.clip_grad_norm_(whole, max_norm)
        torch.testing.assert_close(compute_grad_norm(sharded), expected, rtol=1e-6, atol=0)
        norm = clip_grad_norm(iter(sharded), max_norm)
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        for a, b in zip(sharded, whole, strict=True):
            torch.testing.assert_close(to_full(a.grad), b.grad, rtol=1e-6, atol=1e-7)
    whole, sharded = shard_parameters(mesh, placements, num_plain)
    torch.nn.utils.clip_grad_value_(whole, 0.7)
    clip_grad_value(iter(sharded), 0.7)
    for a, b in zip(sharded, whole, strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert b.grad is None or torch.equal(to_full(a.grad), b.grad)


@pytest.mark.parametrize("num_shards", [2, 3])
def test_shards_that_are_uneven_or_empty_equal_the_whole(num_shards: int) -> None:
    def body() -> None:
        check(init_device_mesh("cpu", (num_shards,)), [Shard(0)])

    run_ranks(body, world_size=num_shards)


def test_copies_are_counted_once() -> None:
    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        check(mesh, [Replicate(), Shard(0)])

    run_ranks(body, world_size=4)


def test_plain_tensors_beside_shards_are_counted_once() -> None:
    def body() -> None:
        check(init_device_mesh("cpu", (3,)), [Shard(0)], num_plain=2)

    run_ranks(body, world_size=3)


def test_parameters_of_two_meshes_have_one_norm() -> None:
    def body() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        whole, sharded = shard_parameters(mesh, [Replicate(), Shard(0)])
        _, flat = shard_parameters(init_device_mesh("cpu", (4,)), [Shard(0)])
        expected = torch.nn.utils.get_total_norm([p.grad for p in whole if p.grad is not None])
        torch.testing.assert_close(compute_grad_norm([*sharded[:3], *flat[3:]]), expected, rtol=1e-6, atol=0)

    run_ranks(body, world_size=4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_on_one_rank_shows_on_every_rank(bad: float) -> None:
    def body() -> None:
        mesh = init_device_mesh("cpu", (3,))
        for rank in range(3):
            _, sharded = shard_parameters(mesh, [Shard(0)])
            grad = sharded[0].grad
            assert isinstance(grad, DTensor)
            if dist.get_rank() == rank:
                grad.to_local()[0] = bad
            norm = float(compute_grad_norm(sharded))
            assert math.isnan(norm) if math.isnan(bad) else norm == math.inf, (rank, norm)

    run_ranks(body, world_size=3)


def test_without_gradients_the_norm_is_zero_and_nothing_is_done() -> None:
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    assert float(clip_grad_norm(parameters, 1.0)) == 0.0
    clip_grad_value(parameters, 1.0)
    assert [p.grad for p in parameters] == [None, None]
    assert float(compute_grad_norm([])) == 0.0


def test_low_precision_gradients_are_measured_in_float32() -> None:
    parameter = nn.Parameter(torch.zeros(10_000, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 0.01)
    norm = clip_grad_norm([parameter], 0.5)
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(float(torch.tensor(0.01).bfloat16()) * 100, rel=1e-5)
    assert parameter.grad.dtype == torch.bfloat16


def test_gradients_in_float64_are_measured_beside_others() -> None:
    parameters = make_parameters()
    for parameter in parameters[::2]:
        parameter.data = parameter.data.double()
        parameter.grad = None if parameter.grad is None else parameter.grad.double()
    expected = compute_grad_norm(make_parameters())
    norm = clip_grad_norm(parameters, 0.5)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(compute_grad_norm(parameters), torch.tensor(0.5), rtol=1e-5, atol=0)


def test_a_known_norm_is_used_and_an_infinite_limit_only_measures() -> None:
    parameters = make_parameters()
    before = [p.grad.clone() for p in parameters if p.grad is not None]
    norm = clip_grad_norm(parameters, math.inf)
    assert all(torch.equal(p.grad, b) for p, b in zip(parameters[:-1], before, strict=True))  # type: ignore[arg-type]
    clip_grad_norm(parameters, 1.0, norm=norm * 2)
    torch.testing.assert_close(compute_grad_norm(parameters), torch.tensor(0.5), rtol=1e-5, atol=0)
    scale_gradients(parameters, torch.tensor(4.0))
    torch.testing.assert_close(compute_grad_norm(parameters), torch.tensor(2.0), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
def test_gradients_are_scaled_by_a_number_of_their_dtype_and_of_float32_at_least(
    dtype: torch.dtype, expected: torch.dtype
) -> None:
    calls = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._foreach_mul_.Tensor:
                calls.append(args[1].dtype)
            return func(*args, **(kwargs or {}))

    parameters = [nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.full((3,), 3.0, dtype=dtype)
    with Calls():
        scale_gradients(parameters, torch.tensor(1 / 3, dtype=torch.float64))
    assert calls == [expected]  # of another dtype than float32 gradients, it is one kernel of a GPU for each of them
    assert all(parameter.grad.eq(1.0).all() for parameter in parameters)  # type: ignore[union-attr]
