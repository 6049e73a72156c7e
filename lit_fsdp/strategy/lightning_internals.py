"""What can only be known or changed through parts of Lightning that are not meant for it; seen in lightning 2.6.6."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_fsdp.sharding.buffers import has_statistics_of_ranks
from lit_fsdp.strategy.signals import hold_signals


def count_micro_batches(trainer: pl.Trainer) -> int | None:
    """Return how many are accumulated in a step, ``None`` if a callback changes it."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    is_scheduled = any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks)
    return None if is_scheduled else trainer.accumulate_grad_batches


def read_logged(trainer: pl.Trainer) -> dict[str, torch.Tensor]:
    """Return what the loop that runs has logged by now, in a step or, at its end, over an epoch.

    In ``trainer.callback_metrics`` that of other loops, logged long before, would be among it. All ranks must call
    it: at the end of an epoch, it may be the first to ask for a metric that is reduced over ranks.
    """
    return dict(trainer._logger_connector.metrics["callback"]) if trainer._results else {}


def log_again(module: pl.LightningModule, values: Mapping[str, torch.Tensor]) -> bool:
    """Put values of a step in place of those that the hook that runs has logged in a step before.

    For them ``log`` would once more check its arguments and copy all that Lightning knows of a metric.
    Returns false, having done nothing, in the first batch of an epoch, where one of them was not
    logged yet, or otherwise than step by step, and for modules that log in a way of their own.

    Args:
        module: Whose hook runs.
        values: By name, scalars without a gradient.
    """
    trainer, hook, own = module.trainer, module._current_fx_name, type(module)
    if own.log is not pl.LightningModule.log or own.log_dict is not pl.LightningModule.log_dict:
        return False
    results = trainer._results
    if results is None or hook is None or trainer._logger_connector.should_reset_tensors(hook):
        return False
    known = [results.get(f"{hook}.{name}") for name in values]
    if any(metric is None or metric.meta.on_epoch or not metric.meta.on_step for metric in known):
        return False
    for name, value in values.items():
        results.update_metrics(f"{hook}.{name}", value, 1)
    return True


def forget_train_loader(trainer: pl.Trainer) -> None:
    """Let a resumed run build its loader when training begins, though a schedule has asked for the number of steps.

    For that number, Lightning builds it before the checkpoint is restored, and never tells that one where to go on:
    the run would see rows of the epoch again, and others not at all. To be called when both have happened.
    """
    trainer.fit_loop._combined_loader = None


def use_no_grad(trainer: pl.Trainer) -> None:
    """Evaluate under ``no_grad``: tensors gathered under ``inference_mode`` cannot be used in a later backward."""
    val_loop = trainer.fit_loop.epoch_loop.val_loop
    for loop in (val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False


def keep_links(trainer: pl.Trainer, skipped: Collection[Path]) -> None:
    """Leave the ``last.ckpt`` of every ``ModelCheckpoint`` where it is instead of linking it to a skipped save.

    Args:
        trainer: About to train.
        skipped: Checkpoints that were not written; looked at when a link is due, the same on all ranks.
    """

    def link(linker: Callable[..., None], trainer: pl.Trainer, filepath: str, linkpath: str) -> None:
        if Path(trainer.strategy.broadcast(filepath)) not in skipped:
            linker(trainer, filepath, linkpath)

    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            linker = type(callback)._link_checkpoint
            callback._link_checkpoint = partial(link, linker)  # type: ignore[method-assign]


def _refuse_float16_on_cpu(device: torch.device) -> None:
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


def leave_signals_alone(trainer: pl.Trainer) -> Callable[[], None]:
    """Keep the Trainer from handling signals itself; return what lets it do so again.

    Left alone, its handler of SIGTERM takes part in a collective wherever the rank happens to be, that of SLURM's
    signal saves there, and every micro-batch begins with a broadcast whose result is waited for.
    """
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    connector.register_signal_handlers = _do_nothing  # type: ignore[method-assign]
    loop._broadcast_sigterm_tensor = _do_nothing  # type: ignore[method-assign]

    def undo() -> None:
        connector.__dict__.pop("register_signal_handlers", None)
        loop.__dict__.pop("_broadcast_sigterm_tensor", None)

    return undo


def hold_signals_at_launch(trainer: pl.Trainer, signals: Collection[Signals]) -> None:
    """Start the ranks that the Trainer starts itself with these signals held back, until they listen to them."""
    launcher = trainer.strategy.launcher
    if isinstance(launcher, _SubprocessScriptLauncher):
        start = launcher._call_children_scripts

        def start_held() -> None:
            with hold_signals(signals):
                start()

        launcher._call_children_scripts = start_held  # type: ignore[method-assign]


def watch_fetches(trainer: pl.Trainer, before: Callable[[], None]) -> Callable[[], None]:
    """Call a function each time training is about to ask for a batch; return what ends that.

    No hook is called there. To be called before the first epoch, as each takes over the function when it begins.
    """
    loop = trainer.fit_loop.epoch_loop
    fetch = loop._on_before_fetch

    def watched() -> None:
        before()
        fetch()

    loop._on_before_fetch = watched  # type: ignore[method-assign]

    def undo() -> None:
        loop.__dict__.pop("_on_before_fetch", None)

    return undo


def delay_killing(patience_s: float = 15.0) -> None:
    """Let Lightning wait before it kills this process because a rank it started failed.

    It looks every five seconds, maybe just before this process sees the broken connection itself, says so and reports.
    One that hangs in a collective of NCCL ends so much later.
    """
    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver) and not isinstance(thread._terminate_all, partial):
            kill = partial(_kill_late, thread, thread._terminate_all, patience_s)
            thread._terminate_all = kill  # type: ignore[method-assign]


def _kill_late(observer: _ChildProcessObserver, kill: Callable[[], None], patience_s: float) -> None:
    time.sleep(patience_s)
    if observer._child_processes:
        kill()


def outlive_children(trainer: pl.Trainer) -> None:
    """Keep Lightning from killing this process, which has yet to say what went wrong, because a rank it started failed.

    Whoever ends the run must then end those ranks, as ``stop_children`` does.
    """
    launcher = trainer.strategy.launcher
    if isinstance(launcher, _SubprocessScriptLauncher) and launcher.procs:
        watched, launcher.procs = launcher.procs, list(launcher.procs)
        watched.clear()  # the list that its observer thread looks at


def mark_saved(trainer: pl.Trainer) -> None:
    """Keep every ``ModelCheckpoint`` from saving this step: somebody else did."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            callback._last_global_step_saved = trainer.global_step


def _do_nothing() -> None:
    return


def refuse_ignored(device: torch.device, layer_sync: object, checkpoint_io: object) -> None:
    """Refuse what Lightning hands to every strategy and ours would ignore.

    Raises:
        ValueError: With the setting and what to use instead.
    """
    _refuse_float16_on_cpu(device)
    if layer_sync is not None:
        raise ValueError(
            "sync_batchnorm: got true: FSDP2Strategy does not replace layers; call "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm in configure_model instead"
        )
    if checkpoint_io is not None:
        raise ValueError(
            f"plugins: got {type(checkpoint_io).__name__}: FSDP2Strategy writes checkpoints itself; leave it out, and "
            "set async_save to write beside training"
        )


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
    if trainer.limit_train_batches == 0:
        raise ValueError("limit_train_batches: got 0: nothing would be trained; expected 1 or more, or leave it out")
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            name = type(callback).__name__
            raise ValueError(  # noqa: TRY004  a setting, not a type in code
                f"callbacks: got {name}: it copies the model before that is sharded; take lit_fsdp.callbacks.EMA"
            )


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


def warn_of_batch_norm(module: pl.LightningModule) -> None:
    """Say that training normalizes by the batch of one rank, where there is BatchNorm."""
    if dist.get_world_size() > 1 and has_statistics_of_ranks(module):
        rank_zero_warn(
            "BatchNorm: each rank normalizes by statistics of its own batch; running statistics are averaged before an "
            "evaluation and a checkpoint"
        )


def reduce_in_place(tensor: Tensor, group: Any | None, reduce_op: Any) -> Tensor:
    """Reduce over all ranks, as ``Strategy.reduce`` names operations."""
    # gloo has no mean, and Lightning's way of telling misses it in a combined backend.
    is_mean = reduce_op in (None, "mean", "avg", dist.ReduceOp.AVG)
    op = getattr(dist.ReduceOp, reduce_op.upper()) if isinstance(reduce_op, str) and not is_mean else reduce_op
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM if is_mean else op, group=group)
    return tensor.copy_(tensor / dist.get_world_size(group)) if is_mean else tensor
