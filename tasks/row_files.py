"""Rows out of files of every task, each with the place it came from, so that an error can name file and line."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_fsdp.files import refuse_special_file

# What a file begins with that another program has packed or written in an encoding of two bytes.
_BEGINNINGS = {
    b"\x1f\x8b": "gzip: unpack it",
    b"\x28\xb5\x2f\xfd": "zstd: unpack it",
    b"\xfd7zXZ\x00": "xz: unpack it",
    b"BZh": "bzip2: unpack it",
    b"PK\x03\x04": "zip: unpack it",
    b"\xff\xfe": "UTF-16: convert it to UTF-8",
    b"\xfe\xff": "UTF-16: convert it to UTF-8",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row, or what kept it from being read.

    Args:
        where: File and line, or data set and row, counted from 1.
        fields: The row; empty if it could not be read.
        problem: Why it could not be read.
    """

    where: str
    fields: dict[str, Any]
    problem: str | None = None


def make_bad(where: str, problem: str) -> Row:
    """Return a row that could not be read."""
    return Row(where=where, fields={}, problem=problem)


def check_rows(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield rows until one could not be read.

    Raises:
        ValueError: That one, with its place.
    """
    for row in rows:
        if row.problem is not None:
            raise ValueError(f"{row.where}: {row.problem}")
        yield row


def read_lines(path: Path, named: str = "") -> Iterator[tuple[int, str | None, str]]:
    """Yield number, text and problem of each line; the text is None where it is not UTF-8.

    Only a line feed ends a line: a JSON string may hold other breaks as they are.

    Args:
        path: The file.
        named: What errors call it, the path if not given.

    Raises:
        ValueError: It cannot be read at all.
    """
    named = named or str(path)
    refuse_special_file(path, named)
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
                try:
                    yield number, raw.decode(), ""
                except UnicodeDecodeError as error:
                    packed = next((kind for begin, kind in _BEGINNINGS.items() if raw.startswith(begin)), None)
                    if number == 1 and packed is not None:
                        yield number, None, f"not text, but {packed}"
                        return
                    byte = raw[error.start]
                    yield number, None, f"not UTF-8 (byte 0x{byte:02x} at column {error.start + 1}); convert the file"
    except OSError as error:
        raise ValueError(f"{named}: cannot be read: {error.strerror}") from error


def read_jsonl(path: Path) -> Iterator[Row]:
    """Yield the objects of JSON lines; lines without anything in them are none."""
    for number, text, problem in read_lines(path):
        where = f"{path} line {number}"
        if text is None:
            yield make_bad(where, problem)
        elif text.strip():
            try:
                yield check_object(where, parse_json(text))
            except json.JSONDecodeError as error:
                yield make_bad(where, describe_json_error(error))


def describe_json_error(error: json.JSONDecodeError) -> str:
    """Return what is wrong with a JSON text, and where in its line."""
    return f"not valid JSON: {error.msg.removesuffix(' at')} at column {error.colno}"


def check_object(where: str, value: object) -> Row:
    """Return a value as a row, if it is an object."""
    if isinstance(value, dict):
        return Row(where=where, fields=value)
    return make_bad(where, f'must be an object like {{"text": "..."}}, it is {describe(value)}')


def read_csv(path: Path) -> Iterator[Row]:
    """Yield the rows of a table with a header, its values separated by commas; a line that is not UTF-8 is the last."""
    refuse_special_file(path, str(path))
    csv.field_size_limit(2**31 - 1)  # the default refuses documents above 128 KiB
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            yield from _read_table(path, file)
    except UnicodeDecodeError:  # which knows its place in a block, not the line
        number, problem = next((number, problem) for number, text, problem in read_lines(path) if text is None)
        yield make_bad(f"{path} line {number}", problem)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error


def _read_table(path: Path, file: Iterable[str]) -> Iterator[Row]:
    reader = csv.reader(file, strict=True)
    place, begin, names = f"{path} line", 1, list[str]()
    try:
        names = next(reader, [])
        if twice := find_twice(names):
            yield make_bad(f"{place} 1", f"the header names {twice!r} twice; rename one of them, or remove it")
            return
        begin = reader.line_num + 1
        for values in reader:
            where, begin = f"{place} {begin}", reader.line_num + 1
            if values and len(values) == len(names) and (len(names) > 1 or not _find_separator(names, values[0])):
                yield Row(where=where, fields=dict(zip(names, values, strict=True)))
            elif kind := _find_separator(names, ",".join(values)):
                yield make_bad(f"{place} 1", f"the columns are separated by {kind}: save it with commas")
                return
            elif values:
                what = f"has {len(values)} fields, the header has {len(names)}"
                yield make_bad(where, f"{what}; quote values that hold commas")
    except csv.Error as error:
        # Also what it says of `"a";"b"`.
        kind = _find_separator(names, names[0]) if names and "expected after" in str(error) else None
        problem = f"the columns are separated by {kind}: save it with commas" if kind else f"not valid CSV: {error}"
        yield make_bad(f"{place} {1 if kind else begin}", problem)


def _find_separator(names: Sequence[str], line: str) -> str | None:
    """Return what separates columns instead of commas, if both the header and a line have it."""
    kinds = {";": "semicolons", "\t": "tabs"}
    return next((kind for s, kind in kinds.items() if len(names) == 1 and s in names[0] and s in line), None)


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a Parquet file; what is damaged in the middle of it is one bad row, the last.

    Args:
        path: The file.
        columns: Those to read, all if not given.
    """
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    number = 0
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            if twice := find_twice(file.schema_arrow.names):
                yield make_bad(str(path), f"has two columns {twice!r}; rename one of them, or remove it")
                return
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for fields in _list_fields(batch):
                    number += 1
                    where = f"{path} row {number}"
                    yield (
                        make_bad(where, "has text that is not UTF-8")
                        if fields is None
                        else Row(where=where, fields=fields)
                    )
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last one: a name in the schema
        place = f"{path} after row {number}" if number else str(path)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        yield make_bad(place, f"not readable as Parquet: {reason}")


def _list_fields(batch: Any) -> list[dict[str, Any] | None]:
    """Return the rows of a batch; ``None`` for those with text that is none, which Arrow does not check."""
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [None]
    return [fields for i in range(batch.num_rows) for fields in _list_fields(batch.slice(i, 1))]


def describe(value: object) -> str:
    """Say what a wrong value is, in words a user of JSON knows."""
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a string",
        list: "a list",
        dict: "an object",
    }
    if value is None:
        return "null"
    shown = repr(value)
    return f"{names.get(type(value), type(value).__name__)} ({shown[:40]}{'...' if len(shown) > 40 else ''})"


def find_twice(names: Iterable[str]) -> str | None:
    """Return the first name of a column that is there twice, of which a reader would keep the last alone."""
    names = [name for name in names if name]
    return next((name for name in names if names.count(name) > 1), None)


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        json.JSONDecodeError: Also for what Python alone would not take or could not write again: deep nesting, numbers
            of thousands of digits, halves of surrogate pairs.
    """
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError:
        raise
    except RecursionError as error:
        raise json.JSONDecodeError("nested too deeply", text, 0) from error
    except UnicodeEncodeError as error:
        raise json.JSONDecodeError("a \\ud... escape without its other half is no character", text, 0) from error
    except ValueError as error:
        raise json.JSONDecodeError("a number of thousands of digits", text, 0) from error
    return value


def list_files(paths: Iterable[Path], suffixes: Sequence[str]) -> list[Path]:
    """Return the files among paths that have one of these endings in any case, sorted; folders are left out.

    Raises:
        ValueError: One of that ending is no regular file: a pipe would be waited for, and rows behind a broken link
            would be missing.
    """
    found = []
    for path in sorted(p for p in paths if p.suffix.lower() in suffixes):
        if path.is_file():  # asked first, as each question is a round trip on a network disk
            found.append(path)
        elif not path.is_dir():
            refuse_special_file(path, str(path))
    return found
