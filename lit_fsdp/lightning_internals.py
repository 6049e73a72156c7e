"""What can only be known or changed through parts of Lightning that are not meant for it; seen in lightning 2.6.6."""

from __future__ import annotations

import inspect

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler


def count_micro_batches(trainer: pl.Trainer) -> int | None:
    """Return how many are accumulated in a step, ``None`` if a callback changes it."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    is_scheduled = any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks)
    return None if is_scheduled else trainer.accumulate_grad_batches


def use_no_grad(trainer: pl.Trainer) -> None:
    """Evaluate under ``no_grad``: tensors gathered under ``inference_mode`` cannot be used in a later backward."""
    val_loop = trainer.fit_loop.epoch_loop.val_loop
    for loop in (val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False


def refuse_float16_on_cpu(device: torch.device) -> None:
    """Refuse ``Trainer(precision="16-mixed")`` where there is no GPU, while that Trainer is being built.

    Lightning replaces it by bf16-mixed with a warning and keeps no trace of what was asked, but its constructor is
    still running. Drop when it refuses by itself.

    Raises:
        ValueError: With the nearest precision.
    """
    frame = inspect.currentframe()
    while frame is not None and device.type == "cpu":
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), pl.Trainer):
            if (asked := frame.f_locals.get("precision")) in ("16-mixed", "16", 16):
                raise ValueError(f"precision: got {asked!r}: float16 needs a GPU and the run is on cpu; set bf16-mixed")
            return
        frame = frame.f_back
