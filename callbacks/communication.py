"""What FSDP2 sends between ranks: bytes, time, how much of it compute waits for, and which rank the others wait for."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lit_fsdp.profiling.collectives import COLLECTIVES, Collective, Traffic
from lit_fsdp.profiling.communication_meter import CommunicationMeter, StepCommunication, UnitCommunication
from lit_fsdp.profiling.expected_communication import UnitBytes, estimate_bytes, estimate_collectives
from lit_fsdp.reporting.communication_section import NUMBERS, SHORT_NAMES, Interval, make_communication_section
from lit_fsdp.reporting.metrics import log_values
from lit_fsdp.reporting.rank_stats import AsyncRankStats, Exchanged
from lit_fsdp.reporting.sections import Section
from lit_fsdp.reporting.step_callback import StepCallback
from lit_fsdp.sharding.wrap import Unit
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy

_MAX_INTERVALS = 1000  # of which every second one goes when there are more
_UNLOGGED_STEPS = 50  # in an interval, where the Trainer logs nothing


class CommunicationLogger(StepCallback):
    """Log what FSDP2 sends in a step, how long it takes, and how much of that time compute waits for it.

    Every all-gather, reduce-scatter and all-reduce of FSDP2 is timed where it runs, without waiting for it:
    ``lit_fsdp.profiling.communication_meter``. Every ``log_every_n_steps`` steps the medians since the last time are
    logged, as means over all ranks, one such interval later: ``comm/gather_gib``, ``comm/reduce_scatter_gib``,
    ``comm/all_reduce_gib``, ``comm/tensor_gib`` (of layers that ``mesh.tensor`` splits; all full sizes),
    ``comm/all_to_all_gib`` (of ``mesh.sequence``, what a rank puts in),
    ``comm/collective_s``, ``comm/exposed_s``, ``comm/overlapped_s``, ``comm/exposed_pct`` (of the
    step, without the time between batches) and ``comm/bandwidth_gb_s`` (bus bandwidth). Tables are for the report, and
    ``RunSummary(verbose=True)`` prints them. On a CPU collectives block, so everything is exposed.

    The number and the bytes of the collectives are compared with what the plan of units predicts. The rank that
    others wait for is named: it comes last, so it spends the least time in collectives. Under another strategy than
    FSDP2 there is nothing to measure, and a note says so.

    Args:
        num_warmup_steps: Steps at the start that do not count, unless there are no others.
        straggler_pct: Name a rank if the others spend longer in collectives than it does, in the median by more than
            this part of the step.
    """

    def __init__(self, num_warmup_steps: int = 3, straggler_pct: float = 5.0) -> None:
        if num_warmup_steps < 0:
            raise ValueError(f"num_warmup_steps: got {num_warmup_steps}: expected 0 or more")
        if not 0 < straggler_pct <= 100:
            raise ValueError(f"straggler_pct: got {straggler_pct}: expected a part of the step above 0, up to 100")
        self.num_warmup_steps = num_warmup_steps
        self.straggler_pct = straggler_pct
        self._reset()

    def _reset(self) -> None:
        self._meter: CommunicationMeter | None = None
        self._warmup: list[dict[str, float]] = []  # by name, one for each step
        self._steps: list[dict[str, float]] = []  # since the last logging
        self._last: StepCommunication | None = None
        self._unit_sums: dict[tuple[str, Traffic], list[float]] = {}  # seconds and exposed seconds
        self._num_summed = 0  # steps in these sums
        self._intervals: list[Interval] = []
        self._notes: list[str] = []
        self._predicted: dict[str, Any] | None = None
        self._is_compared = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # which may end before its first step
            self._stop()
            self._reset()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to measure; the sanity check is over, and the model is sharded."""
        super().on_train_start(trainer, pl_module)
        self._stop()
        self._reset()
        meter = CommunicationMeter(pl_module, trainer.strategy.root_device)
        self._num_micro_batches = 0
        if not meter.num_units:
            name = type(trainer.strategy).__name__
            self._notes = [f"communication is not measured: nothing is sharded with FSDP2 (the strategy is {name})"]
        elif trainer.world_size == 1:
            self._notes = ["communication is not measured: one rank has nobody to send to"]
        else:
            self._meter = meter
            self._stats = AsyncRankStats(trainer, NUMBERS)
            meter.attach()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._meter is not None:
            self._meter.resume()

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if self._meter is not None:
            self._meter.pause()
            self._num_micro_batches += 1
            super().on_train_batch_end(trainer, pl_module, *args)

    @override
    def on_step_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._meter is not None
        self._meter.end_step((self.last_step, self._num_micro_batches))
        self._num_micro_batches = 0
        self._collect(trainer, self._meter.take())
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self.last_step % (every or _UNLOGGED_STEPS) == 0:
            self._keep(trainer, self._stats.exchange(self._take_medians(), self.last_step))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put together what is left, on all ranks."""
        if self._meter is None:
            return
        self._collect(trainer, self._meter.take(wait=True))
        # One GPU may have been further behind than another, so whether steps are left says nothing about other ranks.
        self._keep(trainer, self._stats.exchange(self._take_medians(), self.last_step))
        self._keep(trainer, self._stats.finish())
        if not self._intervals and self.last_step > self.first_step:  # which all ranks find alike
            self._steps = self._warmup
            self._stats.start(self._take_medians(), self.last_step)
            self._keep(trainer, self._stats.finish())
        if self._meter.num_dropped:
            self._notes.append(f"{self._meter.num_dropped:,} steps are missing: the GPU was too far behind the host")
        self._stop()

    on_preemption = on_train_end

    def on_step_undone(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Leave the plan alone: a step that is computed again sends more, and later ones may, see ``oom_retries``."""
        self._is_compared = True

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        """Give FSDP2 back what it had."""
        if self._meter is not None:
            self._meter.detach()

    def make_section(self) -> Section | None:
        """Return what was measured, on rank 0."""
        if self._meter is None or not self._intervals or self._last is None:
            return Section(title="Communication", name="comm", notes=self._notes) if self._notes else None
        return make_communication_section(
            self._intervals,
            self._list_units(),
            predicted=self._predicted,
            notes=self._notes,
            straggler_pct=self.straggler_pct,
        )

    # Steps become intervals

    def _collect(self, trainer: Trainer, steps: Sequence[StepCommunication]) -> None:
        for step in steps:
            # Not the first: what ran before training may have left a unit gathered that backward never reaches.
            if not self._is_compared and step.tag[0] - self.first_step >= 2:
                self._is_compared = True
                self._compare(trainer, step)
            is_warmup = step.tag[0] - self.first_step <= self.num_warmup_steps
            if not is_warmup and self._num_summed == len(self._warmup):  # the first that counts
                self._unit_sums, self._num_summed = {}, 0
            (self._warmup if is_warmup else self._steps).append(_flatten(step))
            self._last = step
            self._num_summed += 1
            for unit in step.units:
                sums = self._unit_sums.setdefault((unit.unit, unit.collective), [0.0, 0.0])
                sums[0] += unit.seconds
                sums[1] += unit.exposed_s

    def _take_medians(self) -> dict[str, float]:
        """Return the medians since the last time, NaN of no steps: all ranks make the same exchanges."""
        steps, self._steps = self._steps, []
        return {name: statistics.median(step[name] for step in steps) if steps else math.nan for name in NUMBERS}

    def _keep(self, trainer: Trainer, found: Exchanged | None) -> None:
        if found is None:
            return
        spreads, step = found
        if any(math.isnan(value) for value in spreads["step_s"].values):  # the warmup, or a rank without steps
            return
        interval = Interval(step=step, spreads=spreads)
        if not trainer.is_global_zero:
            self._intervals = [interval]  # all that is asked of it is whether there is one
            return
        self._intervals.append(interval)
        if len(self._intervals) > _MAX_INTERVALS:
            self._intervals = self._intervals[::2]
        if trainer.log_every_n_steps:  # type: ignore[attr-defined]
            sizes = {kind: spreads[f"{short}_gib"].mean for kind, short in SHORT_NAMES.items()}
            # Of a mesh that has no such dimension there is nothing to plot.
            values = {f"comm/{SHORT_NAMES[k]}_gib": size for k, size in sizes.items() if size or k in COLLECTIVES}
            values |= {f"comm/{name}": spreads[name].mean for name in ("collective_s", "exposed_s")}
            values["comm/overlapped_s"] = spreads["collective_s"].mean - spreads["exposed_s"].mean
            values["comm/exposed_pct"] = statistics.fmean(interval.list_shares())
            values["comm/bandwidth_gb_s"] = statistics.fmean(interval.list_bandwidths())
            log_values(trainer, values, step)

    # Against the plan

    def _compare(self, trainer: Trainer, step: StepCommunication) -> None:
        number, num_micro_batches = step.tag
        strategy = trainer.strategy
        if not isinstance(strategy, FSDP2Strategy) or not strategy.plan:
            return  # sharded by its user, so there is no plan
        module = strategy.lightning_module
        if module is None or not module.automatic_optimization or strategy.device_mesh is None:
            return
        sizes = {
            "num_shards": strategy.mesh_sizes.num_shards,
            "num_replicas": strategy.mesh_sizes.replicate,
            "num_micro_batches": num_micro_batches,
        }
        sharding, dtypes = strategy.settings.sharding, strategy.precision_plugin.mixed_precision
        counts = estimate_collectives(strategy.plan, sharding, **sizes)
        units = estimate_bytes(module, strategy.plan, sharding, dtypes, **sizes)
        expected: dict[Collective, tuple[int, int]] = {
            "all_gather": (counts.gathers, sum(unit.gather_step for unit in units)),
            "reduce_scatter": (counts.reduce_scatters, sum(unit.reduce_scatter_step for unit in units)),
            "all_reduce": (counts.all_reduces, sum(unit.all_reduce_step for unit in units)),
        }
        self._predicted = {}
        for kind, (calls, num_bytes) in expected.items():
            self._predicted[kind] = {"calls": calls, "num_bytes": num_bytes}
            found = step.add_up(kind)
            if (found.calls, found.num_bytes) == (calls, num_bytes):
                continue
            if kind == "all_gather" and _are_of_repeats(strategy.plan, units, step, num_micro_batches):
                self._notes.append(
                    f"a model ran more than once in each micro-batch, or only forward: {found.calls} gather calls of "
                    f"{found.num_bytes:,} bytes; one run, forward and backward, has {calls} of {num_bytes:,}"
                )
            else:
                note = (
                    f"step {number} had {found.calls} {SHORT_NAMES[kind]} calls of {found.num_bytes:,} bytes; the "
                    f"plan says {calls} of {num_bytes:,}: forward or backward uses units in another "
                    "way, such as one not at all or twice"
                )
                self._notes.append(note)
                rank_zero_warn(note)

    def _list_units(self) -> list[UnitCommunication]:
        """Return the units of this rank: calls and bytes of the last step, times as means over the steps."""
        assert self._last is not None
        means = {key: [value / self._num_summed for value in sums] for key, sums in self._unit_sums.items()}
        return [
            replace(unit, seconds=seconds, exposed_s=exposed_s)
            for unit in self._last.units
            for seconds, exposed_s in [means[unit.unit, unit.collective]]
        ]


def _are_of_repeats(
    plan: Sequence[Unit], units: Sequence[UnitBytes], step: StepCommunication, num_micro_batches: int
) -> bool:
    """Return whether the gathers of a step are those of models that ran a number of times in each micro-batch.

    A plan takes a model to run once, forward and backward. A loss that compares two outputs runs it twice, and a frozen
    model beside it only forward. How often a unit is gathered then lies between the plan's number and as many times
    that: what one run has gathered the next may find.

    Args:
        plan: The units.
        units: What the plan says of those that have parameters, in the same order.
        step: What was measured.
        num_micro_batches: In the step.
    """
    gathers = {unit.unit: unit for unit in step.units if unit.collective == "all_gather"}
    models: dict[str, list[tuple[Unit, UnitBytes]]] = {}
    for unit, expected in zip([unit for unit in plan if unit.num_params], units, strict=True):
        models.setdefault(unit.names[0].partition(".")[0], []).append((unit, expected))
    for parts in models.values():
        uses = {step.uses.get(expected.unit, 0) for unit, expected in parts if unit.kind == "block"}
        runs, rest = divmod(uses.pop() if len(uses) == 1 else num_micro_batches, num_micro_batches)
        if uses or rest:  # some units oftener than others
            return False
        is_frozen = not any(unit.num_trainable for unit, _ in parts)
        for _, expected in parts:
            found = gathers.get(expected.unit)
            calls, num_bytes = (found.calls, found.num_bytes) if found is not None else (0, 0)
            planned = expected.gather_step // expected.gather if expected.gather else 0
            least = min(planned, num_micro_batches) if is_frozen else planned
            if not least <= calls <= planned * max(runs, 1) or num_bytes != calls * expected.gather:
                return False
    return True


def _flatten(step: StepCommunication) -> dict[str, float]:
    total = step.add_up()
    sizes = {f"{short}_gib": step.add_up(kind).num_bytes / 2**30 for kind, short in SHORT_NAMES.items()}
    return {
        "step_s": step.step_s,
        "collective_s": total.seconds,
        "exposed_s": total.exposed_s,
        "wire_bytes": total.wire_bytes,
        **sizes,
    }
