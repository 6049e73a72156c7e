"""Adafactor on shards is that of torch on whole parameters."""

from functools import partial

import pytest
import torch
from fixed_gradients import (
    MESHES,
    build_weights,
    build_with,
    list_differences,
    list_unequal,
    read_all,
    run_steps,
    set_gradients,
    shard,
)
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from lit_fsdp.optim.adafactor import Adafactor
from ranks import run_ranks

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}
build = partial(build_with, Adafactor, OPTIONS)
TOLERANCE = 1e-6


def train_with_torch() -> dict[str, Tensor]:
    module = build_weights()
    optimizer = torch.optim.Adafactor(module.parameters(), **OPTIONS)
    run_steps(module, optimizer, range(5))
    return read_all(module, optimizer)


@pytest.mark.full
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
        with CommDebugMode() as counted:
            optimizer.step()
        assert counted.get_total_counts() == counted.get_comm_counts()[torch.ops.c10d.allreduce_] == 2

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


def test_the_stock_ones_still_cannot_step_shards() -> None:
    """Once torch's can, ours can go."""

    def body() -> None:
        module = shard(build_weights())
        optimizer = torch.optim.Adafactor(module.parameters())
        set_gradients(module, 0)
        with pytest.raises(RuntimeError, match="Sharding propagation failed"):
            optimizer.step()

    run_ranks(body)
