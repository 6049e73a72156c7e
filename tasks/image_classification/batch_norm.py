"""Running statistics of BatchNorm, which every rank gathers from its own images: made one before they are used."""

from __future__ import annotations

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn


def warn_of_batch_norm(model: nn.Module) -> None:
    """Say that training normalizes by the images of one rank, where a model has BatchNorm."""
    if _list_statistics(model):
        rank_zero_warn(
            f"{type(model).__name__} has BatchNorm: each rank normalizes by statistics of its own images; running "
            "statistics are averaged before an evaluation and a checkpoint"
        )


@torch.no_grad()
def average_statistics(model: nn.Module | None) -> None:
    """Replace running means and variances by their means over all ranks, which must all call it.

    Without it each rank would evaluate another model, and a checkpoint would have that of one of them. One all-reduce
    of two numbers per channel, in float64 so that equal ones stay as they are.

    Args:
        model: Its buffers are changed in place.
    """
    statistics = _list_statistics(model) if model is not None else []
    if not statistics or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    joined = torch.cat([buffer.flatten().double() for buffer in statistics])
    dist.all_reduce(joined)
    means = (joined / dist.get_world_size()).split([buffer.numel() for buffer in statistics])
    for buffer, mean in zip(statistics, means, strict=True):
        buffer.copy_(mean.view_as(buffer))


def _list_statistics(model: nn.Module) -> list[Tensor]:
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    found = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var)]
    return [buffer for buffer in found if buffer is not None]
