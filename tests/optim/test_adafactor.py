"""Adafactor on shards is that of torch on whole parameters."""

from itertools import product
from pathlib import Path

import pytest
import torch
from fixed_gradients import (
    MESHES,
    build_weights,
    list_unequal,
    load_run,
    read_all,
    run_steps,
    save_run,
    set_gradients,
    shard,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from lit_fsdp.optim.adafactor import Adafactor
from ranks import run_ranks

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}
TOLERANCE = 1e-6


def build(num_copies: int | None = None) -> tuple[nn.Module, Adafactor]:
    """Return whole parameters, or sharded ones."""
    module = build_weights()
    if num_copies is not None:
        shard(module, num_copies)
    return module, Adafactor(module.parameters(), **OPTIONS)


def train_with_torch() -> dict[str, Tensor]:
    module = build_weights()
    optimizer = torch.optim.Adafactor(module.parameters(), **OPTIONS)
    run_steps(module, optimizer, range(5))
    return read_all(module, optimizer)


def list_differences(actual: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest difference of each tensor, relative to its largest number."""
    assert actual.keys() == truth.keys()
    return {n: float((actual[n] - t).abs().max() / t.abs().max()) for n, t in truth.items()}


@pytest.mark.parametrize(
    "mesh", ["whole", "3", "2x2", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("1", "2"))]
)
def test_weights_and_state_equal_those_of_torch_on_any_mesh(mesh: str) -> None:
    truth = train_with_torch()

    def body() -> None:
        module, optimizer = build(None if mesh == "whole" else MESHES[mesh][1])
        run_steps(module, optimizer, range(5))
        differences = list_differences(read_all(module, optimizer), truth)
        assert max(differences.values()) <= TOLERANCE, differences

    run_ranks(body, world_size=MESHES.get(mesh, (1, 1))[0])


@pytest.mark.parametrize("mesh", ["2", "2x2"])
def test_a_step_takes_two_all_reduces_of_one_number_per_column(mesh: str) -> None:
    world_size, num_copies = MESHES[mesh]

    def body() -> None:
        module, optimizer = build(num_copies)
        set_gradients(module, 0)
        with CommDebugMode() as traffic:
            optimizer.step()
        assert traffic.get_total_counts() == traffic.get_comm_counts()[torch.ops.c10d.allreduce_] == 2

    run_ranks(body, world_size=world_size)


def test_a_matrix_keeps_one_number_for_each_row_and_column() -> None:
    def body() -> None:
        module, optimizer = build(1)
        run_steps(module, optimizer, range(1))
        state = optimizer.state[module.aligned]
        sizes = [t.to_local().numel() if isinstance(t, DTensor) else t.numel() for t in state.values()]
        assert sizes == [1, module.aligned.to_local().shape[0], 256]

    run_ranks(body)


def test_bfloat16_parameters_keep_statistics_in_float32() -> None:
    module = build_weights(torch.bfloat16)
    optimizer = Adafactor(module.parameters(), **OPTIONS)
    before = module.aligned.detach().clone()
    run_steps(module, optimizer, range(3))
    assert not torch.equal(module.aligned, before)
    loaded = Adafactor(module.parameters(), **OPTIONS)
    loaded.load_state_dict(optimizer.state_dict())
    assert loaded.state[module.aligned]["row_var"].dtype == torch.float32
    assert list_unequal(read_all(module, loaded), read_all(module, optimizer)) == []


# The others with `pytest -m slow`.
QUICK = {("folder", "2"), ("folder", "3"), ("file", "2x2")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``save_run`` writes on 2 ranks."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(lambda: save_run(folder, *build(1)))
    return folder


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in product(("folder", "file"), MESHES)
    ],
)
def test_a_run_goes_on_to_the_bit_on_as_many_ranks_and_closely_on_others(mesh: str, kind: str, saved: Path) -> None:
    world_size, num_copies = MESHES[mesh]

    def body() -> None:
        now, later = torch.load(saved / "truth")
        module, optimizer = build(num_copies)
        load_run(saved, kind, module, optimizer)
        assert list_unequal(read_all(module, optimizer), now) == []
        run_steps(module, optimizer, range(3, 5))
        differences = list_differences(read_all(module, optimizer), later)
        assert max(differences.values()) <= (0 if mesh == "2" else TOLERANCE), differences

    run_ranks(body, world_size=world_size)


def test_asking_for_the_state_of_a_new_optimizer_changes_no_weight() -> None:
    def body() -> None:
        module, optimizer = build(1)
        before = {n: p.to_local().clone() for n, p in module.named_parameters()}
        get_optimizer_state_dict(module, optimizer)
        assert all(torch.equal(before[n], p.to_local()) for n, p in module.named_parameters())

    run_ranks(body)


def test_the_stock_ones_still_cannot_step_shards() -> None:
    """Once torch's can, ours can go."""

    def body() -> None:
        module = shard(build_weights())
        optimizer = torch.optim.Adafactor(module.parameters())
        set_gradients(module, 0)
        with pytest.raises(RuntimeError, match="Sharding propagation failed"):
            optimizer.step()

    run_ranks(body)


def test_columns_that_are_split_otherwise_are_refused() -> None:
    def body() -> None:
        whole = torch.zeros(64, 256)
        split = nn.Parameter(distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(1)]))
        with pytest.raises(ValueError, match="sharded over dimension 0; use AdamW"):
            Adafactor([split])

    run_ranks(body)
