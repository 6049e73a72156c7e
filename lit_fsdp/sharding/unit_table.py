"""The planned units as a table, printed when a run starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table
from torch import nn

from lit_fsdp.quantization.layers import count_weights
from lit_fsdp.sharding.mesh import MeshSizes
from lit_fsdp.sharding.wrap import Unit, count_shard_bytes

COLUMNS = ("unit", "parameters", "trainable", "bytes per rank")


def print_table(table: Table) -> None:
    """Print the table of ``make_table``."""
    # A file or pipe has no width that the names would have to be cut to.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def make_table(model: nn.Module, plan: Sequence[Unit], sizes: MeshSizes) -> Table:
    """Return one row for each unit of a model, sharded or not; neighbouring blocks of one size share a row."""
    table = Table(title=f"FSDP units, mesh {describe_sizes(sizes)}", title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "unit" else "right")
    *rows, totals = list_rows(model, plan, sizes.num_shards)
    for row in rows:
        table.add_row(*row)
    table.add_section()
    table.add_row(*totals)
    return table


def describe_sizes(sizes: MeshSizes) -> str:
    """Return names and sizes of dimensions, ``replicate`` and ``shard`` always."""
    pairs = sizes.by_name.items()
    return " x ".join(f"{name} {size}" for name, size in pairs if size > 1 or name in ("replicate", "shard"))


def list_rows(model: nn.Module, plan: Sequence[Unit], num_shards: int) -> list[tuple[str, ...]]:
    """Return the cells of the table under ``COLUMNS``, the totals last."""
    weights = count_weights(model)
    counted = []
    for unit in plan:
        num_weights = sum(weights[name] for name in unit.parameters)
        counted.append((unit, (num_weights, unit.num_trainable, count_shard_bytes(model, unit, num_shards))))
    rows = []
    # Only blocks share a row.
    for (_, numbers), group in groupby(counted, key=lambda pair: (pair[0].kind == "block" or pair[0].names, pair[1])):
        units = [unit for unit, _ in group]
        name, times = " + ".join(n or "(root)" for n in units[0].names), ""
        if len(units) > 1:
            name, times = f"{name} .. {units[-1].names[0].rsplit('.', 1)[-1]}", f"{len(units)} x "
        rows.append((name, *(f"{times}{number:,}" for number in numbers)))
    totals = map(sum, zip(*(numbers for _, numbers in counted), strict=True))
    return [*rows, (f"all {len(plan)} units", *(f"{number:,}" for number in totals))]
