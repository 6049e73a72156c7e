"""What is said about memory at the end of a run: of the ranks, over the run, and over one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lit_fsdp.profiling.memory import KINDS
from lit_fsdp.profiling.memory_log import Peak, StepMemory
from lit_fsdp.reporting.curves import Series
from lit_fsdp.reporting.rank_stats import Spread
from lit_fsdp.reporting.sections import Curve, Plot, Section, Table

_GIB = 2**30
_MAX_UNITS = 24  # rows of the table by unit
_MAX_POINTS = 400
_MAX_LIMIT = 4  # of the peak; the step would be too small to see below a higher line


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A step beside what was predicted for it."""

    predicted: Peak  # its peak by the closed form
    measured_bytes: int  # its peak as it was: of a GPU what the allocator gave out, else what was traced

    @property
    def difference_pct(self) -> float:
        """How much more the step took than predicted."""
        return 100 * (self.measured_bytes / self.predicted.num_bytes - 1)

    def describe(self) -> str:
        """Return a sentence."""
        return (
            f"peak predicted {self.predicted.num_bytes / _GIB:.3f} GiB, measured {self.measured_bytes / _GIB:.3f} GiB "
            f"({self.difference_pct:+.1f} %)"
        )


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """The step whose tensors were followed."""

    number: int
    memory: StepMemory  # of rank 0
    ranks: Mapping[str, Spread]  # bytes of each kind at the peak of each rank
    comparison: Comparison | None  # with what was predicted, where there is any


def make_memory_section(
    ranks: Mapping[str, Spread], series: Mapping[str, Series], step: TracedStep | None, notes: Sequence[str]
) -> Section:
    """Return the part of the report about memory.

    Args:
        ranks: By name, what every rank has read at the end of the run.
        series: By name, what rank 0 has read after each step.
        step: The one that was followed, if any.
        notes: Shown above.
    """
    numbers: dict[str, Any] = {name: _list_spread(spread) for name, spread in ranks.items()}
    rows = [[_spell_reading(name), *_format_spread(spread)] for name, spread in ranks.items()]
    columns = ["at the end of the run", "min", "mean", "max", "rank of max"]
    tables = [Table(title="Memory of the ranks", columns=columns, rows=rows)]
    curves = []
    for name, readings in series.items():
        steps, values = zip(*readings.list_points(), strict=True)
        curves.append(Curve(label=_spell_reading(name), x=steps, y=values))
    plots = [Plot(title="Memory over the run (rank 0)", x_label="step", y_label="GiB", curves=curves)]
    if step is not None:
        numbers |= _describe_step(step)
        tables += _make_step_tables(step)
        plots.append(plot_step(step.memory, title=f"Memory over step {step.number} (rank 0)"))
    return Section(title="Memory", name="memory", numbers=numbers, tables=tables, plots=plots, notes=notes)


def _make_step_tables(step: TracedStep) -> list[Table]:
    """Return the table by kind and the table by unit."""
    peak = step.memory.peak
    predicted = None if step.comparison is None else step.comparison.predicted
    size, name = (_GIB, "GiB") if peak.num_bytes >= _GIB else (2**20, "MiB")
    rows = []
    for kind in KINDS:
        numbers = (peak.by_kind.get(kind, 0), max(step.memory.by_kind[kind]))
        cells = [*(f"{number / size:.2f}" for number in numbers), _format_ranks(step.ranks[kind], size)]
        whole = [] if predicted is None else [f"{predicted.by_kind.get(kind, 0) / size:.2f}"]
        rows.append([_spell(kind), *whole, *cells])
    sums = Spread(values=tuple(map(sum, zip(*(spread.values for spread in step.ranks.values()), strict=True))))
    total = f"{peak.num_bytes / size:.2f}"
    whole = [] if predicted is None else [f"{predicted.num_bytes / size:.2f}"]
    rows.append(["all tensors", *whole, total, total, _format_ranks(sums, size)])
    where = f"in {peak.phase}, {peak.unit}"
    columns = ["kind", "at the peak", "largest in the step", "ranks at their peaks"]
    if predicted is not None:
        columns.insert(1, "predicted peak")
    by_kind = Table(title=f"Tensors in step {step.number}, rank 0, {name}; peak {where}", columns=columns, rows=rows)
    title = f"FSDP units at the peak of step {step.number}, rank 0, {name}"
    return [by_kind, make_unit_table(peak, title, size)]


def make_unit_table(peak: Peak, title: str, size: int) -> Table:
    """Return what each unit holds at the peak, the largest first; ``size`` is the bytes of the unit of the numbers."""
    units = sorted(peak.by_unit.items(), key=lambda item: -sum(item[1].values()))
    shown = [(unit, [kinds.get(kind, 0) for kind in KINDS]) for unit, kinds in units[:_MAX_UNITS]]
    if rest := units[_MAX_UNITS:]:
        shown.append((f"{len(rest)} more units", [sum(kinds.get(kind, 0) for _, kinds in rest) for kind in KINDS]))
    rows = [[unit, *(f"{number / size:.2f}" for number in numbers)] for unit, numbers in shown]
    return Table(title=title, columns=["unit", *map(_spell, KINDS)], rows=rows)


def _describe_step(step: TracedStep) -> dict[str, Any]:
    """Return the numbers, for programs."""
    peak, comparison = step.memory.peak, step.comparison
    numbers: dict[str, Any] = {
        "step": {
            "step": step.number,
            "peak_bytes": peak.num_bytes,
            "peak_phase": peak.phase,
            "peak_unit": peak.unit,
            "peak_bytes_by_kind": dict(peak.by_kind),
            "peak_bytes_by_unit": {unit: dict(kinds) for unit, kinds in peak.by_unit.items()},
            "largest_bytes_by_kind": {kind: max(values) for kind, values in step.memory.by_kind.items()},
        }
    }
    if comparison is not None:
        numbers["predicted"] = {
            "peak_bytes": comparison.predicted.num_bytes,
            "peak_bytes_by_kind": dict(comparison.predicted.by_kind),
            "measured_bytes": comparison.measured_bytes,
            "difference_pct": comparison.difference_pct,
        }
    return numbers


def plot_step(memory: StepMemory, *, title: str, x_label: str = "operator", limit_bytes: int | None = None) -> Plot:
    """Return the kinds as areas upon each other, over moments that ``x_label`` names.

    ``limit_bytes`` is what tensors may take: drawn across where it is near enough to be seen beside them.
    """
    size, unit = (_GIB, "GiB") if memory.peak.num_bytes >= _GIB / 4 else (_GIB / 1024, "MiB")
    limit = limit_bytes if limit_bytes and limit_bytes < _MAX_LIMIT * memory.peak.num_bytes else None
    num = len(memory.by_kind[KINDS[0]])
    stride = max(1, num // _MAX_POINTS)
    # The largest moment of every stretch, so that no peak is thinned out.
    totals = [sum(column) for column in zip(*memory.by_kind.values(), strict=True)]
    places = [max(range(i, min(i + stride, num)), key=totals.__getitem__) for i in range(0, num, stride)]
    curves = [
        Curve(label=_spell(kind), x=places, y=[memory.by_kind[kind][i] / size for i in places])
        for kind in KINDS
        if any(memory.by_kind[kind])
    ]
    return Plot(
        title=title,
        x_label=x_label,
        y_label=unit,
        curves=curves,
        kind="stacked",
        spans=memory.phases,
        levels=() if limit is None else [(f"{limit / size:.1f} {unit}: what tensors may take", limit / size)],
    )


def _spell(kind: str) -> str:
    return kind.replace("_", " ")


def _spell_reading(name: str) -> str:
    words, _, unit = name.rpartition("_")
    unit = {"gib": ", GiB", "pct": ", %"}.get(unit, f" {unit}")
    return f"{words.replace('_', ' ')}{unit}".replace("rss", "resident")


def _format_ranks(spread: Spread, size: float) -> str:
    if len(spread.values) == 1:
        return "-"
    return f"{spread.low / size:.2f} - {spread.high / size:.2f} (rank {spread.high_rank})"


def _format_spread(spread: Spread) -> list[str]:
    return [f"{spread.low:.3f}", f"{spread.mean:.3f}", f"{spread.high:.3f}", str(spread.high_rank)]


def _list_spread(spread: Spread) -> dict[str, Any]:
    return {"ranks": list(spread.values), "mean": spread.mean, "max": spread.high, "max_rank": spread.high_rank}
