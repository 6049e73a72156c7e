"""What could be trained in place of what a configuration has: adapters, quantized weights, a loss in chunks."""

from __future__ import annotations

import warnings
from copy import deepcopy
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.planning.planned_step import PlannedStep, prepare_step
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.sharding.shard import check_wire
from lit_fsdp.sharding.wrap import plan_module

_LOSS_CHUNKS = 8


def prepare_variants(
    trainer: Trainer,
    module: LightningModule,
    data: LightningDataModule | None,
    *,
    keeps_result: bool = False,
    searches: bool = True,
) -> list[tuple[PlannedStep, dict[str, Any]]]:
    """Return the step of a run, and those of what could be trained in its place, with the settings for it.

    What cannot be built is left out, and with ``searches`` the reason is a note of the first. What building another
    says is kept as its notes, where it was not said of the first. ``keeps_result`` leaves out what trains otherwise.
    """
    variants = [v for v in _list_variants(module) if not keeps_result or v[1].keys() <= {"model.loss_chunks"}]
    first, warned = _prepare_quietly(trainer, module, data, searches=searches)
    for warning in warned:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    steps, notes = [], list(first.notes)
    said = {*notes, *(str(warning.message) for warning in warned)}
    for variant, changes in variants:
        try:
            step, warned = _prepare_quietly(trainer, variant, data, searches=searches)
            settings, dtypes = step.strategy.settings, step.strategy.precision_plugin.mixed_precision
            check_wire(step.module, plan_module(step.module, settings.wrap), settings.sharding, dtypes.build_policy())
        except ValueError as error:
            if searches:
                notes.append(f"search: not tried: {', '.join(changes)}: {error}")
            continue
        own = [*step.notes, *(str(warning.message) for warning in warned)]
        steps.append((replace(step, notes=[note for note in own if note not in said]), changes))
    trainer.strategy.connect(module)
    return [(replace(first, notes=notes), {}), *steps]


def _prepare_quietly(
    trainer: Trainer, module: LightningModule, data: LightningDataModule | None, *, searches: bool
) -> tuple[PlannedStep, list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        return prepare_step(trainer, module, data, searches=searches), caught


def _list_variants(module: LightningModule) -> list[tuple[LightningModule, dict[str, Any]]]:
    """Return copies of a module that would train otherwise, none of them built yet, with the settings for it.

    A task says by its attributes ``loss_chunks``, ``lora`` and ``quantization`` what it can do, and by
    ``frozen_names`` what its setting ``freeze`` has, which adapters take the place of.
    """
    chunks = {"model.loss_chunks": _LOSS_CHUNKS} if _takes_chunks(module) else {}
    trainings: list[dict[str, Any]] = [{}]
    if getattr(module, "lora", "") is None:
        released: dict[str, Any] = {"model.freeze": []} if getattr(module, "frozen_names", ()) else {}
        trainings.append({"model.lora": {"r": 16}, **released})
        if getattr(module, "quantization", "") is None:
            trainings.append({**trainings[-1], "model.quantization": {"type": "nf4"}})
    found = []
    choices = [{**more, **training} for training in trainings for more in ([{}, chunks] if chunks else [{}])]
    for changes in choices[1:]:
        variant: Any = deepcopy(module)
        if "model.loss_chunks" in changes:
            variant.loss_chunks = changes["model.loss_chunks"]
        if "model.lora" in changes:
            variant.lora = LoRA(**changes["model.lora"])
        if "model.freeze" in changes:
            variant.frozen_names = ()
        if "model.quantization" in changes:
            variant.quantization = Quantization(**changes["model.quantization"])
        found.append((variant, changes))
    return found


def _takes_chunks(module: LightningModule) -> bool:
    task: Any = module
    if getattr(module, "loss_chunks", None) != 1:
        return False
    try:
        task.loss_chunks = _LOSS_CHUNKS
        task.check_loss_chunks()
    except ValueError:
        return False
    finally:
        task.loss_chunks = 1
    return True
