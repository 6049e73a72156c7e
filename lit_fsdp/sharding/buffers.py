"""Buffers that every rank fills by itself, such as running statistics of BatchNorm: made one before they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from lit_fsdp.quantization.layers import iterate_quantized
from lit_fsdp.sharding.replaced_method import ReplacedMethod


@torch.no_grad()
def sync_buffers(model: nn.Module) -> None:
    """Make the buffers that a checkpoint holds the same on all ranks, which must all call it.

    Without it each rank would evaluate another model, and a checkpoint would have that of one of them. Running means
    and variances of BatchNorm become their means over all ranks: one all-reduce of two numbers per channel, in float64
    so that equal ones stay as they are. All others become those of the first rank, as under DDP, in one broadcast.
    Those of quantized weights, and DTensors, are left alone.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    found = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var)]
    statistics = [buffer for buffer in found if buffer is not None and not isinstance(buffer, DTensor)]
    if statistics:
        joined = torch.cat([buffer.flatten().double().to(statistics[0].device) for buffer in statistics])
        dist.all_reduce(joined)
        means = (joined / dist.get_world_size()).split([buffer.numel() for buffer in statistics])
        for buffer, mean in zip(statistics, means, strict=True):
            buffer.copy_(mean.view_as(buffer))
    if others := _list_others(model, {id(buffer) for buffer in statistics}):
        _broadcast(others)


def widen_norms(model: nn.Module, param_dtype: torch.dtype | None) -> None:
    """Let BatchNorm compute with its weights in the dtype of its running statistics, where they come in another one.

    Its kernels take inputs of 16 bits with all else in float32, as under autocast, but no weights of 16 bits beside
    such statistics.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for norm in norms:
        if norm.running_mean is None or norm.weight is None:
            continue
        if (param_dtype or norm.weight.dtype) != norm.running_mean.dtype:
            ReplacedMethod(norm, "forward", partial(_run_widened, norm))


def _run_widened(norm: _BatchNorm, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling() or norm.running_mean is None:  # compiled code takes weights of any dtype
        return forward(*args, **kwargs)
    parameters, dtype = dict(norm._parameters), norm.running_mean.dtype
    norm._parameters.update({name: None if p is None else p.to(dtype) for name, p in parameters.items()})  # type: ignore[misc]
    try:
        output = forward(*args, **kwargs)
    finally:
        norm._parameters.update(parameters)
    given = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    # Which the forward of a subclass may have widened.
    return output.to(given.dtype) if isinstance(output, Tensor) else output


def has_statistics_of_ranks(model: nn.Module) -> bool:
    """Return whether a model, as it is now, has BatchNorm whose statistics are those of each rank's own batch."""
    norms = (module for module in model.modules() if isinstance(module, _BatchNorm) and module.training)
    return any(norm.track_running_stats and not isinstance(norm, nn.SyncBatchNorm) for norm in norms)


def has_batch_statistics(model: nn.Module) -> bool:
    """Return whether a model, as it is now, normalizes rows by statistics of their batch."""
    return any(isinstance(module, _BatchNorm) and module.training for module in model.modules())


def iterate_saved_buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield where the buffers are that checkpoints hold: what training changes is among them, masks are not.

    Those of quantized weights are left out.
    """
    quantized = {id(layer) for _, layer in iterate_quantized(model)}
    for module in model.modules():
        if id(module) not in quantized:
            # Private, seen in torch 2.13: which buffers are not saved.
            yield from ((module, name) for name in module._buffers if name not in module._non_persistent_buffers_set)


def _list_others(model: nn.Module, known: set[int]) -> list[tuple[nn.Module, str]]:
    places = ((module, name, module._buffers[name]) for module, name in iterate_saved_buffers(model))
    return [
        (module, name)
        for module, name, buffer in places
        if buffer is not None and id(buffer) not in known and not isinstance(buffer, DTensor)
    ]


def _broadcast(buffers: list[tuple[nn.Module, str]]) -> None:
    """Send buffers from the first rank, as bytes: not every backend knows every dtype, nor strides."""
    owned = [module.get_buffer(name) for module, name in buffers]
    parts = [buffer.contiguous().flatten().view(torch.uint8).to(owned[0].device) for buffer in owned]
    joined = torch.cat(parts)
    dist.broadcast(joined, src=0)
    for (module, name), buffer, part in zip(buffers, owned, joined.split([p.numel() for p in parts]), strict=True):
        new = part.clone().view(buffer.dtype).view(buffer.shape).to(buffer.device)
        if 0 in buffer.stride():  # expanded: several elements in one place, which cannot be written to
            module._buffers[name] = new
        else:
            buffer.copy_(new)
