"""``fit --launcher ray``: checks a run as ``fit`` does, then lets Ray Train start its ranks."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from typing_extensions import override

from lit_fsdp.checkpoint.latest import describe_interruption
from lit_fsdp.cli.messages import quieten_ray, report_error
from lit_fsdp.cli.ray_options import Workers, choose_workers, count_asked, list_worker_args
from lit_fsdp.cli.train import TrainerCLI
from lit_fsdp.errors import ConfigError, is_debugging
from lit_fsdp.strategy.processes import is_torchrun

_REACH_S = 5.0  # how long the port of a cluster may take to answer


class RayDriverCLI(TrainerCLI):
    """Reads and checks a run, and has Ray start it. Nothing is computed in this process."""

    @override
    def refuse_launcher(self) -> None:
        """Nothing: this is the one that it names."""

    @override
    def before_instantiate_classes(self) -> None:
        trainer = self.settings["trainer"]
        if is_torchrun(os.environ):
            raise ConfigError("launcher: got 'ray' under torchrun, which has started ranks: start it with python")
        if (num_tasks := os.environ.get("SLURM_STEP_NUM_TASKS", "1")) != "1":
            raise ConfigError(
                f"launcher: got 'ray' in each of {num_tasks} tasks of SLURM: start it once, with python or srun "
                "--ntasks=1"
            )
        names = ("num_workers", "max_failures", "resources_per_worker", "address", "cpu_processes")
        given = {name: self.settings.get(name) for name in names}
        numbers = {**given, "devices": trainer["devices"], "num_nodes": trainer["num_nodes"]}
        asked = count_asked(numbers, cpu_processes=given["cpu_processes"])
        self.workers = choose_workers(
            asked,
            connect(given["address"]),
            accelerator=str(trainer["accelerator"]),
            resources=given["resources_per_worker"] or {},
            may_be_fewer=asked[0] is None and given["cpu_processes"] is None,
        )
        trainer["devices"], trainer["num_nodes"] = "auto", 1
        # Where SLURM has given the machines to Ray, its tasks are no ranks; Lightning would take them for some.
        os.environ.pop("SLURM_NTASKS", None)
        for name in [name for name in logging.root.manager.loggerDict if name.startswith("lightning.")]:
            logging.getLogger(name).setLevel(logging.WARNING)  # the first rank says it again
        super().before_instantiate_classes()
        self.devices = self.workers.num_workers

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        precision = self.config_init[self.subcommand]["trainer"]["precision"]
        if self.workers.has_gpus and precision in ("16-mixed", "16", 16):
            kwargs["precision"] = "bf16-mixed"  # only to build it here; the workers' GPUs have float16
        return super().instantiate_trainer(accelerator="cpu", **kwargs)

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        self.run_and_explain(subcommand)  # without a look at the run's folder, which workers begin

    @override
    def start(self, subcommand: str) -> None:
        make: Callable[[], dict[str, Any]] = getattr(self.datamodule, "make_ray_datasets", dict)
        if datasets := make():
            _check_spare_cpu(self.workers)
        try:
            self._run(datasets)
        except SystemExit:
            report_error(describe_interruption(self.run_root.glob("version_*/checkpoints")))
            raise

    def _run(self, datasets: Mapping[str, Any]) -> None:
        run_on_ray(
            list_worker_args(self.given_args),
            self.workers,
            datasets,
            max_failures=self.settings["max_failures"],
            run_root=self.run_root,
        )


def connect(address: str | None) -> list[dict[str, float]]:
    """Connect to a cluster, or start one that ends with this process; return the resources of each machine.

    Raises:
        ConfigError: Ray is not installed, or there is no such cluster.
    """
    try:
        import ray
        import ray.train
    except ImportError as error:
        raise ConfigError(f"launcher: got 'ray': {error}: pip install 'lit_fsdp[ray]'") from error
    name = "RAY_ADDRESS" if address is None else "address"
    given = address or os.environ.get("RAY_ADDRESS")
    if given not in (None, "auto", "local"):
        _check_address(name, given)
    try:
        quiet = {"worker_process_setup_hook": f"{quieten_ray.__module__}.{quieten_ray.__name__}"}
        ray.init(address=address, include_dashboard=False, logging_level="ERROR", runtime_env=quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        if is_debugging():
            raise
        raise ConfigError(
            f"{name}: got {given!r}: no Ray cluster there ({str(error).splitlines()[0]}): expected the host:port that "
            "`ray start --head` prints, or local"
        ) from error
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def run_on_ray(
    args: list[str], workers: Workers, datasets: Mapping[str, Any], *, max_failures: int, run_root: Path
) -> None:
    """Run a command line on every worker until it has ended well. SIGTERM and Ctrl-C end the workers, too.

    Args:
        args: The same on all.
        workers: How many, and what each has.
        datasets: What Ray Data streams to them, by name.
        max_failures: How often they start again; -1 for no limit.
        run_root: Folder of all runs of this name; all machines must have it.

    Raises:
        RuntimeError: It failed once more; with what the first rank that failed said.
    """
    import ray
    from ray.train import ControllerError, WorkerGroupError

    from lit_fsdp.cli.ray_worker import make_trainer

    storage = (run_root / "ray").absolute()
    trainer = make_trainer(args, workers, datasets, max_failures=max_failures, storage=storage)
    # In a thread, as a handler that leaves ``ray.get`` makes the exit code 1 whatever it asks for; seen in ray 2.60.
    outcome: Future[Any] = Future()
    threading.Thread(target=_fit, args=(trainer, outcome), daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        outcome.result()
    except WorkerGroupError as error:
        # Their exceptions, with tracebacks as text; the last line is their own.
        failures = {rank: str(failure).strip() or repr(failure) for rank, failure in error.worker_failures.items()}
        # Others only saw their connection to the first one break.
        first = min(failures, key=lambda rank: ("Connection " in failures[rank].splitlines()[-1], rank))
        text = failures[first]
        if is_debugging():
            sys.stderr.write(f"{text}\n")
        line = text.splitlines()[-1].removeprefix("RuntimeError: ")
        raise RuntimeError(f"rank {first} on Ray failed: {line}") from error
    except ControllerError as error:
        raise RuntimeError(f"Ray could not run the workers: {error.controller_failure}") from error
    finally:
        ray.shutdown()


def _fit(trainer: Any, outcome: Future[Any]) -> None:
    try:
        outcome.set_result(trainer.fit())
    except Exception as error:  # noqa: BLE001  raised where it is waited for
        outcome.set_exception(error)


def _check_spare_cpu(workers: Workers) -> None:
    """Refuse ranks that take all CPUs, so that Ray Data would wait for one without an end."""
    import ray

    taken, total = workers.num_workers * workers.resources.get("CPU", 0), ray.cluster_resources().get("CPU", 0)
    if taken + 1 > total:
        raise ConfigError(
            f"num_workers: {workers.num_workers} ranks take {taken:g} of {total:g} CPUs, and Ray Data needs one of its "
            "own: set num_workers lower, or resources_per_worker to less CPU"
        )


def _check_address(name: str, given: str) -> None:
    """Refuse what nobody answers at: Ray would try for minutes."""
    host, _, port = given.rpartition(":")
    if "://" in given or not host or not port.isdecimal():
        raise ConfigError(f"{name}: got {given!r}: expected host:port of a cluster, auto or local")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{name}: got {given!r}: nobody answers there ({error}): expected the host:port that `ray start --head` "
            "prints"
        ) from None
