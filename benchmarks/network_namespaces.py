"""Machines with a network of their own, on this one: Linux network namespaces on a switch, each link as slow as wanted.

Needs the rights of root, ``ip`` and, for a rate, ``tc``, both of Debian's package iproute2.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count

INTERFACE = "eth0"  # of every node, besides its loopback
_END_S = 10.0  # what still runs in a node gets this long to end

_numbers = count()  # of this process: two sets of nodes may be there at once


@dataclass(frozen=True, kw_only=True)
class Node:
    """A network namespace with a host name and an address.

    Args:
        name: Of the namespace, and of the host as processes in it see it. No server knows it.
        address: That the other nodes reach it at.
    """

    name: str
    address: str

    def wrap(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs this command in the node: its process is that command, so signals reach it."""
        rename = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name]
        return ["ip", "netns", "exec", self.name, *rename, *command]


def find_obstacle() -> str | None:
    """Return why namespaces cannot be had here; ``None`` where they can."""
    try:
        with namespaces(1, rate="1gbit"):
            return None
    except FileNotFoundError as error:
        return f"no {error.filename}: install iproute2"
    except RuntimeError as error:
        return str(error)


@contextmanager
def namespaces(number: int, *, rate: str | None = None) -> Iterator[list[Node]]:
    """Yield this many nodes that reach each other; in the end, kill what runs in them and remove them.

    Args:
        number: How many, at most 250.
        rate: What each link carries in each direction at once, as ``tc`` writes it: ``1gbit``, ``200mbit``. Whatever
            a node sends to several others shares it, and so does what it receives. ``None`` is as fast as memory.

    Raises:
        RuntimeError: ``ip`` or ``tc`` failed; its command and its answer.
        FileNotFoundError: They are not there.
    """
    prefix = f"lit-fsdp-{os.getpid()}-{next(_numbers)}"  # a host name has no underscores
    switch, nodes = f"{prefix}-switch", [Node(name=f"{prefix}-{k}", address=f"10.77.0.{k + 1}") for k in range(number)]
    with ExitStack() as stack:
        for name in (switch, *(node.name for node in nodes)):
            _run("ip", "netns", "add", name)
            stack.callback(_remove, name)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for k, node in enumerate(nodes):
            port = f"port{k}"
            ends = ("name", INTERFACE, "netns", node.name, "type", "veth", "peer", "name", port, "netns", switch)
            _run("ip", "link", "add", *ends)
            _run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            _run("ip", "-n", node.name, "addr", "add", f"{node.address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _run("ip", "-n", node.name, "link", "set", interface, "up")
            # What leaves an end of the link: the node's is what it sends, the switch's is what it receives.
            for namespace, interface in ((node.name, INTERFACE), (switch, port)) if rate is not None else ():
                limit = ("root", "tbf", "rate", str(rate), "burst", "256kb", "latency", "400ms")
                _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, *limit)
        yield nodes


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def _remove(name: str) -> None:
    """Remove a namespace; it would live on, and its links with it, as long as a process is in it."""
    deadline = time.monotonic() + _END_S
    while (pids := _run("ip", "netns", "pids", name).split()) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)
    _run("ip", "netns", "del", name)
