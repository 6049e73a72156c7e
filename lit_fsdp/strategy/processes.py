"""How many processes a run has, by its settings, what has started it, or the machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from lit_fsdp.strategy.slurm import Tasks

_TORCHRUN_VARIABLES = ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
# How other launchers tell a process that it is one of several: Kubernetes operators and scripts, Open MPI, MPICH.
OTHER_VARIABLES = {"WORLD_SIZE": "RANK", "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK", "PMI_SIZE": "PMI_RANK"}
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
    tasks: Tasks | None = None,
) -> tuple[Any, int]:
    """Return ``devices`` and ``num_nodes`` for the Trainer, from its settings; one node counts as not set.

    torchrun and SLURM have started their processes already, so what they say is taken wherever nothing was set; a
    setting that disagrees is refused before anything starts, as it would hang in the first collective. Where
    ``devices`` is ``"auto"`` and there is only a CPU, ``cpu_processes`` is taken.
    """
    if (started := _find_started(environ, tasks)) is not None:
        return _take_started(devices, num_nodes, started)
    if count_devices(devices) is None and cpu_processes is not None and not has_accelerator:
        if not 1 <= cpu_processes <= _MOST_PROCESSES:
            expected = "1 or more" if cpu_processes < 1 else f"{_MOST_PROCESSES} or less"
            raise ValueError(f"cpu_processes: got {cpu_processes}: expected {expected}")
        return cpu_processes, num_nodes
    return devices, num_nodes


def count_started(
    num_devices: int,
    num_nodes: int,
    *,
    num_found: int,
    num_ranks: int | None,
    environ: Mapping[str, str],
    tasks: Tasks | None = None,
) -> int:
    """Return how many ranks this node has where the Trainer of a script counted its devices.

    A launcher may have started fewer than the Trainer finds by itself, as on a part of the GPUs; one node counts as
    not set.

    Args:
        num_devices: That the Trainer has.
        num_nodes: Likewise.
        num_found: How many it has with ``devices="auto"``.
        num_ranks: That the launcher has started on all nodes, if Lightning knows.
        environ: Of this process.
        tasks: Of SLURM, if that has started it.

    Raises:
        ValueError: The launcher has started another number of processes.
    """
    if (started := _find_started(environ, tasks)) is None:
        if num_ranks not in (None, num_devices * num_nodes):
            raise ValueError(
                f"devices: got {num_devices}, with num_nodes {num_nodes}: {num_ranks} processes were started: give the "
                "Trainer devices and num_nodes whose product that is"
            )
        return num_devices
    devices = None if num_devices == num_found > started.local else num_devices
    nodes = None if num_nodes == 1 else num_nodes
    _check_started(started, devices=devices, num_nodes=nodes, advice="give the Trainer {name}={count}")
    return started.local


def refuse_unread(environ: Mapping[str, str], found: ClusterEnvironment | None, num_devices: int, nodes: int) -> None:
    """Refuse a process that is one of several by variables that Lightning does not read: each would train alone.

    Args:
        environ: Of this process.
        found: What Lightning found in it.
        num_devices: That the Trainer has.
        nodes: Likewise.

    Raises:
        ValueError: With the variables that are missing.
    """
    is_read = found is not None and type(found) is not LightningEnvironment
    is_by_hand = nodes > 1 and "NODE_RANK" in environ  # a process starts the ranks of its node, maybe this one
    if is_torchrun(environ) or "SLURM_STEP_ID" in environ or is_read or is_by_hand:
        return
    is_rank = found is not None and found.creates_processes_externally
    for size, rank in OTHER_VARIABLES.items():
        if rank not in environ or environ.get(size) in (None, "1"):
            continue
        # One process may start all ranks that these count.
        is_whole = environ[size] == str(num_devices * nodes) and (is_rank or environ[rank] == "0")
        if not is_whole:
            missing = ", ".join(name for name in _TORCHRUN_VARIABLES if name not in environ)
            raise ValueError(
                f"{size}: got {environ[size]} in the environment, with {rank} {environ[rank]}, but not {missing}: "
                f"each process would train alone: start them with torchrun or srun, set what is missing as torchrun "
                f"does, or unset {size} and {rank} where each is to train alone"
            )


def describe_shared_cores(num_processes: int) -> str | None:
    """Say that processes without GPUs have to share cores; ``None`` where each has its own."""
    num_cores = _count_cores()
    if num_processes <= num_cores:
        return None
    cores = "1 core" if num_cores == 1 else f"{num_cores} cores"
    return f"{num_processes} processes compute on {cores}, as there is no GPU for them: they wait for one another"


def describe_idle_cores(num_processes: int, environ: Mapping[str, str]) -> str | None:
    """Say that torchrun leaves an optimizer on the host one core where it could have more, else ``None``."""
    num_cores = _count_cores() // num_processes
    if not is_torchrun(environ) or environ.get("OMP_NUM_THREADS") != "1" or num_cores < 2:
        return None
    return (
        "cpu_offload: the optimizer of each rank runs on 1 core of the host: OMP_NUM_THREADS is 1, as torchrun sets "
        f"it; set it before, such as to {num_cores}, the cores of this process for each rank"
    )


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class _Started:
    """What a launcher has started: processes on this node, on how many nodes, and its options for both."""

    local: int
    nodes: int
    launcher: str
    options: tuple[str, str]


def _find_started(environ: Mapping[str, str], tasks: Tasks | None) -> _Started | None:
    if is_torchrun(environ):  # also where srun has started torchrun
        local, total = int(environ["LOCAL_WORLD_SIZE"]), int(environ["WORLD_SIZE"])
        nodes = int(environ.get("GROUP_WORLD_SIZE", total // local))  # others' may not be there
        if local * nodes != total:
            raise ValueError(
                f"torchrun started {local} processes on this node, of {total} on {nodes} nodes: expected as many on "
                "each node: use the same --nproc-per-node on all"
            )
        return _Started(local=local, nodes=nodes, launcher="torchrun", options=("--nproc-per-node", "--nnodes"))
    if tasks is None:
        return None
    options = ("--ntasks-per-node", "--nodes")
    return _Started(local=tasks.per_node, nodes=tasks.nodes, launcher="SLURM", options=options)


def _take_started(devices: Any, num_nodes: int, started: _Started) -> tuple[Any, int]:
    count, nodes = count_devices(devices), None if num_nodes == 1 else num_nodes
    _check_started(started, devices=count, num_nodes=nodes, advice="expected {count}, or leave it out", of="trainer.")
    return (started.local if count is None else devices), started.nodes


def _check_started(started: _Started, *, devices: int | None, num_nodes: int | None, advice: str, of: str = "") -> None:
    """Refuse numbers that a launcher has not started; ``None`` is one that is left open."""
    for name, given, count, what, option in (
        ("devices", devices, started.local, "processes on this node", started.options[0]),
        ("num_nodes", num_nodes, started.nodes, "nodes", started.options[1]),
    ):
        if given not in (None, count):
            raise ValueError(
                f"{of}{name}: got {given}: {started.launcher} started {count} {what}: "
                f"{advice.format(name=name, count=count)}, or use {option}={given}"
            )


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
