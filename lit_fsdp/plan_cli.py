"""``plan``: what a run will take of its GPUs, from the same configuration, with nothing of it there."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from typing_extensions import override

from lit_fsdp.cli_errors import ConfigError, describe_exception, is_debugging
from lit_fsdp.config_files import check_config_files
from lit_fsdp.plan import describe_plan, parse_memory
from lit_fsdp.plan_report import draw_plan, print_report
from lit_fsdp.planner import plan_step, prepare_step
from lit_fsdp.processes import count_devices
from lit_fsdp.trainer_cli import TrainerCLI

_OWN_OPTIONS = {"--device-memory": "--device_memory"}


def run_plan(args: Sequence[str]) -> int:
    """Plan a training step of a configuration, and print what it takes.

    Args:
        args: The command line, the command first.
    """
    config_files = check_config_files(args)
    warnings.filterwarnings("ignore", message=".*LightningCLI's args parameter.*")
    warnings.filterwarnings("ignore", category=UserWarning, module="torch.amp.grad_scaler")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    own = [_spell_option(arg) for arg in args]
    PlanCLI(own, default_run_name=config_files[0].stem if config_files else None)
    return 0


class PlanTrainer(Trainer):
    """A Trainer that never trains: for what modules ask of theirs while they build a model and its optimizer."""

    @property
    @override
    def estimated_stepping_batches(self) -> int | float:
        """A number that schedules take, without a look at the data."""
        return self.max_steps if self.max_steps > 0 else 1_000_000

    def plan(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        devices: int | None = None,  # noqa: ARG002  read before there is a Trainer
        nodes: int | None = None,  # noqa: ARG002
        device_memory: str | None = None,
        exact: bool = False,
        out: Path | None = None,
    ) -> None:
        """Plan the memory and the traffic of a training step, without a GPU and without weights.

        Takes the configuration of `fit`. Nothing is allocated, and of a pretrained model only its config is read.

        Args:
            model: That would be trained.
            datamodule: That would give the data.
            devices: GPUs of each node. By default what the configuration says, else 1.
            nodes: How many nodes. By default what the configuration says.
            device_memory: Of one GPU, with a unit, such as 16GiB: says whether the step fits, with 1.15 times the
                tensors for what the allocator takes on top, and 1 GiB for CUDA and NCCL.
            exact: Follow the step operator by operator on tensors without values: some seconds to minutes, for any
                model. Otherwise it is counted from what the model is made of, in a moment, where that can be.
            out: Folder for `plan.json` and the picture `plan.png`. By default nothing is written.
        """
        device_bytes = None if device_memory is None else _check(parse_memory, device_memory)
        if out is not None:
            _make_folder(out)
        found = plan_step(prepare_step(self, model, datamodule), exact=exact)
        print_report(found, device_bytes)
        if out is not None:
            (out / "plan.json").write_text(json.dumps(describe_plan(found, device_bytes), indent=1) + "\n")
            draw_plan(found, out / "plan.png")
            print(f"written: {out / 'plan.json'}, {out / 'plan.png'}")


class PlannedGpu(CUDAAccelerator):
    """GPUs that need not be there: settings are checked, and dtypes chosen, as with real ones."""

    @staticmethod
    @override
    def parse_devices(devices: Any) -> Any:
        return list(range(count_devices(devices) or 1))

    @staticmethod
    @override
    def is_available() -> bool:
        return True


class PlanCLI(TrainerCLI):
    """Reads the configuration of ``fit``, and builds of it what a plan needs."""

    trainer_type = PlanTrainer

    @override
    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        return {self.command: {"model", "datamodule"}}

    @override
    def before_instantiate_classes(self) -> None:
        trainer = self._get(self.config, "trainer")
        given = {name: self._get(self.config, name) for name in ("devices", "nodes")}
        for name, value in given.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name}: got {value}: expected 1 or more")
        default = count_devices(trainer["devices"]) or self._get(self.config, "cpu_processes") or 1
        trainer["devices"] = default if given["devices"] is None else given["devices"]
        trainer["num_nodes"] = given["nodes"] or trainer["num_nodes"]
        # Nothing of a run that would write, connect or listen is built.
        for name in ("callbacks", "profiler"):
            trainer[name] = None
        trainer["logger"] = False
        super().before_instantiate_classes()

    @override
    def choose_parts(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        self.save_config_callback = None
        accelerator = "cpu" if settings["accelerator"] == "cpu" else PlannedGpu()
        return {"callbacks": [], "logger": False, "enable_checkpointing": False, "accelerator": accelerator}

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except ValueError as error:
            line = describe_exception(error)
            if line is None or is_debugging():
                raise
            raise ConfigError(line) from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out: got {folder}: {error.strerror}; choose another folder") from error


def _check(parse: Callable[[str], int], text: str) -> int:
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _spell_option(arg: str) -> str:
    name, sign, value = arg.partition("=")
    return _OWN_OPTIONS.get(name, name) + sign + value
