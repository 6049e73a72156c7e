"""The process group of a run, and whether gloo will reach other nodes."""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment

# Private, seen in lightning 2.6.6: what its own strategies are made of.
from lightning.fabric.utilities.distributed import _destroy_dist_connection, _init_dist_connection
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # as in roll_call.py

from lit_fsdp.sharding.torch_internals import set_timeout
from lit_fsdp.strategy.elastic import advise_own_store, check_nodes, has_agent_store, read_command
from lit_fsdp.strategy.roll_call import call_roll, open_store, sign_in

MAX_TIMEOUT_S = 1e9  # 30 years; torch counts in nanoseconds, of which 64 bits hold 290
_VARIABLE = "GLOO_SOCKET_IFNAME"
_STARTED: WeakSet[dist.ProcessGroup] = WeakSet()  # by us: a group that a user has started keeps its timeout


def init_process_group(
    environment: ClusterEnvironment,
    device: torch.device,
    *,
    num_nodes: int,
    timeout_s: float,
    start_timeout_s: float,
    facts: Mapping[str, str],
    notes: Mapping[str, str] | None = None,
    find_lost: Callable[[], str | None] = lambda: None,
) -> None:
    """Start the process group, unless there is one, once all ranks have come. All ranks must call it.

    That of an earlier run in this process goes on with the timeout of this one.

    Args:
        environment: Says who this rank is, and where the ranks meet.
        device: Of this rank.
        num_nodes: Over how many the ranks are spread.
        timeout_s: For collectives.
        start_timeout_s: How long to wait for ranks to come.
        facts: What has to be the same on all of them.
        notes: What may differ; rank 0 warns if it does.
        find_lost: See ``call_roll``.

    Raises:
        ValueError: gloo would listen where other nodes cannot reach it; ranks cannot meet or start with different
            things; nodes may change under a shared store.
        RuntimeError: Ranks are missing.
    """
    if dist.is_initialized():
        world = dist.group.WORLD
        if world is not None and world in _STARTED:
            set_timeout(world, timeout_s)
        return
    if num_nodes > 1:
        check_gloo_address(environment.main_address, os.environ)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"  # gloo for what is in host memory
    own: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    rank, world_size = environment.global_rank(), environment.world_size()
    if is_kept := has_agent_store(os.environ):
        check_nodes(os.environ, read_command(os.getppid()))
    store = call_roll(
        open_store(environment.main_address, environment.main_port, rank=rank, timeout_s=start_timeout_s),
        sign_in(rank, facts, notes),
        world_size=world_size,
        timeout_s=start_timeout_s,
        find_lost=find_lost,
        is_kept=is_kept,
        advice=advise_own_store(os.environ),
        say=lambda line: rank_zero_warn(f"{line}: the slowest decides how long a step takes, the smallest what fits"),
    )
    store.set_timeout(timedelta(seconds=timeout_s))
    own["store"] = PrefixStore("default_pg", store)  # as torch does with one that it makes itself
    _init_dist_connection(environment, backend, timeout=timedelta(seconds=timeout_s), **own)
    _STARTED.update(world for world in [dist.group.WORLD] if world is not None)
    atexit.register(_leave)  # Lightning does it for plain "nccl" only


def _leave() -> None:
    _destroy_dist_connection()
    wait_for_threads()


def wait_for_threads(timeout_s: float = 1.0) -> None:
    """Return once no other thread of this process computes, or after ``timeout_s``.

    A thread of gloo that still drops the tensors of the last collective when Python ends would end the process with
    SIGABRT, "terminate called without an active exception" (seen in torch 2.13): it waits for the GIL then.
    """
    threads = Path("/proc/self/task")
    if not threads.is_dir():  # not Linux
        time.sleep(min(timeout_s, 0.1))
        return
    own, deadline = str(threading.get_native_id()), time.monotonic() + timeout_s
    is_idle = False
    while not is_idle and time.monotonic() < deadline:
        time.sleep(0.002)  # without the GIL: who waits for it gets it
        with suppress(OSError):  # a thread that ends while it is looked at
            states = [thread.joinpath("stat").read_text() for thread in threads.iterdir() if thread.name != own]
            is_idle = not any(state.rpartition(")")[2].split()[0] == "R" for state in states)


def check_gloo_address(main_address: str, environ: Mapping[str, str]) -> None:
    """Refuse a host whose name stands for an address of its own only, such as Debian's 127.0.1.1.

    gloo listens on the address of the host's name and would hang or fail later, where NCCL finds its way. Runs
    whose main address is a loopback one are on one machine and let through. A node that is refused ends alone; the
    others wait for it until their timeout.
    """
    if len(environ.get(_VARIABLE, "")) > 1 or _is_loopback(main_address):
        return
    host = socket.gethostname()
    address = _find_gloo_address(host)
    if _is_loopback(address):
        names = [name for _, name in socket.if_nameindex() if name != "lo"]
        raise ValueError(
            f"gloo, which NCCL needs beside it, would listen on {address}, which is what the host name {host} stands "
            f"for and no other node can reach: set {_VARIABLE} to the network interface that nodes reach each other "
            f"by (here: {', '.join(names) or 'none'})"
        )


def _find_gloo_address(host: str) -> str:
    """Return where gloo listens: the first address of the host that can be bound to, else the loopback.

    As torch 2.13 does in ``ProcessGroupGloo::createDefaultDevice``.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as attempt:
                attempt.bind(address)
        except OSError:
            continue
        return str(address[0])
    return "127.0.0.1"


def _is_loopback(address: str) -> bool:
    """Whether an address is one of the machine itself; of names only ``localhost`` is known to be."""
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"
