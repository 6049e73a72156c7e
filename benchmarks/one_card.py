"""Several ranks on one GPU: NCCL refuses that, so gloo takes their tensors through host memory.

Slow, and no measure of speed: it runs the code of CUDA that one rank alone never reaches, such as the streams, the
collectives and the buffers of sharding. Start ranks as torchrun does, with ``gloo`` as the only backend.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import Tensor


def share_card() -> dict[str, Any]:
    """Make this rank a node of its own with one device, and return what its Trainer needs for that.

    Lightning refuses more ranks on a node than it has GPUs. Needs the process group, and no Trainer yet.
    """
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=str(dist.get_rank()))
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
        stage_gathers()
    return {"devices": 1, "num_nodes": dist.get_world_size(), "plugins": [TorchElasticEnvironment()]}


@cache
def stage_gathers() -> torch.library.Library:
    """Let all-gathers of DTensors on GPUs work with gloo, as its other collectives do.

    Its ``allgather_into_tensor_coalesced``, which they call, reads addresses of a GPU as those of the host; seen in
    torch 2.11 to 2.13, drop when it copies.
    """
    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", gather_on_host, "CUDA")
    return library


def gather_on_host(tensor: Tensor, group_size: int, group_name: str) -> Tensor:
    """Return the tensors of all ranks, one after another, as ``_c10d_functional.all_gather_into_tensor`` does."""
    operators = torch.ops._c10d_functional
    gathered = operators.all_gather_into_tensor(tensor.cpu(), group_size, group_name)
    return operators.wait_tensor(gathered).to(tensor.device)
