"""Settings of Lightning's Trainer: read, and refused where they would harm in silence."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn

from lit_fsdp.checkpoint.remote import Location, RemotePath, locate


def count_micro_batches(trainer: pl.Trainer) -> int | None:
    """Return how many micro-batches a step accumulates, ``None`` if a callback changes that."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    is_scheduled = any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks)
    return None if is_scheduled else trainer.accumulate_grad_batches


def check_trainer(trainer: pl.Trainer) -> None:
    """Refuse settings of the Trainer that would harm in silence.

    Raises:
        ValueError: With the setting and the nearest fix.
    """
    limit = trainer.gradient_clip_val
    if limit is not None and limit < 0:
        raise ValueError(f"gradient_clip_val: got {limit}: gradients would point uphill; expected above 0, or null")
    if trainer.accumulate_grad_batches < 1:
        raise ValueError(f"accumulate_grad_batches: got {trainer.accumulate_grad_batches}: expected 1 or more")
    if trainer.state.fn != TrainerFn.FITTING:
        return
    list_checkpoint_folders(trainer)
    if trainer.limit_train_batches == 0:
        raise ValueError("limit_train_batches: got 0: nothing would be trained; expected 1 or more, or leave it out")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            name = type(callback).__name__
            raise ValueError(  # noqa: TRY004  a setting, not a type in code
                f"callbacks: got {name}: it copies the model before that is sharded; take lit_fsdp.callbacks.EMA"
            )


def list_checkpoint_folders(trainer: pl.Trainer) -> list[Location]:
    """Return where the callbacks of a Trainer put checkpoints.

    Raises:
        ValueError: An address that cannot be written to, with what to set instead.
    """
    folders = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not (given := getattr(callback, "dirpath", None)):
            continue
        try:
            folder = locate(given)
        except ValueError as error:
            raise ValueError(f"{type(callback).__name__}.dirpath: {error}") from error
        if isinstance(folder, RemotePath) and getattr(callback, "save_last", None) == "link":
            raise ValueError(
                f"{type(callback).__name__}.save_last: got 'link': there are no links at {folder}; set it to true"
            )
        folders.append(folder)
    return folders


def count_checkpoints(trainer: pl.Trainer) -> int:
    """Return how many checkpoints lie on the disk at once: those kept and the one that is written; 0 without any."""
    num_kept = 0
    callbacks = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    for callback in callbacks:
        num_kept += max(callback.save_top_k, 1) if callback.save_top_k else 0  # -1 keeps all, nobody knows how many
        num_kept += bool(callback.save_last is True or (callback.save_last and not callback.save_top_k))
    return num_kept + 1 if num_kept and not trainer.fast_dev_run else 0  # type: ignore[attr-defined]


def refuse_overfit(trainer: pl.Trainer) -> None:
    """Refuse a setting with which Lightning replaces the sampler of a loader; only ours is more than an order.

    Raises:
        ValueError: With what to set instead.
    """
    given: int | float = trainer.overfit_batches  # type: ignore[attr-defined]
    if given:
        raise ValueError(
            f"overfit_batches: got {given}: Lightning would replace the sampler of the data, which resumes and gives "
            f"each rank samples of its own; set limit_train_batches: {given} and data.shuffle: false instead"
        )


def refuse_float16_on_cpu(precision: object, accelerator: Any) -> None:
    """Refuse ``16-mixed`` where there is no GPU, before the Trainer is built: it would only warn and take bf16-mixed.

    Raises:
        ValueError: With the nearest precision.
    """
    is_on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.accelerator.is_available())
    if is_on_cpu and precision in ("16-mixed", "16", 16):
        raise ValueError(f"precision: got {precision!r}: float16 needs a GPU and the run is on cpu; set bf16-mixed")
