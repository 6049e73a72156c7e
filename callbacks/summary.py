"""The summary at the end of a run: what it took, what came out, and where it lies."""

from __future__ import annotations

import math
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from lit_fsdp.reporting.metrics import has_dropped_last_step, read_metric, read_peak_gib, reset_peak


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
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        window = self.window_steps if trainer.strategy.root_device.type == "cuda" else 1
        if self._last is not None and step - self._last[0] < window:
            return
        count = self._read_count(trainer)
        if count is None:
            return
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
        device = trainer.strategy.root_device
        peak = torch.tensor([read_peak_gib(device)], dtype=torch.float32, device=device)
        peaks = trainer.strategy.all_gather(peak).flatten().tolist()
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

    def _collect(self, trainer: Trainer, peaks_gib: list[float], log_dir: str | None) -> dict[str, str]:
        rows = {
            "steps": f"{trainer.global_step - self._first_step:,} (now at {trainer.global_step:,})",
            "wall time": str(timedelta(seconds=round(time.perf_counter() - self._start))),
            "ranks": f"{len(peaks_gib)} on {trainer.strategy.root_device.type}",
        }
        count = self._read_count(trainer)
        if count is not None:
            rows[f"{self._unit} seen"] = f"{count:,.0f}"
        if rates := self._rates or self._warmup_rates:
            rate = statistics.median(rates)
            rows[f"{self._unit}/s"] = f"{rate:,.1f} ({rate / len(peaks_gib):,.1f} per rank)"
        rows["peak memory"] = _format_peaks(peaks_gib)
        for name in ("train/loss", "val/loss"):
            if (loss := read_metric(trainer, name)) is not None:
                rows[name] = f"{loss:.4f}"
        checkpoint = trainer.checkpoint_callback
        if isinstance(checkpoint, ModelCheckpoint):
            for name, path in (("best", checkpoint.best_model_path), ("last", checkpoint.last_model_path)):
                if path and (Path(path).exists() or "://" in path):  # else skipped, as the disk is full
                    rows[f"{name} checkpoint"] = _shorten_path(path)
        if log_dir is not None and trainer.loggers:
            rows["logs"] = _shorten_path(log_dir)
        return rows

    def _read_count(self, trainer: Trainer) -> float | None:
        for unit in ("tokens", "samples"):
            if (count := read_metric(trainer, f"train/{unit}_seen")) is not None:
                self._unit = unit
                return count
        return None


def _print_metrics(trainer: Trainer, loop: Any, title: str) -> None:
    """Print what was logged, unless the user wants no such table, and keep Lightning from doing so."""
    if loop.verbose and trainer.is_global_zero:
        _print_table(title, {name: f"{float(value):.6g}" for name, value in sorted(trainer.callback_metrics.items())})
    loop.verbose = False


def _print_table(title: str, rows: dict[str, str]) -> None:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value, end_section=False)
    # A file or pipe has no width that the paths would have to be cut to.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _format_peaks(peaks_gib: list[float]) -> str:
    if len(peaks_gib) == 1:
        return f"{peaks_gib[0]:.2f} GiB"
    low, high = min(peaks_gib), max(peaks_gib)
    mean = statistics.fmean(peaks_gib)
    return (
        f"min {low:.2f} (rank {peaks_gib.index(low)}), mean {mean:.2f}, "
        f"max {high:.2f} GiB (rank {peaks_gib.index(high)})"
    )


def _shorten_path(path: str) -> str:
    absolute = Path(path).absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)
