"""Whether the disk has room for the checkpoints of a run, known before its first step."""

from __future__ import annotations

import copy
import math
import os
import secrets
import shutil
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_fsdp.optim.sharded_optimizer import ShardOptimizer
from lit_fsdp.sharding.torch_internals import to_local

SPARE_BYTES = 64 * 2**20  # for metadata, and so that the disk is not filled to the last byte
SHARED = (
    "expected a folder that all machines share: set dirpath of ModelCheckpoint to one, or to an address such as "
    "s3://bucket/run"
)
_PATIENCE_S = 60.0  # for so long a network file system may take a name for missing that was just made elsewhere


@dataclass(frozen=True, kw_only=True)
class DiskSpace:
    """What the checkpoints of a run will take, and what there is.

    Args:
        folder: Where they go.
        checkpoint_bytes: Of the largest, over all ranks.
        is_least: Whether it may be more: nobody knows what the optimizer will keep.
        num_at_once: How many there will be at once: those that are kept, and the one that is written.
        bytes_at_once: What these take together.
        free_bytes: On the disk of that folder.
    """

    folder: Path
    checkpoint_bytes: int
    is_least: bool
    num_at_once: int
    bytes_at_once: int
    free_bytes: int

    def check(self) -> None:
        """Refuse a disk that has no room for one checkpoint."""
        if (missing := self.checkpoint_bytes + SPARE_BYTES - self.free_bytes) > 0:
            raise ValueError(
                f"checkpoints: the disk of {self.folder} is too full for one: {self}: free {_format(missing)}, set "
                "dirpath of ModelCheckpoint to another disk, or trainer.enable_checkpointing: false"
            )

    def describe_shortage(self) -> str | None:
        """Return a line for a disk that has no room for all that will be there at once."""
        if self.bytes_at_once + SPARE_BYTES <= self.free_bytes:
            return None
        return (
            f"the disk of {self.folder} may get too full: {self}, and up to {self.num_at_once} lie there at once, "
            "those kept and the one being written; what does not fit is not saved"
        )

    def __str__(self) -> str:
        least = "at least " if self.is_least else ""
        return f"a checkpoint takes {least}{_format(self.checkpoint_bytes)}, {_format(self.free_bytes)} are free"


def measure_free(folder: Path) -> int:
    """Return the free bytes of the disk that a folder is on, or will be."""
    return shutil.disk_usage(_find_existing(folder)).free


def check_access(folder: Path) -> None:
    """Refuse a folder that nothing can be written to, before a run has computed anything that it could not save.

    Raises:
        ValueError: It is on a disk that is only read, or somebody else's.
    """
    if not os.access(_find_existing(folder), os.W_OK | os.X_OK):
        raise ValueError(
            f"checkpoints: {folder} cannot be written to: set dirpath of ModelCheckpoint to another folder"
        )


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A file that one rank leaves for others to find.

    Args:
        host: Of that rank.
        depth: Of how many parts the folder of the checkpoints has to be shortened to be that of the file.
        name: Of the file.
    """

    host: str
    depth: int
    name: str


@contextmanager
def leave_mark(folder: Path) -> Iterator[Mark | None]:
    """Hold a file in a folder, or in the nearest one above that is there; ``None`` where none can be made."""
    place = _find_existing(folder)
    mark = Mark(
        host=socket.gethostname(),
        depth=[folder, *folder.parents].index(place),
        name=f".shared-{secrets.token_hex(4)}",
    )
    try:
        (place / mark.name).touch()
    except OSError:  # a full disk, of which the user will read
        yield None
        return
    try:
        yield mark
    finally:
        with suppress(OSError):
            (place / mark.name).unlink()


def check_mark(folder: Path, mark: Mark) -> None:
    """Refuse a folder that is another one than that of the rank that left a mark.

    Raises:
        ValueError: It does not have the mark.
    """
    path = [folder, *folder.parents][mark.depth] / mark.name
    if not wait_for(path.exists):
        raise ValueError(
            f"checkpoints: {folder} on {socket.gethostname()} is not the one on {mark.host}, where rank 0 is: {SHARED}"
        )


def wait_for(is_there: Callable[[], bool]) -> bool:
    """Return whether what another machine has written is there, as soon as a network file system shows it."""
    deadline = time.monotonic() + _PATIENCE_S
    while not is_there():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _find_existing(folder: Path) -> Path:
    return folder if folder.exists() else _find_existing(folder.parent)


def count_bytes(node: Any) -> int:
    """Return the bytes of the tensors in nested containers, of DTensors this rank's part of what is written."""
    if isinstance(node, DTensor):
        return count_bytes(node.to_local()) // _count_copies(node)
    if isinstance(node, Tensor):
        return node.numel() * node.element_size()
    if isinstance(node, Mapping):
        return sum(count_bytes(value) for value in node.values())
    return sum(count_bytes(value) for value in node) if isinstance(node, list | tuple) else 0


def estimate_state_bytes(optimizers: Iterable[Optimizer]) -> int | None:
    """Return what optimizers will keep beside the parameters, this rank's part; ``None`` where only a step can tell."""
    total = 0
    for optimizer in optimizers:
        if optimizer.state:
            total += count_bytes(list(optimizer.state.values()))
            continue
        found = _count_sharded(optimizer) if isinstance(optimizer, ShardOptimizer) else _step_without_memory(optimizer)
        if found is None:
            return None
        total += found
    return total


def _count_copies(tensor: Tensor) -> int:
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.placements, tensor.device_mesh.mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())


def _list_trained(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


@torch.no_grad()
def _count_sharded(optimizer: ShardOptimizer) -> int:
    # On the meta device: pages of 8-bit AdamW are never given back.
    return sum(
        count_bytes(optimizer.make_state(p, torch.empty_like(p, device="meta"))) for p in _list_trained(optimizer)
    )


def _step_without_memory(optimizer: Optimizer) -> int | None:
    """Let a copy of an optimizer step on the meta device, and count what it keeps; ``None`` if no copy can."""
    if type(optimizer).__getstate__ is not Optimizer.__getstate__:
        return None  # it copies in its own way: a wrapper shares the inner optimizer, whose step would be a real one
    twin = copy.copy(optimizer)  # without the hooks
    twin.state = defaultdict(dict)
    twin.param_groups = []
    copies: dict[Tensor, int] = {}
    for group in optimizer.param_groups:
        parameters = []
        for parameter in filter(lambda p: p.requires_grad, group["params"]):
            made = torch.empty_like(to_local(parameter.detach()), device="meta").requires_grad_()
            made.grad = torch.empty_like(made)
            copies[made] = _count_copies(parameter)
            parameters.append(made)
        switches: dict[str, Any] = {name: False for name in ("fused", "foreach", "capturable") if name in group}
        twin.param_groups.append({**group, **switches, "params": parameters})
    try:
        step: Any = type(twin).step
        # The method itself, as torch's wrapper calls the hooks of all optimizers.
        (step.__wrapped__ if hasattr(step, "hooked") else step)(twin)
    except Exception:  # noqa: BLE001  of anybody's optimizer: LBFGS wants a closure, others read values
        return None
    return sum(count_bytes(state) // copies.get(parameter, 1) for parameter, state in twin.state.items())


def _format(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
