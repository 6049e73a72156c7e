"""Which collectives this rank has issued in a stretch of its work, so that a rank that fell behind can take part.

Note [Ranks that fall behind]: a rank that fails in the middle of its collectives leaves the others waiting in one. All
ranks issue the same ones in the same order. So the rank that has issued most knows what the others still have to, and
they need neither the values nor the modules for it: zeros of the same shapes let everybody go on. What is computed with
them has to be thrown away.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# What all ranks call with the same shapes. Others are noted, but cannot be taken part in without their arguments.
_SYMMETRIC = (
    *("all_gather_single", "reduce_scatter_single", "all_to_all_single", "allreduce", "allgather", "alltoall"),
    *("reduce_scatter", "broadcast", "reduce", "barrier", "_allgather_base", "_reduce_scatter_base", "alltoall_base"),
)
_OTHER = ("gather", "scatter", "send", "recv", "recv_anysource", "_start_coalescing", "allgather_coalesced")
_OPTIONS = ("reduceOp", "rootRank", "rootTensor")


class WorkStopped(BaseException):
    """Another rank has failed: this one shall issue nothing more. Not an ``Exception``, which users catch."""


@dataclass(frozen=True, kw_only=True)
class _Like:
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str


@dataclass(frozen=True, kw_only=True)
class _Options:
    """The options of a collective that have to be the same on all ranks."""

    kind: str
    values: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Issued:
    """A collective that was issued.

    Args:
        name: Of the method of ``ProcessGroup``.
        group: The place of its group among those of this rank, in the order in which they were made.
        size: How many ranks the group has.
        args: With a stand-in for each tensor; ``None`` where other ranks call it with other arguments.
    """

    name: str
    group: int
    size: int
    args: tuple[Any, ...] | None

    def describe(self) -> str:
        """Return it in words."""
        return f"{self.name} of {self.size} ranks"


class CollectiveLog:
    """Notes the collectives that Python issues in a stretch of work, from ``attach`` to ``detach``.

    Costs some microseconds for each, and sends nothing. Those of C++, as DTensor's, are not seen.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._issued: list[Issued] = []
        self._number = -1  # of the stretch that was begun last
        self._is_on = self._is_stopped = False
        self._thread = 0
        self._methods: dict[str, Any] = {}

    def attach(self) -> None:
        """Begin to see what is issued. One log of a process may be attached at a time."""
        assert not self._methods, "attached already"
        for name in (*_SYMMETRIC, *_OTHER):
            method = dist.ProcessGroup.__dict__.get(name)
            if method is not None:
                self._methods[name] = method
                setattr(dist.ProcessGroup, name, self._watch(name, method))

    def detach(self) -> None:
        """Give torch back what it had."""
        for name, method in self._methods.items():
            setattr(dist.ProcessGroup, name, method)
        self._methods = {}

    @contextmanager
    def stretch(self, number: int) -> Iterator[None]:
        """Note what this thread and its backwards issue in this context.

        Raises:
            WorkStopped: Now or at a later collective: ``stop`` was called.
        """
        self._thread = threading.get_ident()
        with self._lock:
            if self._is_stopped:
                raise WorkStopped
            self._number, self._issued = number, []
            self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def stop(self, number: int) -> bytes:
        """Let nothing more be issued in a stretch; return what was, for :meth:`catch_up` on other ranks.

        May be called from another thread. A stretch that has not begun has issued nothing.
        """
        with self._lock:
            self._is_stopped = True
            return pickle.dumps(self._issued if self._number == number else [])

    def resume(self) -> None:
        """Let stretches begin again."""
        with self._lock:
            self._is_stopped = False

    def catch_up(self, number: int, logs: list[bytes], device: torch.device) -> None:
        """Issue what other ranks have issued in a stretch and this one has not.

        Args:
            number: Of the stretch, which has ended here.
            logs: What ``stop`` has returned on all ranks.
            device: Of tensors that are not in host memory.

        Raises:
            RuntimeError: Ranks have issued different ones, or one that needs what only its rank knows.
        """
        own = self._issued if self._number == number else []
        longest = max((pickle.loads(log) for log in logs), key=len)
        for i, (mine, other) in enumerate(zip(own, longest, strict=False)):
            if (mine.name, mine.group, mine.size) != (other.name, other.group, other.size):
                raise RuntimeError(
                    f"collective {i + 1} of this step is {mine.describe()} here and {other.describe()} elsewhere"
                )
        groups = list(dist.distributed_c10d._world.pg_map)  # private, seen in torch 2.13: in the order they were made
        for issued in longest[len(own) :]:
            if issued.args is None:
                raise RuntimeError(f"a step has issued {issued.describe()}, which is not the same on all ranks")
            if issued.group >= len(groups) or groups[issued.group].size() != issued.size:
                raise RuntimeError(f"a step has issued {issued.describe()}, in a group that this rank does not have")
            args = [_make(value, device) for value in issued.args]
            work = getattr(groups[issued.group], issued.name)(*args)
            if work is not None:
                work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def _watch(self, name: str, method: Any) -> Callable[..., Any]:
        @wraps(method)
        def run(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if self._is_on and self._is_own():
                self._note(name, group, (*args, *kwargs.values()))
            return method(group, *args, **kwargs)

        return run

    def _is_own(self) -> bool:
        # Of a GPU's backward, which has a thread of its own. Other threads, such as that of a save, have other groups.
        # Private, seen in torch 2.13: whether a backward runs in this thread.
        return threading.get_ident() == self._thread or torch._C._current_graph_task_id() != -1

    def _note(self, name: str, group: dist.ProcessGroup, args: tuple[Any, ...]) -> None:
        groups = list(dist.distributed_c10d._world.pg_map)
        place = next((i for i, known in enumerate(groups) if known is group), -1)
        issued = Issued(
            name=name,
            group=place,
            size=group.size(),
            args=tuple(_strip(value) for value in args) if name in _SYMMETRIC and not _is_uneven(args) else None,
        )
        with self._lock:
            if self._is_stopped:
                raise WorkStopped
            self._issued.append(issued)


def _is_uneven(args: tuple[Any, ...]) -> bool:
    """Whether a collective has sizes of its own for each rank."""
    return any(isinstance(value, list) and value and isinstance(value[0], int) for value in args)


def _strip(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Like(shape=tuple(value.shape), dtype=value.dtype, device_type=value.device.type)
    if isinstance(value, list | tuple):
        return [_strip(part) for part in value]
    if type(value).__name__.endswith("Options"):
        found = {name: getattr(value, name) for name in _OPTIONS if hasattr(value, name)}
        return _Options(kind=type(value).__name__, values=found)
    return value


def _make(value: Any, device: torch.device) -> Any:
    if isinstance(value, _Like):
        place = torch.device("cpu") if value.device_type == "cpu" else device
        return torch.zeros(value.shape, dtype=value.dtype, device=place)
    if isinstance(value, list):
        return [_make(part, device) for part in value]
    if isinstance(value, _Options):
        # Private, seen in torch 2.13: only some of these classes are in ``torch.distributed``.
        options = getattr(dist.distributed_c10d, value.kind)()
        for name, given in value.values.items():
            setattr(options, name, given)
        return options
    return value
