"""How fast training is, what a step spends its time on, and how much of the hardware's compute it uses."""

from __future__ import annotations

import math
import statistics
import warnings
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lit_fsdp.planning.step_parts import NoEstimateError
from lit_fsdp.planning.timing.links import parse_links
from lit_fsdp.planning.timing.step_estimate import StepTimeEstimator, compare_times, get_matmul_dtype, read_gpu
from lit_fsdp.planning.timing.step_time import StepTime
from lit_fsdp.profiling.clock import Clock, Step, Timeline
from lit_fsdp.profiling.compilations import CompilationMeter
from lit_fsdp.profiling.flops import FlopCounter, Flops, is_compiled
from lit_fsdp.reporting.metrics import is_logging_step, log_values, read_count
from lit_fsdp.reporting.rank_stats import AsyncRankStats, Exchanged, Spread, gather_over_ranks
from lit_fsdp.reporting.sections import Curve, Plot, Section, Table
from lit_fsdp.reporting.step_callback import StepCallback
from lit_fsdp.strategy.lightning_internals import watch_fetches
from lit_fsdp.strategy.lightning_strategies import get_own_optimizer

PARTS = ("data", "forward", "backward", "optimizer", "other")
_TIMES = ("step_s", *(f"{part}_s" for part in PARTS))
_COMPUTE = ("model_tflop_s", "mfu_pct", "hfu_pct")
_MAX_POINTS = 200


class ThroughputLogger(StepCallback):
    """Log tokens (or samples) per second, the parts of a step, FLOP/s and MFU; with a table in the report.

    Parts of a step are added up over its micro-batches. *data* is waiting for the next batch and moving it to the
    device, *forward* the training step. *backward* includes the reduction of gradients that it does not hide.
    *optimizer* is everything after it up to the new weights (gradient norm, clipping), *other* the rest: callbacks,
    logging. Validation and the saving of checkpoints do not count as training. On a GPU these are times of the GPU:
    data that is read while it computes costs nothing.

    Throughput is how ``train/tokens_seen`` or ``train/samples_seen``, which a task logs with the counts of all ranks,
    grows over this time. MFU is model FLOPs / (step time x peak FLOP/s), HFU the same with what is computed again in
    backward; see ``lit_fsdp.profiling.flops`` for what is counted, ``lit_fsdp.planning.timing.hardware`` for peaks.
    FLOPs are counted in the first step of a run; later steps are taken to cost as many for each element of their
    batches, padding included.

    Every ``trainer.log_every_n_steps`` steps, one interval later, rank 0 logs ``speed/tokens_per_s``,
    ``speed/tokens_per_s_per_rank``, ``speed/step_s``, ``speed/data_s``, ``speed/forward_s``, ``speed/backward_s``,
    ``speed/optimizer_s``, ``speed/other_s`` (seconds per step, mean over ranks), ``speed/model_tflop_s`` (of a rank),
    ``speed/mfu_pct`` and ``speed/hfu_pct``.

    Args:
        num_warmup_steps: Steps at the start that count neither for medians nor for warnings.
        starved_pct: Warn once if a rank waits for data for more than this share of its time.
        count_flops: Count operations in the first step, which takes longer for it.
        link: Between GPUs, as ``plan --link`` takes it (``pcie4``, ``nvlink,ib400``), to predict the time of a step
            with; by default that of ``fsdp2_auto``, or else what is usual for the GPU.
    """

    def __init__(
        self,
        num_warmup_steps: int = 5,
        starved_pct: float = 10.0,
        count_flops: bool = True,
        link: str | None = None,
    ) -> None:
        if num_warmup_steps < 0:
            raise ValueError(f"num_warmup_steps: got {num_warmup_steps}: expected 0 or more")
        if not 0 < starved_pct <= 100:
            raise ValueError(f"starved_pct: got {starved_pct}: expected above 0, at most 100; 100 never warns")
        self.num_warmup_steps = num_warmup_steps
        self.starved_pct = starved_pct
        self.count_flops = count_flops
        self.links = None if link is None else parse_links(link)
        self._section: Section | None = None
        self._undo: list[Callable[[], None]] = []
        self._counter: FlopCounter | None = None
        self._counting = ExitStack()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # which may end before its first step
            self._section = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._stop_watching()
        self._section = None
        self._notes: list[str] = []
        self._timeline = Timeline(Clock(trainer.strategy.root_device))
        self._stats = AsyncRankStats(trainer, [*_TIMES, *_COMPUTE])
        self._history = {name: array("d") for name in (*_TIMES, "elements")}  # of this rank, by step
        self._num_sent = 0  # steps of the history that were sent off already
        self._reading: tuple[int, float] | None = None  # steps of the history, count
        self._rates: list[tuple[int, float, bool]] = []  # step, per second, whether after the warm-up
        self._unit = "tokens"
        self._num_elements = 0.0
        self._is_starved = False
        self._flops: Flops | None = None
        self._counted_step = trainer.global_step
        self._flop_elements = 0.0
        self._estimator: StepTimeEstimator | None = None
        self._peak_tflops = self._choose_peak(trainer, pl_module)
        self._counter = self._build_counter(pl_module)
        self._compilations = self._watch_compiler(pl_module)
        self._undo.append(watch_fetches(trainer, lambda: self._timeline.cut("data")))
        end_step = self._end_optimizer if pl_module.automatic_optimization else lambda *_: self._timeline.cut("forward")
        for optimizer in trainer.optimizers:
            self._undo.append(get_own_optimizer(optimizer).register_step_post_hook(end_step).remove)

    # Marks

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._timeline.cut("forward")
        self._num_elements += _count_elements(batch)
        is_sample = trainer.global_step == self.first_step or is_logging_step(trainer)
        if self._estimator is not None and is_sample:
            self._estimator.add(pl_module, batch)
        if self._counter is not None and trainer.global_step == self._counted_step:
            self._counting.enter_context(self._counter)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._timeline.cut("backward")

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._timeline.cut("optimizer")
        if pl_module.automatic_optimization:
            self._counting.close()

    def on_step_undone(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Count the next step, as this one is computed again, in parts; see ``oom_retries``."""
        self._counting.close()
        if self._counter is not None:
            self._counter, self._counted_step = FlopCounter(), trainer.global_step + 1

    def _end_optimizer(self, *_: Any) -> None:
        # Torch calls this for the step of a parent class too, where an optimizer builds on that.
        if self._timeline.name == "other":
            self._timeline.rename("optimizer")
        self._timeline.cut("other")

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._pause(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pause(trainer)

    def _pause(self, trainer: Trainer) -> None:
        """Leave out the stretch between two steps, or after one, in which something else is done."""
        is_training = bool(self._undo) and not trainer.sanity_checking
        if is_training and self._timeline.name == "other":
            self._timeline.drop()

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._counting.close()
        if trainer.global_step == self.last_step:  # a micro-batch without a step
            self._timeline.rename("other")
        super().on_train_batch_end(trainer, pl_module, *args)

    @override
    def on_step_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._compilations is not None and (warning := self._compilations.end_step(self.last_step)):
            self._notes.append(warning)
            warnings.warn(warning, stacklevel=1)  # on each rank, as each compiles for itself
        self._timeline.cut("other")
        self._timeline.close(self._num_elements)
        if self._counter is not None and trainer.global_step > self._counted_step:
            self._flops, self._flop_elements = self._counter.flops, self._num_elements
            self._counter = None
        self._num_elements = 0.0
        self._keep(self._timeline.take())
        if self.last_step - self.first_step in (1, self.num_warmup_steps):
            self._read_rate(trainer)
        if is_logging_step(trainer):
            self._read_rate(trainer)
            self._log(trainer, self._stats.exchange(*self._measure_interval()))

    # Between ranks

    def _keep(self, steps: list[Step]) -> None:
        for step in steps:
            self._history["step_s"].append(step.total_s)
            self._history["elements"].append(step.tag)
            for part in PARTS:
                self._history[f"{part}_s"].append(step.parts.get(part, 0.0))

    def _read_rate(self, trainer: Trainer) -> None:
        """Note the throughput since the last call."""
        if (found := read_count(trainer)) is None:
            return
        self._unit, count = found
        self._keep(self._timeline.take(wait=True))  # the metric was waited for already
        num_steps, last = len(self._history["step_s"]), self._reading
        self._reading = (num_steps, count)
        if last is None:
            return
        time_s = sum(self._history["step_s"][last[0] : num_steps])
        if time_s > 0 and count > last[1]:
            is_warm = last[0] >= self.num_warmup_steps
            self._rates.append((self.last_step, (count - last[1]) / time_s, is_warm))

    def _measure_interval(self) -> tuple[dict[str, float], Any]:
        """Return this rank's means since the last time, and what they are of."""
        begin, self._num_sent = self._num_sent, len(self._history["step_s"])
        if begin < self.num_warmup_steps < self._num_sent:
            begin = self.num_warmup_steps  # starting the workers would look like slow data
        return self._measure(begin, statistics.fmean), (self.last_step, self._rates[-1:])

    def _measure(self, begin: int, average: Callable[[Any], float]) -> dict[str, float]:
        """Return this rank's numbers over the steps from ``begin`` on; NaN where there are none."""
        values = {n: average(self._history[n][begin:]) if self._history[n][begin:] else math.nan for n in _TIMES}
        time_s, elements = sum(self._history["step_s"][begin:]), sum(self._history["elements"][begin:])
        flops = self._flops
        has_flops = flops is not None and flops.model > 0 and time_s > 0
        scale = elements / self._flop_elements / time_s / 1e12 if has_flops else math.nan
        model, hardware = (0, 0) if flops is None else (flops.model, flops.hardware)
        peak = math.nan if self._peak_tflops is None else self._peak_tflops
        values["model_tflop_s"] = model * scale
        return values | {"mfu_pct": 100 * model * scale / peak, "hfu_pct": 100 * hardware * scale / peak}

    def _log(self, trainer: Trainer, found: Exchanged | None) -> None:
        if found is None or not trainer.is_global_zero:
            return
        spreads, (step, rates) = found
        values = {f"speed/{name}": spread.mean for name, spread in spreads.items()}
        for _, rate, _ in rates:
            values[f"speed/{self._unit}_per_s"] = rate
            values[f"speed/{self._unit}_per_s_per_rank"] = rate / trainer.world_size
        log_values(trainer, {name: value for name, value in values.items() if not math.isnan(value)}, step)
        if step - self.first_step > self.num_warmup_steps:
            self._warn_if_starved(spreads)

    def _warn_if_starved(self, spreads: dict[str, Spread]) -> None:
        shares = [100 * share for share in spreads["data_s"].divide_by(spreads["step_s"])]
        worst = max(shares)
        if self._is_starved or not worst > self.starved_pct:  # NaN where an interval had no step
            return
        self._is_starved = True
        rank = shares.index(worst)
        note = (
            f"rank {rank} waits for data {worst:.0f} % of its time ({spreads['data_s'].values[rank]:.3g} of "
            f"{spreads['step_s'].values[rank]:.3g} s a step): raise num_workers of the data, or read from a faster disk"
        )
        self._notes.append(note)
        rank_zero_warn(note)

    # FLOPs

    def _build_counter(self, module: LightningModule) -> FlopCounter | None:
        if not self.count_flops:
            return None
        if is_compiled(module):
            self._notes.append("FLOPs are not counted: what is compiled cannot be seen")
            return None
        return FlopCounter()

    def _watch_compiler(self, module: LightningModule) -> CompilationMeter | None:
        if not is_compiled(module):
            return None
        meter = CompilationMeter()
        meter.start()
        self._undo.append(meter.stop)
        return meter

    def _choose_peak(self, trainer: Trainer, module: LightningModule) -> float | None:
        device, dtype = trainer.strategy.root_device, get_matmul_dtype(trainer, module)
        if device.type != "cuda":
            self._notes.append(f"no MFU, and no time predicted: the peak of a {device.type} is not known")
            return None
        gpu, name = read_gpu(device)
        peak = None if gpu is None else gpu.get_peak_tflops(dtype)
        if gpu is None or peak is None:
            what = (
                "is not in the table of lit_fsdp/planning/timing/hardware.py"
                if gpu is None
                else f"has no peak for {dtype}"
            )
            self._notes.append(f"no MFU, and no time predicted: {name} {what}")
        else:
            self._notes.append(f"MFU is of {peak:g} TFLOP/s, the peak of {name} in {dtype}")
            self._estimator = StepTimeEstimator(gpu=gpu, dtype=dtype, links=self.links)
        return peak

    # The end

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_watching()
        self._keep(self._timeline.take(wait=True))
        if self._reading is None or self._reading[0] < len(self._history["step_s"]):
            self._read_rate(trainer)
        # One GPU may have been further behind than another, so whether steps are left says nothing about other ranks.
        self._log(trainer, self._stats.exchange(*self._measure_interval()))
        self._log(trainer, self._stats.finish())
        num_steps = len(self._history["step_s"])
        begin = self.num_warmup_steps if num_steps > self.num_warmup_steps else 0
        spreads = gather_over_ranks(trainer, self._measure(begin, statistics.median))
        if num_steps:
            self._predicted = self._predict(trainer, pl_module)
            self._section = self._build_section(spreads, trainer.world_size, num_steps - begin, is_warm=begin > 0)

    on_preemption = on_train_end

    def _predict(self, trainer: Trainer, module: LightningModule) -> StepTime | None:
        if self._estimator is None or not trainer.is_global_zero:
            return None
        try:
            return self._estimator.estimate(trainer, module)
        except NoEstimateError as error:
            self._notes.append(f"no time predicted: {error}")
            return None

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop_watching()

    def _stop_watching(self) -> None:
        self._counting.close()
        while self._undo:
            self._undo.pop()()

    def make_section(self) -> Section | None:
        """Return what the last run has measured."""
        return self._section

    def _build_section(self, spreads: dict[str, Spread], world_size: int, num_steps: int, *, is_warm: bool) -> Section:
        notes = list(self._notes)
        if not is_warm and self.num_warmup_steps:
            notes.append(f"of {num_steps} steps none is after the {self.num_warmup_steps} of the warm-up: all count")
        if self._flops is not None and self._flops.uncounted:
            notes.append(f"FLOPs are more than counted, without a formula: {', '.join(self._flops.uncounted)}")
        rates = [rate for _, rate, is_after in self._rates if is_after] or [rate for _, rate, _ in self._rates]
        numbers: dict[str, Any] = {"steps": num_steps, "ranks": world_size}
        if self._compilations is not None:
            numbers["compiler"], sentences = self._compilations.describe()
            notes += sentences
        rows = []
        if rates:
            rate = statistics.median(rates)
            numbers |= {f"{self._unit}_per_s": rate, f"{self._unit}_per_s_per_rank": rate / world_size}
            rows.append((f"{self._unit}/s", f"{rate:,.1f} ({rate / world_size:,.1f} per rank)", "", ""))
        step_s = spreads["step_s"].mean
        for name in _TIMES:
            spread = spreads[name]
            numbers[name] = spread.mean
            share = "" if name == "step_s" or not step_s else f"{100 * spread.mean / step_s:.1f} %"
            slowest = f"{spread.high:.4f} (rank {spread.high_rank})" if world_size > 1 else ""
            rows.append((name.removesuffix("_s") + " s", f"{spread.mean:.4f}", share, slowest))
        if self._predicted is not None and step_s:
            numbers["predicted"], sentences = compare_times(self._predicted, step_s)
            notes += sentences
            rows.insert(len(rows) - len(PARTS), ("predicted step s", f"{self._predicted.step_s:.4f}", "", ""))
        for name, label in zip(_COMPUTE, ("model TFLOP/s per rank", "MFU %", "HFU %"), strict=True):
            if not math.isnan(spreads[name].mean):
                numbers[name] = spreads[name].mean
                rows.append((label, f"{spreads[name].mean:.4g}", "", ""))
        if self._flops is not None:
            numbers["first_step_flops_of_rank_0"] = {"model": self._flops.model, "hardware": self._flops.hardware}
        title = f"Speed, medians of {num_steps} steps" + (" after the warm-up" if is_warm else "")
        table = Table(title=title, columns=("", "mean of ranks", "share", "slowest"), rows=rows)
        return Section(
            title="Speed", name="speed", numbers=numbers, tables=[table], plots=self._build_plots(), notes=notes
        )

    def _build_plots(self) -> list[Plot]:
        num_steps = len(self._history["step_s"])
        size = -(-num_steps // _MAX_POINTS)
        begins = range(0, num_steps, size)
        steps = [float(self.first_step + min(begin + size, num_steps)) for begin in begins]
        curves = [
            Curve(label=part, x=steps, y=[statistics.fmean(self._history[f"{part}_s"][b : b + size]) for b in begins])
            for part in PARTS
        ]
        plots = [Plot(title="Parts of a step, rank 0", x_label="step", y_label="s", curves=curves, kind="stacked")]
        if self._rates:
            x, y = [float(step) for step, _, _ in self._rates], [rate for _, rate, _ in self._rates]
            curve = Curve(label=f"{self._unit}/s", x=x, y=y)
            plots.append(Plot(title="Throughput", x_label="step", y_label=f"{self._unit}/s", curves=[curve]))
        return plots


def _count_elements(batch: Any) -> float:
    """Return how many numbers a batch holds; 1 for one without tensors."""
    return float(sum(leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)) or 1)
