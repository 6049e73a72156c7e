"""Settings of Lightning's Trainer: read, and refused where they would harm in silence."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.parsing import lightning_hasattr

from lit_fsdp.checkpoint.remote import Location, RemotePath, locate
from lit_fsdp.sharding.mesh import DataRanks
from lit_fsdp.strategy.elastic import find_agent


@dataclass(frozen=True, kw_only=True)
class _Derived:
    """An accumulation that was derived.

    Args:
        sizes: Of the data: its global batch, and the rows of a micro-batch.
        num_micro_batches: What they came to.
        problem: What is wrong with it unless the run is a resumed one.
    """

    sizes: tuple[Any, Any]
    num_micro_batches: int
    problem: str


_DERIVED: WeakKeyDictionary[pl.Trainer, _Derived] = WeakKeyDictionary()

_Rule = tuple[Callable[[Any], bool], str]  # what holds of a value, and the words for it


def _at_least(low: int, all_word: str = "") -> _Rule:
    words = f"{low} or more, or -1 for {all_word}" if all_word else f"{low} or more"
    return (lambda value: value >= low or (all_word != "" and value == -1)), words


def _is_share(value: float) -> bool:
    return value >= 0 and (isinstance(value, int) or value <= 1)


_SHARE = (_is_share, "a number of batches, such as 10, or a fraction of them from 0.0 to 1.0")
# Lightning takes some of these without a word though they mean nothing, and refuses others without their key.
_RULES: dict[str, _Rule] = {
    "accumulate_grad_batches": _at_least(1),
    "check_val_every_n_epoch": _at_least(1),
    "gradient_clip_val": (lambda value: value >= 0, "above 0, or null; with less, gradients would point uphill"),
    "limit_predict_batches": _SHARE,
    "limit_test_batches": _SHARE,
    "limit_train_batches": _SHARE,
    "limit_val_batches": _SHARE,
    "log_every_n_steps": _at_least(0),
    "max_epochs": _at_least(1, "no limit"),
    "max_steps": _at_least(1, "no limit"),
    "min_epochs": _at_least(0),
    "min_steps": _at_least(0),
    "num_nodes": _at_least(1),
    "num_sanity_val_steps": _at_least(0, "all of them"),
    "reload_dataloaders_every_n_epochs": _at_least(0),
}


def check_numbers(settings: Mapping[str, Any]) -> None:
    """Refuse numbers of the Trainer that mean nothing, before it is built.

    Args:
        settings: By name, some or all. What is no number is left to others.

    Raises:
        ValueError: With the setting, its value and what it may be.
    """
    for name, (holds, expected) in _RULES.items():
        value = settings.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and not holds(value):
            raise ValueError(f"{name}: got {value}: expected {expected}")
    every = settings.get("val_check_interval")
    if isinstance(every, int | float) and not (_is_share(every) and every > 0):
        raise ValueError(
            f"val_check_interval: got {every}: expected a number of batches from 1, or a fraction of an epoch above 0; "
            "limit_val_batches: 0 leaves validation out"
        )
    for unit in ("steps", "epochs"):
        least, most = settings.get(f"min_{unit}"), settings.get(f"max_{unit}")
        if isinstance(least, int) and isinstance(most, int) and least > most > 0:
            raise ValueError(f"min_{unit}: got {least}: training ends at max_{unit} {most}: expected {most} or less")


def count_micro_batches(trainer: pl.Trainer) -> int | None:
    """Return how many micro-batches a step accumulates, ``None`` if a callback changes that."""
    return None if _list_schedulers(trainer) else trainer.accumulate_grad_batches


def _list_schedulers(trainer: pl.Trainer) -> list[GradientAccumulationScheduler]:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, GradientAccumulationScheduler)]


def get_accumulation(trainer: pl.Trainer, epoch: int) -> int:
    """Return how many micro-batches a step of an epoch accumulates."""
    schedulers = _list_schedulers(trainer)
    return schedulers[-1].get_accumulate_grad_batches(epoch) if schedulers else trainer.accumulate_grad_batches


def count_steps_of_epochs(trainer: pl.Trainer, first: int, end: int) -> int:
    """Return how many optimizer steps the epochs from ``first`` to before ``end`` have, as the data is known to be."""
    changes = {epoch for scheduler in _list_schedulers(trainer) for epoch in scheduler.scheduling}
    bounds = sorted({first, end, *(epoch for epoch in changes if first < epoch < end)})
    num_batches = trainer.num_training_batches
    return sum((b - a) * math.ceil(num_batches / get_accumulation(trainer, a)) for a, b in pairwise(bounds))


def derive_accumulation(trainer: pl.Trainer, data: object, *, is_resumed: bool | None) -> None:
    """Set how many micro-batches a step accumulates by ``global_batch_size`` and ``batch_size`` of data that has them.

    Again for the data of each ``fit``; the same data may be asked for twice. Data without leaves what is set, but takes
    back what was derived of the data before.

    Where that global batch is not to be had, and the number of ranks is not the user's to choose, the nearest one is
    taken, and a warning says so. That is where torchrun may start fewer ranks, and in a resumed run.

    Args:
        trainer: Of the run.
        data: With its rows.
        is_resumed: ``None`` if that is known only when the checkpoint is loaded, after which ``settle_accumulation`` is
            called.

    Raises:
        ValueError: The ranks cannot share a global batch, or the accumulation was set, too.
    """
    rows: int | None = getattr(data, "global_batch_size", None)
    batch_size = getattr(data, "batch_size", None)
    if (before := _DERIVED.get(trainer)) is not None:
        if before.sizes == (rows, batch_size):
            return
        del _DERIVED[trainer]
        if trainer.accumulate_grad_batches == before.num_micro_batches:  # else it was set since
            trainer.accumulate_grad_batches = 1
    if rows is None:
        return
    if count_micro_batches(trainer) != 1:
        given = count_micro_batches(trainer) or "by a callback"
        raise ValueError(
            f"accumulate_grad_batches: set ({given}) beside data.global_batch_size {rows}, which decides it: leave one "
            "of them out"
        )
    if not isinstance(batch_size, int):
        what = "the rows in a micro-batch of one rank"
        raise ValueError(f"global_batch_size: got {rows}: needs batch_size, {what}")  # noqa: TRY004  a setting
    agent = find_agent(os.environ)
    is_fixed = not is_resumed and (agent is None or agent.max_restarts == 0)
    num_ranks = get_data_ranks(trainer).count
    num_micro_batches, problem = choose_accumulation(rows, batch_size=batch_size, num_ranks=num_ranks)
    is_open = is_fixed and is_resumed is None
    if problem and is_fixed and not is_open:
        raise ValueError(problem)
    trainer.accumulate_grad_batches = num_micro_batches
    left = problem if is_open else ""
    _DERIVED[trainer] = _Derived(sizes=(rows, batch_size), num_micro_batches=num_micro_batches, problem=left)
    if problem and not is_open:
        _warn_of_nearest(trainer, data, problem)


def is_accumulation_derived(trainer: pl.Trainer) -> bool:
    """Whether the accumulation follows from a global batch, and so from the number of ranks."""
    return trainer in _DERIVED


def settle_accumulation(trainer: pl.Trainer, data: object) -> None:
    """Refuse what ``derive_accumulation`` had to leave open, or say which global batch a resumed run takes.

    Lightning's ``GradientAccumulationScheduler`` has its say when an epoch begins, so not in a run that is resumed in
    the middle of one, seen in 2.6.6: here it has.

    Raises:
        ValueError: The run is not a resumed one.
    """
    trainer.accumulate_grad_batches = get_accumulation(trainer, trainer.current_epoch)
    derived = _DERIVED.get(trainer)
    if derived is not None and derived.problem:
        if trainer.ckpt_path is None:
            raise ValueError(derived.problem)
        _warn_of_nearest(trainer, data, derived.problem)


def _warn_of_nearest(trainer: pl.Trainer, data: Any, problem: str) -> None:
    rows = trainer.accumulate_grad_batches * data.batch_size * get_data_ranks(trainer).count
    rank_zero_warn(f"{problem}; this start takes {rows}")


def choose_accumulation(global_batch_size: int, *, batch_size: int, num_ranks: int) -> tuple[int, str]:
    """Return how many micro-batches come nearest to a global batch, and what to say if they do not make it up.

    ``num_ranks`` are those with rows of their own.
    """
    at_once = batch_size * num_ranks
    num, rest = divmod(global_batch_size, at_once)
    if not rest:
        return num, ""
    sizes = [k * at_once for k in (num, num + 1) if k]
    nearest = min(sizes, key=lambda size: abs(size - global_batch_size))
    return nearest // at_once, (
        f"global_batch_size: got {global_batch_size}: expected a multiple of {at_once} (batch_size {batch_size} x "
        f"{num_ranks} ranks), such as {' or '.join(map(str, sizes))}"
    )


def get_data_ranks(trainer: Any) -> DataRanks:
    """Return which rows are those of this rank: each has its own, unless the strategy says otherwise."""
    found: DataRanks | None = getattr(getattr(trainer, "strategy", None), "data_ranks", None)
    return found or DataRanks(count=trainer.world_size, index=trainer.global_rank)


def check_trainer(trainer: pl.Trainer) -> None:
    """Refuse settings of the Trainer that would harm in silence.

    Raises:
        ValueError: With the setting and the nearest fix.
    """
    check_numbers({name: getattr(trainer, name, None) for name in ("gradient_clip_val", "accumulate_grad_batches")})
    if trainer.state.fn != TrainerFn.FITTING:
        return
    list_checkpoint_folders(trainer)
    if trainer.limit_train_batches == 0:
        raise ValueError("limit_train_batches: got 0: nothing would be trained; expected 1 or more, or leave it out")
    boards = [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
    if trainer.world_size > 1 and any(board._log_graph for board in boards):  # private, seen in lightning 2.6.6
        raise ValueError(
            "log_graph: got true: TensorBoardLogger runs the model on rank 0 alone, while its shards are on all ranks; "
            "leave it out, or log the graph in a run on one rank"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            name = type(callback).__name__
            raise ValueError(  # noqa: TRY004  a setting, not a type in code
                f"callbacks: got {name}: it copies the model before that is sharded; take lit_fsdp.callbacks.EMA"
            )
        if isinstance(callback, ModelPruning):
            raise ValueError(  # noqa: TRY004
                "callbacks: got ModelPruning: it lists parameters before the model is sharded; prune what is exported"
            )
        if isinstance(callback, BackboneFinetuning) and (module := getattr(trainer, "lightning_module", None)):
            _check_attribute(callback, module, "backbone")


def check_learning_rate_finder(module: pl.LightningModule) -> None:
    """Refuse Lightning's ``LearningRateFinder`` for a built module without an attribute that it could change.

    Raises:
        ValueError: With the names that it looks for.
    """
    callbacks: list[pl.Callback] = module.trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        # Private, seen in lightning 2.6.6.
        if isinstance(callback, LearningRateFinder) and callback._update_attr:
            told = callback._attr_name
            _check_attribute(callback, module, *([told] if told else ["lr", "learning_rate"]))


def _check_attribute(callback: pl.Callback, module: pl.LightningModule, *names: str) -> None:
    if not any(lightning_hasattr(module, name) for name in names):
        raise ValueError(
            f"callbacks: got {type(callback).__name__}: {type(module).__name__} has no {' or '.join(names)}, which it "
            "changes: it is for modules of your own that have one; leave it out"
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


def count_checkpoints(trainer: pl.Trainer) -> tuple[int, int]:
    """Return how many checkpoints lie on the disk at once, and how many of weights alone; 0 without any.

    Those are the ones that are kept, and the largest once more, as it is written.
    """
    num_kept = {False: 0, True: 0}  # by save_weights_only
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            num = max(callback.save_top_k, 1) if callback.save_top_k else 0  # -1 keeps all, nobody knows how many
            num += bool(callback.save_last is True or (callback.save_last and not callback.save_top_k))
            num_kept[callback.save_weights_only] += num
    num_whole, num_weights = num_kept.values()
    if trainer.fast_dev_run or not num_whole + num_weights:  # type: ignore[attr-defined]
        return 0, 0
    return (num_whole + 1, num_weights) if num_whole else (0, num_weights + 1)


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
