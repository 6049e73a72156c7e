"""The progress bar: loss, throughput and memory, as a bar in a terminal, as plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from typing_extensions import override

from lit_fsdp.profiling.device_memory import read_peak_gib
from lit_fsdp.reporting.metrics import read_count, read_metric


class ProgressBar(TQDMProgressBar):
    """Show the loss, tokens (or samples) per second over all ranks, and the memory of this rank.

    Throughput is how ``train/tokens_seen`` or ``train/samples_seen`` grew between two refreshes. Reading a
    metric waits for the GPU, so nothing is read between refreshes. Where the output is no terminal, every
    refresh is one plain line.

    Args:
        refresh_rate: Refresh after this many batches (in plain lines: steps); 0 turns the display off.
        leave: Leave the finished bar of every epoch on the screen.
    """

    def __init__(self, refresh_rate: int = 10, leave: bool = False) -> None:
        super().__init__(refresh_rate=refresh_rate, leave=leave)
        self._is_plain = not sys.stdout.isatty()
        self._last: tuple[float, float] | None = None  # time, count at the last refresh
        self._last_step = -1
        self._rate = ""

    @property
    @override
    def is_disabled(self) -> bool:
        return self._is_plain or super().is_disabled

    @override
    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        super().on_train_start(trainer)
        self._last, self._last_step = None, trainer.global_step
        self._total_steps = trainer.estimated_stepping_batches

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if not self._is_plain:
            super().on_train_batch_end(trainer, pl_module, *args)
            return
        step = trainer.global_step
        is_due = self.is_enabled and (step % max(self.refresh_rate, 1) == 0 or step == self._total_steps)
        if is_due and step != self._last_step:
            self._last_step = step
            shown = " ".join(f"{k} {v}" for k, v in self.get_metrics(trainer, pl_module).items())
            print(f"step {step}/{self._total_steps} {shown}", flush=True)

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
        loss = read_metric(trainer, "val/loss")
        if self.is_enabled and loss is not None and not trainer.sanity_checking:
            self.print(f"step {trainer.global_step} val/loss {loss:.3f}")

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
        bar.bar_format = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
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


def _shorten(value: float) -> str:
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{suffix}"
    return f"{value:.1f}"
