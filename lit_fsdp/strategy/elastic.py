"""What a rank can know of torchrun, which starts ranks again, maybe on another number of nodes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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


def has_agent_store(environ: Mapping[str, str]) -> bool:
    """Whether ranks meet in the store that the agents of torchrun keep, through all restarts."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def advise_own_store(environ: Mapping[str, str]) -> str:
    """Return what to add to an error where ranks that start again on several nodes do not meet; else nothing."""
    agent = find_agent(environ) if has_agent_store(environ) else None
    return (
        f"; if a node was replaced, start each torchrun with {_OWN_STORE}=1" if agent and agent.num_agents > 1 else ""
    )


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


def read_command(pid: int) -> list[str]:
    """Return the command line of a process; empty where the system does not tell."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
