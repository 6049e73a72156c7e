"""Where a run took place: versions and hardware, without anything that names the machine or its user."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

_PACKAGES = ("lit_fsdp", "torch", "lightning", "transformers", "peft", "bitsandbytes")
_GIB = 2**30


def read_environment(trainer: Trainer) -> dict[str, Any]:
    """Return versions, devices of all ranks and the commit of the current folder; all ranks must call it."""
    devices = _gather(_read_device(trainer.strategy.root_device))
    return {
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _find_version(name)) is not None},
        "cuda": torch.version.cuda,
        "nccl": _read_nccl(),
        "driver": _read_driver(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _read_cpu(),
        "num_cpus": os.cpu_count(),
        "host_memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB, 1),
        "world_size": trainer.world_size,
        "num_nodes": trainer.num_nodes,
        "devices": devices,
        "commit": _read_commit() if trainer.is_global_zero else None,
    }


def _gather(own: dict[str, Any]) -> list[dict[str, Any]]:
    if not dist.is_available() or not dist.is_initialized():
        return [own]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return parts


def _read_device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": device.type, "memory_gib": None}
    properties = torch.cuda.get_device_properties(device)
    return {"name": properties.name, "memory_gib": round(properties.total_memory / _GIB, 1)}


def _find_version(package: str) -> str | None:
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
