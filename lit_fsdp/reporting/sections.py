"""What a callback has to say at the end of a run: numbers, tables and plots, shown in the terminal and the report."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from rich import table as rich_table
from rich.console import Console

from lit_fsdp.redaction import redact

_WIDE = 200  # of a file or pipe, which has no width that cells would have to be cut to


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text under columns.

    Args:
        title: Above it.
        columns: Their names; all but the first are set to the right. None leave the head out: names and values.
        rows: As many cells each as there are columns.
        is_prose: Whether cells hold sentences, with lines of their own: set to the left.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_prose: bool = False


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line or layer of a plot.

    Args:
        label: In the legend.
        x: Where.
        y: What, as many as ``x``.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Counts by row and column, such as those of a confusion matrix.

    Args:
        values: As many rows as columns.
        labels: Of rows and columns.
    """

    values: Sequence[Sequence[float]]
    labels: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Plot:
    """What is drawn, apart from how.

    Args:
        title: Above it.
        x_label: With the unit.
        y_label: With the unit.
        curves: In the order of the legend; of ``stacked``, from the bottom, over one and the same ``x``.
        kind: Lines, areas upon each other, a group of bars for each ``x``, or a matrix of colors.
        spans: Stretches of ``x`` with a name, such as the phases of a step: ``(name, begin, end)``.
        log_x: Whether ``x`` has a logarithmic scale, of base 2.
        from_zero: Whether the scale of ``y`` begins at 0 where no value is below. Bars and layers need it.
        matrix: Of kind ``matrix``, which has no curves.
        levels: Heights of ``y`` with a name, drawn across, such as the memory of a GPU.
    """

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    kind: Literal["lines", "stacked", "bars", "matrix"] = "lines"
    spans: Sequence[tuple[str, float, float]] = ()
    log_x: bool = False
    from_zero: bool = True
    matrix: Matrix | None = None
    levels: Sequence[tuple[str, float]] = ()


@dataclass(frozen=True, kw_only=True)
class Sound:
    """Audio to listen to.

    Args:
        title: Above it.
        wav: Contents of a WAV file. They lie in the page itself, so they should be short.
    """

    title: str
    wav: bytes


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of the report.

    Args:
        title: Its heading.
        numbers: What programs read, plain types only: goes to ``report.json`` under ``name``.
        name: A key for the numbers.
        tables: What people read.
        plots: What people look at.
        notes: Sentences above the tables: warnings, and what a number means.
        sounds: What people listen to.
    """

    title: str
    name: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()
    notes: Sequence[str] = ()
    sounds: Sequence[Sound] = ()


@runtime_checkable
class HasSection(Protocol):
    """A callback with a part of its own in the report, ours or a user's."""

    def make_section(self) -> Section | None:
        """Return what is known by now, on rank 0, without a collective; ``None`` if that is nothing."""


def print_table(table: Table) -> None:
    """Print a table to the terminal, without credentials."""
    table = redact(table)
    drawn = rich_table.Table(title=table.title, title_justify="left", show_header=bool(table.columns))
    for i, column in enumerate(table.columns or ("", "")):
        drawn.add_column(
            column, justify="right" if i and table.columns and not table.is_prose else "left", overflow="fold"
        )
    for row in table.rows:
        drawn.add_row(*row)
    Console(width=get_width() or _WIDE).print(drawn)


def get_width() -> int | None:
    """Return how many columns the reader has: of the terminal, or as ``COLUMNS`` says; ``None`` if nobody knows."""
    is_known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console().width if is_known else None
