"""Host and device memory on GPUs: what ``tests/test_host_and_device.py`` checks on CPUs, and copies that are slow."""

from pathlib import Path

import pytest
import torch
from gpu_cases import CASES, save_start, train_and_go_on
from torch import nn

from lit_fsdp.sharding.mixed_precision import ShardedGradScaler
from ranks import count_gpus, run_ranks

pytestmark = pytest.mark.gpu
BACKEND = "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize("name", list(CASES))
def test_a_run_goes_on_from_its_checkpoint(name: str, tmp_path: Path) -> None:
    world_size = min(count_gpus(), 2)
    folder = save_start(tmp_path / "start", name)
    # Sums of atomic additions are not the same twice.
    run_ranks(train_and_go_on, folder, name, 1e-5, world_size=world_size, backend=BACKEND)


def unscale_behind_a_slow_kernel() -> None:
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), 6.0)
    scaler = ShardedGradScaler("cuda", init_scale=2.0)
    scaler.scale(torch.ones((), device="cuda"))  # makes the number
    torch.cuda._sleep(10**9)  # about half a second, before its inverse is computed
    scaler.unscale_(torch.optim.SGD([parameter]))
    assert parameter.grad.tolist() == [3.0] * 4


def test_gradients_in_host_memory_wait_for_the_number_they_are_unscaled_by() -> None:
    run_ranks(unscale_behind_a_slow_kernel, world_size=1, backend=BACKEND)
