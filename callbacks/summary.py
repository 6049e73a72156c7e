"""The summary at the end of a run: what it took, what came out, and where it lies."""

from __future__ import annotations

import math
import statistics
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lit_fsdp.profiling.device_memory import read_peak_gib, reset_peak
from lit_fsdp.reporting.lost_logs import list_lost_logs
from lit_fsdp.reporting.metrics import has_dropped_last_step, read_count, read_metric, relative_to_here
from lit_fsdp.reporting.rank_stats import Spread, gather_over_ranks
from lit_fsdp.reporting.sections import Table, print_table
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy


class RunSummary(Callback):
    """Print a table when ``fit`` ends: steps, time, throughput, memory of the ranks, losses, folders.

    Throughput is the median over windows of a few steps, without the first ones and without validation: the
    speed of training alone. It comes from ``train/tokens_seen`` or ``train/samples_seen``, which a task logs
    with the counts of all ranks.

    After ``validate`` and ``test`` the table holds the metrics, in place of Lightning's with all the digits of a
    double.

    Args:
        num_warmup_steps: Steps at the start that do not count for the throughput.
        window_steps: Steps between two readings. A reading waits for the GPU.
    """

    def __init__(self, num_warmup_steps: int = 5, window_steps: int = 10) -> None:
        self.num_warmup_steps = num_warmup_steps
        self.window_steps = window_steps
        self._first_step = 0
        self._rates: list[float] = []
        self._warmup_rates: list[float] = []
        self._last: tuple[int, float, float] | None = None  # step, time, count at the last reading
        self._unit = "tokens"

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = time.perf_counter()
        reset_peak(trainer.strategy.root_device)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first_step = trainer.global_step  # after a resume, so not at 0

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step = trainer.global_step
        window = self.window_steps if trainer.strategy.root_device.type == "cuda" else 1
        if self._last is not None and step - self._last[0] < window:
            return
        if (found := read_count(trainer)) is None:
            return
        self._unit, count = found
        now, last, self._last = time.perf_counter(), self._last, (step, time.perf_counter(), count)
        if last is not None and count > last[2]:
            is_warm = last[0] - self._first_step >= self.num_warmup_steps
            (self._rates if is_warm else self._warmup_rates).append((count - last[2]) / (now - last[1]))

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = None  # a window must not contain a validation

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather over all ranks, print on the first."""
        log_dir = trainer.log_dir  # a broadcast, so on every rank
        peaks = gather_over_ranks(trainer, {"peak_gib": read_peak_gib(trainer.strategy.root_device)})["peak_gib"]
        if not trainer.is_global_zero:
            return
        _print_table("Run summary", self._collect(trainer, peaks, log_dir))
        loss = read_metric(trainer, "train/loss")
        if loss is not None and not math.isfinite(loss) and not has_dropped_last_step(trainer):
            rank_zero_warn(
                f"the run ended with a train/loss of {loss}, so its last checkpoint is likely worthless: go on from "
                "an earlier one, with a lower learning rate, or with StabilityMonitor and policy: skip or stop"
            )

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            _print_metrics(trainer, trainer.validate_loop, "Validation")

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _print_metrics(trainer, trainer.test_loop, "Test")

    def _collect(self, trainer: Trainer, peaks: Spread, log_dir: str | None) -> dict[str, str]:
        rows = {
            "steps": f"{trainer.global_step - self._first_step:,} (now at {trainer.global_step:,})",
            "wall time": str(timedelta(seconds=round(time.perf_counter() - self._start))),
            "ranks": f"{trainer.world_size} on {trainer.strategy.root_device.type}",
        }
        if (found := read_count(trainer)) is not None:
            rows[f"{found[0]} seen"] = f"{found[1]:,.0f}"
        if rates := self._rates or self._warmup_rates:
            rate = statistics.median(rates)
            rows[f"{self._unit}/s"] = f"{rate:,.1f} ({rate / trainer.world_size:,.1f} per rank)"
        rows["peak memory"] = _format_peaks(peaks)
        for name in ("train/loss", "val/loss"):
            if (loss := read_metric(trainer, name)) is not None:
                rows[name] = f"{loss:.4f}"
        if isinstance(trainer.strategy, FSDP2Strategy):
            rows |= _describe_disk(trainer.strategy)
        checkpoint = trainer.checkpoint_callback
        if isinstance(checkpoint, ModelCheckpoint):
            for name, path in (("best", checkpoint.best_model_path), ("last", checkpoint.last_model_path)):
                if path and (Path(path).exists() or "://" in path):  # else skipped, as the disk is full
                    rows[f"{name} checkpoint"] = str(relative_to_here(path))
        if log_dir is not None and trainer.loggers:
            rows["logs"] = str(relative_to_here(log_dir))
        if lost := list_lost_logs(trainer):
            rows["NOT logged"] = "; ".join(lost)
        return rows


def _describe_disk(strategy: FSDP2Strategy) -> dict[str, str]:
    rows = {} if strategy.disk_space is None else {"disk": f"{strategy.disk_space} at the start"}
    if strategy.missing_checkpoint is not None:
        rows["NOT saved"] = str(relative_to_here(strategy.missing_checkpoint))
    return rows


def _print_metrics(trainer: Trainer, loop: Any, title: str) -> None:
    """Print what was logged, unless the user wants no such table, and keep Lightning from doing so."""
    if loop.verbose and trainer.is_global_zero:
        _print_table(title, {name: f"{float(value):.6g}" for name, value in sorted(trainer.callback_metrics.items())})
    loop.verbose = False


def _print_table(title: str, rows: dict[str, str]) -> None:
    print_table(Table(title=title, columns=(), rows=list(rows.items())))


def _format_peaks(peaks: Spread) -> str:
    if len(peaks.values) == 1:
        return f"{peaks.low:.2f} GiB"
    low, high = f"min {peaks.low:.2f} (rank {peaks.low_rank})", f"max {peaks.high:.2f} GiB (rank {peaks.high_rank})"
    return f"{low}, mean {peaks.mean:.2f}, {high}"
