"""The progress bar: loss, throughput and memory, as a bar in a terminal, as plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lit_fsdp.profiling.device_memory import read_peak_gib
from lit_fsdp.reporting.metrics import count_planned_steps, get_headline, read_count, read_metric


class ProgressBar(TQDMProgressBar):
    """Show the loss, tokens (or samples) per second over all ranks, the memory of this rank, and the time left.

    Throughput is how ``train/tokens_seen`` or ``train/samples_seen`` grew between two refreshes. The time left is
    that of the whole run: steps left, times the mean of those so far without the first, validations included.
    Reading a metric waits for the GPU, so nothing is read between refreshes. Where the output is no terminal, there
    is a plain line every minute, after the first step and after the last.

    Args:
        refresh_rate: Refresh the bar after this many batches; 0 turns bar and lines off.
        leave: Leave the finished bar of every epoch on the screen.
        line_every_s: Seconds between two plain lines; 0 prints one for each step.
    """

    def __init__(self, refresh_rate: int = 10, leave: bool = False, line_every_s: float = 60.0) -> None:
        if not line_every_s >= 0:
            raise ValueError(f"line_every_s: got {line_every_s}: expected seconds, 0 or more")
        super().__init__(refresh_rate=refresh_rate, leave=leave)
        self.line_every_s = line_every_s
        self._is_plain = not sys.stdout.isatty()
        self._last: tuple[float, float] | None = None  # time, count at the last refresh
        self._begin: tuple[float, int] | None = None  # time, steps after the first step of this run
        self._last_line = (0.0, -1)  # time, step
        self._last_step = -1
        self._rate = ""

    @property
    @override
    def is_disabled(self) -> bool:
        return self._is_plain or super().is_disabled

    @override
    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        super().on_train_start(trainer)
        self._last, self._begin, self._last_step = None, None, trainer.global_step
        self._last_line, self._rate = (0.0, trainer.global_step), ""
        self._total_steps = count_planned_steps(trainer)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        step, now = trainer.global_step, time.perf_counter()
        is_first = self._begin is None and step != self._last_step
        if is_first:
            self._begin = (now, step)
        if not self._is_plain:
            super().on_train_batch_end(trainer, pl_module, *args)
        elif self.is_enabled and step != self._last_step:
            if is_first or step == self._total_steps or now - self._last_line[0] >= self.line_every_s:
                self._print_line(trainer, pl_module)
            elif self._last is None:  # after a validation: the rate begins anew
                self._measure_rate(trainer)
        self._last_step = step

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_plain:
            super().on_train_end(trainer, pl_module)
        elif self.is_enabled and trainer.global_step != self._last_line[1]:  # stopped early
            self._print_line(trainer, pl_module)

    def _print_line(self, trainer: Trainer, module: LightningModule) -> None:
        step = trainer.global_step
        self._last_line = (time.perf_counter(), step)
        of = f"/{self._total_steps}" if math.isfinite(self._total_steps) else ""
        shown = " ".join(f"{k} {v}" for k, v in self.get_metrics(trainer, module).items())
        print(f"step {step}{of} {shown}", flush=True)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_plain:
            super().on_train_epoch_end(trainer, pl_module)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not super(): it would count the time of the validation as training.
        self.val_progress_bar.close()
        self.reset_dataloader_idx_tracker()
        self._last = None
        names = dict.fromkeys(("val/loss", f"val/{get_headline(pl_module).metric}"))
        found = {name: read_metric(trainer, name) for name in names}
        shown = " ".join(f"{name} {value:.3f}" for name, value in found.items() if value is not None)
        is_training = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if self.is_enabled and shown and is_training:
            self.print(f"step {trainer.global_step} {shown}")

    @override
    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return what is shown after the bar, and what the user's module logs with ``prog_bar=True``."""
        shown = {k: v for k, v in super().get_metrics(trainer, pl_module).items() if k != "v_num"}
        loss = read_metric(trainer, "train/loss")
        for name in ("train/loss", "train/loss_step"):
            shown.pop(name, None)
        own: dict[str, Any] = {} if loss is None else {"loss": f"{loss:.3f}"}
        own |= self._measure_rate(trainer)
        own["mem"] = f"{read_peak_gib(trainer.strategy.root_device):.2f} GiB"
        own |= self._estimate_left(trainer)
        return own | {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in shown.items()}

    @override
    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Print without tearing the bar apart."""
        if self._is_plain:
            print(*args, sep=sep, flush=True)
        else:
            super().print(*args, sep=sep, **kwargs)

    @override
    def init_train_tqdm(self) -> Tqdm:
        bar = super().init_train_tqdm()
        bar.bar_format = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"  # the time left is of the run
        return bar

    def _measure_rate(self, trainer: Trainer) -> dict[str, str]:
        if (found := read_count(trainer)) is None:
            return {}
        (unit, count), now, last = found, time.perf_counter(), self._last
        if last is None or count > last[1]:
            self._last = (now, count)
        if last is not None and count > last[1]:
            self._rate = _shorten((count - last[1]) / (now - last[0]))
        return {f"{unit}/s": self._rate} if self._rate else {}

    def _estimate_left(self, trainer: Trainer) -> dict[str, str]:
        step, now = trainer.global_step, time.perf_counter()
        if self._begin is None or not self._begin[1] < step < self._total_steps < math.inf:
            return {}
        step_s = (now - self._begin[0]) / (step - self._begin[1])
        return {"eta": str(timedelta(seconds=round(step_s * (self._total_steps - step))))}


def _shorten(value: float) -> str:
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{suffix}"
    return f"{value:.1f}"
