"""Where a run took place: versions and hardware, without anything that names the machine or its user."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from lit_fsdp.profiling.host_memory import count_host_bytes
from lit_fsdp.reporting.sections import Section, Table
from lit_fsdp.sharding.mesh import gather_objects

_PACKAGES = ("lit_fsdp", "torch", "lightning", "transformers", "peft", "bitsandbytes")
_GIB = 2**30


def read_environment(trainer: Trainer) -> dict[str, Any]:
    """Return versions, devices of all ranks and the commit of the current folder; all ranks must call it."""
    devices = gather_objects(_read_device(trainer.strategy.root_device))
    return {
        **read_machine(),
        "world_size": trainer.world_size,
        "num_nodes": trainer.num_nodes,
        "devices": devices,
        "commit": _read_commit() if trainer.is_global_zero else None,
    }


def read_machine() -> dict[str, Any]:
    """Return versions, and what this machine is made of besides GPUs."""
    return {
        "python": platform.python_version(),
        # Of torch with its build, such as +cu130, which is no part of the version of the registry's package.
        "packages": {name: found for name in _PACKAGES if (found := _get_version(name)) is not None}
        | {"torch": str(torch.__version__)},
        "cuda": torch.version.cuda,
        "nccl": _read_nccl(),
        "driver": _read_driver(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _read_cpu(),
        "num_cpus": os.cpu_count(),
        "host_memory_gib": round(count_host_bytes() / _GIB, 1),
    }


def describe_environment(environment: Mapping[str, Any]) -> Section:
    """Return versions and hardware as a section."""
    rows = list_versions(environment)
    if environment["commit"]:
        rows.append(("commit of the current folder", environment["commit"]))
    rows.append(("devices", format_devices(environment["devices"])))
    rows.append(("ranks", format_ranks(environment)))
    rows.append(("host of rank 0", format_host(environment)))
    table = Table(title="", columns=("", "version or value"), rows=rows)
    return Section(title="Environment", name="environment", tables=[table])


def list_versions(machine: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what ``read_machine`` has read of software, as rows of a table."""
    names = {"cuda": "CUDA of torch", "nccl": "NCCL", "driver": "NVIDIA driver", "platform": "system"}
    known = [(label, str(machine[key])) for key, label in names.items() if machine[key]]
    return [("Python", machine["python"]), *machine["packages"].items(), *known]


def format_host(machine: Mapping[str, Any]) -> str:
    """Return the processor and the memory of a machine in a few words."""
    return f"{machine['cpu']}, {machine['num_cpus']} threads, {machine['host_memory_gib']:,} GiB"


def format_devices(devices: Sequence[Mapping[str, Any]]) -> str:
    """Return the devices of all ranks in a few words."""
    counts = Counter(
        device["name"] + ("" if device["memory_gib"] is None else f" ({device['memory_gib']} GiB)")
        for device in devices
    )
    return ", ".join(f"{number} x {name}" for name, number in counts.items())


def format_ranks(environment: Mapping[str, Any]) -> str:
    """Return how many ranks ran on how many nodes."""
    nodes = environment["num_nodes"]
    return f"{environment['world_size']} on {nodes} node{'s' if nodes > 1 else ''}"


def _read_device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": device.type, "memory_gib": None}
    properties = torch.cuda.get_device_properties(device)
    return {"name": properties.name, "memory_gib": round(properties.total_memory / _GIB, 1)}


def _get_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _read_nccl() -> str | None:
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _read_driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"Kernel Module\D*?\s([\d.]+)", path.read_text()) if path.exists() else None
    return found[1] if found else None


def _read_cpu() -> str:
    path = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", path.read_text(), re.MULTILINE) if path.exists() else None
    return found[1] if found else platform.machine()


def _read_commit() -> str | None:
    """Return the commit of the current folder, with ``-dirty`` after it where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=3, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
