"""What can only be known or changed through private parts of Lightning; seen in lightning 2.6.6."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from copy import copy
from difflib import get_close_matches
from functools import partial
from itertools import count
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed import DistError
from torch.optim import Optimizer

from lit_fsdp.checkpoint.remote import Location, locate
from lit_fsdp.checkpoint.writer import CheckpointWriter
from lit_fsdp.errors import describe_unknown_metric
from lit_fsdp.sharding.replaced_method import ReplacedMethod
from lit_fsdp.strategy.roll_call import get_store, wait_until

_GIVEN_UP = "given up"  # by a rank that has failed alone: what fails later does so because of it
_FAILURE_PATIENCE_S = 10.0  # ranks that fail alike do so within a step
_fits = count()  # of this process, the same on all ranks


def read_logged(trainer: pl.Trainer) -> dict[str, Tensor]:
    """Return what the loop that runs has logged by now, in a step or, at its end, over an epoch.

    ``trainer.callback_metrics`` also has what other loops logged long before. All ranks must call this: at the end of
    an epoch, it may be the first to ask for a metric that is reduced over ranks.
    """
    return dict(trainer._logger_connector.metrics["callback"]) if trainer._results else {}


def is_epoch_over(trainer: pl.Trainer, metric: str) -> bool:
    """Return whether the hook that runs ends an epoch of training or its last validation, which has logged a metric."""
    hook = trainer.lightning_module._current_fx_name
    if hook != "on_train_epoch_end" and not (hook == "on_validation_end" and metric in read_logged(trainer)):
        return False
    return trainer.fit_loop.epoch_loop._num_ready_batches_reached()


def restore_metrics(trainer: pl.Trainer, metrics: Mapping[str, float]) -> None:
    """Let callbacks and schedules find metrics that a run has logged before it was interrupted."""
    trainer._logger_connector._callback_metrics.update({name: torch.tensor(v) for name, v in metrics.items()})


def end_restart(trainer: pl.Trainer) -> None:
    """Let the end of the epoch step schedules by metrics: of a resumed one it does not, though it has trained since."""
    trainer.fit_loop._restarting = False


def is_read_now(module: pl.LightningModule, names: Collection[str]) -> bool:
    """Return whether anybody may read what the hook that runs logs in this step, the same on all ranks.

    Loggers do in some steps, a callback with a ``monitor`` whenever it likes, callbacks of users may, and what sums up
    a run reads the last. In the first batch of an epoch, values have to come to be there.
    """
    trainer = module.trainer
    is_last = trainer.is_last_batch or trainer.global_step + 1 == trainer.max_steps
    if is_last or trainer._logger_connector.should_update_logs or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return True
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        is_known = type(callback).__module__.startswith(("lit_fsdp.", "lightning."))
        if not is_known or getattr(callback, "monitor", None) in names:
            return True
    results, hook = trainer._results, module._current_fx_name
    return results is None or any(results.get(f"{hook}.{name}") is None for name in names)


def log_again(module: pl.LightningModule, values: Mapping[str, Tensor]) -> bool:
    """Put values of a step in place of those that the hook that runs has logged in a step before.

    For them ``log`` would check its arguments again and copy all that Lightning knows of a metric: 1.4 ms for five
    values instead of 0.05. Returns false, having done nothing, in the first batch of an epoch, where one of them was
    not logged yet, or otherwise than step by step, and for modules that log in a way of their own.
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


def evaluate_without_inference_mode(trainer: pl.Trainer) -> None:
    """Let evaluations run under ``no_grad``: a later backward cannot use what was gathered under ``inference_mode``."""
    val_loop = trainer.fit_loop.epoch_loop.val_loop
    for loop in (val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False


def forget_train_loader(trainer: pl.Trainer) -> None:
    """Let a resumed run build its loader when training begins, though a schedule has asked for the number of steps.

    For that number, Lightning builds it before the checkpoint is restored, and never tells that one where to go on:
    the run would see rows of the epoch again, and others not at all. To be called when both have happened.
    """
    trainer.fit_loop._combined_loader = None


def replace_closures(trainer: pl.Trainer, make: Callable[[Closure, Any, Optimizer], Closure]) -> Callable[[], None]:
    """Put closures of ours in place of those that the Trainer makes for micro-batches; return what ends that.

    ``make`` is given each closure, the arguments of ``training_step`` by name, and the optimizer. Closures that run no
    backward stay.
    """

    def make_closure(original: Any, kwargs: Any, optimizer: Optimizer, batch_idx: int) -> Closure:
        closure: Closure = original(kwargs, optimizer, batch_idx)
        return closure if closure._backward_fn is None else make(closure, kwargs, optimizer)

    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    return ReplacedMethod(loop, "_make_closure", make_closure).remove


def run_training_step(trainer: pl.Trainer, kwargs: Any) -> ClosureResult:
    """Run ``training_step`` with its hooks, as a closure does. What it logs weighs as the rows it is given."""
    loop = trainer.fit_loop.epoch_loop
    results: Any = loop._results
    before, results.batch, results.batch_size = results.batch, kwargs.get("batch", results.batch), None
    try:
        return loop.automatic_optimization._training_step(kwargs)
    finally:
        results.batch, results.batch_size = before, None


def count_steps_of_loggers(trainer: pl.Trainer) -> None:
    """Let loggers number the next step as the optimizer does. To be called before the first micro-batch of a run.

    In a resumed run Lightning counts a step more where it passes over a validation that the checkpoint has behind it.
    """
    if trainer.lightning_module.automatic_optimization:  # else one step may have several optimizer steps
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step


def is_last_micro_batch(trainer: pl.Trainer) -> bool:
    """Whether the micro-batch that runs is the last one of its optimizer step."""
    return not trainer.fit_loop._should_accumulate()


def get_evaluation_loop(trainer: pl.Trainer) -> Any:
    """Return the loop of the validation, also of one inside of training, or of the test that runs."""
    return trainer._evaluation_loop


def is_of_unknown_length(loop: Any) -> bool:
    """Whether a loop asks loaders that do not know their length, and knows its last batch by asking ahead."""
    fetcher = loop._data_fetcher
    return fetcher is not None and fetcher.length is None and hasattr(fetcher, "prefetch_batches")


def has_no_batch(loop: Any) -> bool:
    """Whether a loop that is about to begin has found its loaders to be empty."""
    return is_of_unknown_length(loop) and loop._data_fetcher.done


def is_placeholder(optimizer: Optimizer) -> bool:
    """Whether Lightning put it in the place of the ``None`` that ``configure_optimizers`` returned."""
    return isinstance(optimizer, _MockOptimizer)


def has_requeue_checkpoint(trainer: pl.Trainer) -> bool:
    """Whether there is what ``ckpt_path`` "hpc" means: a checkpoint that Lightning saved before a requeue."""
    return trainer._checkpoint_connector._hpc_resume_path is not None


_CHANGES = {  # what methods of ModelCheckpoint that save change of it
    "_save_topk_checkpoint": (
        *("best_k_models", "best_model_path", "best_model_score"),
        *("current_score", "kth_best_model_path", "kth_value"),
    ),
    "_save_last_checkpoint": ("last_model_path",),
}


def forget_skipped(trainer: pl.Trainer, writer: CheckpointWriter) -> list[ReplacedMethod]:
    """Leave every ``ModelCheckpoint`` as it was before a save that was skipped, beside training too.

    Its best ones, and what is called ``last``, stay and stay known: otherwise they would go with the next save, and
    what is better than them, but not than the one that is not there, would not be saved. Nor is ``last.ckpt`` linked
    to it; a save in flight is linked when it is there.
    """
    noted: dict[tuple[ModelCheckpoint, str], tuple[Location | None, dict[str, Any]]] = {}

    def forget() -> None:
        for (callback, method), (path, before) in list(noted.items()):
            if path in writer.skipped:
                del noted[callback, method]
                vars(callback).update(before)
                for kept in (*callback.best_k_models, callback.best_model_path, callback.last_model_path):
                    writer.keep(locate(kept))

    def save(callback: ModelCheckpoint, method: str, original: Callable[..., None], *args: Any) -> None:
        if method == "_save_topk_checkpoint":
            writer.wait()  # whether there is a better one depends on what is there
        before = {name: copy(getattr(callback, name)) for name in _CHANGES[method]}
        original(*args)
        noted[callback, method] = writer.newest, before
        forget()

    def link(linker: Callable[..., None], trainer: pl.Trainer, filepath: str, linkpath: str) -> None:
        path = locate(trainer.strategy.broadcast(filepath))
        writer.link(path, partial(linker, trainer, filepath, linkpath))

    writer.on_skip = forget
    savers = _list_model_checkpoints(trainer)
    return [
        *(ReplacedMethod(c, method, partial(save, c, method)) for c in savers for method in _CHANGES),
        *(ReplacedMethod(c, "_link_checkpoint", link) for c in savers),
    ]


def save_whole_steps(trainer: pl.Trainer) -> list[ReplacedMethod]:
    """Keep every ``ModelCheckpoint`` from saving between the micro-batches of a step.

    A resumed one does, as it does not know that its step is saved: what goes on from there would leave out the
    gradients of the micro-batches before. So does one with ``train_time_interval``, which now waits for the step.
    """

    def save(original: Callable[..., None], trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if is_last_micro_batch(trainer):
            original(trainer, *args, **kwargs)

    return [ReplacedMethod(callback, "on_train_batch_end", save) for callback in _list_model_checkpoints(trainer)]


def watch_monitors(trainer: pl.Trainer) -> list[ReplacedMethod]:
    """Refuse a ``monitor`` of a ``ModelCheckpoint`` that nothing logs, when a save is due and no validation may log it.

    Left alone it would put off every save until a validation that never comes. With one, Lightning refuses it then.
    What was trained is saved before, also where an ``EarlyStopping`` finds nothing.
    """

    def watched(callback: ModelCheckpoint, original: Any, trainer: pl.Trainer) -> dict[str, Tensor]:
        found: dict[str, Tensor] = original(trainer)
        name = callback.monitor
        # Before its first epoch with a validation, nobody knows what there is to validate.
        is_unknown = trainer.fit_loop.epoch_loop.val_loop._combined_loader is None
        may_validate = trainer.enable_validation and (is_unknown or any(trainer.num_val_batches))
        if name is None or name in found or not trainer.training or may_validate:
            return found
        if trainer.state.status == TrainerStatus.RUNNING:
            at_epoch_end = {metric.meta.name for metric in trainer.fit_loop.epoch_loop._results.values()}
            if name.removesuffix("_epoch") not in at_epoch_end:
                _refuse_saved(callback, trainer, name, found)
        return found

    def save(callback: ModelCheckpoint, original: Any, trainer: pl.Trainer, found: dict[str, Tensor]) -> None:
        try:
            original(trainer, found)
        except MisconfigurationException:
            if callback.monitor is None or callback.monitor in found:
                raise
            # The validation has not logged it.
            _refuse_saved(callback, trainer, callback.monitor, found)

    def check(callback: EarlyStopping, original: Any, trainer: pl.Trainer) -> None:
        found = trainer.callback_metrics
        is_missing = callback.strict and callback.monitor not in found and not trainer.fast_dev_run  # type: ignore[attr-defined]
        # A rank that lacks it alone cannot save: the others would not come.
        if trainer.strategy.reduce_boolean_decision(is_missing, all=True):
            path = save_last_step(trainer)  # callbacks that save come after this one
            _refuse_monitor(callback, callback.monitor, found, _describe_saved(trainer, path) if path else "")
        original(trainer)

    savers, stoppers = _list_model_checkpoints(trainer), trainer.early_stopping_callbacks
    return [
        *(ReplacedMethod(saver, "_monitor_candidates", partial(watched, saver)) for saver in savers),
        *(ReplacedMethod(saver, "_save_topk_checkpoint", partial(save, saver)) for saver in savers),
        *(ReplacedMethod(stopper, "_run_early_stopping_check", partial(check, stopper)) for stopper in stoppers),
    ]


def _refuse_saved(callback: ModelCheckpoint, trainer: pl.Trainer, name: str, found: dict[str, Tensor]) -> NoReturn:
    path = callback._get_metric_interpolated_filepath_name({**found, name: torch.tensor(0)}, trainer)
    callback._save_checkpoint(trainer, path)
    _refuse_monitor(callback, name, found, _describe_saved(trainer, path))


def _describe_saved(trainer: pl.Trainer, path: str) -> str:
    trainer.strategy.on_train_end()  # which waits for saves beside training
    is_lost = getattr(trainer.strategy, "missing_checkpoint", None) is not None
    return "" if is_lost else f"; what was trained is saved: {path}"


def save_where_all_fail(trainer: pl.Trainer, *, has_begun: Callable[[], bool]) -> list[ReplacedMethod]:
    """Let what saves on an exception save only where all ranks have failed, as in Ctrl-C: the others would not join.

    Lightning's ``OnExceptionCheckpoint`` saves nothing either before the first step: it would replace what the run
    before has left by what that had trained, or by less. All ranks must call this.
    """
    store_name = f"failures/{next(_fits)}"

    def save(callback: Checkpoint, original: Any, trainer: pl.Trainer, *args: Any) -> None:
        if isinstance(callback, ModelCheckpoint):
            name, is_due = "ModelCheckpoint.save_on_exception", callback._should_save_on_exception(trainer)
        else:
            name, is_due = type(callback).__name__, has_begun()
        if is_due and not _have_all_failed(store_name):
            warnings.warn(  # on the rank that failed
                f"{name}: nothing is saved, as not all ranks have failed: they would have to save together",
                stacklevel=2,
            )
            return
        if is_due or isinstance(callback, ModelCheckpoint):
            original(trainer, *args)
            trainer.strategy.on_train_end()  # which waits for saves beside training

    return [
        ReplacedMethod(callback, "on_exception", partial(save, callback))
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint | OnExceptionCheckpoint)
    ]


def _have_all_failed(store_name: str) -> bool:
    if not dist.is_initialized():
        return True
    store, rank = get_store(store_name), dist.get_rank()
    others = [str(other) for other in range(dist.get_world_size()) if other != rank]
    try:
        store.set(str(rank), "")
        if others and not wait_until(lambda: store.check(others), _FAILURE_PATIENCE_S):
            store.set(_GIVEN_UP, "")
        return not store.check([_GIVEN_UP])
    except DistError:  # whoever kept the store is gone
        return False


def check_monitors(trainer: pl.Trainer) -> None:
    """Refuse, after the sanity check, a ``monitor`` of a ``ModelCheckpoint`` that is a letter off what is logged.

    Others may be logged in training, or by a later validation.
    """
    for callback in _list_model_checkpoints(trainer):
        known, name = trainer.callback_metrics, callback.monitor
        if name is not None and name not in known and get_close_matches(name, known, n=1, cutoff=0.87):
            _refuse_monitor(callback, name, known)


def save_last_step(trainer: pl.Trainer) -> str:
    """Save what was trained after the last save, where ``save_last`` is set or nothing was saved.

    Left alone, ``save_last`` is what was saved last, not what was trained last. Weights alone are no save where others
    save more. Returns where the last step is saved, which may be nowhere.
    """
    savers = [saver for saver in _list_model_checkpoints(trainer) if saver.save_top_k or saver.save_last]
    savers = [saver for saver in savers if not saver.save_weights_only] or savers
    for saver in savers:
        if saver._last_global_step_saved == trainer.global_step:
            return saver._last_checkpoint_saved
    keeper = next((saver for saver in savers if saver.save_last), None)
    if not savers or (keeper is None and any(saver._last_global_step_saved for saver in savers)):
        return ""
    saver = keeper or savers[0]
    found = saver._monitor_candidates(trainer)
    if saver.monitor is None and saver.save_top_k:
        saver._save_topk_checkpoint(trainer, found)
    elif saver.save_top_k and saver.save_last in (None, False, "link"):
        saver._save_checkpoint(trainer, saver._get_metric_interpolated_filepath_name(found, trainer))
    saver._save_last_checkpoint(trainer, found)
    path = saver._last_checkpoint_saved
    if keeper is None:
        rank_zero_warn(f"ModelCheckpoint has saved nothing by now, so what was trained is saved at the end: {path}")
    return path


def list_waiting_monitors(trainer: pl.Trainer) -> list[str]:
    """Return for which metrics, that nothing has logged, a ``ModelCheckpoint`` still waits that has saved no best."""
    callbacks = _list_model_checkpoints(trainer)
    waiting = [c.monitor for c in callbacks if c._defer_save_until_validation and not c.best_model_path]
    return [name for name in waiting if name is not None and name not in trainer.callback_metrics]


def _refuse_monitor(callback: pl.Callback, name: str, known: Collection[str], saved: str = "") -> NoReturn:
    raise ValueError(f"{type(callback).__name__}.monitor: {describe_unknown_metric(name, known)}{saved}")


def _list_model_checkpoints(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def mark_saved(trainer: pl.Trainer) -> None:
    """Keep every ``ModelCheckpoint`` from saving this step: somebody else did."""
    for callback in _list_model_checkpoints(trainer):
        callback._last_global_step_saved = trainer.global_step


def leave_signals_alone(trainer: pl.Trainer) -> Callable[[], None]:
    """Keep the Trainer from handling signals itself; return what lets it do so again.

    Left alone, its handler of SIGTERM takes part in a collective wherever the rank happens to be, that of SLURM's
    signal saves there, and every micro-batch begins with a broadcast whose result is waited for.
    """
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    handlers = ReplacedMethod(connector, "register_signal_handlers", lambda _: None)
    broadcast = ReplacedMethod(loop, "_broadcast_sigterm_tensor", lambda _: None)

    def undo() -> None:
        handlers.remove()
        broadcast.remove()

    return undo


def watch_fetches(trainer: pl.Trainer, before: Callable[[], None]) -> Callable[[], None]:
    """Call a function each time training is about to ask for a batch; return what ends that.

    No hook is called there. To be called before the first epoch, as each takes over the function when it begins.
    """

    def watched(fetch: Callable[[], None]) -> None:
        before()
        fetch()

    return ReplacedMethod(trainer.fit_loop.epoch_loop, "_on_before_fetch", watched).remove
