"""A few steps under torch's profiler: a trace for each rank, and what took the most time."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.autograd import DeviceType  # type: ignore[attr-defined]  # exported without saying so
from torch.profiler import ProfilerActivity, profile, schedule
from typing_extensions import override

from lit_fsdp.reporting.lost_logs import outlive_lost_log
from lit_fsdp.reporting.metrics import find_run_folder
from lit_fsdp.reporting.step_callback import StepCallback

_RANGES = "FSDP::"  # how torch names what fully_shard does


class Profile(StepCallback):
    """Record a window of steps with ``torch.profiler``, and say at the end where the files are.

    ``profile/`` in the run's folder gets, for each rank, ``rank<r>.json.gz``, a trace that https://ui.perfetto.dev and
    ``chrome://tracing`` open, and ``rank<r>.txt``, the operators that took the most time, with the share of FSDP's own
    work: its gathers, copies and reductions. Recorded steps are slower than others. A run that fails or ends inside
    the window leaves what was recorded until then.

    Args:
        start_step: The first step to record, counted from where this run starts; the one before warms the profiler up.
        num_steps: How many steps to record.
        ranks: Which ranks record; ``null`` is all of them.
        memory: Also record every allocation. Much larger traces.
        stacks: Also record from which line each operator was called. Much slower.
        shapes: Also record the shapes of inputs.
        num_rows: How many operators the text lists.
    """

    def __init__(
        self,
        start_step: int = 10,
        num_steps: int = 3,
        ranks: list[int] | None = None,
        memory: bool = False,
        stacks: bool = False,
        shapes: bool = False,
        num_rows: int = 25,
    ) -> None:
        for name, value, least in (
            ("start_step", start_step, 2),
            ("num_steps", num_steps, 1),
            ("num_rows", num_rows, 1),
        ):
            if value < least:
                raise ValueError(f"{name}: got {value}: expected {least} or more")
        if ranks is not None and (not ranks or min(ranks) < 0):
            raise ValueError(f"ranks: got {list(ranks)}: expected numbers of ranks from 0, or null for all")
        self.start_step = start_step
        self.num_steps = num_steps
        self.ranks = ranks
        self.memory = memory
        self.stacks = stacks
        self.shapes = shapes
        self.num_rows = num_rows
        self._profiler: profile | None = None
        self._is_over = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._stop()
        if self.ranks is not None and max(self.ranks) >= trainer.world_size:
            raise ValueError(f"ranks: got {list(self.ranks)}: this run has {trainer.world_size}, from 0 on")
        self._folder = find_run_folder(trainer) / "profile"
        self._rank = trainer.global_rank
        self._is_over = self.ranks is not None and self._rank not in self.ranks

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # The step before the window is the profiler's warm-up: starting it would otherwise be in the trace.
        if not self._is_over and self._profiler is None and self._next_step(trainer) >= self.start_step - 1:
            self._profiler = self._build(trainer)
            self._profiler.start()

    @override
    def on_step_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._profiler is None:
            return
        if self._next_step(trainer) >= self.start_step + self.num_steps:
            self._stop()
        else:
            self._profiler.step()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()
        done = trainer.global_step - self.first_step
        if done < self.start_step:
            rank_zero_warn(f"nothing was profiled: start_step is {self.start_step}, and the run had {done} steps")
        else:
            last = min(done, self.start_step + self.num_steps - 1)
            rank_zero_info(
                f"profiled steps {self.first_step + self.start_step} to {self.first_step + last}: {self._folder}, "
                "rank<r>.json.gz for https://ui.perfetto.dev and rank<r>.txt for reading"
            )

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _next_step(self, trainer: Trainer) -> int:
        return trainer.global_step - self.first_step + 1

    def _build(self, trainer: Trainer) -> profile:
        device = trainer.strategy.root_device
        return profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])],
            schedule=schedule(wait=0, warmup=1, active=self.num_steps, repeat=1),
            on_trace_ready=partial(self._write, trainer),
            profile_memory=self.memory,
            with_stack=self.stacks,
            record_shapes=self.shapes,
        )

    def _stop(self) -> None:
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            self._is_over = True
            profiler.stop()  # writes what was recorded

    def _write(self, trainer: Trainer, profiler: profile) -> None:
        with outlive_lost_log(trainer, type(self).__name__, self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._folder / f"rank{self._rank}.json.gz"))
            (self._folder / f"rank{self._rank}.txt").write_text(self._summarize(profiler))

    def _summarize(self, profiler: profile) -> str:
        averages = profiler.key_averages()
        on_gpu = ProfilerActivity.CUDA in profiler.activities
        key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        time_key = "device_time_total" if on_gpu else "cpu_time_total"
        total_us = 0.0
        ranges: dict[str, tuple[int, float]] = {}
        for event in averages:
            # A kernel is there by itself and once more as what its operator ran, a range also as one of the GPU.
            on_host = event.device_type == DeviceType.CPU
            if on_host != on_gpu and not (on_gpu and event.is_user_annotation):
                total_us += getattr(event, key)
            if on_host and event.key.startswith(_RANGES):
                name = event.key.split()[0]  # without that of the unit
                count, time_us = ranges.get(name, (0, 0.0))
                ranges[name] = (count + event.count, time_us + getattr(event, time_key))
        lines = [f"FSDP's own work, as shares of all {'GPU' if on_gpu else 'CPU'} time; some lie inside others", ""]
        for name, (count, time_us) in sorted(ranges.items(), key=lambda item: -item[1][1]):
            share = 100 * time_us / total_us if total_us else 0.0
            lines.append(f"{name:<40} {count:>6} x {time_us / 1000:>12.3f} ms {share:>6.1f} %")
        if not ranges:
            lines.append("none: the model is not sharded")
        lines += ["", averages.table(sort_by=key, row_limit=self.num_rows)]
        return "\n".join(lines) + "\n"
