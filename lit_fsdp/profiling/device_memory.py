"""What the device says of this rank's memory: now, at its peak, and allocation by allocation."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

_GIB = 2**30
_RECORDING: set[int] = set()  # who wants allocations noted
_PEAKS: dict[torch.device, int] = {}  # bytes, of the stretches that ended with take_peak_bytes
_MESSAGES = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "Cannot allocate memory")
_MAX_ENTRIES = 100_000  # of the allocator's history, the last ones: each has several KB, and torch has no limit
PEAK_NAMES = {"cuda": "peak_allocated_gib", "cpu": "peak_rss_gib"}


@dataclass(frozen=True, kw_only=True)
class CardMemory:
    """The memory of a rank's GPU, in bytes, as that rank sees it."""

    uuid: str  # of the card: ranks may share one
    name: str
    total: int
    free: int  # which no process has
    reserved: int  # by the allocator of this rank, which can use it again


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or what caused it, says that there was no memory left."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError | OSError) and any(text in str(error) for text in _MESSAGES):
            return True
        error = error.__cause__ or error.__context__
    return False


def read_card(device: torch.device) -> CardMemory:
    """Return what a GPU has, what is free, and what this process holds; starts CUDA."""
    free, total = torch.cuda.mem_get_info(device)
    properties = torch.cuda.get_device_properties(device)
    reserved = torch.cuda.memory_reserved(device)
    return CardMemory(uuid=str(properties.uuid), name=properties.name, total=total, free=free, reserved=reserved)


def count_usable_bytes(cards: Sequence[CardMemory]) -> list[int]:
    """Return what each rank can have, of what all ranks have read: an equal share of what those of a card may use.

    That is what is free, and what they have reserved. The CUDA contexts that exist are in neither.
    """
    usable = []
    for card in cards:
        same = [other for other in cards if other.uuid == card.uuid]
        usable.append((min(other.free for other in same) + sum(other.reserved for other in same)) // len(same))
    return usable


def read_step(device: torch.device) -> dict[str, float]:
    """Return what is read after every step; of a GPU, begins a new stretch for its peak."""
    if device.type != "cuda":
        return {"rss_gib": read_resident_bytes() / _GIB}
    peak, reserved = take_peak_bytes(device), torch.cuda.memory_reserved(device)
    return {"peak_allocated_gib": peak / _GIB, "reserved_gib": reserved / _GIB}


def read_memory(device: torch.device) -> dict[str, float]:
    """Return what is known of this process's memory, the peak as that of the run."""
    if device.type != "cuda":
        return {"rss_gib": read_resident_bytes() / _GIB, "peak_rss_gib": read_peak_gib(device)}
    stats = torch.cuda.memory_stats(device)
    reserved, split = stats["reserved_bytes.all.current"], stats["inactive_split_bytes.all.current"]
    return {
        "allocated_gib": stats["allocated_bytes.all.current"] / _GIB,
        "peak_allocated_gib": read_peak_gib(device),
        "active_gib": stats["active_bytes.all.current"] / _GIB,
        "reserved_gib": reserved / _GIB,
        "inactive_split_gib": split / _GIB,
        "fragmentation_pct": 100 * split / max(reserved, 1),
        "alloc_retries": stats["num_alloc_retries"],
        "device_free_gib": torch.cuda.mem_get_info(device)[0] / _GIB,
    }


def reset_peak(device: torch.device) -> None:
    """Let ``read_peak_gib`` begin anew. No effect on the CPU, where the peak is that of the process."""
    _PEAKS.pop(device, None)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def take_peak_bytes(device: torch.device) -> int:
    """Return the peak of a GPU since the last call, and begin a new stretch; ``read_peak_gib`` is not changed."""
    peak = torch.cuda.max_memory_allocated(device)
    _PEAKS[device] = max(peak, _PEAKS.get(device, 0))
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def start_recording(owner: object) -> None:
    """Let CUDA's allocator note what it does, for a snapshot, as long as anyone wants it to."""
    _RECORDING.add(id(owner))
    torch.cuda.memory._record_memory_history(max_entries=_MAX_ENTRIES)  # documented, though it has no public name yet


def stop_recording(owner: object) -> None:
    """End what ``start_recording`` began, unless somebody else still records."""
    if id(owner) in _RECORDING:
        _RECORDING.discard(id(owner))
        if not _RECORDING:
            torch.cuda.memory._record_memory_history(enabled=None)


def write_snapshot(path: Path) -> None:
    """Write what ``start_recording`` has let the allocator note, for https://pytorch.org/memory_viz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))  # documented, though it has no public name yet


def read_resident_bytes() -> int:
    """Return what this process has in host memory now."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE")


def read_peak_gib(device: torch.device) -> float:
    """Return the peak of this rank: allocated by torch on the GPU, resident for a process on the CPU."""
    if device.type == "cuda":
        return max(torch.cuda.max_memory_allocated(device), _PEAKS.get(device, 0)) / _GIB
    # From /proc where it is there: ru_maxrss starts at the peak of the process that started this one.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / _GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB
