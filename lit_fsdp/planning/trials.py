"""The same step with other sizes, ranks or settings, estimated: what every question about a plan is answered from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any

from lightning.pytorch import LightningDataModule

from lit_fsdp.planning.closed_form.engine import estimate_step
from lit_fsdp.planning.closed_form.reader import UnreadableModuleError
from lit_fsdp.planning.estimate import (
    Hardware,
    StepCost,
    describe_model,
    estimate_step_time,
    measure_batch,
)
from lit_fsdp.planning.needed_memory import compute_needed_bytes
from lit_fsdp.planning.planned_step import PlannedStep
from lit_fsdp.planning.search.search import list_changes
from lit_fsdp.planning.search.steps import Steps
from lit_fsdp.planning.search.traced import make_tracer
from lit_fsdp.planning.step_parts import MicroBatch, ModelToTrain, NoEstimateError, Ranks
from lit_fsdp.planning.timing.step_time import StepTime
from lit_fsdp.sharding.settings import Settings

MODEL_ERROR = 1.02  # of times: what is not faster by more is no reason to change a setting


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One step, estimated.

    Args:
        model: That trains.
        settings: Of the strategy.
        ranks: That take part.
        micro_batch: Of a rank.
        num_micro_batches: Accumulated in a step.
        cost: By whatever engine can.
        changes: What differs from the configuration: settings as in YAML, with their values.
    """

    model: ModelToTrain
    settings: Settings
    ranks: Ranks
    micro_batch: MicroBatch
    num_micro_batches: int
    cost: StepCost
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """Of the tensors of a GPU."""
        return self.cost.memory.peak.num_bytes

    @property
    def needed_bytes(self) -> int:
        """The memory that a GPU must have: with headroom, and what lies outside of the allocator."""
        return compute_needed_bytes(self.cost, self.ranks.resolve(self.settings.mesh))

    @property
    def host_bytes(self) -> int:
        """Of host memory of a rank, with offload."""
        return sum(self.cost.memory.host_by_kind.values())

    def estimate_time(self, hardware: Hardware) -> StepTime:
        """Return the time of an optimizer step.

        Raises:
            ValueError: The GPU does not compute in this dtype, or there is no link between nodes.
        """
        return estimate_step_time(
            self.model,
            self.settings,
            hardware,
            self.cost,
            ranks=self.ranks,
            micro_batch=self.micro_batch,
            num_micro_batches=self.num_micro_batches,
        )


class Trials:
    """Estimates a planned step with other sizes, ranks and settings, each at most once.

    A step without a closed form is traced, in a process of its own: seconds to a minute each.

    Args:
        steps: The configured step first, then others in its place, with the settings that make them of it.
        data: The data module, asked for batches of other sizes.

    Raises:
        NoEstimateError: The module does not say what rows and tokens a batch has, or builds its own optimizer.
    """

    def __init__(self, steps: Steps, data: LightningDataModule | None) -> None:
        self.steps, self._data = steps, data
        self._models = [describe_model(step.module, step.strategy) for step, _ in steps]
        self._known: dict[str, StepCost] = {}
        self._trace_numbers = count(1)
        step = steps[0][0]
        self.settings, self.ranks = step.strategy.settings, step.ranks
        self.micro_batch = measure_batch(step.module, step.batch)
        self.num_sharing = self.ranks.resolve(self.settings.mesh).num_sharing  # ranks that work on the same rows
        self.global_batch_size: int | None = getattr(data, "global_batch_size", None)

    def estimate(
        self,
        settings: Settings | None = None,
        *,
        number: int = 0,
        rows: int | None = None,
        length: int | None = None,
        ranks: Ranks | None = None,
    ) -> Trial:
        """Return a step; what is not given is as configured.

        Args:
            settings: Of the strategy.
            number: Which of the steps.
            rows: ``data.batch_size``.
            length: ``data.seq_length``.
            ranks: That take part.

        Raises:
            ConfigError: The step cannot be traced, or settings do not fit the ranks.
            ValueError: The ranks cannot share ``data.global_batch_size``.
        """
        step, own = self.steps[number]
        settings, ranks, model = settings or self.settings, ranks or self.ranks, self._models[number]
        batch = step.batch if rows is None and length is None else self._make_batch(rows, length)
        micro_batch = measure_batch(step.module, batch)
        num_micro_batches = self._count_micro_batches(step, rows, ranks, settings)
        key = f"{number} {settings} {ranks} {micro_batch} {num_micro_batches}"
        if key not in self._known:
            moved = replace(step, batch=batch, ranks=ranks, num_micro_batches=num_micro_batches)
            self._known[key] = self._count(moved, model, settings, micro_batch)
        return Trial(
            model=model,
            settings=settings,
            ranks=ranks,
            micro_batch=micro_batch,
            num_micro_batches=num_micro_batches,
            cost=self._known[key],
            changes={**own, **list_changes(self.settings, settings)},
        )

    def can_share(self, ranks: Ranks) -> bool:
        """Whether these ranks can share rows, and a global batch, as the configured ones do."""
        num_shares, rest = divmod(ranks.world_size, self.num_sharing)
        total: Any = self.global_batch_size
        return not rest and (total is None or total % (num_shares * self._get_size()) == 0)

    def list_sizes(self, most: int) -> Sequence[int]:
        """Return what ``data.batch_size`` may be on the configured ranks, at most ``most``.

        Raises:
            NoEstimateError: It does not say how many rows a batch has.
        """
        if getattr(self._data, "max_frames_per_batch", None) is not None:
            raise NoEstimateError("data.max_frames_per_batch: it decides how many rows a batch has, not batch_size")
        if self.global_batch_size is None:
            return range(1, most + 1)
        share = self.global_batch_size * self.num_sharing // self.ranks.world_size
        return [size for size in range(1, min(most, share) + 1) if share % size == 0]

    @property
    def can_offload(self) -> bool:
        """Whether shards may go to the host: not where they are, and not with pages, which are on the host already."""
        return self.settings.cpu_offload is None and self._models[0].optimizer.name != "adamw_8bit_paged"

    def find_chunked_loss(self) -> int | None:
        """Return the number of the step that only ``model.loss_chunks`` tells from the first, ``None`` without one."""
        return next((i for i, (_, own) in enumerate(self.steps) if own.keys() == {"model.loss_chunks"}), None)

    @cached_property
    def is_traced(self) -> bool:
        """Whether every estimate is a trace: there are no rules for the model, or for ranks that share rows."""
        step = self.steps[0][0]
        if self.num_sharing > 1:
            return True
        try:
            self._count_quickly(step, self._models[0], self.settings, self.micro_batch)
        except UnreadableModuleError:
            return True
        return False

    def _get_size(self) -> int:
        data: Any = self._data
        size: int = data.batch_size
        return size

    def _count_micro_batches(self, step: PlannedStep, size: int | None, ranks: Ranks, settings: Settings) -> int:
        if self.global_batch_size is None:
            return step.num_micro_batches
        at_once = (size or self._get_size()) * ranks.resolve(settings.mesh).num_data_ranks
        num, rest = divmod(self.global_batch_size, at_once)
        if rest:
            raise ValueError(f"data.global_batch_size: got {self.global_batch_size}: expected a multiple of {at_once}")
        return num

    def _count(self, step: PlannedStep, model: ModelToTrain, settings: Settings, micro_batch: MicroBatch) -> StepCost:
        if not self.is_traced:
            return self._count_quickly(step, model, settings, micro_batch)
        tracer = make_tracer([step], None, who="plan", numbers=self._trace_numbers)
        return tracer(model, settings, micro_batch.rows, step.num_micro_batches)

    def _count_quickly(
        self, step: PlannedStep, model: ModelToTrain, settings: Settings, micro_batch: MicroBatch
    ) -> StepCost:
        counts: dict[str, Any] = {"ranks": step.ranks, "num_micro_batches": step.num_micro_batches}
        return estimate_step(model, settings, micro_batch, device_type=step.device_type, **counts)

    def _make_batch(self, rows: int | None, length: int | None) -> Any:
        data: Any = self._data
        with _set(data, "batch_size", rows), _set(data, "seq_length", length):
            batch: Any = data.make_example_batch()
        return batch


@contextmanager
def _set(data: Any, name: str, value: int | None) -> Iterator[None]:
    """Give a data module another size; ``None`` leaves it as it is."""
    if value is None:
        yield
        return
    given = getattr(data, name, None)
    if not isinstance(given, int):
        raise NoEstimateError(f"{type(data).__name__} has no {name} that could change")
    setattr(data, name, value)
    try:
        yield
    finally:
        setattr(data, name, given)
