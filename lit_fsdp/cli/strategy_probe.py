"""What ``bench strategies`` reads in each run: step times, losses, memory, bytes sent, and what a rank holds."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lit_fsdp.cli.strategies import NUM_UNTIMED
from lit_fsdp.profiling.device_memory import read_peak_gib, reset_peak
from lit_fsdp.profiling.sent_bytes import SentBytes
from lit_fsdp.reporting.step_callback import StepCallback
from lit_fsdp.sharding.torch_internals import to_local
from lit_fsdp.strategy.lightning_strategies import get_own_optimizer, holds_gradients

COUNTED_STEP = 2  # in which collectives are counted; the first may gather and broadcast what others do not


class StrategyProbe(StepCallback):
    """Write ``rank_<r>.json`` with what one run under one strategy did.

    Args:
        folder: Where to, for all ranks.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._step_s: list[float] = []
        self._losses: list[float] = []
        self._held: dict[str, float | None] = {}
        self._full_numel = self._trained_numel = 0
        self._sent: SentBytes | None = None
        self._ended_s = 0.0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # No hook of a callback lies between configure_model and the strategy's setup, which may make pieces of it.
        set_up: Any = trainer.strategy.setup

        def count_and_set_up(given: Trainer) -> None:
            parameters = list(pl_module.parameters())
            self._full_numel = sum(p.numel() for p in parameters)
            self._trained_numel = sum(p.numel() for p in parameters if p.requires_grad)
            set_up(given)

        trainer.strategy.setup = count_and_set_up  # type: ignore[method-assign, assignment]

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._sent is None and trainer.global_step - self.first_step == COUNTED_STEP - 1:
            self._sent = SentBytes()
            self._sent.__enter__()  # type: ignore[no-untyped-call]

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if not self._held:
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            known = holds_gradients(trainer.strategy) and self._trained_numel
            self._held["gradients"] = _count(gradients) / self._trained_numel if known else None

    @override
    def on_step_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now, step = time.perf_counter(), self.last_step - self.first_step
        if step == COUNTED_STEP and self._sent is not None:
            self._sent.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._held["parameters"] = _count_parameters(pl_module) / max(self._full_numel, 1)
            self._held["optimizer state"] = _count_state(trainer.optimizers) / max(self._trained_numel, 1)
        if step == NUM_UNTIMED:
            reset_peak(device)
        if step > NUM_UNTIMED:
            self._step_s.append(now - self._ended_s)
        loss = getattr(pl_module, "step_loss", None)
        if loss is not None:
            self._losses.append(float(loss))
        self._ended_s = time.perf_counter()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._sent is not None
        found = {
            "ranks": trainer.world_size,
            "step_s": self._step_s,
            "losses": self._losses,
            "peak_gib": read_peak_gib(trainer.strategy.root_device),
            "wire_bytes": dict(self._sent.wire_bytes),
            "calls": dict(self._sent.calls),
            "unknown": sorted(self._sent.unknown),
            "held": self._held,
            "parameters": self._full_numel,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"rank_{trainer.global_rank}.json").write_text(json.dumps(found))


def _count(tensors: Iterable[Tensor]) -> int:
    return sum(to_local(t).numel() for t in tensors)


def _count_parameters(module: nn.Module) -> int:
    """Return how many elements of parameters this rank has; ZeRO-3 keeps its part beside an empty parameter."""
    parts = [p.ds_tensor for p in module.parameters() if hasattr(p, "ds_tensor")]
    return _count(module.parameters()) + _count(parts)


def _count_state(optimizers: Iterable[Any]) -> int:
    """Return how many elements of trained parameters this rank has the optimizer's state of."""
    counts: dict[str, int] = {}
    for optimizer in optimizers:
        for state in get_own_optimizer(optimizer).state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    counts[name] = counts.get(name, 0) + _count([value])
    return max(counts.values(), default=0)
