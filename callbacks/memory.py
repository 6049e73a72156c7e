"""Where the memory goes: of every step what the device says, of one step every tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lit_fsdp.planning.closed_form.engine import StepEstimate, estimate_step
from lit_fsdp.planning.estimate import describe_model, estimate_beside_training, measure_batch
from lit_fsdp.planning.step_parts import MicroBatch, NoEstimateError, Ranks
from lit_fsdp.profiling.device_memory import (
    PEAK_NAMES,
    read_memory,
    read_step,
    start_recording,
    stop_recording,
    write_snapshot,
)
from lit_fsdp.profiling.memory import KINDS
from lit_fsdp.profiling.memory_log import StepMemory
from lit_fsdp.profiling.memory_trace import MemoryTrace
from lit_fsdp.reporting.curves import Series
from lit_fsdp.reporting.lost_logs import outlive_lost_log
from lit_fsdp.reporting.memory_section import Comparison, TracedStep, make_memory_section
from lit_fsdp.reporting.metrics import find_run_folder, is_logging_step, is_trial, log_values
from lit_fsdp.reporting.plots import write_png
from lit_fsdp.reporting.rank_stats import AsyncRankStats, Exchanged, Spread, gather_over_ranks
from lit_fsdp.reporting.sections import Section
from lit_fsdp.reporting.step_callback import StepCallback
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy
from lit_fsdp.strategy.trainer_settings import count_micro_batches

_GIB = 2**30


class MemoryLogger(StepCallback):
    """Measure the memory of every step on every rank, and follow that of one step tensor by tensor.

    On GPUs it logs what torch's allocator says, of rank 0 and the largest of all ranks. ``memory/allocated_gib`` and
    ``memory/peak_allocated_gib`` are tensors, ``memory/reserved_gib`` is taken from the driver.
    ``memory/inactive_split_gib`` is held in pieces that cannot be given back; ``memory/fragmentation_pct`` is their
    share of reserved memory. ``memory/alloc_retries`` counts how often the allocator gave memory back to find some:
    a run that has any is slow, and near its end. ``memory/active_gib`` and ``memory/device_free_gib`` are as torch has
    them. On CPUs it logs ``memory/rss_gib`` and ``memory/peak_rss_gib`` of the process. The ranks' numbers are put
    together in the background, so a value is logged one interval (``trainer.log_every_n_steps``) after it was read.

    In one step it notes after every operator which tensors are alive: parameters, gathered parameters, gradients,
    optimizer state, buffers of collectives, activations, and the rest, by FSDP unit. That step takes about
    twice as long, and computes the same. Not with ``compile``, whose code such a look would not see. Beside it stands
    what the closed form of ``plan`` says of the same step and batch, where it has rules for the model, else why not; a
    difference above ``warn_pct`` is warned of. An error in any of this is printed in one line, and the run goes on.

    At the end of ``fit`` it writes ``memory/step.png`` and ``memory/run.png`` into the run's folder. Its tables are for
    the report, and ``RunSummary(verbose=True)`` prints them.

    Args:
        trace_step: Which step of this run to follow, 2 or later, as optimizer state comes to be in the first; ``null``
            follows none.
        warn_pct: Warn if the peak of that step differs from the predicted one by more than this share.
        snapshot_steps: Steps of this run of which every rank writes ``memory/snapshot_step_<n>_rank_<r>.pickle``,
            with the last 100,000 allocations of the CUDA allocator in that step and who made them, for
            https://pytorch.org/memory_viz. GPU only.
        fallback_dir: Folder for it if the run has none of its own, which it has with TensorBoardLogger or
            CSVLogger; by default the Trainer's ``default_root_dir``.
    """

    def __init__(
        self,
        trace_step: int | None = 2,
        warn_pct: float = 15.0,
        snapshot_steps: Sequence[int] = (),
        fallback_dir: str | None = None,
    ) -> None:
        if trace_step is not None and trace_step < 2:
            raise ValueError(f"trace_step: got {trace_step}: optimizer state comes to be in step 1; expected 2 or more")
        if any(step < 1 for step in snapshot_steps):
            raise ValueError(f"snapshot_steps: got {list(snapshot_steps)}: steps are counted from 1")
        if warn_pct <= 0:
            raise ValueError(f"warn_pct: got {warn_pct}: expected above 0, such as 15")
        self.trace_step = trace_step
        self.warn_pct = warn_pct
        self.snapshot_steps = tuple(snapshot_steps)
        self.fallback_dir = fallback_dir
        self._trace: MemoryTrace | None = None
        self._reset()

    def _reset(self) -> None:
        self._step: TracedStep | None = None
        self._micro_batch: MicroBatch | None = None  # the largest of the traced step
        self._ranks: dict[str, Spread] = {}  # over the whole run
        self._series: dict[str, Series] = {}
        self._notes: list[str] = []
        self._snapshots_left = sorted(self.snapshot_steps)
        self._is_recording = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # which may end before its first step
            self._reset()
        if self.snapshot_steps and trainer.strategy.root_device.type != "cuda":
            raise ValueError(f"snapshot_steps: got {list(self.snapshot_steps)}: only CUDA has them; leave it out")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._reset()
        self._folder = find_run_folder(trainer, self.fallback_dir) / "memory"
        self._device = trainer.strategy.root_device
        self._peak_gib = 0.0
        self._stats = AsyncRankStats(trainer, list(read_memory(self._device)))
        strategy = trainer.strategy
        self._can_trace = self.trace_step is not None
        if isinstance(strategy, FSDP2Strategy) and strategy.settings.compile is not None and self._can_trace:
            self._can_trace = False
            self._notes.append("No step was followed: compiled code does not show its tensors.")

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step - self.first_step + 1
        # Not ==: several optimizers count as several steps.
        if self._snapshots_left and step >= self._snapshots_left[0] and not self._is_recording:
            self._is_recording = True
            start_recording(self)
        if self._can_trace and self._step is None and self._trace is None and step >= (self.trace_step or 0):
            with self._give_up_on_error(trainer):
                self._start_trace(trainer, pl_module, batch)
        if self._trace is not None:
            self._measure_batch(trainer, pl_module, batch)
        self._begin_phase("forward")

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._begin_phase("backward")

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._begin_phase("optimizer")

    @override
    def on_step_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trace = self._close_trace()
        self._write_snapshot(trainer)
        values = read_step(self._device)
        if trace is not None:
            with self._give_up_on_error(trainer):
                memory = trace.finish()
                comparison = self._compare(trainer, pl_module, memory, values)
                self._step = TracedStep(number=self.last_step, memory=memory, ranks={}, comparison=comparison)
        for name, value in values.items():
            self._series.setdefault(name, Series()).add(self.last_step, value)
        peak = PEAK_NAMES[self._device.type]
        self._peak_gib = max(self._peak_gib, values.get(peak, 0.0))
        if is_logging_step(trainer):
            # The peak is the largest of all steps since the last one that was logged.
            now = {**read_memory(self._device), **({peak: self._peak_gib} if self._peak_gib else {})}
            self._log(trainer, self._stats.exchange(now, self.last_step))
            self._peak_gib = 0.0

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close_trace()  # of a step that did not come to its end
        stop_recording(self)
        self._log(trainer, self._stats.finish())
        if self._can_trace and self._step is None:
            self._notes.append(f"No step was followed: the run had no step {self.trace_step}.")
        self._gather(trainer)
        section = self.make_section()
        has_steps = trainer.is_global_zero and self.last_step > self.first_step
        if section is not None and has_steps and not is_trial(trainer):
            with self._give_up_on_error(trainer):
                self._report(trainer, section)

    on_preemption = on_train_end

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close_trace()
        stop_recording(self)

    def make_section(self) -> Section | None:
        """Return the tables and plots of the run."""
        return make_memory_section(self._ranks, self._series, self._step, self._notes) if self._ranks else None

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._trace is not None:  # between two micro-batches
            self._trace.pause()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._trace is not None:
            self._trace.resume()

    @contextmanager
    def _give_up_on_error(self, trainer: Trainer) -> Iterator[None]:
        """Say in one line what went wrong, and follow no step: the run goes on.

        Nothing in it may wait for other ranks, on which the same may have gone well.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001  whatever it is, training did not cause it
            self._close_trace()
            self._can_trace = False
            text = (str(error).strip() or "no message").split("\n")[0]
            self._notes.append(f"{type(self).__name__} stopped on rank {trainer.global_rank}: {text}.")
            print(self._notes[-1], flush=True)

    def _start_trace(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        plan = getattr(trainer.strategy, "plan", ())
        trace = MemoryTrace(pl_module, trainer.optimizers, plan=plan, device=self._device)
        self._trace = trace.__enter__()
        trace.add_inputs(batch)

    def _gather(self, trainer: Trainer) -> None:
        """Exchange what the ranks hold at the end, and held at the peak of the step, in one exchange of fixed size.

        A rank that could not follow the step sends NaN. Then no rank shows the step, as all must do the same.
        """
        peak = None if self._step is None else self._step.memory.peak.by_kind
        kinds: dict[str, float] = {kind: math.nan if peak is None else peak.get(kind, 0) for kind in KINDS}
        found = gather_over_ranks(trainer, {**read_memory(self._device), **kinds})
        self._ranks = {name: spread for name, spread in found.items() if name not in KINDS}
        missing = [rank for rank, value in enumerate(found[KINDS[0]].values) if math.isnan(value)]
        if self._step is None:
            return
        if missing:
            self._notes.append(f"Step {self._step.number} is not shown: ranks {missing} could not follow it.")
            self._step = None
        else:
            self._step = replace(self._step, ranks={kind: found[kind] for kind in KINDS})

    def _begin_phase(self, name: str) -> None:
        if self._trace is not None:
            self._trace.begin_phase(name)

    def _close_trace(self) -> MemoryTrace | None:
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.__exit__(None, None, None)
        return trace

    def _measure_batch(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> None:
        if not trainer.is_global_zero:
            return
        try:
            if not isinstance(trainer.strategy, FSDP2Strategy):
                raise NoEstimateError(f"the strategy is {type(trainer.strategy).__name__}")
            with estimate_beside_training():
                found = measure_batch(pl_module, batch)
        except NoEstimateError as error:
            self._note_missing(error)
            return
        # A mask is a matter of square lengths, so of two alike the one with it holds more.
        known = [] if self._micro_batch is None else [self._micro_batch]
        self._micro_batch = max([*known, found], key=lambda one: (one.num_tokens, one.is_masked))

    def _compare(
        self, trainer: Trainer, pl_module: LightningModule, memory: StepMemory, values: Mapping[str, float]
    ) -> Comparison | None:
        if (micro_batch := self._micro_batch) is None:
            return None
        num_micro_batches = count_micro_batches(trainer)
        try:
            with estimate_beside_training():
                predicted = self._estimate(trainer, pl_module, micro_batch, num_micro_batches)
        except NoEstimateError as error:
            self._note_missing(error)
            return None
        allocated = round(values.get("peak_allocated_gib", 0) * _GIB)
        found = Comparison(predicted=predicted.memory.peak, measured_bytes=allocated or memory.peak.num_bytes)
        self._notes.append(f"Step {self.last_step}, rank 0: {found.describe()}.")
        shape = f"{'the batch' if num_micro_batches == 1 else 'the largest micro-batch'}, {micro_batch.describe()}"
        self._notes.append(f"Predicted for {shape}, of that step and rank; plan counts the largest that may come.")
        if abs(found.difference_pct) > self.warn_pct:
            rank_zero_warn(f"memory of step {self.last_step}: {found.describe()}: a plan of this run would mislead")
        return found

    def _estimate(
        self, trainer: Trainer, module: LightningModule, micro_batch: MicroBatch, num_micro_batches: int | None
    ) -> StepEstimate:
        strategy = trainer.strategy
        assert isinstance(strategy, FSDP2Strategy)  # else there is no micro-batch
        if strategy.settings.cpu_offload is not None and self._device.type == "cpu":
            raise NoEstimateError("on a CPU, offload moves nothing")
        if num_micro_batches is None:
            raise NoEstimateError("the number of accumulated micro-batches changes")
        return estimate_step(
            describe_model(module, strategy),
            strategy.settings,
            micro_batch,
            ranks=Ranks(num_nodes=trainer.num_nodes, per_node=trainer.world_size // trainer.num_nodes),
            num_micro_batches=num_micro_batches,
            device_type=self._device.type,
        )

    def _note_missing(self, error: NoEstimateError) -> None:
        if (note := f"Nothing was predicted: {error}.") not in self._notes:
            self._notes.append(note)

    def _write_snapshot(self, trainer: Trainer) -> None:
        if self._is_recording:
            self._is_recording = False
            step = trainer.global_step - self.first_step
            self._snapshots_left = [other for other in self._snapshots_left if other > step]
            path = self._folder / f"snapshot_step_{trainer.global_step}_rank_{trainer.global_rank}.pickle"
            with outlive_lost_log(trainer, type(self).__name__, self._folder):
                write_snapshot(path)
                rank_zero_info(f"memory snapshot: {path}")
            stop_recording(self)

    def _log(self, trainer: Trainer, found: Exchanged | None) -> None:
        if found is None or not trainer.is_global_zero:
            return
        spreads, step = found
        values = {f"memory/{name}": spread.values[0] for name, spread in spreads.items()}
        if trainer.world_size > 1:
            name = PEAK_NAMES[self._device.type]
            values |= {f"memory/max_{name}": spreads[name].high, f"memory/max_{name}_rank": spreads[name].high_rank}
        log_values(trainer, values, step)

    def _report(self, trainer: Trainer, section: Section) -> None:
        with outlive_lost_log(trainer, type(self).__name__, self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            for name, plot in zip(("run", "step"), section.plots, strict=False):
                write_png(plot, self._folder / f"{name}.png")
