"""What a module logged, as plots and a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from lit_fsdp.reporting.history import Point, Series
from lit_fsdp.reporting.sections import Curve, Plot, Section, Table

_STAGES = ("train", "val", "test", "valid", "validation")
_FIRST = ("loss", "perplexity", "learning_rate", "grad_norm")
_MAX_CURVES = 8  # in one plot
_MAX_RATIO = 50  # between the scales of two curves in one plot


def make_section(history: Mapping[str, Series]) -> Section:
    """Return the curves of a run.

    ``train/loss`` and ``val/loss`` share a plot, and so do names with another prefix in common, unless their scales
    are too far apart.

    Args:
        history: By the names of the metrics.
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
        groups.setdefault(rest if prefix in _STAGES and rest else prefix, []).append(name)

    def place(key: str) -> tuple[int, str]:
        return (_FIRST.index(key) if key in _FIRST else len(_FIRST), "" if key in _FIRST else key)

    return [part for key in sorted(groups, key=place) for part in _split(groups[key], history)]


def _split(names: list[str], history: Mapping[str, Series]) -> list[list[str]]:
    """Take apart what would not be seen side by side: too many curves, or scales too far apart."""
    if len(names) == 1:
        return [names]
    sizes = {name: _find_size(history[name]) for name in names}
    parts: list[list[str]] = []
    for name in sorted(names, key=lambda name: sizes[name]):
        is_far = bool(parts) and sizes[name] > _MAX_RATIO * max(sizes[parts[-1][0]], 1e-300)
        if not parts or len(parts[-1]) == _MAX_CURVES or is_far:
            parts.append([])
        parts[-1].append(name)
    return [sorted(part, key=names.index) for part in parts]


def _find_size(series: Series) -> float:
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
