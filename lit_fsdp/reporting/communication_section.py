"""What is said about communication at the end of a run: numbers, tables, plots."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from typing import Any

from lit_fsdp.profiling.collectives import TRAFFIC, Traffic
from lit_fsdp.profiling.communication_meter import Communication, UnitCommunication, add_up
from lit_fsdp.reporting.rank_stats import Spread
from lit_fsdp.reporting.sections import Curve, Plot, Section, Table

SHORT_NAMES: dict[Traffic, str] = {
    "all_gather": "gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "tensor": "tensor",
    "all_to_all": "all_to_all",
}
# What every rank says about an interval.
NUMBERS = ("step_s", "collective_s", "exposed_s", "wire_bytes", *(f"{short}_gib" for short in SHORT_NAMES.values()))
_MAX_RANKS = 16  # in a table


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The steps between two loggings: medians over them, for every rank."""

    step: int  # the last of them
    spreads: Mapping[str, Spread]  # by the names in ``NUMBERS``

    def list_bandwidths(self) -> list[float]:
        """Return the bus bandwidth of each rank in GB/s."""
        return [speed / 1e9 for speed in self.spreads["wire_bytes"].divide_by(self.spreads["collective_s"])]

    def list_shares(self) -> list[float]:
        """Return the exposed part of each rank's step, in percent."""
        return [100 * share for share in self.spreads["exposed_s"].divide_by(self.spreads["step_s"])]


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """The rank that the others wait for."""

    rank: int
    waited_s: float  # how much longer the others are in collectives, in their median and each step
    waited_pct: float  # that part of the step


def make_communication_section(
    intervals: Sequence[Interval],
    units: Sequence[UnitCommunication],
    *,
    predicted: Mapping[str, Any] | None,
    notes: Sequence[str],
    straggler_pct: float,
) -> Section:
    """Return the part of the report about communication.

    Args:
        intervals: Of the run, at least one.
        units: Of the first rank, times as means over the steps.
        predicted: What the plan says, by collective.
        notes: Shown above.
        straggler_pct: From which part of the step on a rank is named.
    """
    whole = _summarize(intervals)
    straggler = find_straggler(whole, straggler_pct)
    totals = {kind: add_up([unit for unit in units if unit.collective == kind]) for kind in TRAFFIC}
    ranks = _list_ranks(whole)
    steps = [interval.step for interval in intervals]
    shares = [statistics.fmean(interval.list_shares()) for interval in intervals]
    numbers = {
        "step": {name: statistics.fmean(rank[name] for rank in ranks) for name in ranks[0] if name != "rank"},
        "collectives": {kind: _describe(total) for kind, total in totals.items()},
        "predicted": None if predicted is None else dict(predicted),
        "ranks": ranks,
        "straggler": None if straggler is None else asdict(straggler),
        "units": [{"unit": unit.unit, "collective": unit.collective, **_describe(unit)} for unit in units],
        "intervals": {"step": steps, "exposed_pct": shares},
    }
    if straggler is not None:
        notes = [*notes, _name(straggler)]
    return Section(
        title="Communication",
        name="comm",
        numbers=numbers,
        tables=[_make_totals_table(totals), _make_ranks_table(ranks), _make_units_table(units)],
        plots=_make_plots(units, ranks, Curve(label="exposed", x=steps, y=shares)),
        notes=notes,
    )


def find_straggler(interval: Interval, straggler_pct: float) -> Straggler | None:
    """Return the rank that is in collectives for the shortest time, if the others are there for much longer.

    The rank that comes last to a collective does not wait in it. Much is more than ``straggler_pct`` of the step.
    """
    seconds, step_s = interval.spreads["collective_s"], interval.spreads["step_s"].mean
    others = [value for rank, value in enumerate(seconds.values) if rank != seconds.low_rank]
    waited_s = statistics.median(others) - seconds.low
    found = Straggler(rank=seconds.low_rank, waited_s=waited_s, waited_pct=100 * waited_s / step_s)
    return found if found.waited_pct > straggler_pct else None


def _name(straggler: Straggler) -> str:
    return (
        f"rank {straggler.rank} is the straggler: the other ranks spend {straggler.waited_s:.3g} s more of each step "
        f"in collectives, {straggler.waited_pct:.0f} % of it, waiting for this one"
    )


def _summarize(intervals: Sequence[Interval]) -> Interval:
    """Return the medians of each rank over all intervals."""
    spreads = {}
    for name in NUMBERS:
        columns = zip(*(interval.spreads[name].values for interval in intervals), strict=True)
        spreads[name] = Spread(values=tuple(statistics.median(column) for column in columns))
    return Interval(step=intervals[-1].step, spreads=spreads)


def _list_ranks(whole: Interval) -> list[dict[str, float]]:
    shares, bandwidths = whole.list_shares(), whole.list_bandwidths()
    ranks = []
    for rank, (exposed_pct, bandwidth_gb_s) in enumerate(zip(shares, bandwidths, strict=True)):
        own = {name: whole.spreads[name].values[rank] for name in ("step_s", "collective_s", "exposed_s")}
        own["overlapped_s"] = own["collective_s"] - own["exposed_s"]
        ranks.append({"rank": rank, **own, "exposed_pct": exposed_pct, "bandwidth_gb_s": bandwidth_gb_s})
    return ranks


def _describe(total: Communication) -> dict[str, float]:
    sums = {f.name: getattr(total, f.name) for f in fields(Communication)}
    return {**sums, "overlapped_s": total.overlapped_s, "bandwidth_gb_s": total.bandwidth_gb_s}


_COLUMNS = ("calls", "GiB", "seconds", "exposed s", "overlapped s", "bus GB/s")


def _make_cells(total: Communication, times: str = "") -> list[str]:
    size = f"{total.num_bytes / 2**30:.3g}"
    seconds = (total.seconds, total.exposed_s, total.overlapped_s)
    numbers = [f"{total.calls}", size, *(f"{value:.4f}" for value in seconds)]
    return [*(times + number for number in numbers), f"{total.bandwidth_gb_s:.3g}"]


def _make_totals_table(totals: Mapping[Traffic, Communication]) -> Table:
    rows = [[SHORT_NAMES[kind], *_make_cells(total)] for kind, total in totals.items() if total.calls]
    return Table(title="Collectives of a step, means of rank 0", columns=["collective", *_COLUMNS], rows=rows)


def _make_ranks_table(ranks: Sequence[Mapping[str, float]]) -> Table:
    shown = list(ranks)
    title = "Communication of a step by rank, medians"
    if len(shown) > _MAX_RANKS:
        shown = sorted(shown, key=lambda rank: rank["collective_s"])
        shown = [*shown[: _MAX_RANKS // 2], *shown[-_MAX_RANKS // 2 :]]
        title += f": those of {len(ranks)} that are in collectives for the shortest and the longest time"
    names = ("step_s", "collective_s", "exposed_s", "overlapped_s", "exposed_pct", "bandwidth_gb_s")
    columns = ["rank", "step s", "collectives s", "exposed s", "overlapped s", "exposed %", "bus GB/s"]
    rows = [[f"{rank['rank']:.0f}", *(f"{rank[name]:.4g}" for name in names)] for rank in shown]
    return Table(title=title, columns=columns, rows=rows)


def _make_units_table(units: Sequence[UnitCommunication]) -> Table:
    """Return one row for each unit and collective; neighbours of one size share a row, times are then means."""
    rows = []
    for kind in TRAFFIC:
        of_kind = [unit for unit in units if unit.collective == kind]
        for _, group in groupby(of_kind, key=lambda unit: (unit.calls, unit.num_bytes)):
            same = list(group)
            total, n = add_up(same), len(same)
            first = replace(same[0], seconds=total.seconds / n, exposed_s=total.exposed_s / n)
            name = same[0].unit if n == 1 else f"{same[0].unit} .. {same[-1].unit.rsplit('.', 1)[-1]}"
            rows.append([f"{SHORT_NAMES[kind]} {name}", *_make_cells(first, f"{n} x " if n > 1 else "")])
    return Table(title="Units in a step, means of rank 0", columns=["unit", *_COLUMNS], rows=rows)


def _make_plots(units: Sequence[UnitCommunication], ranks: Sequence[Mapping[str, float]], share: Curve) -> list[Plot]:
    order = list(dict.fromkeys(unit.unit for unit in units))
    by_unit = []
    for kind in TRAFFIC:
        seconds = {unit.unit: unit.seconds for unit in units if unit.collective == kind}
        if seconds:
            heights = [seconds.get(name, 0.0) for name in order]
            by_unit.append(Curve(label=SHORT_NAMES[kind], x=list(range(len(order))), y=heights))
    numbers = [rank["rank"] for rank in ranks]
    by_rank = [
        Curve(label=label, x=numbers, y=[rank[name] for rank in ranks])
        for label, name in (("exposed", "exposed_s"), ("overlapped", "overlapped_s"))
    ]
    return [
        Plot(title="Collectives by unit, rank 0", x_label="unit, in order", y_label="s", curves=by_unit, kind="bars"),
        Plot(title="Collectives by rank", x_label="rank", y_label="s in a step", curves=by_rank, kind="bars"),
        Plot(title="Exposed communication", x_label="step", y_label="% of the step", curves=[share]),
    ]
