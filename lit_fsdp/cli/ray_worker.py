"""What a worker of Ray does: it becomes a rank, and runs the command line. Needs Ray."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
import ray.train
from lightning.pytorch import Callback
from lightning_utilities.core.rank_zero import rank_zero_only
from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
from ray.train.backend import Backend
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchConfig, TorchTrainer
from typing_extensions import override

from lit_fsdp.callbacks import Preemption, RayReport
from lit_fsdp.callbacks.ray_report import find_reported_checkpoint
from lit_fsdp.cli.messages import describe_exception, redact_logs
from lit_fsdp.cli.ray_options import Workers
from lit_fsdp.cli.train import TrainerCLI, run_trainer
from lit_fsdp.errors import ConfigError, is_debugging


class RankBackend(Backend):
    """Lets the strategy start the process group, once it knows that all ranks start with the same."""

    share_cuda_visible_devices = True  # each rank sees the GPUs of all ranks of its machine, and takes one by number


class RankConfig(TorchConfig):
    """Has Ray take ``RankBackend``."""

    @property
    @override
    def backend_cls(self) -> type[RankBackend]:
        return RankBackend


class RayWorkerCLI(TrainerCLI):
    """A run that Ray has started: it reports to Ray, and leaves signals to it."""

    @override
    def choose_parts(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        parts = super().choose_parts(settings)
        given = settings["callbacks"] or []
        given = given if isinstance(given, list | tuple) else [given]  # those of the user warn themselves
        callbacks: list[Callback] = [c for c in parts["callbacks"] if not isinstance(c, Preemption) or c in given]
        if not any(isinstance(callback, RayReport) for callback in callbacks):
            callbacks.append(RayReport())
        return {**parts, "callbacks": callbacks}


def make_trainer(
    args: Sequence[str], workers: Workers, datasets: Mapping[str, Any], *, max_failures: int, storage: Path
) -> TorchTrainer:
    """Return a trainer of Ray whose workers run a command line.

    Args:
        args: The same on all.
        workers: How many, and what each has.
        datasets: What Ray Data streams to them, by name.
        max_failures: How often they start again; -1 for no limit.
        storage: Where Ray keeps what it knows of its runs, in a folder for each.
    """
    return TorchTrainer(
        run_rank,
        train_loop_config={"args": list(args), "folder": str(Path.cwd())},
        torch_config=RankConfig(),
        datasets=dict(datasets),
        scaling_config=ScalingConfig(
            num_workers=workers.num_workers,
            use_gpu=workers.has_gpus,
            resources_per_worker=dict(workers.resources),
        ),
        run_config=RunConfig(
            name=f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{uuid4().hex[:6]}",
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=max_failures),
            # Else several lines for each report.
            logging_config=LoggingConfig(log_level="INFO" if is_debugging() else "ERROR"),
        ),
    )


def run_rank(config: Mapping[str, Any]) -> None:
    """Run the command line as the rank that this worker is.

    Args:
        config: ``args``, and the ``folder`` to start in, which all machines must have.

    Raises:
        RuntimeError: It did not end well; with the one line that says why.
    """
    context = ray.train.get_context()
    rank, local_size = context.get_world_rank(), context.get_local_world_size()
    folder = Path(config["folder"])
    if not folder.is_dir():
        raise RuntimeError(
            f"{folder}: not on {socket.gethostname()}: start the run in a folder that all machines share"
        )
    os.chdir(folder)
    if str(folder) not in sys.path:  # for `class_path: mytask.MyTask`
        sys.path.insert(0, str(folder))
    first = broadcast_from_rank_zero(
        {"address": ray.util.get_node_ip_address(), "port": _find_free_port(), "local_size": local_size}
        | {"ckpt_path": find_reported_checkpoint()}
        if rank == 0
        else None
    )
    assert first is not None
    if local_size != first["local_size"]:
        raise RuntimeError(
            f"num_workers: {local_size} ranks on {socket.gethostname()}, {first['local_size']} on that of rank 0: "
            "expected as many on each: choose num_workers or resources_per_worker so"
        )
    # As torchrun has them, which Lightning and the command line know.
    values = {
        "RANK": rank,
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": context.get_node_rank(),
        "MASTER_ADDR": first["address"],
        "MASTER_PORT": first["port"],
        "TORCHELASTIC_RUN_ID": context.get_experiment_name(),
    }
    os.environ.update({name: str(value) for name, value in values.items()})
    rank_zero_only.rank = rank  # type: ignore[attr-defined]
    again = [f"--ckpt_path={found}"] if (found := first["ckpt_path"]) else []
    redact_logs()
    try:
        run_trainer([*config["args"], *again], RayWorkerCLI)
    except SystemExit as stop:
        if stop.code:
            raise RuntimeError(f"ended with code {stop.code}, see its output") from None
    except Exception as error:
        line = error.line if isinstance(error, ConfigError) else describe_exception(error)
        if line is None or is_debugging():
            raise
        raise RuntimeError(line) from None


def _find_free_port() -> int:
    with socket.socket() as attempt:
        attempt.bind(("", 0))
        return int(attempt.getsockname()[1])
