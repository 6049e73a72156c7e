"""Inputs of recomputed blocks wait in host memory for their backward.

Note [Offloaded inputs]: what recomputation keeps of a block is its input, and of all blocks together that grows with
depth. Each input goes to the host beside the forward of its own block, and is let go of where the next block begins: by
then the copy is over, or the GPU waits for it. In backward it comes back while the block after it is computed again. So
a GPU has two inputs at a time, however deep the model is. The last block keeps its own, which backward asks for first.
Copies out and in have a stream each. Their memory on the GPU is allocated and freed in the stream that computes, which
waits for them before; so no block is recorded on another stream, and is free again at a known moment.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

# Of host memory allocated at once: torch rounds pinned memory up to a power of two, so this is the most that is lost.
PIECE_BYTES = 2**26
# Entered around every allocation of host memory for an input.
Watcher = Callable[[], AbstractContextManager[None]]
_WATCHERS: list[Watcher] = []


@contextmanager
def watch_host_memory(watcher: Watcher) -> Iterator[None]:
    """Have ``watcher`` entered around what allocates host memory for inputs: tensors without values have one device."""
    _WATCHERS.append(watcher)
    try:
        yield
    finally:
        _WATCHERS.remove(watcher)


class InputOffload:
    """Keeps the inputs of a model's recomputed blocks in host memory; see Note [Offloaded inputs]."""

    def __init__(self) -> None:
        self._latest: weakref.ref[_SavedInput] | None = None  # of the block that ran last
        self._leaving: _SavedInput | None = None  # still on the device, as its copy may not be over
        self._streams: tuple[Any, Any] | None = None  # out and in, of a GPU

    def __reduce__(self) -> Any:
        # A copy of the model, or one in another process, begins without the inputs of this one.
        return InputOffload, ()

    def run(
        self, recompute: Callable[..., Any], forward: Callable[..., Any], name: str, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Run a block under activation checkpointing; its input is the first tensor of numbers it is called with.

        Args:
            recompute: Runs a function under activation checkpointing.
            forward: Of the block.
            name: Of the block, for errors; empty leaves its input on the device.
            args: Of the block.
            kwargs: Of the block.

        Raises:
            RuntimeError: The block is called without such a tensor, or changes it in place.
        """
        if not torch.is_grad_enabled():
            return recompute(forward, *args, **kwargs)
        key, given = _find_input(args, kwargs, name)

        # All else is the function's own: what blocks share, such as a mask, is in memory once.
        others = [None if i == key else value for i, value in enumerate(args)]
        named = {name: value for name, value in kwargs.items() if name != key}

        def run_on(tensor: Tensor) -> Any:
            if isinstance(key, str):
                return forward(*others, **named, **{key: tensor})
            return forward(*others[:key], tensor, *others[key + 1 :], **named)

        version = given._version
        with saved_tensors_hooks(lambda tensor: self._pack(tensor, is_kept=not name), self._unpack):
            out = recompute(run_on, given)
        if given._version != version:  # before or after it was copied
            raise RuntimeError(
                f"activation_checkpointing.offload: {name} changes its input in place, so that it cannot be computed "
                "again; change a copy of it"
            )
        return out

    def _pack(self, tensor: Tensor, *, is_kept: bool) -> _SavedInput:
        if self._leaving is not None:
            self._leaving.leave()
        saved = _SavedInput(tensor, previous=self._latest)
        if not is_kept:
            saved.send(self._get_streams(tensor)[0])
        self._leaving = None if is_kept else saved
        self._latest = weakref.ref(saved)
        return saved

    def _unpack(self, saved: _SavedInput) -> Tensor:
        streams = self._get_streams(saved)
        saved.fetch(streams[1])
        tensor = saved.take()
        previous = None if saved.previous is None else saved.previous()
        if previous is not None:  # while this block is computed again
            previous.fetch(streams[1])
        return tensor

    def _get_streams(self, where: Tensor | _SavedInput) -> tuple[Any, Any]:
        if where.device.type != "cuda":
            return None, None
        if self._streams is None:
            self._streams = torch.cuda.Stream(where.device), torch.cuda.Stream(where.device)
        return self._streams


class _SavedInput:
    """One input of a block, on the device, on the host, or on its way."""

    def __init__(self, tensor: Tensor, *, previous: weakref.ref[_SavedInput] | None) -> None:
        self.previous = previous
        self.device, self._dtype = tensor.device, tensor.dtype
        is_dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
        self._tensor: Tensor | None = tensor if is_dense else tensor.contiguous()
        self._shape, self._strides = self._tensor.shape, self._tensor.stride()
        self._pieces: list[Tensor] = []  # on the host
        self._copied: Any = None  # an event: the last copy that was begun is over

    @torch.no_grad()
    def send(self, stream: Any) -> None:
        """Begin the copy to the host; the tensor stays."""
        parts = self._split(self._tensor)
        with ExitStack() as stack:
            for watcher in _WATCHERS:
                stack.enter_context(watcher())
            self._pieces = [torch.empty(part.shape, dtype=part.dtype, pin_memory=stream is not None) for part in parts]
        self._copy(self._pieces, parts, stream)

    def leave(self) -> None:
        """Let go of the tensor once its copy is over."""
        self._wait()
        self._tensor = None

    @torch.no_grad()
    def fetch(self, stream: Any) -> None:
        """Begin the copy to the device, unless it is there or on its way."""
        if self._tensor is None:
            options: dict[str, Any] = {"dtype": self._dtype, "device": self.device}
            self._tensor = torch.empty_strided(self._shape, self._strides, **options)
            self._copy(self._split(self._tensor), self._pieces, stream)

    def take(self) -> Tensor:
        """Return the tensor; the host keeps it for another backward."""
        self._wait()
        tensor = self._tensor
        assert tensor is not None
        if self._pieces:
            self._tensor = None
        return tensor

    def _split(self, tensor: Tensor | None) -> list[Tensor]:
        assert tensor is not None
        flat = tensor.as_strided((tensor.numel(),), (1,))
        return list(flat.split(PIECE_BYTES // flat.itemsize))

    def _copy(self, targets: list[Tensor], sources: list[Tensor], stream: Any) -> None:
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self.device))  # which has made, or freed, the memory
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=stream is not None)
        self._copied = None if stream is None else stream.record_event()

    def _wait(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self._copied)
            self._copied = None

    def __del__(self) -> None:
        # Where backward ended early: others may get the memory, which is still being written.
        if self._tensor is not None:
            self._wait()


def _find_input(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> tuple[int | str, Tensor]:
    candidates: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for key, value in candidates:
        if isinstance(value, Tensor) and value.is_floating_point():
            return key, value
    raise RuntimeError(
        f"activation_checkpointing.offload: {name or 'the last block'} is called without a tensor of floating-point "
        "numbers, so there is no input to offload; set offload to false"
    )
