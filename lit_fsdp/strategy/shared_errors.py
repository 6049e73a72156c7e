"""Work that a run can do without: where it fails, all ranks learn of it and go on together.

Note [Who can go on]: a rank that fails alone in the middle of its collectives leaves the others waiting in one, and no
further collective can tell them. So ranks meet in the store. Where all come, whether they failed or not, all go on.
Where one does not come, it waits in a collective for a rank that failed, whose error ends the run as any other.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import DistError

from lit_fsdp.errors import is_debugging
from lit_fsdp.sharding.torch_internals import leave_forward
from lit_fsdp.strategy.roll_call import get_store, wait_until

_PATIENCE_S = 60.0  # ranks come to the same error, or to the end, within a frame of each other
_HEALTHY = 10  # times as long: a rank that has not failed may be early

Result = TypeVar("Result")

_calls = count()  # of this process, the same on all ranks


def try_on_all(work: Callable[[], Result], root: nn.Module | None = None) -> tuple[Result | None, str | None]:
    """Return what ``work`` gives and no problem, or nothing and the problem: the same one on all ranks.

    All ranks must call it, at the same place. What the work has changed before it failed stays changed. A rank that
    failed waits a minute for the others; one that did not fail ten times as long.

    Args:
        work: May have collectives.
        root: The sharded module inside whose forward this is called, if it is.

    Raises:
        Exception: Of ``work``, where other ranks do not come, or where it is the connection between ranks.
        RuntimeError: Another rank does not come, for a reason of its own.
    """
    found, error = None, None
    try:
        found = work()
    except DistError:
        raise
    except Exception as raised:
        if is_debugging():
            raise
        error = raised  # of whatever kind: the run can do without it
    problem = _share(error)
    if problem is None:
        return found, None
    if root is not None:
        leave_forward(root)
    return None, problem


def _share(error: Exception | None) -> str | None:
    own = "" if error is None else f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own or None
    patience_s = _PATIENCE_S * (_HEALTHY if error is None else 1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if error is not None and torch.cuda.is_initialized():
        # NCCL's collectives wait on the GPU, not on the host: what has begun must end before this rank says so.
        begun = torch.cuda.Event()
        begun.record()
        if not wait_until(begun.query, patience_s):
            error.add_note(f"rank {rank} waited {patience_s:g} s for a collective that other ranks did not begin")
            raise error
    store = get_store(f"shared_errors/{next(_calls)}")
    store.set(str(rank), own)
    others = [other for other in range(world_size) if other != rank]
    if not wait_until(lambda: store.check([str(other) for other in others]), patience_s):
        missing = [other for other in others if not store.check([str(other)])]
        alone = f"rank {rank} waited {patience_s:g} s for rank {missing[0]}, which did not come to the same place"
        if error is None:
            raise RuntimeError(alone)
        error.add_note(alone)
        raise error
    told = {other: own if other == rank else store.get(str(other)).decode() for other in range(world_size)}
    failed = {other: text for other, text in told.items() if text}
    if not failed:
        return None
    first, text = next(iter(failed.items()))
    return text if len(failed) == world_size else f"rank {first}: {text}"
