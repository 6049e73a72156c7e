"""Tables of images and their classes: CSV, JSON lines, Parquet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_fsdp.tasks.data import find_twice, parse_json

MANIFESTS = (".csv", ".jsonl", ".parquet")

Table = tuple[Sequence[str], Sequence[dict[str, Any]] | None]  # names of columns, rows


def read_table(path: Path, *, image: str, label: str) -> Table:
    """Return the columns and rows of a table with one of ``MANIFESTS`` as its ending.

    There are no rows where it holds images, and not their paths. Parquet is read for the two named columns alone.
    """
    if path.suffix == ".parquet":
        return _read_parquet(path, image, label)
    return _read_csv(path) if path.suffix == ".csv" else _read_jsonl(path)


def _read_csv(path: Path) -> Table:
    reader = csv.DictReader(io.StringIO(_read_text(path), newline=""))
    rows = []
    begin = 2
    try:
        for row in reader:
            num_extra, num_missing = len(row.get(None) or []), list(row.values()).count(None)
            if num_extra or num_missing:
                num_columns = len(reader.fieldnames or [])
                what = f"has {num_columns + num_extra - num_missing} fields, the header has {num_columns}"
                raise ValueError(f"{path} line {begin}: {what}; quote values that hold commas")
            rows.append(row)
            begin = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path} after line {reader.line_num}: not readable as CSV: {error}") from error
    names = list(reader.fieldnames or [])
    for separator, called in ((";", "semicolons"), ("\t", "tabs")):
        if len(names) == 1 and separator in names[0]:
            raise ValueError(f"{path}: its columns are separated by {called}: save it with commas")
    if twice := find_twice(names):
        raise ValueError(f"{path} line 1: the header names {twice!r} twice; rename one of them, or remove it")
    return names, rows


def _read_jsonl(path: Path) -> Table:
    rows = []
    for number, line in enumerate(_read_text(path).split("\n"), start=1):  # no other separator: JSON may hold them
        if line.strip():
            try:
                row = parse_json(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path} line {number}: not valid JSON: {error.msg}") from error
            if not isinstance(row, dict):
                raise ValueError(f'{path} line {number}: expected an object like {{"image": "a.jpg", "label": "cat"}}')
            rows.append(row)
    return list(dict.fromkeys(name for row in rows for name in row)), rows


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not in UTF-8 from byte {error.start} on: save it in that encoding") from error


def _read_parquet(path: Path, image: str, label: str) -> Table:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    try:
        schema = pq.read_schema(path)
        if image in schema.names and _holds_images(schema.field(image).type):
            return schema.names, None
        wanted = [name for name in (image, label) if name in schema.names]
        return schema.names, pq.read_table(path, columns=wanted).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not readable as Parquet: {str(error).splitlines()[0]}") from error


def _holds_images(kind: Any) -> bool:
    """Whether a column has bytes, or structs with them; text has several types, such as that of pandas 3."""
    from pyarrow import types

    is_binary = types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)
    return bool(is_binary or types.is_nested(kind))
