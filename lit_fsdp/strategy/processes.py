"""How many processes a run has, by its settings, torchrun or the machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TORCHRUN_VARIABLES = ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
_MOST_PROCESSES = 1024  # of one machine


def is_torchrun(environ: Mapping[str, str]) -> bool:
    """Whether torchrun, or something that sets the same variables, has started this process."""
    return all(name in environ for name in _TORCHRUN_VARIABLES)


def choose_processes(
    devices: Any,
    num_nodes: int,
    *,
    cpu_processes: int | None,
    has_accelerator: bool,
    environ: Mapping[str, str],
) -> tuple[Any, int]:
    """Return ``devices`` and ``num_nodes`` for the Trainer, from its settings; one node counts as not set.

    torchrun has started its processes already, so what it says is taken wherever nothing was set; a setting
    that disagrees is refused before anything starts, as it would hang in the first collective. Where ``devices`` is
    ``"auto"`` and there is only a CPU, ``cpu_processes`` is taken.
    """
    count = count_devices(devices)
    if is_torchrun(environ):
        local, total = int(environ["LOCAL_WORLD_SIZE"]), int(environ["WORLD_SIZE"])
        nodes = int(environ.get("GROUP_WORLD_SIZE", total // local))  # SLURM's and others' may not be there
        if local * nodes != total:
            raise ValueError(
                f"torchrun started {local} processes on this node, of {total} on {nodes} nodes: expected as many on "
                "each node: use the same --nproc-per-node on all"
            )
        if count not in (None, local):
            raise ValueError(
                f"trainer.devices: got {devices}: torchrun started {local} processes on this node: "
                f"expected {local}, or leave it out, or use --nproc-per-node={count}"
            )
        if num_nodes not in (1, nodes):
            raise ValueError(
                f"trainer.num_nodes: got {num_nodes}: torchrun started {nodes} nodes: "
                f"expected {nodes}, or leave it out, or use --nnodes={num_nodes}"
            )
        return (local if count is None else devices), nodes
    if count is None and cpu_processes is not None and not has_accelerator:
        if not 1 <= cpu_processes <= _MOST_PROCESSES:
            expected = "1 or more" if cpu_processes < 1 else f"{_MOST_PROCESSES} or less"
            raise ValueError(f"cpu_processes: got {cpu_processes}: expected {expected}")
        return cpu_processes, num_nodes
    return devices, num_nodes


def count_devices(devices: Any) -> int | None:
    """Count what ``trainer.devices`` asks for; ``None`` when it is left to the machine.

    Raises:
        ValueError: It is neither a number of processes nor a list of GPUs.
    """
    if devices in ("auto", "-1", -1, None):
        return None
    try:
        given: Any = devices.split(",") if isinstance(devices, str) and "," in devices else devices
        listed = [int(part) for part in given if str(part).strip()] if isinstance(given, list | tuple) else None
        count = int(given) if listed is None else len(listed)
    except (TypeError, ValueError):
        count = 0
    if not 1 <= count <= _MOST_PROCESSES:
        raise ValueError(
            f"trainer.devices: got {devices!r}: expected auto, a number of processes from 1 to {_MOST_PROCESSES}, or "
            "GPUs by number, such as [0, 1]"
        )
    return count
