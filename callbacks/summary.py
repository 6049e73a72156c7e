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

from lit_fsdp.errors import describe_unknown_metric
from lit_fsdp.profiling.device_memory import read_peak_gib, reset_peak
from lit_fsdp.quantization.layers import count_weights
from lit_fsdp.reporting.lost_logs import list_lost_logs
from lit_fsdp.reporting.metrics import (
    Headline,
    count_planned_steps,
    get_headline,
    has_dropped_last_step,
    read_count,
    read_metric,
    relative_to_here,
)
from lit_fsdp.reporting.rank_stats import Spread, gather_over_ranks
from lit_fsdp.reporting.sections import HasSection, Table, print_table
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy


class RunSummary(Callback):
    """Print a table when ``fit`` ends: losses, steps, time, throughput, memory of the ranks, folders.

    It begins with the metric that the module names as ``headline_metric``: its last value of a validation, and its best
    one by ``headline_mode``. When training begins, one line says what is trained, where, and which folder has the logs.

    Throughput is the median over windows of a few steps, without the first ones and without validation: the
    speed of training alone. It comes from ``train/tokens_seen`` or ``train/samples_seen``, which a task logs
    with the counts of all ranks.

    After ``validate`` and ``test`` the table holds the metrics, in place of Lightning's with all the digits of a
    double.

    Args:
        num_warmup_steps: Steps at the start that do not count for the throughput.
        window_steps: Steps between two readings. A reading waits for the GPU.
        verbose: Print before it what other callbacks and the module have for the report: tables and notes of each
            that has a method ``make_section``.
    """

    def __init__(self, num_warmup_steps: int = 5, window_steps: int = 10, verbose: bool = False) -> None:
        self.num_warmup_steps = num_warmup_steps
        self.window_steps = window_steps
        self.verbose = verbose

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = time.perf_counter()
        self._first_step: int | None = None  # unless there is one to be trained
        self._headline = get_headline(pl_module)
        self._found: list[tuple[int, float]] = []  # step, value of the headline
        self._has_validated = False
        self._rates: list[float] = []
        self._warmup_rates: list[float] = []
        self._last: tuple[int, float, float] | None = None  # step, time, count at the last reading
        self._unit = "tokens"
        reset_peak(trainer.strategy.root_device)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first_step = trainer.global_step  # after a resume, so not at 0
        self._is_told = False

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Say it once: by now nothing is left that refuses to begin."""
        if self._is_told:
            return
        self._is_told = True
        log_dir = trainer.log_dir  # a broadcast, so on every rank
        if trainer.is_global_zero:
            where = f", logs in {relative_to_here(log_dir)}" if log_dir is not None and trainer.loggers else ""
            pl_module.print(f"training: {_describe_start(trainer, pl_module)}{where}")  # beside the bar

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
            is_warm = last[0] - (self._first_step or 0) >= self.num_warmup_steps
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
        if self.verbose:
            _print_sections(trainer)
        if self._first_step is None and (limit := _describe_reached_limit(trainer)):
            print(f"nothing left to train: the run is at step {trainer.global_step:,} and {limit}; raise it to go on")
        _print_table("Run summary", self._collect(trainer, peaks, log_dir))
        if self._has_validated and not self._found and hasattr(pl_module, "headline_metric"):
            known = [name.removeprefix("val/") for name in trainer.callback_metrics if name.startswith("val/")]
            rank_zero_warn(f"headline_metric: {describe_unknown_metric(self._headline.metric, known)}")
        loss = read_metric(trainer, "train/loss")
        if loss is not None and not math.isfinite(loss) and not has_dropped_last_step(trainer):
            rank_zero_warn(
                f"the run ended with a train/loss of {loss}, so its last checkpoint is likely worthless: go on from "
                "an earlier one, with a lower learning rate, or with StabilityMonitor and policy: skip or stop"
            )

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            _print_metrics(trainer, trainer.validate_loop, "Validation", f"val/{get_headline(pl_module).metric}")
        elif not trainer.sanity_checking:
            self._has_validated = True
            if (value := read_metric(trainer, f"val/{self._headline.metric}")) is not None:
                self._found.append((trainer.global_step, value))

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _print_metrics(trainer, trainer.test_loop, "Test", f"test/{get_headline(pl_module).metric}")

    def _collect(self, trainer: Trainer, peaks: Spread, log_dir: str | None) -> dict[str, str]:
        first_step = trainer.global_step if self._first_step is None else self._first_step
        rows = _describe_headline(self._headline, self._found)
        for name in ("train/loss", "val/loss"):
            if name not in rows and (loss := read_metric(trainer, name)) is not None:
                rows[name] = f"{loss:.4f}"
        rows |= {
            "steps": f"{trainer.global_step - first_step:,} (now at {trainer.global_step:,})",
            "wall time": str(timedelta(seconds=round(time.perf_counter() - self._start))),
            "ranks": f"{trainer.world_size} on {trainer.strategy.root_device.type}",
        }
        shares = getattr(getattr(trainer.train_dataloader, "sampler", None), "rows", ())
        if len(set(shares)) > 1:
            rows["rows by rank"] = f"{', '.join(map(str, shares))} of each micro-batch round"
        if (found := read_count(trainer)) is not None:
            rows[f"{found[0]} seen"] = f"{found[1]:,.0f}"
        if rates := self._rates or self._warmup_rates:
            rate = statistics.median(rates)
            rows[f"{self._unit}/s"] = f"{rate:,.1f} ({rate / trainer.world_size:,.1f} per rank)"
        rows["peak memory"] = _format_peaks(peaks)
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


def _describe_start(trainer: Trainer, module: LightningModule) -> str:
    parts = []
    if isinstance(trainer.strategy, FSDP2Strategy):  # others keep pieces, which do not have the sizes
        counts = count_weights(module)
        num_trained = sum(counts[name] for name, parameter in module.named_parameters() if parameter.requires_grad)
        parts.append(f"{num_trained:,} of {sum(counts.values()):,} parameters")
    parts.append(f"{trainer.world_size} rank{'s'[: trainer.world_size > 1]} on {trainer.strategy.root_device.type}")
    if math.isfinite(steps := count_planned_steps(trainer)):
        parts.append(f"from step {trainer.global_step:,} to {steps:,}")
    return ", ".join(parts)


def _describe_reached_limit(trainer: Trainer) -> str:
    """Return the setting by which a resumed run was over before its first step, or nothing."""
    if trainer.global_step and trainer.global_step >= trainer.max_steps >= 0:
        return f"trainer.max_steps is {trainer.max_steps:,}"
    if trainer.global_step and trainer.max_epochs is not None and trainer.current_epoch >= trainer.max_epochs >= 0:
        return f"trainer.max_epochs is {trainer.max_epochs:,}"
    return ""


def _describe_headline(headline: Headline, found: list[tuple[int, float]]) -> dict[str, str]:
    """Return the row of the last value, and of the best one where that is another."""
    if not found:
        return {}
    text = f"{found[-1][1]:.4f}"
    finite = [point for point in found if math.isfinite(point[1])]
    best = headline.choose_best(*finite) if finite else found[-1]
    text += f" (best {best[1]:.4f} at step {best[0]:,})" if f"{best[1]:.4f}" != text else ""
    return {f"val/{headline.metric}": text}


def _print_sections(trainer: Trainer) -> None:
    for callback in (*trainer.callbacks, trainer.lightning_module):  # type: ignore[attr-defined]
        if not isinstance(callback, HasSection):
            continue
        try:
            section = callback.make_section()
        except Exception as error:  # noqa: BLE001 - of a callback that may be anyone's
            rank_zero_warn(f"{type(callback).__name__}: make_section: {type(error).__name__}: {error}")
            continue
        if section is not None:
            for table in section.tables:
                print_table(table)
            for note in section.notes:
                print(note)


def _print_metrics(trainer: Trainer, loop: Any, title: str, headline: str) -> None:
    """Print what was logged, unless the user wants no such table, and keep Lightning from doing so."""
    if loop.verbose and trainer.is_global_zero:
        found = sorted(trainer.callback_metrics.items(), key=lambda item: (item[0] != headline, item[0]))
        _print_table(title, {name: f"{float(value):.6g}" for name, value in found})
    loop.verbose = False


def _print_table(title: str, rows: dict[str, str]) -> None:
    print_table(Table(title=title, columns=(), rows=list(rows.items())))


def _format_peaks(peaks: Spread) -> str:
    if len(peaks.values) == 1:
        return f"{peaks.low:.2f} GiB"
    low, high = f"min {peaks.low:.2f} (rank {peaks.low_rank})", f"max {peaks.high:.2f} GiB (rank {peaks.high_rank})"
    return f"{low}, mean {peaks.mean:.2f}, {high}"
