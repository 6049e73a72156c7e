"""Rows out of files, each with the place it came from, so that an error can name file and line."""

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from lit_fsdp.tasks.causal_lm.rows import Row, describe
from lit_fsdp.tasks.data import find_twice, parse_json


def read_file(path: Path, *, txt_documents: str) -> Iterator[Row]:
    """Yield the rows of a file by its suffix. A file without rows yields one row that says so.

    Args:
        path: Must exist and end in one of ``READERS``.
        txt_documents: What is one document in a ``.txt`` file: ``file``, ``line`` or ``paragraph``.
    """
    reader = READERS[path.suffix]
    rows = _read_txt(path, txt_documents) if reader is None else reader(path)
    num_rows = 0
    for row in rows:
        num_rows += 1
        yield row
    if not num_rows:
        yield _bad(str(path), "the file is empty" if not path.stat().st_size else "the file has no rows")


def _bad(where: str, problem: str) -> Row:
    return Row(where=where, fields={}, problem=problem)


def _read_lines(path: Path) -> Iterator[tuple[int, str | None, str]]:
    """Yield number, text and problem of each line; the text is None where it is not UTF-8."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            try:
                yield number, raw.decode(), ""
            except UnicodeDecodeError as error:
                byte = raw[error.start]
                yield number, None, f"not UTF-8 (byte 0x{byte:02x} at column {error.start + 1}); convert the file"


def _read_txt(path: Path, documents: str) -> Iterator[Row]:
    begin = 1
    lines: list[str] = []
    for number, text, problem in _read_lines(path):
        if text is None:
            yield _bad(f"{path} line {number}", problem)
            if documents == "file":
                return
        elif documents == "line":
            if text.strip():
                yield Row(where=f"{path} line {number}", fields={"text": text.rstrip("\r\n")})
        elif documents == "paragraph" and not text.strip():
            if lines:
                yield Row(where=f"{path} line {begin}", fields={"text": "".join(lines).rstrip("\r\n")})
            lines = []
        else:
            begin = begin if lines else number
            lines.append(text)
    if lines:
        whole = "".join(lines)
        if documents == "file":
            yield Row(where=str(path), fields={"text": whole})
        else:
            yield Row(where=f"{path} line {begin}", fields={"text": whole.rstrip("\r\n")})


def _read_jsonl(path: Path) -> Iterator[Row]:
    for number, text, problem in _read_lines(path):
        where = f"{path} line {number}"
        if text is None:
            yield _bad(where, problem)
        elif text.strip():
            try:
                yield _check_object(where, parse_json(text))
            except json.JSONDecodeError as error:
                yield _bad(where, f"not valid JSON: {error.msg.removesuffix(' at')} at column {error.colno}")


def _check_object(where: str, value: object) -> Row:
    if not isinstance(value, dict):
        return _bad(where, f'must be an object like {{"text": "..."}}, it is {describe(value)}')
    return Row(where=where, fields=value)


def _read_json(path: Path) -> Iterator[Row]:
    lines = []
    for number, text, problem in _read_lines(path):
        if text is None:
            yield _bad(f"{path} line {number}", problem)
            return
        lines.append(text)
    whole = "".join(lines)
    if not whole.lstrip().startswith("["):
        yield from _read_jsonl(path)  # many tools write JSON lines under this suffix
        return
    try:
        values = parse_json(whole)
    except json.JSONDecodeError as error:
        reason = f"not valid JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        yield _bad(f"{path} line {error.lineno}", reason)
        return
    for number, value in enumerate(values, start=1):
        yield _check_object(f"{path} row {number}", value)


def _read_csv(path: Path) -> Iterator[Row]:
    for number, text, problem in _read_lines(path):
        if text is None:
            yield _bad(f"{path} line {number}", problem)
            return
    csv.field_size_limit(2**31 - 1)  # the default refuses documents above 128 KiB
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True)
        begin = 2
        try:
            if twice := find_twice(reader.fieldnames or []):
                yield _bad(f"{path} line 1", f"the header names {twice!r} twice; rename one of them, or remove it")
                return
            for fields in reader:
                where, begin = f"{path} line {begin}", reader.line_num + 1
                num_extra, num_missing = len(fields.get(None) or []), list(fields.values()).count(None)
                if num_extra or num_missing:
                    num_columns = len(reader.fieldnames or [])
                    num_fields = num_columns + num_extra - num_missing
                    yield _bad(where, f"has {num_fields} fields, the header has {num_columns}")
                else:
                    yield Row(where=where, fields=fields)
        except csv.Error as error:
            yield _bad(f"{path} line {begin}", f"not valid CSV: {error}")


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for fields in batch.to_pylist():
                    number += 1
                    yield Row(where=f"{path} row {number}", fields=fields)
    except (pa.ArrowException, OSError) as error:
        place = f"{path} row {number + 1}" if number else str(path)
        yield _bad(place, f"not readable as Parquet: {str(error).splitlines()[0]}")


# By suffix; .txt takes one more argument.
READERS: dict[str, Callable[[Path], Iterator[Row]] | None] = {
    ".txt": None,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
