"""When the machine is taken away: all ranks save at the same step, and the run ends as one that can go on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lit_fsdp.checkpoint.remote import locate
from lit_fsdp.files import refuse_no_folder
from lit_fsdp.reporting.metrics import find_checkpoint_folder
from lit_fsdp.reporting.rank_stats import AsyncRankStats, gather_over_ranks
from lit_fsdp.reporting.step_callback import StepCallback
from lit_fsdp.strategy.elastic import Agent, find_agent
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy
from lit_fsdp.strategy.launcher import Launcher
from lit_fsdp.strategy.lightning_internals import leave_signals_alone, mark_saved
from lit_fsdp.strategy.signals import SignalListener

_NOTHING, _STOP, _REQUEUE = 0, 1, 2  # what a rank was told; what all ranks do is the maximum
_PATIENCE_S = 5.0  # an agent of torchrun looks for new nodes ten times a second
_TRY_AGAIN = 75  # EX_TEMPFAIL


class Preemption(StepCallback):
    """Save a checkpoint and end the run when any rank gets SIGTERM or SIGUSR1, from a scheduler or from you.

    The handler only notes the signal. After every optimizer step, and every batch of a validation, the ranks send
    their notes to each other in the background, and read them one step later: so all of them stop at the same step,
    and none ever waits for it. Then they save ``preempted-step=<n>.ckpt``, wait until it is
    complete, and leave ``fit`` with Lightning's ``SIGTERMException``, a ``SystemExit``: what follows ``fit`` in a
    script does not take the run for a finished one. A signal before the first step ends the run there; nothing is
    saved, as nothing would be lost. Further signals change nothing, but for SIGINT, if you have named it: the first
    Ctrl-C saves, the second one ends the run at once.

    It replaces Lightning's own handling of these signals. Where Lightning would requeue a SLURM job (its
    ``SLURMEnvironment`` with ``auto_requeue``, on its ``requeue_signal``), the job is requeued after the save.

    Under torchrun on several nodes, the run goes on where ranks got no signal themselves: their node stays. They wait
    a moment for that of their own torchrun, which sends it when nodes join, and end with 75 if it will start them
    again. A rank whose torchrun is gone counts as one that got a signal.

    Args:
        signals: Their names.
        dirpath: Folder of the checkpoint. By default that of ``ModelCheckpoint``, else ``checkpoints`` beside the
            logs.
        exit_code: Of every rank. 0 suits schedulers that requeue by themselves what they preempted; take another
            one, such as 75, for those that start again only what failed.
    """

    def __init__(
        self, signals: Sequence[str] = ("SIGTERM", "SIGUSR1"), dirpath: str | None = None, exit_code: int = 0
    ) -> None:
        known = signal.Signals.__members__
        if not signals or not set(signals) <= set(known):
            raise ValueError(f"signals: got {list(signals)}: expected names such as SIGTERM, at least one")
        if stubborn := sorted({"SIGKILL", "SIGSTOP"} & set(signals)):
            raise ValueError(f"signals: got {list(signals)}: {stubborn[0]} cannot be caught; leave it out")
        self.signals = [known[name] for name in signals]
        self.dirpath = dirpath
        self.exit_code = exit_code
        self.is_preempted = False
        self._requeue_signal: signal.Signals | None = None
        self._order = _NOTHING  # what this rank was told
        self._was_interrupted = False
        self._listener = SignalListener(self._note)
        self._undo: Callable[[], None] | None = None
        self._agent: Agent | None = None

    def listen(self, trainer: Trainer) -> None:
        """Begin to listen, already before ``trainer.fit`` if called there: from then on no signal is lost."""
        environment = getattr(trainer.strategy, "cluster_environment", None)
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            self._requeue_signal = environment.requeue_signal
        signals = {*self.signals, *filter(None, [self._requeue_signal])}
        if not self._listener.start(signals):
            rank_zero_warn(f"{type(self).__name__} hears no signals: fit does not run in the main thread")
        if self._undo is None:
            self._agent = find_agent(os.environ)
            if isinstance(launcher := trainer.strategy.launcher, Launcher):
                launcher.held_signals = signals
            self._undo = leave_signals_alone(trainer)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.is_preempted = False
            folder = None if self.dirpath is None else locate(self.dirpath)
            if isinstance(folder, Path) and trainer.is_global_zero:  # now, not when the machine is taken away
                refuse_no_folder(f"{type(self).__name__}.dirpath", folder)
            self.listen(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._stats = AsyncRankStats(trainer, ["order"])
        if order := int(gather_over_ranks(trainer, {"order": self._order})["order"].high):
            self._end(trainer, order, "before the first step, so there is nothing to save")
            self._leave_if_preempted(trainer, pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._leave_if_preempted(trainer, pl_module)

    @override
    def on_step_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Leaves in the next hook, after the metrics of this step are logged.
        self._save_if_told(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave_if_preempted(trainer, pl_module)

    on_train_epoch_end = on_validation_start

    @override
    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        # Other strategies may give the ranks unequal numbers of batches: they would disagree on when.
        is_equal = isinstance(trainer.strategy, FSDP2Strategy)
        if trainer.state.fn == "fit" and not trainer.sanity_checking and is_equal:
            self._save_if_told(trainer)
            self._leave_if_preempted(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stats.finish()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop_listening()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop_listening()

    def _note(self, number: signal.Signals) -> None:
        if number == signal.SIGINT and self._was_interrupted:
            raise KeyboardInterrupt  # whoever sends it twice does not want to wait
        self._was_interrupted |= number == signal.SIGINT
        self._order = max(self._order, _REQUEUE if number == self._requeue_signal else _STOP)

    def _save_if_told(self, trainer: Trainer) -> None:
        if self._agent is not None and not self._agent.is_alive:
            self._note(signal.SIGTERM)  # nobody else would end this rank, which the run will start again elsewhere
        found = self._stats.exchange({"order": self._order})
        order = _NOTHING if found is None else int(found[0]["order"].high)
        if trainer.world_size == 1:  # there is nobody to wait for
            order = self._order
        if not order:
            return
        self._stats.finish()
        folder = locate(self.dirpath) if self.dirpath is not None else find_checkpoint_folder(trainer)
        path = folder / f"preempted-step={trainer.global_step}.ckpt"
        trainer.save_checkpoint(str(path), weights_only=False)
        trainer.strategy.on_train_end()  # where FSDP2Strategy waits for a checkpoint that is written beside training
        if not trainer.strategy.broadcast(path.exists()):
            raise RuntimeError(f"preempted at step {trainer.global_step}, but {path} could not be saved, see above")
        mark_saved(trainer)
        self._end(trainer, order, f"at step {trainer.global_step}: saved {path}")

    def _end(self, trainer: Trainer, order: int, what: str) -> None:
        self.is_preempted = trainer.should_stop = True
        rank_zero_info(f"preempted {what}")
        if order == _REQUEUE and trainer.is_global_zero:
            _requeue_job()

    def _leave_if_preempted(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.is_preempted:
            return
        others: list[Any] = trainer.callbacks if self.last_step > self.first_step else []  # type: ignore[attr-defined]
        for callback in others:
            if isinstance(callback, StepCallback):
                try:
                    callback.on_preemption(trainer, pl_module)
                except Exception as error:  # noqa: BLE001  all is saved, and the run ends as one that can go on
                    rank_zero_warn(f"{type(callback).__name__} has no result: {type(error).__name__}: {error}")
        raise SIGTERMException(self._choose_exit_code())

    def _choose_exit_code(self) -> int:
        """Return that of this rank. With 0, its torchrun would take the run for a finished one."""
        if self._agent is None or self._agent.num_agents == 1:
            return self.exit_code
        deadline = time.monotonic() + _PATIENCE_S
        while self._order == _NOTHING and time.monotonic() < deadline:
            time.sleep(0.02)
        goes_on = self._order == _NOTHING and self._agent.num_restarts < self._agent.max_restarts
        return self.exit_code or (_TRY_AGAIN if goes_on else 0)

    def _stop_listening(self) -> None:
        # After a signal the process is about to end, well or not; the next signal must not end it half-way.
        self._listener.stop(ignore=self._order != _NOTHING)
        self._order, self._was_interrupted = _NOTHING, False
        if self._undo is not None:
            self._undo()
            self._undo = None


def _requeue_job() -> None:
    job = os.environ.get("SLURM_JOB_ID", "")
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    if not re.fullmatch(r"\d+(_\d+)?", job):
        rank_zero_warn(f"the job is not requeued: {job!r} is no job of SLURM")
        return
    try:
        code = subprocess.call(["scontrol", "requeue", job])
    except OSError as error:
        rank_zero_warn(f"the job is not requeued: scontrol: {error}")
        return
    rank_zero_info(f"requeued job {job}" if code == 0 else f"the job is not requeued: scontrol ended with {code}")
