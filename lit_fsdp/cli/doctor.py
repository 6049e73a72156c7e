"""``doctor``: what this machine has, and what is missing of it, on one screen to paste into an issue."""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement

from lit_fsdp.cache import get_cache_dir
from lit_fsdp.checkpoint.space import measure_free
from lit_fsdp.errors import get_first_line
from lit_fsdp.parsing.parser import run_function
from lit_fsdp.reporting.environment import format_host, list_versions, read_machine
from lit_fsdp.reporting.sections import Table, print_table
from lit_fsdp.strategy.process_group import check_gloo_address

_SUMMARY = "Tell what this machine has and what is missing, on one screen to paste into an issue."
_GIB = 2**30
_FULL_GIB = 1.0  # free on a disk, below which it is named
_DEVELOPMENT = "test"  # the extra that no user needs
_MANY_FILES = 4096  # that a process may have open: workers of loaders hand on each tensor as one


def run_doctor(args: Sequence[str]) -> int:
    """Print what the machine has and what is wrong with it; return 1 if that keeps runs from starting.

    Args:
        args: The command line, the command first.
    """
    code: int = run_function(examine, args[1:], command="doctor", description=_SUMMARY)
    return code


def examine() -> int:
    """Look at versions, GPUs, disks and the network of this machine. Nothing is started or changed."""
    machine, problem = read_machine(), _start_cuda()
    broken = list_broken(requires("lit_fsdp") or [])
    gpus = [("GPUs", "cannot be used")] if problem else _list_gpus()
    rows = [*list_versions(machine), ("host", format_host(machine)), *gpus, *_list_disks()]
    print_table(Table(title="This machine", columns=(), rows=rows))
    of_gpus = [f"CUDA does not start: {problem}"] if problem else _check_gpus(machine)
    warnings = [*of_gpus, *_check_disks(), *_check_network(), *_check_limits()]
    extras = list_extras(requires("lit_fsdp") or [], metadata("lit_fsdp").get_all("Provides-Extra") or [])
    for extra, missing in extras.items():
        state = f"not installed: {', '.join(missing)}: pip install 'lit_fsdp[{extra}]'" if missing else "installed"
        print(f"extra {extra}: {state}")
    for line in warnings:
        print(f"warning: {line}")
    for line in broken:
        print(f"error: {line}")
    if not broken:
        print("nothing that a run needs is missing")
    return 1 if broken else 0


def list_broken(requirements: Sequence[str]) -> list[str]:
    """Return what is wrong with installed packages, a line each.

    Args:
        requirements: As of a package's metadata; those of extras are not looked at.
    """
    found = []
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        wanted = f"pip install '{requirement.name}{requirement.specifier}'"
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            found.append(f"{requirement.name} is not installed: {wanted}")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            found.append(f"{requirement.name} is {installed}: expected {requirement.specifier}: {wanted}")
    return found


def list_extras(requirements: Sequence[str], extras: Sequence[str]) -> dict[str, list[str]]:
    """Return what is not installed of each extra that is of use to users."""
    parsed = [Requirement(text) for text in requirements]
    found: dict[str, list[str]] = {}
    for extra in extras:
        if extra != _DEVELOPMENT:
            own = [r.name for r in parsed if r.marker and r.marker.evaluate({"extra": extra})]
            found[extra] = [name for name in own if not _is_installed(name)]
    return found


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _start_cuda() -> str:
    """Return why the GPUs of the driver cannot be used, as where that is older than torch; empty if they can.

    Before, torch counts GPUs by the driver's library, also those that are then not to be had.
    """
    try:
        if torch.cuda.device_count():
            torch.cuda.init()
    except Exception as error:  # noqa: BLE001  whatever it is, this command is asked for it
        return get_first_line(error)
    return ""


def _list_gpus() -> list[tuple[str, str]]:
    count = torch.cuda.device_count()
    rows = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        compute = f"compute {properties.major}.{properties.minor}"
        rows.append((f"GPU {index}", f"{properties.name}, {_describe_memory(index)}, {compute}"))
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    if pairs:
        direct = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
        rows.append(("GPU to GPU", f"{direct} of {len(pairs)} pairs reach each other without host memory"))
    return rows or [("GPUs", "none that torch sees")]


def _describe_memory(index: int) -> str:
    try:  # to tell, a GPU is opened: it may be full, or belong to another process alone
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        return f"which cannot be opened ({get_first_line(error)})"
    return f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"


def _check_gpus(machine: Mapping[str, Any]) -> list[str]:
    count = torch.cuda.device_count()
    if not count and machine["driver"] is not None:
        if machine["cuda"] is None:
            return ["there is an NVIDIA driver, but torch is built for CPUs: install torch for CUDA, see pytorch.org"]
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = f": CUDA_VISIBLE_DEVICES is {shown!r}" if shown is not None else ": is nvidia-smi well?"
        return [f"there is an NVIDIA driver, but torch sees no GPU{hidden}"]
    names = {torch.cuda.get_device_properties(index).name for index in range(count)}
    lines = [f"GPUs differ ({', '.join(sorted(names))}): a step takes as long as the slowest"] if len(names) > 1 else []
    old = [index for index in range(count) if torch.cuda.get_device_capability(index) < (8, 0)]
    return [*lines, f"GPU {old[0]} computes bfloat16 slowly or not at all: set precision 16-mixed"] if old else lines


def _find_disks() -> dict[str, Path]:
    """Return what each folder that runs write to is for."""
    from huggingface_hub.constants import HF_HOME

    places = {"runs, here": Path(), "cache of data": get_cache_dir(None), "cache of models": Path(HF_HOME)}
    # Where workers of loaders put batches.
    return places | ({"shared memory": Path("/dev/shm")} if sys.platform == "linux" else {})


def _read_free_gib(path: Path) -> float | None:
    """Return what is free on the disk of a folder that may not be there yet; ``None`` if nobody lets us look."""
    try:
        return measure_free(path.absolute()) / _GIB
    except OSError:
        return None


def _list_disks() -> list[tuple[str, str]]:
    free = {name: _read_free_gib(path) for name, path in _find_disks().items()}
    return [(f"free for {name}", "cannot be read" if gib is None else f"{gib:,.1f} GiB") for name, gib in free.items()]


def _check_disks() -> list[str]:
    lines = []
    for name, path in _find_disks().items():
        gib = _read_free_gib(path)
        if gib is None:
            lines.append(f"the folder for {name} cannot be read by you: set another one, or its rights")
        elif gib < _FULL_GIB:
            lines.append(f"{gib:.1f} GiB are free for {name}")
    return lines


def _check_network() -> list[str]:
    try:
        check_gloo_address("another node", os.environ)
    except ValueError as error:
        return [f"on several nodes: {error}".replace(f"the host name {socket.gethostname()}", "its host name")]
    return []


def _check_limits() -> list[str]:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or most >= _MANY_FILES:
        return []
    return [f"a process may have {most} files open, which many data workers exceed: ulimit -n {_MANY_FILES}"]
