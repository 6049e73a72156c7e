"""Gets a step of a run ready as ``fit`` would, but without data, weights and GPUs: for engines to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lit_fsdp.adapters.layers import list_adapter_parameters
from lit_fsdp.errors import ConfigError
from lit_fsdp.optim.factory import Optimizer
from lit_fsdp.planning.auto_strategy import AutoFSDP2Strategy
from lit_fsdp.planning.estimate import make_example_batch
from lit_fsdp.planning.step_parts import NoEstimateError, Ranks
from lit_fsdp.sharding.float8 import check_unadapted
from lit_fsdp.sharding.mixed_precision import cast_parameters
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy
from lit_fsdp.strategy.processes import count_devices
from lit_fsdp.strategy.trainer_settings import (
    check_trainer,
    count_micro_batches,
    is_accumulation_derived,
    refuse_overfit,
)


class PlannedTrainer(Trainer):
    """A Trainer that never trains: for what modules ask of theirs while they build a model and its optimizer."""

    @property
    @override
    def estimated_stepping_batches(self) -> int | float:
        """A number that schedules take, without a look at the data."""
        return self.max_steps if self.max_steps > 0 else 1_000_000


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


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """Everything that a step is made of."""

    module: LightningModule  # on the meta device, cast as it will be
    strategy: FSDP2Strategy
    batch: Any  # one micro-batch
    ranks: Ranks
    num_micro_batches: int
    clip_norm: float | None
    notes: Sequence[str]  # what to know about it

    @property
    def device_type(self) -> str:
        """``cuda`` or ``cpu``."""
        return self.strategy.root_device.type

    def build_optimizer(self) -> torch.optim.Optimizer:
        """Return the module's optimizer, once it is sharded."""
        task: Any = self.module
        settings = getattr(task, "optimizer_settings", None)
        if isinstance(settings, Optimizer) and settings.name == "adamw_8bit_paged":  # needs a GPU, and counts alike
            task.optimizer_settings = replace(settings, name="adamw_8bit")
        found: Any = task.configure_optimizers()
        while isinstance(found, list | tuple | dict):
            if isinstance(found, list | tuple) and len(found) != 1 and not isinstance(found[0], list | tuple):
                name = type(task).__name__
                raise ConfigError(f"model: {name}.configure_optimizers returned {len(found)} optimizers: expected one")
            found = found["optimizer"] if isinstance(found, dict) else found[0]
        optimizer: torch.optim.Optimizer = found.optimizer if isinstance(found, LightningOptimizer) else found
        return optimizer


def prepare_step(
    trainer: Trainer, module: LightningModule, data: LightningDataModule | None, *, searches: bool = False
) -> PlannedStep:
    """Build the model of a run on the meta device, and return what its step is made of.

    ``searches`` says whether other settings will be tried as well.

    Raises:
        ConfigError: It is none that can be planned.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, FSDP2Strategy):
        raise ConfigError(
            f"trainer.strategy: got {type(strategy).__name__}: only FSDP2Strategy can be planned; set fsdp2"
        )
    _check_step(trainer, module, data)
    strategy.check_module(module)
    num_micro_batches = count_micro_batches(trainer)
    strategy.settings.check_accumulation(
        num_micro_batches=None if is_accumulation_derived(trainer) else num_micro_batches,
        is_automatic=module.automatic_optimization,
    )
    notes = _prepare_module(trainer, module, data)
    if num_micro_batches is None:
        if (number := trainer.accumulate_grad_batches) != 1:
            raise ConfigError(
                f"trainer.accumulate_grad_batches: got {number} beside GradientAccumulationScheduler, which decides "
                "it: leave one of them out"
            )
        notes.append("GradientAccumulationScheduler changes how many micro-batches a step has: here it is one")
    if (float8 := strategy.settings.float8) is not None:
        float8.check_dtypes(strategy.precision_plugin.mixed_precision)
        check_unadapted(module)
    try:
        batch = make_example_batch(data)
    except NoEstimateError as error:
        raise ConfigError(str(error)) from None
    if isinstance(strategy, AutoFSDP2Strategy):
        help_text = "" if searches else "; add --search true"
        notes.append(f"fsdp2_auto chooses its settings when fit starts: here are those of fsdp2{help_text}")
    return describe_step(trainer, module, batch, notes=notes)


def describe_step(trainer: Trainer, module: LightningModule, batch: Any, *, notes: Sequence[str] = ()) -> PlannedStep:
    """Cast a module that has its model already, and return what its step is made of."""
    strategy = trainer.strategy
    assert isinstance(strategy, FSDP2Strategy)
    ranks = Ranks(num_nodes=trainer.num_nodes, per_node=strategy.num_processes)
    ranks.resolve(strategy.settings.mesh)  # refuses what does not fit
    cast_parameters(module, strategy.precision_plugin.mixed_precision, keep=list_adapter_parameters(module))
    clip_norm = None if trainer.gradient_clip_algorithm == "value" else trainer.gradient_clip_val
    return PlannedStep(
        module=module,
        strategy=strategy,
        batch=batch,
        ranks=ranks,
        num_micro_batches=trainer.accumulate_grad_batches,
        clip_norm=float(clip_norm) if clip_norm else None,
        notes=notes,
    )


def enter_fit(trainer: Trainer, module: LightningModule) -> None:
    """Let a module see its trainer as in ``fit``, where what it logs goes nowhere."""
    trainer.state.fn, trainer.training = TrainerFn.FITTING, True
    trainer.strategy.connect(module)
    module.trainer = trainer
    for name in ("log", "log_dict"):
        setattr(module, name, lambda *_, **__: None)


def _check_step(trainer: Trainer, module: LightningModule, data: LightningDataModule | None) -> None:
    """Refuse what ``fit`` refuses before it reads data."""
    trainer.state.fn = TrainerFn.FITTING
    check_trainer(trainer)
    if any(owner.__module__.startswith("lit_fsdp.tasks.") for owner in type(data).__mro__):  # which have our loaders
        refuse_overfit(trainer)
    for name in ("training_step", "configure_optimizers"):
        if getattr(type(module), name) is getattr(LightningModule, name) and name not in vars(module):
            raise ConfigError(f"model: {type(module).__name__} has no {name}, so it does not train; write one")


def _prepare_module(trainer: Trainer, module: LightningModule, data: LightningDataModule | None) -> list[str]:
    """Let a module build its model as at the start of ``fit``, but for its data and weights."""
    if not module.automatic_optimization:
        raise ConfigError(
            f"model: {type(module).__name__} optimizes manually: only training_step knows what a step is, so it "
            "cannot be planned"
        )
    enter_fit(trainer, module)
    trainer.datamodule = data  # type: ignore[attr-defined]  # which models look at, such as for the size of images
    prepare: Any = getattr(module, "prepare_plan", lambda _: [])
    notes = list(prepare(data))
    module.configure_model()
    module.train()
    if not any(parameter.is_meta for parameter in module.parameters()):
        notes.append("the model was not built on the meta device: this process has allocated it")
    return notes
