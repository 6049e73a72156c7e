"""Losses and gradients that go wrong: where, in which batch, on which rank, and what to do about it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lit_fsdp.profiling.anomalies import (
    KINDS,
    NO_TARGETS,
    SpikeDetector,
    UnitWatch,
    classify,
    conclude,
    describe,
    make_row,
)
from lit_fsdp.profiling.clock import Clock, Mark
from lit_fsdp.profiling.flops import is_compiled
from lit_fsdp.reporting.metrics import find_checkpoint_folder, is_logging_step, is_trial, log_values
from lit_fsdp.reporting.sections import Section, Table
from lit_fsdp.reporting.step_callback import StepCallback
from lit_fsdp.sharding.grad_clipping import compute_grad_norm
from lit_fsdp.sharding.mesh import gather_objects
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy
from lit_fsdp.strategy.lightning_internals import mark_saved

_MAX_EVENTS = 100


class UnstableTrainingError(RuntimeError):
    """A step was bad, and ``StabilityMonitor`` shall end the run."""


@runtime_checkable
class KnowsStep(Protocol):
    """A module that knows the loss of a step over all ranks, such as our tasks."""

    @property
    def step_loss(self) -> Tensor | None:
        """Over all ranks."""

    @property
    def rank_loss(self) -> Tensor | None:
        """Over this rank."""

    def get_grad_norm(self) -> Tensor:
        """Over all ranks, before clipping."""


@runtime_checkable
class KnowsSamples(Protocol):
    """A loader that can tell afterwards which samples it gave, such as those of our tasks."""

    @property
    def last_place(self) -> tuple[int, int]:
        """Of the micro-batch handed out last."""

    def list_samples(self, place: tuple[int, int]) -> list[int]:
        """Of this rank."""


@dataclass
class _StepState:
    """What is known of a step on this rank, for as long as it may be asked for."""

    step: int = 0
    places: list[tuple[int, int] | None] = field(default_factory=list)
    rank_loss: Tensor | None = None
    sums: dict[str, Tensor] = field(default_factory=dict)  # of unit outputs, in the order of forward
    values: Tensor | None = None  # [2] loss, gradient norm; on the way to host memory
    mark: Mark = 0.0
    is_scaled: bool = False
    knows_targets: bool = False


class StabilityMonitor(StepCallback):
    """Find steps with a NaN or infinite loss or gradient, a spike of either, or no targets; warn, skip them or stop.

    A bad step is reported with its number, the ranks whose own loss was bad, their samples (rows of the training data,
    where the loader knows them: those of our tasks do) and the first FSDP unit (block) whose output was not finite; if
    all were, under ``skip`` and ``stop``, the first one in backward whose gradient was not. A spike lies more than
    ``loss_sigmas`` or ``grad_norm_sigmas`` standard deviations above the median of the last ``window`` steps. The idea
    of leaving such steps out is that of OLMo-core's ``SkipStepOptimizer``. The loss is that of the step over all
    ranks, the norm that before clipping.

    With ``warn`` nothing waits: a step is judged one step later. ``skip`` and ``stop`` must know before the weights
    change, so the host waits for the GPU once a step. A skipped step changes no weight, no optimizer state and no step
    count of the optimizer; the schedule, the step number and the place in the data go on. ``stop`` leaves the step out
    too, saves ``unstable-step=<n>.ckpt`` and raises ``UnstableTrainingError`` on all ranks: resuming from there goes on
    after the bad batch. A step without targets, whose loss and gradient are 0, ends nothing, but is left out. All ranks
    judge the same numbers, so they all do the same.

    Where float16 gradients are scaled (``16-mixed``), infinite ones are how the scaler finds its scale: they are not
    counted.

    Logs ``stability/skipped_steps``, ``stability/nonfinite_loss``, ``stability/nonfinite_grad``,
    ``stability/no_targets``, ``stability/loss_spike`` and ``stability/grad_norm_spike``: how many so far.

    Args:
        policy: What to do about a bad step.
        loss_sigmas: How far above the median a loss is a spike; ``null`` looks for none.
        grad_norm_sigmas: The same of the gradient norm.
        window: Steps that a value is compared with; the first half of them is never a spike.
        max_skips: Under ``skip``: that many bad steps in a row end the run as ``stop`` does.
        watch_units: Keep the sum of every unit's output, to be able to name the first bad one.
    """

    def __init__(
        self,
        policy: Literal["warn", "skip", "stop"] = "warn",
        loss_sigmas: float | None = 6.0,
        grad_norm_sigmas: float | None = 6.0,
        window: int = 128,
        max_skips: int = 10,
        watch_units: bool = True,
    ) -> None:
        if policy not in ("warn", "skip", "stop"):
            raise ValueError(f"policy: got {policy!r}: expected warn, skip or stop")
        for name, sigmas in (("loss_sigmas", loss_sigmas), ("grad_norm_sigmas", grad_norm_sigmas)):
            if sigmas is not None and not sigmas > 0:
                raise ValueError(f"{name}: got {sigmas}: expected above 0, such as 6, or null")
        if window < 4:
            raise ValueError(f"window: got {window}: expected 4 or more")
        if max_skips < 1:
            raise ValueError(f"max_skips: got {max_skips}: expected 1 or more; policy stop allows none")
        self.policy = policy
        self.max_skips = max_skips
        self.watch_units = watch_units
        self._loss = SpikeDetector(loss_sigmas, window)
        self._norm = SpikeDetector(grad_norm_sigmas, window)
        self._counts: Counter[str] = Counter()
        self._events: list[dict[str, Any]] = []
        self._notes: list[str] = []
        self._pending: _StepState | None = None
        self._error: str | None = None
        self._num_bad = 0  # in a row; one without targets breaks no row, and is none of it
        self._was_empty = self._was_dropped = False  # the last step
        self._is_redone = False  # the step, after an error of memory

    @property
    def has_dropped_last_step(self) -> bool:
        """Whether weights have not seen the last step, as it was bad."""
        return self._was_dropped

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._error = None
        if stage == "fit":  # before a checkpoint is loaded
            self.load_state_dict({"loss": [], "grad_norm": [], "counts": {}, "events": []})

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._state, self._pending = _StepState(), None
        self._num_bad = 0
        self._was_empty = self._was_dropped = False
        self._notes = []
        self._loader: Any = None
        self._clock = Clock(trainer.strategy.root_device)
        self._watch = UnitWatch(pl_module)
        if self.watch_units and is_compiled(pl_module):
            self._notes.append("outputs of units are not watched: what is compiled cannot be seen")
        elif self.watch_units:
            self._watch.open()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._raise_if_stopped()
        self._loader = trainer.train_dataloader
        self._state.places.append(self._loader.last_place if isinstance(self._loader, KnowsSamples) else None)
        self._watch.is_on, self._is_redone = True, False

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._watch.is_on = False  # else what is computed again would count twice
        total = loss.detach().float()
        self._state.rank_loss = total if self._state.rank_loss is None else self._state.rank_loss + total

    def on_step_undone(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Forget the losses and outputs of a step that is computed again, see ``oom_retries``."""
        self._state.rank_loss = None
        self._watch.take_sums()
        self._watch.is_on = self._is_redone = True

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._watch.is_on = self._is_redone  # of the next part, or micro-batch, before which no batch starts

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        state, self._state = self._state, _StepState()
        self._watch.is_on = False
        state.step, state.sums = trainer.global_step + 1, self._watch.take_sums()
        self._collect(trainer, pl_module, state)
        if self.policy == "warn":
            # On all ranks here, and of a step ago: nothing is left to wait for.
            self._judge_pending()
            self._pending = state
            return
        if self._judge(state, has_gradients=True):
            optimizer.zero_grad()

    def _collect(self, trainer: Trainer, module: LightningModule, state: _StepState) -> None:
        """Put loss and norm of the step, the same on all ranks, on their way to host memory."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        state.is_scaled = scaler is not None
        state.knows_targets = isinstance(module, KnowsStep)  # of others, a loss may be 0 for other reasons
        loss = module.step_loss if isinstance(module, KnowsStep) else None
        is_reduced = loss is not None and isinstance(trainer.strategy, FSDP2Strategy)
        norm = module.get_grad_norm() if isinstance(module, KnowsStep) else compute_grad_norm(module.parameters())
        if loss is not None:
            assert isinstance(module, KnowsStep)
            state.rank_loss = module.rank_loss
        elif state.rank_loss is not None:
            # What backward began with; the scaler waits for the device in every step anyway.
            state.rank_loss = loss = state.rank_loss / (scaler.get_scale() if scaler is not None else 1.0)
        else:
            loss = torch.zeros_like(norm)  # a module that does backward by itself
        values = torch.stack([loss.float().reshape(()), norm.float().to(loss.device)])
        if not is_reduced and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(values)
            values = values / dist.get_world_size()
        is_cuda = values.device.type == "cuda"
        state.values = torch.empty(2, pin_memory=is_cuda, device="cpu").copy_(values, non_blocking=True)
        state.mark = self._clock.mark()

    # Judging

    def _judge_pending(self) -> None:
        if self._pending is not None:
            state, self._pending = self._pending, None
            self._judge(state, has_gradients=False)

    def _judge(self, state: _StepState, *, has_gradients: bool) -> bool:
        """Return whether a step is bad, having dealt with it; ``has_gradients`` while its gradients are still there."""
        self._clock.wait(state.mark)
        assert state.values is not None
        loss, norm = state.values.tolist()
        limits = {"loss_spike": self._loss.compute_limit(), "grad_norm_spike": self._norm.compute_limit()}
        kind = classify(loss, norm, limits, is_scaled=state.is_scaled)
        if kind == NO_TARGETS and not state.knows_targets:
            kind = None
        was_empty, self._was_empty = self._was_empty, kind == NO_TARGETS
        self._was_dropped = kind is not None and self.policy != "warn"
        if kind != NO_TARGETS:  # it says nothing about others
            self._loss.add(loss)
            self._norm.add(norm)
        if kind is None:
            self._num_bad = 0
            return False
        self._num_bad += not self._was_empty
        is_first = not was_empty if self._was_empty else self._num_bad == 1
        self._counts[kind] += 1
        if self.policy != "warn":
            self._counts["skipped_steps"] += 1
        # A model that is broken stays so: its first step tells why.
        ends = self.policy == "stop" and not self._was_empty  # which breaks nothing
        if self.policy != "warn" or is_first:
            action = "skip" if self.policy == "stop" and not ends else self.policy
            values = {"loss": loss, "grad_norm": norm, "limit": limits.get(kind), "action": action}
            found = self._diagnose(state, kind, has_gradients=has_gradients)
            event = {"step": state.step, "kind": kind, **values, **found}
            self._events = [*self._events, event][:_MAX_EVENTS]
            rank_zero_warn(describe(event))
        if ends or (self.policy == "skip" and not self._was_empty and self._num_bad >= self.max_skips):
            why = "" if ends else f", the last of {self._num_bad} bad steps in a row (max_skips)"
            self._error = f"step {state.step}: {KINDS[kind]}{why}"
        return True

    def _diagnose(self, state: _StepState, kind: str, *, has_gradients: bool) -> dict[str, Any]:
        """Ask all ranks what was wrong; all must call it."""
        own: dict[str, Any] = {"loss": math.nan if state.rank_loss is None else float(state.rank_loss)}
        own["samples"] = self._find_samples(state)
        own["order"] = list(state.sums)
        sums = torch.stack(list(state.sums.values())).tolist() if state.sums else []
        own["forward"] = [name for name, total in zip(state.sums, sums, strict=True) if not math.isfinite(total)]
        own["backward"] = self._watch.list_bad_gradients() if has_gradients else []
        return conclude(gather_objects(own), kind, list(self._watch.units))

    def _find_samples(self, state: _StepState) -> list[int] | None:
        loader = self._loader
        if not isinstance(loader, KnowsSamples) or not state.places or None in state.places:
            return None
        return [sample for place in state.places if place is not None for sample in loader.list_samples(place)]

    # Between steps

    @override
    def on_step_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._error is not None:
            self._save(trainer)
        if trainer.is_global_zero and is_logging_step(trainer):
            log_values(trainer, {f"stability/{name}": float(n) for name, n in self._list_counts()}, self.last_step)

    def _save(self, trainer: Trainer) -> None:
        if is_trial(trainer):
            return
        path = find_checkpoint_folder(trainer) / f"unstable-step={trainer.global_step}.ckpt"
        trainer.save_checkpoint(str(path))
        trainer.strategy.on_train_end()  # where FSDP2Strategy waits for a checkpoint that is written beside training
        if getattr(trainer.strategy, "missing_checkpoint", None) is not None:
            self._error = f"{self._error}; weights of before could not be saved, see above"
            return
        mark_saved(trainer)
        self._error = f"{self._error}; weights of before are saved in {path}, which --ckpt_path takes to go on"

    def _raise_if_stopped(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise UnstableTrainingError(error)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._raise_if_stopped()

    on_train_epoch_end = on_validation_start

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._judge_pending()
        self._watch.close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if hasattr(self, "_watch"):  # else it failed before training
            self._watch.close()

    # What is kept

    @override
    def state_dict(self) -> dict[str, Any]:
        windows = {"loss": self._loss.state_dict(), "grad_norm": self._norm.state_dict()}
        return {**windows, "counts": dict(self._counts), "events": list(self._events)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loss.load_state_dict(state_dict["loss"])
        self._norm.load_state_dict(state_dict["grad_norm"])
        self._counts = Counter(state_dict["counts"])
        self._events = list(state_dict["events"])

    def _list_counts(self) -> list[tuple[str, int]]:
        return [(name, self._counts[name]) for name in ("skipped_steps", *KINDS)]

    def make_section(self) -> Section | None:
        """Return how many steps were bad, and the first of them in full."""
        notes = list(self._notes)
        tables = []
        if self._events:
            columns = ("step", "what", "loss", "grad norm", "ranks", "samples", "unit", "done")
            tables = [Table(title="Bad steps", columns=columns, rows=[make_row(event) for event in self._events])]
        else:
            notes.append("no step was bad")
        numbers = {**dict(self._list_counts()), "events": self._events}
        return Section(title="Stability", name="stability", numbers=numbers, tables=tables, notes=notes)
