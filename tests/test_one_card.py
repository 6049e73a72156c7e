"""Several ranks on one card, tried on CPUs, where nothing but the device differs."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from training import EVEN, Result, fit, list_differences, save_model, train_plainly

from benchmarks.one_card import gather_on_host, share_card, stage_gathers
from lit_fsdp import Mesh
from ranks import run_ranks


def gather() -> None:
    own = torch.arange(6.0).view(2, 3) + 10 * dist.get_rank()
    gathered = gather_on_host(own, 2, dist.group.WORLD.group_name)  # type: ignore[union-attr]
    assert torch.equal(gathered, torch.cat([own - own[0, 0], own - own[0, 0] + 10]))


def test_gathers_go_through_host_memory() -> None:
    run_ranks(gather)
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("_c10d_functional::all_gather_into_tensor", "CUDA")
    stage_gathers()
    assert torch._C._dispatch_has_kernel_for_dispatch_key("_c10d_functional::all_gather_into_tensor", "CUDA")


def train(folder: Path, out: Path, strategy: dict[str, Any]) -> None:
    fit(folder, out, strategy, share_card())


@pytest.mark.full(after=1)
@pytest.mark.parametrize(("world_size", "strategy"), [(2, {}), (4, {"mesh": Mesh(replicate=2)})])
def test_ranks_that_are_nodes_of_one_machine_train_like_one_rank(
    world_size: int, strategy: dict[str, Any], tmp_path: Path
) -> None:
    folder, out = save_model(tmp_path / "model", **EVEN), tmp_path / "result"
    run_ranks(train, folder, out, strategy, world_size=world_size)
    assert max(list_differences(Result(**torch.load(out)), train_plainly(folder)).values()) <= 1e-6
