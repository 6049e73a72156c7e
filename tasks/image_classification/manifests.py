"""Tables of images and their classes: CSV, JSON lines, Parquet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_fsdp.errors import get_first_line
from lit_fsdp.tasks.row_files import (
    Row,
    check_rows,
    describe,
    find_twice,
    make_bad,
    read_csv,
    read_jsonl,
    read_parquet,
)

MANIFESTS = (".csv", ".jsonl", ".parquet")


def read_table(path: Path, *, image: str, label: str) -> list[Row] | None:
    """Return the rows of a table with one of ``MANIFESTS`` as its ending, ``None`` where it holds the images itself.

    Parquet is read for the two named columns alone. In CSV, white space around names and values is none of theirs.

    Raises:
        ValueError: It has no such column of images, or no rows, or cannot be read.
    """
    names: list[str] | None = None
    if path.suffix == ".csv" and (spaced := next((name for name in (image, label) if name != name.strip()), None)):
        raise ValueError(f"{path}: got the column {spaced!r}: names are read without spaces; set {spaced.strip()!r}")
    if path.suffix == ".parquet":
        names, is_inside = _read_schema(path, image)
        if is_inside:
            return None
        rows = read_parquet(path, [name for name in (image, label) if name in names])
    else:
        rows = _strip(read_csv(path)) if path.suffix == ".csv" else read_jsonl(path)
    found = list(check_rows(rows))
    if not found:
        raise ValueError(f"{path}: has no rows")
    if names is None:
        names = list(dict.fromkeys(name for row in found for name in row.fields))
    if image not in names:
        raise ValueError(f"{path}: has no column {image!r}, but {', '.join(names)}; set image_field")
    return found


def get_label(label: object, *, where: str, field: str) -> str:
    """Return the name of a class, without white space around it.

    Raises:
        ValueError: It is missing, or cannot name one class: lists are several, and true, false and NaN would be names
            of their own.
    """
    label = label.strip() if isinstance(label, str) else label
    if label is None or label == "":
        raise ValueError(f"{where}: {field} is missing: expected the name of a class, or leave the row out")
    is_number = isinstance(label, int | float) and not isinstance(label, bool) and math.isfinite(label)
    if not is_number and not isinstance(label, str):
        raise ValueError(f"{where}: {field} is {describe(label)}: expected one class: a name or a number")
    # In JSON and Parquet 1.0 is the number 1: as names they would be two classes.
    return str(int(label) if isinstance(label, float) and label.is_integer() else label)


def _strip(rows: Iterable[Row]) -> Iterator[Row]:
    for row in rows:
        if twice := find_twice(name.strip() for name in row.fields):
            yield make_bad(row.where, f"the header names {twice!r} twice; rename one of them, or remove it")
        else:
            yield replace(row, fields={name.strip(): value.strip() for name, value in row.fields.items()})


def _read_schema(path: Path, image: str) -> tuple[list[str], bool]:
    """Return the columns of a Parquet file, and whether that of images has their bytes."""
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    try:
        schema = pq.read_schema(path)
        return schema.names, image in schema.names and _holds_images(schema.field(image).type)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not readable as Parquet: {get_first_line(error)}") from error


def _holds_images(kind: Any) -> bool:
    """Whether a column has bytes, or structs as ``datasets`` writes them; text has several types, as that of pandas."""
    from pyarrow import types

    is_binary = types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)
    is_struct = types.is_struct(kind) and any(kind.get_field_index(name) >= 0 for name in ("bytes", "path"))
    return bool(is_binary or is_struct)
