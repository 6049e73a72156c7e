"""The random number generators of a rank: what steps draw from, and what everything else draws from.

Note [Two streams]: dropout must differ between ranks, but a sampler that draws from the global generator must draw the
same on all of them, or rows get lost. So Python, NumPy and torch on the host have two streams: one of this rank, in use
inside ``own_generators`` (in steps, and where rows are read), and one that is the same on all ranks, in use otherwise.
A GPU's generator is always the rank's. Checkpoints hold both. Ranks that share their rows count as one: what they
compute is part of the same numbers, so they drop the same, see ``DataRanks``.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_Generators = tuple[torch.Tensor, Any, Any]


class _Streams:
    """Which stream the global generators hold, and where the other one stands; none until they were split."""

    waiting: _Generators | None = None
    is_own = False


def join_generators() -> None:
    """Forget the streams of an earlier run in this process, so that the next one draws by its own seed."""
    _Streams.waiting, _Streams.is_own = None, False


def split_generators(state: dict[str, Any], rank: int) -> None:
    """Go on drawing from ``state``, the same on all ranks; inside ``own_generators`` from a stream of this rank."""
    join_generators()
    _write(state)
    _Streams.waiting = torch.get_rng_state(), random.getstate(), np.random.MT19937()
    reseed(state, rank)


@contextmanager
def own_generators(is_own: bool = True) -> Iterator[None]:
    """Let everything in this context draw from this rank's stream, or else the common one. May be nested."""
    is_other = is_own != _Streams.is_own and _Streams.waiting is not None
    if is_other:
        _swap()
    try:
        yield
    finally:
        if is_other:
            _swap()


def _swap() -> None:
    assert _Streams.waiting is not None
    torch_state, python_state, numpy_generator = _Streams.waiting
    # NumPy's state takes 0.3 ms to read and write, its generator nothing to exchange.
    _Streams.waiting = torch.get_rng_state(), random.getstate(), np.random.mtrand.get_bit_generator()
    torch.set_rng_state(torch_state)
    random.setstate(python_state)
    np.random.mtrand.set_bit_generator(numpy_generator)
    _Streams.is_own = not _Streams.is_own


def collect_random_state() -> dict[str, Any]:
    """Return the state of all generators of this process, as plain types and tensors.

    That of the GPU only where CUDA runs: to ask for it would start CUDA in a run on the CPU. What all ranks have in
    common is under ``common``, once generators were split.
    """
    with own_generators():
        state = _read()
    if _Streams.waiting is not None:
        with own_generators(is_own=False):
            state["common"] = _read()
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Go on drawing where the state was collected, in steps; a GPU only if it was collected from one."""
    with own_generators():
        _write(state)
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])


def remember_generators() -> Callable[[], None]:
    """Return what lets steps of this rank draw the same numbers again. Takes some 50 microseconds, and no GPU's time.

    ``collect_random_state`` returns what can be saved, in ten times as long.
    """
    with own_generators():
        torch_state, python_state = torch.get_rng_state(), random.getstate()
        generator = np.random.mtrand.get_bit_generator()
        numpy_state = generator.state
    cuda_state = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore() -> None:
        with own_generators():
            torch.set_rng_state(torch_state)
            random.setstate(python_state)
            generator.state = numpy_state
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)

    return restore


def restore_common_random_state(state: dict[str, Any]) -> None:
    """Go on drawing where the state was collected, outside of steps."""
    if "common" in state:
        with own_generators(is_own=False):
            _write(state["common"])


def reseed(state: dict[str, Any], rank: int) -> None:
    """Start fresh generators for steps that depend on a saved state and the rank: for another number of ranks."""
    digest = hashlib.sha256(state["torch"].numpy().tobytes() + rank.to_bytes(4, "little")).digest()
    seed = int.from_bytes(digest[:4], "little")
    with own_generators():
        torch.manual_seed(seed)  # also of all GPUs
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002


def _read() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  what libraries draw from
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
    }


def _write(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
