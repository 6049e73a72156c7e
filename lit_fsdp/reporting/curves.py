"""What a module logged: kept in bounded memory, and shown as plots and a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from lit_fsdp.reporting.sections import Curve, Plot, Section, Table

Point = tuple[int, float]  # step, value
_STAGES = ("train", "val", "test", "valid", "validation")
_FIRST = ("loss", "perplexity", "learning_rate", "grad_norm")
_COUNTERS = ("epoch", "step", "global_step", "tokens_seen", "samples_seen")  # rise by themselves: nothing to look at
_MAX_CURVES = 8  # in one plot
_MAX_RATIO = 50  # between the scales of two curves in one plot


class Series:
    """The values of one metric over the steps, thinned as they become many.

    Once there are more than ``max_points`` (a multiple of 4), every stretch of steps keeps its lowest and its highest
    value only. So a peak of a single step is never lost. A value that is not finite counts as higher than any other.
    """

    def __init__(self, max_points: int = 2000) -> None:
        assert max_points >= 4
        assert max_points % 4 == 0
        self.max_points = max_points
        self.num_values = 0
        self.num_not_finite = 0
        self.first_not_finite: int | None = None  # step
        self.last: Point | None = None
        self.low: Point | None = None  # of the finite ones
        self.high: Point | None = None
        self._kept: list[Point] = []
        self._stretch: list[Point] = []  # the lowest and the highest of the values that are not kept yet
        self._num_in_stretch = 0
        self._stretch_length = 2  # values that become two points

    def add(self, step: int, value: float) -> None:
        """Add the value of a step, the steps in their order."""
        point = (step, value)
        self.num_values += 1
        self.last = point
        if math.isfinite(value):
            self.low = point if self.low is None else min(self.low, point, key=_rank)
            self.high = point if self.high is None else max(self.high, point, key=_rank)
        else:
            self.num_not_finite += 1
            self.first_not_finite = step if self.first_not_finite is None else self.first_not_finite
        self._stretch = _choose_extremes([*self._stretch, point])
        self._num_in_stretch += 1
        if self._num_in_stretch < self._stretch_length:
            return
        if len(self._kept) == self.max_points:
            quads = (self._kept[i : i + 4] for i in range(0, self.max_points, 4))
            self._kept = [point for quad in quads for point in _choose_extremes(quad)]
            self._stretch_length *= 2
            return  # the stretch is only half as long now as they are from here on
        self._kept += self._stretch
        self._stretch, self._num_in_stretch = [], 0

    def list_points(self) -> list[Point]:
        """Return the points that are left, the last value always among them."""
        points = [*self._kept, *self._stretch]
        if self.last is not None and (not points or points[-1] != self.last):
            points.append(self.last)
        return points

    @property
    def is_thinned(self) -> bool:
        """Whether points have been left out."""
        return self._stretch_length > 2


def make_curves_section(history: Mapping[str, Series]) -> Section:
    """Return the curves of a run, by the names of metrics.

    ``train/loss`` and ``val/loss`` share a plot, and so do names with another prefix in common, unless their scales
    are too far apart. Counters are in the table only.
    """
    numbers = {name: _describe_series(series) for name, series in history.items()}
    plots = [plot for group in _group(history) for plot in _plot(group, history)]
    columns = ("metric", "last", "lowest", "at step", "highest", "at step", "values")
    rows = [(name, *_format_row(series)) for name, series in history.items()]
    notes = [
        f"{name} was not a finite number {series.num_not_finite:,} times, first at step {series.first_not_finite:,}."
        for name, series in history.items()
        if series.num_not_finite
    ]
    if any(series.is_thinned for series in history.values()):
        notes.append("Long curves are thinned: of every stretch of steps the lowest and the highest value are shown.")
    tables = [Table(title="", columns=columns, rows=rows)] if rows else []
    notes += [] if rows else ["Nothing was logged."]
    return Section(title="Curves", name="curves", numbers=numbers, plots=plots, tables=tables, notes=notes)


def _describe_series(series: Series) -> dict[str, Any]:
    """Return a series for ``report.json``."""
    points = series.list_points()
    return {
        "steps": [step for step, _ in points],
        "values": [value for _, value in points],
        "num_values": series.num_values,
        "num_not_finite": series.num_not_finite,
        "last": _describe(series.last),
        "lowest": _describe(series.low),
        "highest": _describe(series.high),
    }


def _describe(point: Point | None) -> dict[str, Any] | None:
    return None if point is None else {"step": point[0], "value": point[1]}


def _format_row(series: Series) -> Iterable[str]:
    yield _format_value(series.last)
    for point in (series.low, series.high):
        yield _format_value(point)
        yield f"{point[0]:,}" if point is not None else ""
    yield f"{series.num_values:,}"


def _format_value(point: Point | None) -> str:
    return "" if point is None else f"{point[1]:.5g}"


def _group(history: Mapping[str, Series]) -> list[list[str]]:
    """Return names that belong together, the best known ones first."""
    groups: dict[str, list[str]] = {}
    for name in history:
        prefix, _, rest = name.partition("/")
        if name.rpartition("/")[2] in _COUNTERS:
            continue
        groups.setdefault(rest if prefix in _STAGES and rest else prefix, []).append(name)

    def place(key: str) -> tuple[int, str]:
        return (_FIRST.index(key) if key in _FIRST else len(_FIRST), "" if key in _FIRST else key)

    return [part for key in sorted(groups, key=place) for part in _split(groups[key], history)]


def _split(names: list[str], history: Mapping[str, Series]) -> list[list[str]]:
    """Take apart what would not be seen side by side: too many curves, or scales too far apart."""
    if len(names) == 1:
        return [names]
    sizes = {name: _get_size(history[name]) for name in names}
    parts: list[list[str]] = []
    for name in sorted(names, key=lambda name: sizes[name]):
        is_far = bool(parts) and sizes[name] > _MAX_RATIO * max(sizes[parts[-1][0]], 1e-300)
        if not parts or len(parts[-1]) == _MAX_CURVES or is_far:
            parts.append([])
        parts[-1].append(name)
    return [sorted(part, key=names.index) for part in parts]


def _get_size(series: Series) -> float:
    return max((abs(point[1]) for point in (series.low, series.high) if point is not None), default=0.0)


def _plot(names: list[str], history: Mapping[str, Series]) -> list[Plot]:
    curves = []
    for name in names:
        points = [point for point in history[name].list_points() if math.isfinite(point[1])]
        if points:
            curves.append(Curve(label=name, x=[step for step, _ in points], y=[value for _, value in points]))
    if not curves:
        return []
    labels = [curve.label for curve in curves]
    title = labels[0] if len(labels) == 1 else ", ".join(labels)
    if len(title) > 48:
        title = f"{labels[0]} and {len(labels) - 1} more" if len(labels) > 1 else f"{title[:45]}..."
    return [Plot(title=title, x_label="step", y_label="", curves=curves, from_zero=False)]


def _rank(point: Point) -> float:
    return point[1] if math.isfinite(point[1]) else math.inf


def _choose_extremes(points: list[Point]) -> list[Point]:
    """Return the points of the lowest and the highest value, in their order."""
    if len(points) < 2:
        return points
    low, high = min(points, key=_rank), max(points, key=_rank)
    if low == high:
        return [points[0], points[-1]]
    return sorted([low, high], key=lambda point: point[0])
