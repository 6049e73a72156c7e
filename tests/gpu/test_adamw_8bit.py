"""8-bit AdamW on CUDA: the kernels of the GPU on shards, and pages that leave it."""

from pathlib import Path

import bitsandbytes
import pytest
import torch
import torch.distributed as dist
from fixed_gradients import build_weights, load_run, run_steps, save_run
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from lit_fsdp.optim.adamw_8bit import AdamW8bit
from ranks import count_gpus, run_ranks

pytestmark = pytest.mark.gpu

BACKEND = "cpu:gloo,cuda:nccl"
OPTIONS = {"lr": 1e-3, "weight_decay": 0.1}


def count_ranks() -> int:
    """One, two or three."""
    return min(3, count_gpus())


def build_whole() -> nn.Module:
    """Return parameters one of which is large enough for pages."""
    module = build_weights()
    module.register_parameter("large", nn.Parameter(torch.linspace(-0.1, 0.1, 1024 * 512).view(1024, 512)))
    return module


def build_sharded(*, is_paged: bool = False, offload: OffloadPolicy | None = None) -> tuple[nn.Module, AdamW8bit]:
    """Return the parameters sharded over the GPUs."""
    torch.cuda.set_device(dist.get_rank())
    module, mesh = build_whole(), init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("shard",))
    fully_shard(module.to("cuda"), mesh=mesh, offload_policy=offload or OffloadPolicy())
    if offload is not None:
        module.to("cpu")
    return module, AdamW8bit(module.parameters(), **OPTIONS, is_paged=is_paged)


def gather(module: nn.Module) -> dict[str, Tensor]:
    """Return all weights in host memory."""
    return get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def compare_shards(is_paged: bool) -> None:
    module, optimizer = build_sharded(is_paged=is_paged)
    run_steps(module, optimizer, range(5))
    assert getattr(optimizer.state[module.large]["codes1"], "is_paged", False) is is_paged
    weights, whole = gather(module), build_whole().to("cuda")
    run_steps(whole, bitsandbytes.optim.AdamW8bit(whole.parameters(), **OPTIONS), range(5))
    if dist.get_rank() == 0:
        for name in ("aligned", "experts", "large", "norm"):
            assert torch.equal(weights[name], whole.get_parameter(name).cpu()), name


@pytest.mark.parametrize("is_paged", [False, True])
def test_shards_equal_bitsandbytes_on_one_gpu(is_paged: bool) -> None:
    run_ranks(compare_shards, is_paged, world_size=count_ranks(), backend=BACKEND)


def compare_offloaded() -> None:
    module, optimizer = build_sharded(offload=CPUOffloadPolicy())
    run_steps(module, optimizer, range(3))
    assert optimizer.state[module.large]["codes1"].device.type == "cpu"
    weights, whole = gather(module), build_whole()
    run_steps(whole, AdamW8bit(whole.parameters(), **OPTIONS), range(3))
    if dist.get_rank() == 0:
        assert all(torch.equal(weights[n], p) for n, p in whole.named_parameters())


def test_state_in_host_memory_is_that_of_the_cpu() -> None:
    run_ranks(compare_offloaded, world_size=count_ranks(), backend=BACKEND)


def save_and_load_pages(folder: Path, kind: str) -> None:
    save_run(folder, *build_sharded(is_paged=True))
    dist.barrier()
    module, optimizer = build_sharded(is_paged=True)
    load_run(folder, kind, module, optimizer)
    assert optimizer.state[module.large]["codes1"].is_paged
    run_steps(module, optimizer, range(3, 5))
    weights, (_, later) = gather(module), torch.load(folder / "truth", map_location="cpu")
    assert all(torch.equal(weight, later[name]) for name, weight in weights.items())


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_pages_go_into_checkpoints_and_come_back(kind: str, tmp_path: Path) -> None:
    run_ranks(save_and_load_pages, tmp_path, kind, world_size=count_ranks(), backend=BACKEND)
