"""Draws the plots of sections with matplotlib."""

from __future__ import annotations

import io
import re
from html import escape
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_fsdp.files import open_whole
from lit_fsdp.reporting.sections import Matrix, Plot

if TYPE_CHECKING:  # half a second, and most processes draw nothing
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDE, NARROW = (8.0, 3.6), (4.2, 3.0)  # inches
PALETTE = ("#2563a8", "#c2571a", "#2c8653", "#a83279", "#7a5cc4", "#8a6d1d", "#0f8a94", "#b03a3a", "#6b7280", "#4d7c0f")
_INK = "#010203"  # stands for the colour of the text around a picture
_NARROW_SPAN = 0.12  # of the whole axis
_NUMBERS = count()


def write_png(plot: Plot, path: Path) -> None:
    """Write a plot as a picture, whole or not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = _draw(plot, WIDE)
    figure.set_dpi(110)
    with open_whole(path, "wb") as file:
        # Not savefig, which draws all of it twice, to the same picture.
        FigureCanvasAgg(figure).print_png(file)  # type: ignore[no-untyped-call]


def render_svg(plot: Plot, size: tuple[float, float] = WIDE) -> str:
    """Return a plot as one ``<svg>`` element that needs no other file.

    It has the width of what is around it, no background, and the colour of the text there. A page may set the
    colours of the curves, as ``--curve-1`` to ``--curve-10``. ``size``, in inches, is the room beside the text, whose
    size is always the same.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.StringIO()
    colors: Any = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK)
    colors |= dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none")
    # Text stays text: it can be searched and copied, and the browser's fonts show it.
    with mpl.rc_context({"svg.fonttype": "none", **colors}):
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        canvas = FigureCanvasSVG(_draw(plot, size))
        canvas.print_svg(buffer, metadata=metadata)  # type: ignore[no-untyped-call]  # not savefig, as above
    text = buffer.getvalue()
    return _fit_in(text[text.index("<svg") :], plot)


def _fit_in(svg: str, plot: Plot) -> str:
    """Make the picture one part of a page: ids that no other has, its size and colours from around it."""
    prefix = f"plot{next(_NUMBERS)}-"
    svg = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{prefix}", svg)
    svg = svg.replace(_INK, "currentColor").replace(">*{", ">svg *{")
    svg = re.sub('font-family: [^;"]*', "font-family: inherit", svg)
    for number, color in enumerate(PALETTE, start=1):
        svg = svg.replace(color, f"var(--curve-{number}, {color})")
    head, rest = svg.split(">", 1)
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{escape(plot.title)}">{rest}'


def _draw(plot: Plot, size: tuple[float, float]) -> Figure:
    from matplotlib.figure import Figure

    # Not pyplot: it would keep the figure, and choose a window system.
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel=_plain(plot.x_label), ylabel=_plain(plot.y_label))
    axes.set_title(_plain(plot.title), loc="left", pad=18 if plot.spans else 6, fontsize="medium", fontweight="bold")
    if plot.matrix is not None:
        _draw_matrix(plot.matrix, axes, is_wide=size[0] >= WIDE[0])
        return figure
    axes.set_prop_cycle(color=PALETTE)
    draw = {"lines": _draw_lines, "stacked": _draw_stacked, "bars": _draw_bars}[plot.kind]
    draw(plot, axes)
    for i, (name, begin, end) in enumerate(plot.spans):
        axes.axvspan(begin, end, color="0.5", alpha=0.10 if i % 2 else 0.03, linewidth=0)
        is_narrow = end - begin < _NARROW_SPAN * plot.spans[-1][2]  # its name would run into that before
        place = (begin if is_narrow else (begin + end) / 2, 1.0)
        align = "left" if is_narrow else "center"
        axes.annotate(_plain(name), place, xycoords=("data", "axes fraction"), ha=align, va="bottom")
    for name, y in plot.levels:
        axes.axhline(y, color="0.5", linewidth=1, linestyle="--")
        axes.annotate(_plain(name), (0.01, y), xycoords=("axes fraction", "data"), va="top", fontsize=9)
    if plot.log_x:
        axes.set_xscale("log", base=2)
    elif plot.kind != "bars" and all(float(x).is_integer() for curve in plot.curves for x in curve.x):
        from matplotlib.ticker import MaxNLocator

        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    if plot.from_zero:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.grid(visible=True, axis="y", color="0.5", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if len(plot.curves) > 1:
        is_short = all(len(curve.label) <= 24 for curve in plot.curves)
        legend: Any = {"loc": "outside lower left", "ncols": 2 if is_short else 1}
        if size[0] >= WIDE[0]:  # there is room beside the plot
            legend = {"loc": "outside right upper", "ncols": 1}
        figure.legend(**legend, frameon=False, fontsize=9)
    return figure


def _draw_lines(plot: Plot, axes: Axes) -> None:
    for curve in plot.curves:
        marker = "." if len(curve.x) < 40 else None
        axes.plot(curve.x, curve.y, label=_plain(curve.label), linewidth=1.4, marker=marker)


def _draw_stacked(plot: Plot, axes: Axes) -> None:
    labels = [_plain(curve.label) for curve in plot.curves]
    # Each value lasts until the next; the last one too has a width.
    end = plot.spans[-1][2] if plot.spans else plot.curves[0].x[-1] + 1
    layers = ([*curve.y, curve.y[-1]] for curve in plot.curves)
    axes.stackplot([*plot.curves[0].x, end], *layers, labels=labels, step="post", linewidth=0)


def _draw_bars(plot: Plot, axes: Axes) -> None:
    places = list(range(len(plot.curves[0].x)))
    width = 0.8 / len(plot.curves)
    for i, curve in enumerate(plot.curves):
        offset = (i - (len(plot.curves) - 1) / 2) * width
        axes.bar([place + offset for place in places], curve.y, width, label=_plain(curve.label))
    axes.set_xticks(places, [f"{x:g}" for x in plot.curves[0].x])


def _draw_matrix(matrix: Matrix, axes: Axes, *, is_wide: bool) -> None:
    """Color each cell by its share of the row, and write counts and names where there is room."""
    totals = [max(sum(row), 1) for row in matrix.values]
    shares = [[value / total for value in row] for row, total in zip(matrix.values, totals, strict=True)]
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest", aspect="equal")
    axes.figure.colorbar(image, ax=axes, label="share of the row")
    num_classes = len(matrix.labels)
    if num_classes > (30 if is_wide else 12):
        return
    names = [_plain(label if len(label) <= 16 else f"{label[:15]}…") for label in matrix.labels]
    axes.set_xticks(range(num_classes), names, rotation=90 if max(map(len, names)) > 2 else 0, fontsize=7)
    axes.set_yticks(range(num_classes), names, fontsize=7)
    if num_classes <= 12:
        for i, row in enumerate(matrix.values):
            for j, value in enumerate(row):
                color = "white" if shares[i][j] > 0.5 else "black"
                axes.text(j, i, f"{value:g}" if value else "", ha="center", va="center", fontsize=6, color=color)


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # else what is between two of them would be set as mathematics
