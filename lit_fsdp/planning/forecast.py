"""What the closed form says of a module under its strategy: for ``plan``, for the search, and for a run to check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from lit_fsdp.optim.factory import Optimizer
from lit_fsdp.planning.closed_form import StepPrediction, predict_step
from lit_fsdp.planning.estimate import ModelToTrain
from lit_fsdp.planning.overrides import find_overrides
from lit_fsdp.planning.reader import UnreadableModuleError
from lit_fsdp.planning.step_parts import MicroBatch
from lit_fsdp.sharding.wrap import plan_module
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy


class NoForecastError(ValueError):
    """There is no closed form of this step; says why."""


def measure_batch(module: LightningModule, batch: Any) -> MicroBatch:
    """Return the shape of a micro-batch, as the module's ``measure_batch`` says.

    Raises:
        NoForecastError: It has no such method, or says that this batch has no such shape.
    """
    measure: Any = getattr(module, "measure_batch", None)
    found: MicroBatch | None = measure(batch) if measure is not None and isinstance(batch, Mapping) else None
    if found is None:
        raise NoForecastError(f"{_name(module)} does not say what shape its batches have (measure_batch)")
    return found


def find_optimizer(module: LightningModule) -> Optimizer:
    """Return the settings of a module's optimizer.

    Raises:
        NoForecastError: It builds one of its own, of which nothing is known.
    """
    optimizer = getattr(module, "optimizer_settings", None)
    owner, replaced = find_overrides(module)
    if "configure_optimizers" in replaced:
        raise NoForecastError(f"{owner} overrides configure_optimizers, so it builds an optimizer of its own")
    if not isinstance(optimizer, Optimizer):
        raise NoForecastError(f"{_name(module)} builds an optimizer of its own")
    return optimizer


def guess_shape(batch: Mapping[str, Any]) -> MicroBatch:
    """Return what a search by traces takes for the shape of a micro-batch that nobody measures: rows of one token."""
    tensors = [value for value in batch.values() if isinstance(value, Tensor) and value.dim()]
    return MicroBatch(rows=len(tensors[0]) if tensors else 1, length=1)


def guess_optimizer(module: LightningModule) -> Optimizer:
    """Return what a search by traces times in place of an optimizer of the module's own."""
    given = getattr(module, "optimizer_settings", None)
    return given if isinstance(given, Optimizer) else Optimizer()


def describe_model(module: LightningModule, strategy: FSDP2Strategy) -> ModelToTrain:
    """Return a module as estimates of its time take it.

    Raises:
        NoForecastError: It builds an optimizer of its own.
    """
    return ModelToTrain(
        module=module,
        units=plan_module(module, strategy.settings.wrap),
        dtypes=strategy.precision_plugin.mixed_precision,
        optimizer=find_optimizer(module),
    )


def forecast_step(
    module: LightningModule,
    strategy: FSDP2Strategy,
    micro_batch: MicroBatch,
    *,
    world_size: int,
    ranks_per_node: int,
    num_micro_batches: int,
    device_type: str,
) -> StepPrediction:
    """Predict a step of the first rank by the closed form.

    Args:
        module: With its model, cast as it will be; sharded or not.
        strategy: Its settings and dtypes.
        micro_batch: The shape of one.
        world_size: How many ranks there are.
        ranks_per_node: How many of them each node has.
        num_micro_batches: Accumulated in a step.
        device_type: ``cuda`` or ``cpu``.

    Raises:
        NoForecastError: The module or its optimizer is none that the closed form has rules for.
    """
    try:
        return predict_step(
            module,
            plan_module(module, strategy.settings.wrap),
            strategy.settings,
            dtypes=strategy.precision_plugin.mixed_precision,
            optimizer=find_optimizer(module),
            micro_batch=micro_batch,
            world_size=world_size,
            ranks_per_node=ranks_per_node,
            num_micro_batches=num_micro_batches,
            device_type=device_type,
        )
    except UnreadableModuleError as error:
        raise NoForecastError(f"{error.name}: {error.reason}") from error


def _name(module: LightningModule) -> str:
    return type(module).__name__.removeprefix("FSDP")
