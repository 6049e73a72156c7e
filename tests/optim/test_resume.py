"""Optimizers that work on shards go on from checkpoints at any number of ranks, and refuse columns that are split."""

from collections.abc import Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from fixed_gradients import (
    MESHES,
    build_with,
    list_differences,
    list_unequal,
    load_run,
    read_all,
    run_steps,
    save_run,
    set_gradients,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lit_fsdp.optim.adafactor import Adafactor
from lit_fsdp.optim.adamw_8bit import AdamW8bit
from lit_fsdp.optim.muon import Muon
from ranks import run_ranks


def build_muon(parameters: Iterable[nn.Parameter], **options: Any) -> Muon:
    """Return Muon for matrices and stacks, with AdamW for the rest."""
    groups: list[dict[str, Any]] = [{"params": [], "is_hidden": is_hidden} for is_hidden in (False, True)]
    for parameter in parameters:
        groups[parameter.ndim in (2, 3)]["params"].append(parameter)
    return Muon([group for group in groups if group["params"]], **options)


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adafactor": (Adafactor, {"lr": 1e-2, "weight_decay": 0.1}),
    "adamw_8bit": (AdamW8bit, {"lr": 1e-3, "weight_decay": 0.1}),
    "muon": (build_muon, {"lr": 1e-2, "weight_decay": 0.1}),
}
# Sums over ranks are rounded in another order.
TOLERANCES = {"adafactor": 1e-6, "adamw_8bit": 0, "muon": 0}
# The others with `pytest -m slow`.
QUICK = {
    *(("adafactor", "folder", "2"), ("adafactor", "folder", "3"), ("adafactor", "file", "2x2")),
    *(("muon", "folder", "3"), ("muon", "file", "2x2")),
    *(("adamw_8bit", "folder", "3"), ("adamw_8bit", "folder", "2x2"), ("adamw_8bit", "file", "2")),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``save_run`` writes on 2 ranks, in a folder for each optimizer."""
    folder = tmp_path_factory.mktemp("saved")
    for name, kind in OPTIMIZERS.items():
        (folder / name).mkdir()
        run_ranks(lambda: save_run(folder / name, *build_with(*kind, 1)))  # noqa: B023  called at once
    return folder


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "kind", "mesh"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in product(OPTIMIZERS, ("folder", "file"), MESHES)
    ],
)
def test_a_run_goes_on_to_the_bit_on_as_many_ranks_and_closely_on_others(
    name: str, kind: str, mesh: str, saved: Path
) -> None:
    world_size, num_copies = MESHES[mesh]

    def body() -> None:
        now, later = torch.load(saved / name / "truth")
        module, optimizer = build_with(*OPTIMIZERS[name], num_copies)
        load_run(saved / name, kind, module, optimizer)
        assert list_unequal(read_all(module, optimizer), now) == []
        run_steps(module, optimizer, range(3, 5))
        if mesh == "2" or not TOLERANCES[name]:
            assert list_unequal(read_all(module, optimizer), later) == []
        else:
            differences = list_differences(read_all(module, optimizer), later)
            assert max(differences.values()) <= TOLERANCES[name], differences

    run_ranks(body, world_size=world_size)


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_gradients_that_an_earlier_run_left_keep_no_state_from_coming_back(kind: str, tmp_path: Path) -> None:
    def body() -> None:
        save_run(tmp_path, *build_with(torch.optim.AdamW, {"lr": 1e-3}, 1))
        now, _ = torch.load(tmp_path / "truth")
        module, optimizer = build_with(torch.optim.AdamW, {"lr": 1e-3}, 1)
        set_gradients(module, 0)
        load_run(tmp_path, kind, module, optimizer)
        assert list_unequal(read_all(module, optimizer), now) == []

    run_ranks(body, world_size=1)


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_settings_are_those_of_the_checkpoint_and_kernels_those_of_the_run(kind: str, tmp_path: Path) -> None:
    def body() -> None:
        save_run(tmp_path, *build_with(torch.optim.AdamW, {"lr": 1e-3, "fused": False}, 1))
        module, optimizer = build_with(torch.optim.AdamW, {"lr": 1, "fused": True}, 1)
        load_run(tmp_path, kind, module, optimizer)
        assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["fused"]) == (1e-3, True)

    run_ranks(body, world_size=1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_asking_for_the_state_of_a_new_optimizer_changes_no_weight(name: str) -> None:
    def body() -> None:
        module, optimizer = build_with(*OPTIMIZERS[name], 1)
        before = {n: p.to_local().clone() for n, p in module.named_parameters()}
        get_optimizer_state_dict(module, optimizer)
        assert all(torch.equal(before[n], p.to_local()) for n, p in module.named_parameters())

    run_ranks(body)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_columns_that_are_split_are_refused(name: str) -> None:
    def body() -> None:
        mesh, build = init_device_mesh("cpu", (2,)), partial(OPTIMIZERS[name][0], **OPTIMIZERS[name][1])
        build([nn.Parameter(distribute_tensor(torch.zeros(64, 256), mesh, [Replicate()]))])
        with pytest.raises(ValueError, match=r"sharded over dimension 0 alone; set optimizer\.name: adamw"):
            build([nn.Parameter(distribute_tensor(torch.zeros(64, 256), mesh, [Shard(1)]))])

    run_ranks(body)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_a_parameter_of_no_dimension_is_loaded_to_where_that_is(name: str) -> None:
    build, options = OPTIMIZERS[name]
    scale = nn.Parameter(torch.tensor(2.0))
    scale.grad = torch.tensor(1.0)
    optimizer = build([scale], **options)
    optimizer.step()
    elsewhere = nn.Parameter(torch.empty((), device="meta"))
    other = build([elsewhere], **options)
    other.load_state_dict(optimizer.state_dict())
    assert {key for key, value in other.state[elsewhere].items() if not value.is_meta} == {"step"}
