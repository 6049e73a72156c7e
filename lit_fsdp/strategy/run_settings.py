"""What a resumed run does otherwise than the one that saved its checkpoint: said, a line for each setting."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils._pytree import tree_leaves

from lit_fsdp.checkpoint.optimizer_state import KERNELS
from lit_fsdp.sharding.mixed_precision import MixedPrecision
from lit_fsdp.strategy.trainer_settings import count_micro_batches, get_data_ranks

RUN_SETTINGS = "run_settings"  # in the metadata of a checkpoint
_STEP = ("batch_size", "accumulate_grad_batches", "num_ranks")  # only their product matters
_RESTORED = "restored."  # before names of settings that a checkpoint wins over


def collect_run_settings(trainer: pl.Trainer, mixed_precision: MixedPrecision | None) -> dict[str, Any]:
    """Return settings without which a run is not the same, by name, as plain values; ``None`` for what is not known.

    Args:
        trainer: In ``fit``.
        mixed_precision: What wins over the Trainer's.
    """
    loaders = tree_leaves(trainer.train_dataloader)
    # Ranks with unequal shares have the same rows together, whichever of them is asked.
    sizes = [getattr(loader, "mean_batch_size", getattr(loader, "batch_size", None)) for loader in loaders]
    settings: dict[str, Any] = {
        "precision": str(trainer.precision),
        "seed": os.environ.get("PL_GLOBAL_SEED"),
        "batch_size": sizes[0] if len(sizes) == 1 else None,
        "accumulate_grad_batches": count_micro_batches(trainer),
        "num_ranks": get_data_ranks(trainer).count,  # with rows of their own
        "gradient_clip_val": trainer.gradient_clip_val or 0,
        "gradient_clip_algorithm": str(trainer.gradient_clip_algorithm or "norm"),
    }
    settings |= {f"mixed_precision.{n}": str(v) for n, v in asdict(mixed_precision or MixedPrecision()).items()}
    schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
    own = [s for s in schedules if getattr(s, "keeps_configuration", False)]  # these compare by themselves
    if len(own) < len(schedules):
        settings |= {"max_steps": trainer.max_steps, "max_epochs": trainer.max_epochs}
        settings["lr_scheduler"] = ", ".join(type(schedule).__name__ for schedule in schedules)
    for i, optimizer in enumerate(trainer.optimizers):
        number = f" {i}" if len(trainer.optimizers) > 1 else ""
        settings[f"optimizer{number}"] = name = type(optimizer).__name__
        if not any(schedule.optimizer is optimizer for schedule in own):
            known = {n: v for n, v in getattr(optimizer, "defaults", {}).items() if _is_plain(v) and n not in KERNELS}
            settings |= {f"{_RESTORED}{name}{number}.{n}": v for n, v in known.items()}
    return settings


def warn_of_changes(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Say which settings differ from those of the checkpoint; what only one side knows is not compared."""
    changed = {n: (saved[n], v) for n, v in own.items() if saved.get(n) is not None and v is not None}
    changed = {n: (before, now) for n, (before, now) in changed.items() if not is_same(before, now)}
    if _count_samples(saved) == _count_samples(own) is not None:
        changed = {n: values for n, values in changed.items() if n not in _STEP}
    for name, (before, now) in changed.items():
        end = "; that of the checkpoint is used" if name.startswith(_RESTORED) else ""
        rank_zero_warn(f"resume: {name.removeprefix(_RESTORED)} was {before} in the checkpoint, is {now} now{end}")


def is_same(before: Any, now: Any) -> bool:
    """Whether two values are equal; a list is the tuple that it was."""
    return bool(_as_tuple(before) == _as_tuple(now))


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _count_samples(settings: Mapping[str, Any]) -> int | None:
    """Return how many samples all ranks take in a step."""
    counts = [settings[name] for name in _STEP if settings.get(name) is not None]
    return math.prod(counts) if len(counts) == len(_STEP) else None


def _is_plain(value: Any) -> bool:
    items = value if isinstance(value, tuple | list) else [value]
    return all(item is not None and isinstance(item, bool | int | float | str) for item in items)
