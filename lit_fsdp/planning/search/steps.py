"""The search around a configured step: what else could be trained, and with which settings it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lightning.pytorch import LightningDataModule, Trainer

from lit_fsdp.planning.estimate import Hardware, describe_model, guess_optimizer, guess_shape, measure_batch
from lit_fsdp.planning.planned_step import PlannedStep
from lit_fsdp.planning.search.search import Candidate, Problem, Variant, search
from lit_fsdp.planning.search.traced import make_tracer
from lit_fsdp.planning.step_parts import MicroBatch, NoEstimateError
from lit_fsdp.strategy.trainer_settings import count_micro_batches

Steps = Sequence[tuple[PlannedStep, Mapping[str, Any]]]  # the configured one first; with the settings for each


def search_steps(
    trainer: Trainer, steps: Steps, data: LightningDataModule | None, hardware: Hardware, device_bytes: int
) -> tuple[list[Candidate], str]:
    """Return what a search around the configured step finds, and the unit of its speeds.

    Prints why settings have to be traced, where they have to.

    Args:
        trainer: Of the configuration.
        steps: As ``prepare_variants`` returns them.
        data: That would give the batches.
        hardware: To estimate speed for.
        device_bytes: Memory of a GPU, that a step has to fit.
    """
    step = steps[0][0]
    is_split = step.strategy.settings.mesh.tensor > 1
    # Adapters, quantized layers and other optimizers are refused there.
    problem, unit, reason = _describe_problem(steps[:1] if is_split else steps, hardware, device_bytes)
    if isinstance(size := getattr(data, "batch_size", None), int):
        problem = replace(problem, batch_size=size)
    if is_split:
        problem = replace(problem, tries_optimizers=False)
    if reason:
        print(f"note: {reason}: each setting is traced, up to a minute each, and batch and model stay as they are")
        return search(replace(problem, trace=make_tracer([step], None))), unit
    if splits_batch(trainer, step, data):
        problem = replace(problem, splits_batch=True, measure=partial(_measure_size, step, data))
        problem = replace(problem, sets_accumulation=getattr(data, "global_batch_size", None) is None)
    try:
        return search(problem), unit
    except NoEstimateError as error:
        print(f"note: {error}: no closed form, so each setting is traced, up to a minute each")
    return search(replace(problem, trace=make_tracer([step for step, _ in steps], data))), unit


def list_new_notes(steps: Steps, chosen: Candidate | None) -> list[str]:
    """Return what is to be known of the chosen model and was not said of the configured one.

    Args:
        steps: That were searched.
        chosen: The candidate, if one fits.
    """
    changes = {} if chosen is None else chosen.changes
    step, own = max((pair for pair in steps if pair[1].items() <= changes.items()), key=lambda pair: len(pair[1]))
    return list(step.notes) if own else []


def _describe_problem(steps: Steps, hardware: Hardware, device_bytes: int) -> tuple[Problem, str, str]:
    """Return what to search, the unit of speed, and why only a trace can read the step, if so.

    Then it is the configured model alone, as ``fsdp2_auto`` has it, and an optimizer of the module's own is timed as
    AdamW, which goes for all settings alike.
    """
    step, unit, reason = steps[0][0], "tokens/s", ""
    try:
        micro_batch = measure_batch(step.module, step.batch)
    except NoEstimateError as error:
        micro_batch, unit, reason = guess_shape(step.batch), "rows/s", str(error)
    try:
        variants = [Variant(model=describe_model(s.module, s.strategy), changes=changes) for s, changes in steps]
    except NoEstimateError as error:
        reason = reason or str(error)
    if reason:
        variants = [Variant(model=describe_model(step.module, step.strategy, guess_optimizer(step.module)))]
    problem = Problem(
        variants=variants,
        settings=step.strategy.settings,
        ranks=step.ranks,
        micro_batch=micro_batch,
        num_micro_batches=step.num_micro_batches,
        splits_batch=False,
        hardware=hardware,
        device_bytes=device_bytes,
        device_type=step.device_type,
        tries_optimizers=not reason,
    )
    return problem, unit, reason


def _measure_size(step: PlannedStep, data: Any, size: int) -> MicroBatch:
    """Return the shape of a micro-batch of another size: what must be masked may change with it."""
    given, data.batch_size = data.batch_size, size
    try:
        return measure_batch(step.module, data.make_example_batch())
    finally:
        data.batch_size = given


def splits_batch(trainer: Trainer, step: PlannedStep, data: Any) -> bool:
    """Whether micro-batches may be of another size, with accumulation in return, and all else stays the same."""
    counts = [trainer.val_check_interval, trainer.limit_train_batches]  # as whole numbers, of micro-batches
    is_counting = any(isinstance(count, int) and not isinstance(count, bool) for count in counts)
    is_sized = isinstance(getattr(data, "batch_size", None), int)
    is_sized = is_sized and getattr(data, "max_frames_per_batch", None) is None  # by which speech is batched instead
    is_fixed = count_micro_batches(trainer) is not None
    return is_sized and is_fixed and not is_counting and getattr(step.module, "is_sum_of_rows", True)
