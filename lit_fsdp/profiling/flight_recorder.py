"""torch's Flight Recorder: which collectives this process has begun, and which of them are not over."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Private, seen in torch 2.13 to 2.15: gloo and NCCL have a recorder each, which is on by default. That of NCCL is
# there in builds for CUDA only.
from torch._C import _distributed_c10d

_RECORDERS: dict[str, Callable[[bool, bool], bytes] | None] = {
    "gloo": _distributed_c10d._dump_fr_trace_json,  # type: ignore[attr-defined]
    "nccl": getattr(_distributed_c10d, "_dump_nccl_trace_json", None),
}
_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the newer name wins


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective that this rank has begun.

    Args:
        key: Of its process group in ``count_collectives``.
        group: Backend and name of the group, the same on all its ranks.
        number: Its place among the collectives of the group, from 1.
        operation: The backend's name of it, such as ``gloo:all_gather``.
        sizes: The shapes of its inputs and outputs.
        thread: That began it, as of ``threading.get_ident()``.
        is_over: Whether it has ended, on this rank.
    """

    key: str
    group: str
    number: int
    operation: str
    sizes: str
    thread: int
    is_over: bool


def name_switch() -> str | None:
    """Return the environment variable that turns the recorder off, with its value; ``None`` if it is on."""
    given = next((name for name in _VARIABLES if name in os.environ), None)
    return f"{given}={os.environ[given]}" if given is not None and os.environ[given].strip() == "0" else None


def count_collectives() -> dict[str, tuple[int, int]]:
    """Return the last collective that each process group has begun, and its last that is over, by number.

    Takes some 20 microseconds and touches no GPU. The second number may lag, so what looks unfinished may be over:
    ``list_collectives`` knows.
    """
    counts = {}
    for backend, dump in _RECORDERS.items():
        if dump is not None:
            for group, status in json.loads(dump(False, False)).get("pg_status", {}).items():
                begun, over = status["last_enqueued_collective"], status["last_completed_collective"]
                counts[f"{backend}/{group}"] = int(begun), int(over)
    return counts


def list_collectives() -> list[Collective]:
    """Return what the recorders still hold, by default the last 2000 of each, the oldest first. Takes milliseconds."""
    found = []
    for backend, dump in _RECORDERS.items():
        if dump is not None:
            entries = json.loads(dump(True, False)).get("entries", [])
            found += [(entry["time_created_ns"], _read(backend, entry)) for entry in entries if not entry["is_p2p"]]
    return [collective for _, collective in sorted(found, key=lambda pair: pair[0])]


def _read(backend: str, entry: dict[str, Any]) -> Collective:
    return Collective(
        key=f"{backend}/{entry['pg_id']}",
        group=f"{backend} {entry['process_group'][0]}",
        number=entry["collective_seq_id"],
        operation=entry["profiling_name"],
        sizes=f"{entry['input_sizes']} -> {entry['output_sizes']}",
        thread=int(entry["thread_id"]),
        is_over=entry["retired"] or entry["state"] == "completed",
    )
