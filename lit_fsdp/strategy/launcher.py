"""The ranks that this process starts: how they begin, and how they end together."""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from signal import SIGKILL, SIGTERM, Signals
from typing import Any

# Private, seen in lightning 2.6.6: the launcher of its own strategies, which has no settings for any of this.
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

from lit_fsdp.strategy.notebook_launcher import is_notebook
from lit_fsdp.strategy.signals import hold_signals

_PATIENCE_S = 15.0
_LOST: dict[object, str] = {}


class Launcher(_SubprocessScriptLauncher):
    """Starts the other ranks of this node, as Lightning does, and gives this one time to say what went wrong."""

    held_signals: Collection[Signals] = ()  # kept from the ranks until they listen

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return self.num_processes * self.num_nodes == 1  # then it starts none

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            check_nodes_by_hand(self.num_nodes, os.environ)
            # It sets LOCAL_RANK, by which the next Trainer of a kernel would take itself for a rank of some launcher.
            if not (is_notebook() and self.is_interactive_compatible):
                with hold_signals(self.held_signals):
                    self._call_children_scripts()
                PatientObserver(os.getpid(), self.procs).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


def check_nodes_by_hand(num_nodes: int, environ: Mapping[str, str]) -> None:
    """Refuse several nodes that cannot find each other: no launcher is there that would tell them where they are.

    Raises:
        ValueError: A variable is missing, or gives this node a number that there is not.
    """
    number = environ.get("NODE_RANK") or environ.get("GROUP_RANK")
    given = {"MASTER_ADDR": environ.get("MASTER_ADDR"), "MASTER_PORT": environ.get("MASTER_PORT"), "NODE_RANK": number}
    missing = [name for name, value in given.items() if not value]
    if num_nodes > 1 and missing:
        raise ValueError(
            f"num_nodes: got {num_nodes}: not set in the environment: {', '.join(missing)}: on every node set "
            f"MASTER_ADDR and MASTER_PORT to a free port of the first one, and NODE_RANK to its own number, 0 to "
            f"{num_nodes - 1}; or start it with torchrun or srun"
        )
    if number and int(number) >= num_nodes:
        raise ValueError(
            f"NODE_RANK: got {number} in the environment: expected 0 to {num_nodes - 1}, as trainer.num_nodes is "
            f"{num_nodes}; unset it to run on this node alone"
        )


class PatientObserver(_ChildProcessObserver):
    """Waits before it kills this process because a rank it started failed.

    Lightning's looks every five seconds, maybe just before this process sees the broken connection itself, says so
    and reports. One that hangs in a collective of NCCL ends so much later.
    """

    @override
    def _terminate_all(self) -> None:
        time.sleep(_PATIENCE_S)
        if self._child_processes:
            super()._terminate_all()


def outlive_children(launcher: Any) -> None:
    """Keep Lightning from killing this process, which has yet to say what went wrong, because a rank it started failed.

    Whoever ends the run must then end those ranks, as ``stop_children`` does. A launcher without ``procs``, or none,
    has no children.
    """
    if watched := getattr(launcher, "procs", None):
        launcher.procs = list(watched)
        watched.clear()  # the list that the observer looks at


def stop_children(launcher: Any, patience_s: float = 5.0) -> dict[int, int]:
    """Wait briefly for the local ranks this process started, kill those that are left, return the exit codes.

    A rank that fails like this one ends by itself and says why; one that waits in a collective never would.
    """
    outlive_children(launcher)
    children: list[subprocess.Popen[bytes]] = getattr(launcher, "procs", [])
    codes = {}
    for rank, child in enumerate(children, start=1):
        try:
            codes[rank] = child.wait(timeout=patience_s)
        except subprocess.TimeoutExpired:
            patience_s = 0.1
            child.kill()
            child.wait()
    children.clear()
    return codes


def describe_ended(launcher: Any) -> str | None:
    """Return which of the local ranks that this process started are gone, ``None`` while all are there."""
    children: list[subprocess.Popen[bytes]] = getattr(launcher, "procs", [])
    codes = {rank: code for rank, child in enumerate(children, start=1) if (code := child.poll()) is not None}
    return describe_failed(codes) if codes else None


def describe_failed(codes: Mapping[int, int]) -> str:
    """Return which ranks failed and where to look, by the exit codes of ranks."""
    failed = {rank: code for rank, code in codes.items() if code}
    if SIGKILL in (-code for code in failed.values()):
        killed = " and ".join(f"rank {rank}" for rank, code in failed.items() if code == -SIGKILL)
        return f"{killed} was killed (SIGKILL), and left no message: the kernel does so when host memory runs out"
    died = {rank: -code for rank, code in failed.items() if code < 0 and -code != SIGTERM}  # that ends the others
    if died:
        ended = " and ".join(f"rank {rank} was ended by {Signals(number).name}" for rank, number in died.items())
        return f"{ended}, and left no message"
    who = " and ".join(f"rank {rank} (exit code {code})" for rank, code in failed.items()) or "another rank"
    return f"{who} failed first, see the message there"


def note_lost(owner: object, line: str | None) -> None:
    """Let this process end with code 1 and a line of what ``owner`` has lost by then; with ``None``, no longer."""
    _LOST.pop(owner, None)
    if line is not None:
        _LOST[owner] = line


# Here, so that it runs after what anything registers later: no code can be returned, and nothing comes after it.
@atexit.register
def end_for_lost() -> None:
    """End this process with code 1 if something was lost. Unregister it where an exit code is chosen otherwise."""
    for line in _LOST.values():
        sys.stderr.write(f"error: {line}\n")
    if _LOST:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
