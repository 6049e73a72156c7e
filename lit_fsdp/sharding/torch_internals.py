"""What can only be read or set through private parts of torch; seen in torch 2.13."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule


def set_timeout(group: dist.ProcessGroup, timeout_s: float) -> None:
    """Set how long a collective of a group that exists may take."""
    _set_pg_timeout(timedelta(seconds=timeout_s), group)


def make_finished_work(tensors: list[Tensor]) -> dist.Work:
    """Return what a collective returns that is over already, with these results: DDP takes the first of them."""
    done: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    done.set_result(tensors)
    return _create_work_from_future(done)


def iterate_sharded(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield every sharded parameter of ``model``, as torch's ``FSDPParam``, with the name of its unit.

    A unit of several modules has the name of the first. Before the first forward nothing was gathered yet.
    """
    seen: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:
            if id(group) not in seen:
                seen.add(id(group))
                for parameter in group.fsdp_params:
                    yield name, parameter


def list_gathered(parameter: Any) -> list[Tensor]:
    """Return the tensors that hold a gathered parameter; their storage has no bytes while it is sharded.

    On one rank the shard is the whole parameter, and may be its gathered form too.
    """
    return list(parameter.all_gather_outputs)


def get_shard(parameter: Any) -> nn.Parameter:
    """Return this rank's shard, a DTensor."""
    return parameter.sharded_param


def list_unreduced_gradients(parameter: Any) -> list[Tensor]:
    """Return the gradients at full size that a parameter has at this moment, before they are reduced."""
    gathered = getattr(parameter, "_unsharded_param", None)
    gradients = (None if gathered is None else gathered.grad, parameter.unsharded_accumulated_grad)
    return [gradient for gradient in gradients if gradient is not None]
