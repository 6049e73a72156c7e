"""What a process can know of SLURM, whose srun starts one task for each rank."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

_SHELLS = ("bash", "interactive")  # names of jobs that Lightning takes for a user at a prompt


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """The tasks of a step.

    Args:
        rank: Of this one.
        per_node: How many each node has.
        nodes: On how many nodes.
        first_node: That of rank 0.
    """

    rank: int
    per_node: int
    nodes: int
    first_node: str

    @property
    def total(self) -> int:
        """How many there are."""
        return self.per_node * self.nodes


def find_tasks(environ: Mapping[str, str], parent: str = "") -> Tasks | None:
    """Return the tasks of which this process is one; ``None`` outside of SLURM, and in a shell that SLURM has opened.

    Args:
        environ: Of this process.
        parent: The name of the program that has started it.

    Raises:
        ValueError: The job has tasks, but srun has not started this process, or not as many on each node.
    """
    # A script that srun has started has a shell for a parent, too; but a prompt is one task, where there are several.
    is_task = parent == "slurmstepd" or int(environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1
    is_shell = environ.get("SLURM_JOB_NAME") in _SHELLS and not is_task
    if "SLURM_NTASKS" not in environ or is_shell:
        return None
    total = int(environ["SLURM_NTASKS"])
    if "SLURM_STEP_ID" not in environ and (total > 1 or "SLURM_PROCID" not in environ):
        raise ValueError(
            f"SLURM_NTASKS: got {total}, but SLURM has not started this process as one of them: start it with srun, "
            "such as srun python -m lit_fsdp fit ..., or unset SLURM_NTASKS to run without SLURM"
        )
    nodes = int(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES", "1"))
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    if not re.fullmatch(r"\d+(\(x\d+\))?", counts):
        raise ValueError(
            f"SLURM started {total} tasks on {nodes} nodes, {counts} of them: expected as many on each node: use "
            f"--ntasks-per-node={max(total // nodes, 1)} instead of --ntasks"
        )
    names = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "localhost")
    return Tasks(
        rank=int(environ["SLURM_PROCID"]), per_node=total // nodes, nodes=nodes, first_node=_get_first_node(names)
    )


def find_own_tasks() -> Tasks | None:
    """Return ``find_tasks`` of this process."""
    try:
        parent = Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    except OSError:  # it has ended
        parent = ""
    return find_tasks(os.environ, parent)


def mend_variables(environ: MutableMapping[str, str], tasks: Tasks) -> None:
    """Let Lightning read of the step what it reads of the job, which may have more nodes or tasks than the step.

    Below salloc, it would take each task for a run of its own, by the name of the job. Seen in lightning 2.6.6; drop
    when its ``SLURMEnvironment`` reads ``SLURM_STEP_*``.
    """
    environ["SLURM_NTASKS_PER_NODE"] = str(tasks.per_node)
    environ.setdefault("MASTER_ADDR", tasks.first_node)
    if environ.get("SLURM_JOB_NAME") in _SHELLS:
        environ["SLURM_JOB_NAME"] = "lit_fsdp"


def describe_idle(tasks: Tasks, num_gpus: int) -> str | None:
    """Return how many GPUs of this node no task uses; ``None`` if all are used.

    Args:
        tasks: Of the step.
        num_gpus: That this task sees: those of the node, or with ``--gpus-per-task`` its own.
    """
    if num_gpus <= max(tasks.per_node, 1):
        return None
    return (
        f"SLURM started {tasks.per_node} of the processes on this node, which has {num_gpus} GPUs: the others stay "
        f"idle: use srun --ntasks-per-node={num_gpus}, or set trainer.devices if that is meant"
    )


def choose_port(environ: Mapping[str, str]) -> int:
    """Return the port where the ranks of a job meet, as Lightning's ``SLURMEnvironment`` chooses it."""
    return int(environ.get("MASTER_PORT") or 15_000 + int(environ.get("SLURM_JOB_ID", "0")[-4:]))


def _get_first_node(names: str) -> str:
    """Return ``n7`` of ``n[7-8,10]``, ``n[7-8],m1`` and ``n7,m1``."""
    first = re.match(r"([^\[,]*)(?:\[([^\],-]*)[^\]]*\])?([^,]*)", names)
    assert first is not None
    return "".join(part or "" for part in first.groups())
