"""Draws the plots of sections with matplotlib."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_fsdp.callbacks.sections import Plot


def write_png(plot: Plot, path: Path) -> None:
    """Write a plot as a picture."""
    _draw(plot).savefig(path, format="png", dpi=110)


def render_svg(plot: Plot) -> str:
    """Return a plot as one ``<svg>`` element that needs no other file."""
    buffer = io.StringIO()
    # Text stays text: it can be searched and copied, and the browser's fonts show it.
    with mpl.rc_context({"svg.fonttype": "none"}):
        _draw(plot).savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _draw(plot: Plot) -> Figure:
    # Not pyplot: it would keep the figure, and choose a window system.
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.add_subplot()
    draw = {"lines": _draw_lines, "stacked": _draw_stacked, "bars": _draw_bars}[plot.kind]
    draw(plot, axes)
    for i, (name, begin, end) in enumerate(plot.spans):
        axes.axvspan(begin, end, color="0.5", alpha=0.10 if i % 2 else 0.03, linewidth=0)
        axes.annotate(name, ((begin + end) / 2, 1.0), xycoords=("data", "axes fraction"), ha="center", va="bottom")
    if plot.log_x:
        axes.set_xscale("log", base=2)
    axes.set(xlabel=plot.x_label, ylabel=plot.y_label)
    axes.set_title(plot.title, loc="left", pad=18 if plot.spans else 6)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.grid(visible=True, axis="y", alpha=0.3)
    if len(plot.curves) > 1:
        figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    return figure


def _draw_lines(plot: Plot, axes: Axes) -> None:
    for curve in plot.curves:
        axes.plot(curve.x, curve.y, label=curve.label, linewidth=1.4, marker="." if len(curve.x) < 40 else None)


def _draw_stacked(plot: Plot, axes: Axes) -> None:
    labels = [curve.label for curve in plot.curves]
    axes.stackplot(plot.curves[0].x, *(curve.y for curve in plot.curves), labels=labels, step="post", linewidth=0)


def _draw_bars(plot: Plot, axes: Axes) -> None:
    places = list(range(len(plot.curves[0].x)))
    width = 0.8 / len(plot.curves)
    for i, curve in enumerate(plot.curves):
        offset = (i - (len(plot.curves) - 1) / 2) * width
        axes.bar([place + offset for place in places], curve.y, width, label=curve.label)
    axes.set_xticks(places, [f"{x:g}" for x in plot.curves[0].x])
