"""``plan``: what a run will take of its GPUs, from the same configuration, with nothing of it there."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from typing_extensions import override

from lit_fsdp.cli_errors import ConfigError, describe_exception, is_debugging
from lit_fsdp.config_files import check_config_files
from lit_fsdp.dry_run import fake_ranks, trace_training_step
from lit_fsdp.memory_trace import StepMemory
from lit_fsdp.plan import Plan, Ranks, describe_plan, parse_memory
from lit_fsdp.plan_report import draw_plan, print_report
from lit_fsdp.processes import count_devices
from lit_fsdp.quantized_layers import iterate_quantized
from lit_fsdp.shard_optimizer import to_local
from lit_fsdp.strategy import FSDP2Strategy
from lit_fsdp.traffic import predict_bytes, predict_collectives
from lit_fsdp.trainer_cli import TrainerCLI
from lit_fsdp.units import plan_module

_MAX_TRACED = 2  # micro-batches: all after the second hold what it holds
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


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """What an engine is given: everything that a step is made of.

    Args:
        module: On the meta device.
        strategy: With its settings and dtypes.
        batch: One micro-batch.
        ranks: That take part.
        num_micro_batches: Accumulated in a step.
        clip_norm: Of ``gradient_clip_val``.
        build_optimizer: Called once the module is sharded.
    """

    module: LightningModule
    strategy: FSDP2Strategy
    batch: Mapping[str, Any]
    ranks: Ranks
    num_micro_batches: int
    clip_norm: float | None
    build_optimizer: Callable[[], torch.optim.Optimizer]


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
        exact: bool = True,
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
            exact: Follow the step operator by operator on tensors without values. The only engine so far.
            out: Folder for `plan.json` and the picture `plan.png`. By default nothing is written.
        """
        device_bytes = None if device_memory is None else _check(parse_memory, device_memory)
        if not exact:
            raise ConfigError("exact: got false: there is no other engine yet; leave it out")
        if out is not None:
            _make_folder(out)
        found = _plan(self, model, datamodule)
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


def _plan(trainer: PlanTrainer, module: LightningModule, data: LightningDataModule | None) -> Plan:
    strategy = trainer.strategy
    if not isinstance(strategy, FSDP2Strategy):
        raise ConfigError(
            f"trainer.strategy: got {type(strategy).__name__}: only FSDP2Strategy can be planned; set fsdp2"
        )
    settings, per_node = strategy.settings, strategy.num_processes
    sizes = {"world_size": trainer.num_nodes * per_node, "ranks_per_node": per_node}
    num_replicas, num_shards = settings.mesh.resolve(**sizes)
    ranks = Ranks(num_nodes=trainer.num_nodes, per_node=per_node, num_replicas=num_replicas, num_shards=num_shards)
    if settings.offload is not None and num_shards == 1:
        raise ConfigError("plan: offload on one rank cannot be followed yet: the shard is the whole; use --devices 2")
    batch = _make_batch(data)
    notes = _prepare_module(trainer, module, data)
    step = PlannedStep(
        module=module,
        strategy=strategy,
        batch=batch,
        ranks=ranks,
        num_micro_batches=trainer.accumulate_grad_batches,
        clip_norm=_find_clip_norm(trainer),
        build_optimizer=lambda: _find_optimizer(module),
    )
    memory = trace_exactly(step)
    if settings.compile is not None:
        notes.append("compile is left out: compiled blocks keep fewer activations, which no trace can see")
    if settings.offload is not None:
        notes.append("offload: shards, gradients and optimizer state are in host memory, where the optimizer runs")
    counts = {"num_replicas": num_replicas, "num_micro_batches": trainer.accumulate_grad_batches}
    units, dtypes = plan_module(module, settings.units), strategy.precision_plugin.mixed_precision
    return Plan(
        memory=memory,
        ranks=ranks,
        traffic=predict_bytes(module, units, settings.sharding, dtypes, num_shards=num_shards, **counts),
        collectives=predict_collectives(units, settings.sharding, num_shards=num_shards, **counts),
        num_micro_batches=trainer.accumulate_grad_batches,
        quantized_bytes=_count_quantized(module),
        engine="exact trace",
        notes=notes,
    )


def trace_exactly(step: PlannedStep) -> StepMemory:
    """Return the memory of a step, followed operator by operator on tensors without values."""
    module, strategy = step.module, step.strategy
    find_context: Callable[..., AbstractContextManager[None]]
    find_context = getattr(module, "enter_dry_run", lambda _: nullcontext())
    try:
        with fake_ranks(step.ranks.world_size), find_context(step.batch):
            return trace_training_step(
                module,
                strategy.settings,
                step.batch,
                dtypes=strategy.precision_plugin.mixed_precision,
                compute_loss=lambda batch: _take_loss(module.training_step(batch, 0)),  # looked up when it is sharded
                build_optimizer=step.build_optimizer,
                step_name="training_step",
                ranks_per_node=step.ranks.per_node,
                num_micro_batches=min(step.num_micro_batches, _MAX_TRACED),
                clip_norm=step.clip_norm,
            )
    except RuntimeError as error:  # also what torch raises when values are asked for that fake tensors have not
        if is_debugging():
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(
            f"plan: the step of {type(module).__name__} cannot run on tensors without values ({reason}); see "
            "docs/planning.md"
        ) from error


def _take_loss(output: Any) -> Tensor:
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss


def _make_batch(data: LightningDataModule | None) -> Mapping[str, Any]:
    make: Any = getattr(data, "make_example_batch", None)
    if make is None:
        what = "data: not set" if data is None else f"data: {type(data).__name__} has no method make_example_batch"
        raise ConfigError(
            f"{what}: a plan needs one that returns a micro-batch of the sizes that training will have, without "
            "reading data; see docs/planning.md"
        )
    batch: Mapping[str, Any] = make()
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"data: {type(data).__name__}.make_example_batch returned a {type(batch).__name__}: expected a dict of "
            "tensors"
        )
    return batch


def _prepare_module(trainer: PlanTrainer, module: LightningModule, data: LightningDataModule | None) -> list[str]:
    """Let a module build its model as at the start of ``fit``, but for its data and weights."""
    if not module.automatic_optimization:
        raise ConfigError(
            f"model: {type(module).__name__} optimizes manually: only training_step knows what a step is, so it "
            "cannot be planned"
        )
    trainer.state.fn, trainer.training = TrainerFn.FITTING, True
    trainer.strategy.connect(module)
    module.trainer = trainer
    prepare: Any = getattr(module, "prepare_plan", lambda _: [])
    notes = list(prepare(data))
    module.configure_model()
    # What is logged goes nowhere.
    for name in ("log", "log_dict"):
        setattr(module, name, lambda *_, **__: None)
    module.train()
    if not any(parameter.is_meta for parameter in module.parameters()):
        notes.append("the model was not built on the meta device: this process has allocated it")
    return notes


def _find_optimizer(module: LightningModule) -> torch.optim.Optimizer:
    found: Any = module.configure_optimizers()
    while isinstance(found, list | tuple | dict):
        if isinstance(found, list | tuple) and len(found) != 1 and not isinstance(found[0], list | tuple):
            raise ConfigError(
                f"model: {type(module).__name__}.configure_optimizers returned {len(found)} optimizers: expected one"
            )
        found = found["optimizer"] if isinstance(found, dict) else found[0]
    optimizer: torch.optim.Optimizer = found.optimizer if isinstance(found, LightningOptimizer) else found
    return optimizer


def _find_clip_norm(trainer: Trainer) -> float | None:
    by_value = trainer.gradient_clip_algorithm == "value"
    return None if by_value or not trainer.gradient_clip_val else float(trainer.gradient_clip_val)


def _count_quantized(module: nn.Module) -> int:
    tensors: list[Tensor] = []
    for _, layer in iterate_quantized(module):
        named = {**dict(layer.named_parameters(recurse=False)), **dict(layer.named_buffers(recurse=False))}
        tensors += [to_local(tensor.detach()) for tensor in named.values() if tensor.dtype == torch.uint8]
    return sum(tensor.numel() for tensor in tensors)


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
