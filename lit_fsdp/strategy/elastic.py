"""What a rank can know of torchrun, which starts ranks again, maybe on another number of nodes.

Note [Old keys]: the agents of torchrun keep one store through all restarts of their ranks, and torch leaves the keys
of a process group in it. Ranks that start again find where the earlier ones listened, and fail with
``connectFullMesh failed`` or hang. The number of the restart is no way out: each agent counts for itself. So the ranks
of a start agree on a name of their own, and meet below it. Seen in torch 2.13
(pytorch#135712); drop when torch does so.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, but not to mypy

_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@dataclass(frozen=True, kw_only=True)
class Agent:
    """The torchrun that has started this rank.

    Args:
        pid: Its process.
        num_agents: Of the run, one a node.
        num_restarts: How often this one has started ranks again that failed.
        max_restarts: How often it would.
    """

    pid: int
    num_agents: int
    num_restarts: int
    max_restarts: int

    @property
    def is_alive(self) -> bool:
        """Whether it can still end or restart this rank."""
        return os.getppid() == self.pid


def find_agent(environ: Mapping[str, str]) -> Agent | None:
    """Return what torchrun says of itself, ``None`` where it has not started this process."""
    try:
        count, most = int(environ["TORCHELASTIC_RESTART_COUNT"]), int(environ["TORCHELASTIC_MAX_RESTARTS"])
        num_agents = int(environ["GROUP_WORLD_SIZE"])
    except KeyError:
        return None
    return Agent(pid=os.getppid(), num_agents=num_agents, num_restarts=count, max_restarts=most)


def open_store(environ: Mapping[str, str], *, rank: int, world_size: int, timeout_s: float) -> Store | None:
    """Return a store for the process group without old keys, see Note [Old keys]. All ranks must call it.

    ``None`` where there is none to share: torch then makes one that ends with its ranks.

    Raises:
        ValueError: Nodes may join and leave, which a shared store does not survive.
        RuntimeError: The ranks did not all come.
    """
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    check_nodes(environ, _read_command(os.getppid()))
    store = TCPStore(
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        world_size,
        is_master=False,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )
    return PrefixStore(agree_on_start(store, rank=rank, world_size=world_size, timeout_s=timeout_s), store)


def check_nodes(environ: Mapping[str, str], command: Sequence[str]) -> None:
    """Refuse a number of nodes that may change while agents share a store: some keep the address of one that left.

    Args:
        environ: Of this process, which has the variables of torchrun.
        command: Of torchrun; empty where it cannot be read.

    Raises:
        ValueError: With the command that works.
    """
    nodes = re.search(r"(?:^|\s)--?nnodes[=\s](\S+)", " ".join(command))
    given = nodes[1] if nodes else environ.get("PET_NNODES", "")
    least, _, most = given.partition(":")
    if most and least != most:
        raise ValueError(
            f"torchrun --nnodes={given}: its agents share a store that does not survive a change of nodes: start each "
            f"of them as {_OWN_STORE}=1 torchrun --nnodes={given} ..."
        )


def agree_on_start(store: Store, *, rank: int, world_size: int, timeout_s: float) -> str:
    """Return a name that only the ranks of this start know, in a store that may be full of names of earlier ones.

    The first rank offers a name, the others answer with a word of their own, and what it says then has all these
    words: so nobody takes what ranks that are gone have left.

    Raises:
        RuntimeError: The ranks did not all come.
    """
    deadline = time.monotonic() + timeout_s
    word, offered = uuid4().hex, f"lit_fsdp/start/{world_size}"
    name = word if rank == 0 else ""
    if rank == 0:
        store.set(offered, name)
    while time.monotonic() < deadline:
        if rank == 0:
            answers = [f"{name}/{r}" for r in range(1, world_size)]
            if store.check(answers):
                store.set(f"{name}/all", json.dumps([store.get(key).decode() for key in answers]))
                return name
        elif store.check([offered]):
            if (now := store.get(offered).decode()) != name:
                name = now
                store.set(f"{name}/{rank}", word)
            if store.check([f"{name}/all"]) and word in json.loads(store.get(f"{name}/all")):
                return name
        time.sleep(0.02)
    raise RuntimeError(
        f"rank {rank}: the {world_size} ranks of this start did not meet within {timeout_s:.0f} s; if nodes have "
        f"joined or left, start each torchrun with {_OWN_STORE}=1"
    )


def _read_command(pid: int) -> list[str]:
    """Return the command line of a process; empty where the system does not tell."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []
