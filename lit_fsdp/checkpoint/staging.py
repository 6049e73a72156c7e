"""Copies a state into host memory, so that it can be written while training changes the original."""

from __future__ import annotations

import copy
import mmap
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lit_fsdp.sharding.torch_internals import to_local

_ALIGNMENT = 64  # of each tensor in the buffer, in bytes; at least that of every dtype


class Stager:
    """Copies states into host memory of its own, one at a time: the next one overwrites the last.

    Tensors on a GPU go into pinned memory, which is kept for the next state; another structure may take its place at
    any time. Without a GPU each state gets new memory. All tensors share one buffer of the size they need: torch's own
    pinned memory would be rounded up to a power of two for each tensor, up to twice as much.
    """

    def __init__(self) -> None:
        self._pinned: _HostBuffer | None = None

    @torch.no_grad()
    def stage(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of nested containers with all tensors in host memory; blocks until it is made.

        DTensors stay DTensors, of the same mesh and placements.

        Raises:
            RuntimeError: The memory could not be pinned.
        """
        num_bytes = sum(_align(to_local(tensor).nbytes) for tensor in iterate_tensors(state))
        buffer = self._take_pinned(num_bytes) if has_gpu_tensors(state) else _HostBuffer(num_bytes, is_pinned=False)
        staged: dict[str, Any] = _Copier(buffer.pages).copy(state)
        if has_gpu_tensors(state):  # once, not after each tensor, between which the link would rest
            torch.cuda.current_stream().synchronize()
        return staged

    def release(self) -> None:
        """Give the memory back. What was staged must not be in use any more."""
        self._pinned = None

    def _take_pinned(self, num_bytes: int) -> _HostBuffer:
        if self._pinned is None or self._pinned.num_bytes < num_bytes:
            self._pinned = None  # before its successor is there: the host may not have room for both
            self._pinned = _HostBuffer(num_bytes, is_pinned=True)
        return self._pinned


def iterate_tensors(node: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested containers."""
    if isinstance(node, Tensor):
        yield node
    elif isinstance(node, Mapping | list | tuple):
        for value in node.values() if isinstance(node, Mapping) else node:
            yield from iterate_tensors(value)


def has_gpu_tensors(state: Mapping[str, Any]) -> bool:
    """Whether a tensor in nested containers is in the memory of a GPU."""
    return any(tensor.is_cuda for tensor in iterate_tensors(state))


class _HostBuffer:
    """Whole pages of host memory, pinned for as long as this object is referred to."""

    def __init__(self, num_bytes: int, *, is_pinned: bool) -> None:
        self.num_bytes = max(num_bytes, 1)
        self.pages = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Else every data loader worker that is forked would get a copy of pinned pages.
        self.pages.madvise(mmap.MADV_DONTFORK)
        if is_pinned:
            self._pin(torch.frombuffer(self.pages, dtype=torch.uint8).data_ptr())

    def _pin(self, address: int) -> None:
        cudart: Any = torch.cuda.cudart()
        if code := int(cudart.cudaHostRegister(address, self.num_bytes, 0)):
            raise RuntimeError(
                f"async_save: {self.num_bytes / 2**30:.2f} GiB of host memory could not be pinned (CUDA error {code}); "
                "free some, or set async_save to false"
            )
        # Not at exit, when CUDA may be gone; it then unpins by itself.
        weakref.finalize(self, cudart.cudaHostUnregister, address).atexit = False


class _Copier:
    """Copies nested containers, with tensors one after the other in a buffer."""

    def __init__(self, pages: mmap.mmap) -> None:
        self._pages = pages
        self._offset = 0  # in bytes

    def copy(self, node: Any) -> Any:
        if isinstance(node, Tensor):
            return self._copy_tensor(node)
        if isinstance(node, Mapping):
            return {key: self.copy(value) for key, value in node.items()}
        if isinstance(node, list | tuple):
            items = [self.copy(value) for value in node]
            return tuple(items) if isinstance(node, tuple) else items
        return copy.deepcopy(node)

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        made = torch.empty_like(tensor, device="cpu")  # costs no memory: it is never written to
        local = to_local(made)
        if local.nbytes:
            # Each has a storage of its own, which keeps the pages: torch would copy a part of a larger one to write it.
            part = torch.frombuffer(self._pages, dtype=torch.uint8, count=local.nbytes, offset=self._offset)
            local.set_(part.untyped_storage(), 0, local.size(), local.stride())
        local.copy_(to_local(tensor), non_blocking=True)
        self._offset += _align(local.nbytes)
        return made


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
