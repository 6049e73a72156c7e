"""What is staged is a copy of its own, in memory of the exact size that may change with every state."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lit_fsdp.checkpoint import staging
from lit_fsdp.checkpoint.staging import Stager, iterate_tensors
from ranks import run_ranks


def make_state(num_layers: int, *, with_optimizer: bool = True) -> dict[str, Any]:
    weights = {f"layer.{i}": torch.randn(3, 700).T for i in range(num_layers)}
    state: dict[str, Any] = {"state_dict": {**weights, "empty": torch.empty(0, 4), "codes": torch.ones(5).byte()}}
    if with_optimizer:
        moments = {n: {"step": torch.tensor(3.0), "exp_avg": w.half()} for n, w in weights.items()}
        groups = [{"lr": 0.1, "params": list(weights), "betas": (0.9, torch.tensor(0.99))}]
        state["optimizer_0"] = {"state": moments, "param_groups": groups}
    return state


def clone(node: Any) -> Any:
    if isinstance(node, Tensor):
        return node.clone()
    if isinstance(node, dict):
        return {key: clone(value) for key, value in node.items()}
    return type(node)(clone(value) for value in node) if isinstance(node, list | tuple) else node


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return (a.dtype, a.stride()) == (b.dtype, b.stride()) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and all(is_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


class Driver:
    """Stands in for ``torch.cuda.cudart()``: holds what is pinned, by address."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.calls = 0
        self.waits = 0
        self.refuses = False

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        if self.refuses:
            return 2
        assert (address % 4096, flags) == (0, 0)
        self.pinned[address] = num_bytes
        self.calls += 1
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0

    def synchronize(self) -> None:
        self.waits += 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Let the stager take all tensors for those of a GPU."""
    driver = Driver()
    monkeypatch.setattr(staging, "has_gpu_tensors", lambda _: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: driver)
    return driver


def test_every_state_is_staged_whatever_the_one_before_was(driver: Driver) -> None:
    stager = Stager()
    states = [make_state(3), make_state(3, with_optimizer=False), make_state(3), make_state(5), make_state(1)]
    for number, state in enumerate(states, start=1):
        truth = clone(state)
        staged = stager.stage(state)
        assert driver.waits == number  # once for all of its tensors
        for tensor in iterate_tensors(state):
            tensor.zero_()
        assert is_same(staged, truth)


def test_pinned_memory_is_of_the_exact_size_and_kept_until_more_is_needed(driver: Driver) -> None:
    stager = Stager()
    small, large = make_state(3), make_state(4)
    for state, num_calls in ((small, 1), (make_state(3, with_optimizer=False), 1), (small, 1), (large, 2), (small, 2)):
        stager.stage(state)
        assert driver.calls == num_calls
        assert len(driver.pinned) == 1
    needed = sum(tensor.nbytes for tensor in iterate_tensors(large))
    assert 0 <= sum(driver.pinned.values()) - needed < 64 * len(list(iterate_tensors(large)))
    stager.release()
    assert driver.pinned == {}


def test_memory_that_cannot_be_pinned_is_one_clear_error(driver: Driver) -> None:
    driver.refuses = True
    with pytest.raises(RuntimeError, match=r"async_save: 0\.00 GiB of host memory could not be pinned \(CUDA error 2"):
        Stager().stage(make_state(1))
    assert driver.pinned == {}


def test_without_a_gpu_nothing_is_pinned_and_nothing_kept() -> None:
    stager = Stager()
    first = stager.stage(make_state(2))
    truth = clone(first)
    stager.stage(make_state(2))
    assert is_same(first, truth)


def stage_shards() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    whole = torch.arange(15.0).view(5, 3)
    for rows in (5, 1):  # of one row, the second rank has none
        shard = distribute_tensor(whole[:rows].clone(), mesh, [Shard(0)])
        weight = torch.nn.Parameter(shard)
        staged = Stager().stage({"weight": weight, "square": shard * shard})
        with torch.no_grad():
            weight.zero_()
        copy = staged["weight"]
        assert isinstance(copy, DTensor)
        assert (copy.placements, copy.device_mesh, copy.shape) == ((Shard(0),), mesh, (rows, 3))
        assert torch.equal(copy.full_tensor(), whole[:rows])
        assert torch.equal(staged["square"].full_tensor(), whole[:rows] ** 2)


def test_shards_are_staged_as_shards_of_the_same_tensor() -> None:
    run_ranks(stage_shards)


def test_what_no_container_of_tensors_knows_is_copied() -> None:
    thing = SimpleNamespace(values=[1])
    staged = Stager().stage({"thing": thing})
    thing.values.append(2)
    assert staged["thing"].values == [1]
