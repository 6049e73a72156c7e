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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, but not to mypy

from lit_fsdp.strategy.roll_call import wait_until

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


def leave_old_keys(store: Store, environ: Mapping[str, str], *, rank: int, world_size: int, timeout_s: float) -> Store:
    """Return a part of a store that has no old keys, see Note [Old keys]; all ranks must call it.

    Args:
        store: That of torchrun's agent. Any other is new, and comes back as it is.
        environ: Of this process.
        rank: Of this process.
        world_size: How many ranks start.
        timeout_s: How long to wait for them.

    Raises:
        ValueError: Nodes may join and leave, which a shared store does not survive.
        RuntimeError: The ranks did not all come.
    """
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store
    check_nodes(environ, _read_command(os.getppid()))
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
    word, offered = uuid4().hex, f"lit_fsdp/start/{world_size}"
    name = word if rank == 0 else ""
    if rank == 0:
        store.set(offered, name)
    answers = {r: f"{name}/{r}" for r in range(1, world_size)}

    def is_agreed() -> bool:
        nonlocal name
        if rank == 0:
            return bool(store.check(list(answers.values())))
        if store.check([offered]) and (now := store.get(offered).decode()) != name:
            name = now
            store.set(f"{name}/{rank}", word)
        return bool(name and store.check([f"{name}/all"])) and word in json.loads(store.get(f"{name}/all"))

    if wait_until(is_agreed, timeout_s):
        if rank == 0:
            store.set(f"{name}/all", json.dumps([store.get(key).decode() for key in answers.values()]))
        return name
    missing = [str(r) for r, key in answers.items() if not store.check([key])] if rank == 0 else []
    named = f" (missing: {', '.join(missing)})" if missing else ""
    raise RuntimeError(
        f"start_timeout_s: rank {rank}: the {world_size} ranks of this start did not meet within {timeout_s:g} s"
        f"{named}; if nodes have joined or left, start each torchrun with {_OWN_STORE}=1"
    )


def _read_command(pid: int) -> list[str]:
    """Return the command line of a process; empty where the system does not tell."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []
