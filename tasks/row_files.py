"""Rows out of files of every task, each with the place it came from, so that an error can name file and line."""

from __future__ import annotations

import csv
import errno
import io
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lit_fsdp.checkpoint.remote import Location, UnreachableError
from lit_fsdp.errors import get_first_line
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
# A name of a file or folder that datasets takes for that of a split.
_SPLIT = re.compile(r"(?<![a-z])(?:(train|training)|test|val|valid|validation|dev|eval)(?![a-z])[-_]?", re.IGNORECASE)
_AT_ONCE_BYTES = 1 << 22  # of a table at an address, of which only some parts are read
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and line feed


@contextmanager
def tell_retries_once() -> Iterator[None]:
    """Have the client of the Hub say once that it tries again, not at each of its attempts."""
    told: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        kind = re.sub(r"\d+", "", record.getMessage())  # of which attempt
        is_told = kind in told
        told.add(kind)
        return not is_told

    log = logging.getLogger("huggingface_hub.utils._http")  # private, seen in huggingface_hub 2.4
    log.addFilter(is_new)
    try:
        yield
    finally:
        log.removeFilter(is_new)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row, or what kept it from being read.

    Args:
        where: File and line, or data set and row, counted from 1.
        fields: The row; empty if it could not be read.
        problem: Why it could not be read.
        mark: A character that its reader keeps beside what becomes of the row.
    """

    where: str
    fields: dict[str, Any]
    problem: str | None = None
    mark: str = ""


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


@contextmanager
def open_bytes(path: Location, named: str = "", wanted_bytes: int | None = None) -> Iterator[IO[bytes]]:
    """Open a file, or an object at an address.

    Args:
        path: Of it.
        named: What errors call it, the path if not given.
        wanted_bytes: How much to ask a store for at once.

    Raises:
        ValueError: It is not to be read, at all or while the body runs.
    """
    named = named or str(path)
    options = {} if wanted_bytes is None else {"wanted_bytes": wanted_bytes}
    try:
        if isinstance(path, Path):
            refuse_special_file(path, named)
        with path.open("rb") if isinstance(path, Path) else path.open("rb", **options) as file:
            yield file
    except OSError as error:
        raise ValueError(f"{named}: cannot be read: {error.strerror}") from error
    except UnreachableError as error:  # which names it
        raise ValueError(f"cannot be read: {error}") from error


def read_lines(path: Location, named: str = "") -> Iterator[tuple[int, str | None, str]]:
    """Yield number, text and problem of each line; the text is None where it is not UTF-8.

    Only a line feed ends a line: a JSON string may hold other breaks as they are.

    Args:
        path: The file.
        named: What errors call it, the path if not given.

    Raises:
        ValueError: It cannot be read at all.
    """
    with open_bytes(path, named) as file:
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


def read_jsonl(path: Location, num_skipped: int = 0, named: str = "") -> Iterator[Row]:
    """Yield the objects of JSON lines after the first ones; lines without anything in them are none."""
    for number, text, problem in read_lines(path, named):
        where = f"{named or path} line {number}"
        if num_skipped and (text is None or text.strip()):
            num_skipped -= 1
        elif text is None:
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


def read_csv(path: Location) -> Iterator[Row]:
    """Yield the rows of a table with a header, its values separated by commas; a line that is not UTF-8 is the last."""
    csv.field_size_limit(2**31 - 1)  # the default refuses documents above 128 KiB
    try:
        with open_bytes(path) as file, io.TextIOWrapper(file, newline="", encoding="utf-8-sig") as text:
            yield from _read_table(path, text)
    except UnicodeDecodeError:  # which knows its place in a block, not the line
        number, problem = next((number, problem) for number, text, problem in read_lines(path) if text is None)
        yield make_bad(f"{path} line {number}", problem)


def _read_table(path: Location, file: Iterable[str]) -> Iterator[Row]:
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


def read_parquet(path: Location, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a Parquet file; what is damaged in the middle of it is one bad row, the last.

    Args:
        path: The file.
        columns: Those to read, all if not given.
    """
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    number = 0
    try:
        with ExitStack() as stack:
            # Of a file of this machine Arrow itself says what is wrong with it.
            source = (
                path if isinstance(path, Path) else stack.enter_context(open_bytes(path, wanted_bytes=_AT_ONCE_BYTES))
            )
            file = stack.enter_context(pq.ParquetFile(source, page_checksum_verification=True))
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
        reason = get_first_line(error)
        yield make_bad(place, f"not readable as Parquet: {reason}")


def read_class_names(path: Location, field: str) -> list[str] | None:
    """Return the names that ``datasets`` has written into a Parquet file for the numbers of a column, if there are any.

    Raises:
        ValueError: It is there, and cannot be read; of a file that is no Parquet, whoever reads its rows says so.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if isinstance(path, Path):
            schema = pq.read_schema(path)
        else:
            with open_bytes(path, wanted_bytes=_AT_ONCE_BYTES) as file:
                schema = pq.read_schema(file)
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        return None
    if b"huggingface" not in (schema.metadata or {}):
        return None
    from datasets import Features

    try:
        return list_class_names(Features.from_arrow_schema(schema).get(field))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        reason = get_first_line(error)
        raise ValueError(f"{path}: what datasets has written about its columns is damaged: {reason}") from error


def list_class_names(kind: Any) -> list[str] | None:
    """Return the names of a column of ``datasets`` that is a ``ClassLabel``, or has lists of it."""
    names = getattr(getattr(kind, "feature", kind), "names", None)
    return [name.strip() for name in names] if names else None


def name_class(number: Any, names: Sequence[str]) -> str | None:
    """Return the name of the class of a number; ``None`` for -1, of which data sets make no label."""
    return names[number] if number in range(len(names)) else None


def is_saved(folder: Path) -> bool:
    """Return whether ``datasets`` has saved to a folder, be it in part.

    Others call a file ``dataset_info.json``, too, so that counts beside rows in Arrow only.

    Raises:
        ValueError: This process may not look into the folder.
    """

    def holds(name: str) -> bool:  # without a list of all files, which may be millions
        try:
            (folder / name).stat()
        except PermissionError as error:
            raise ValueError(f"{folder}: cannot be read: {error.strerror}") from error
        except (OSError, ValueError):  # none there, or no name of a folder
            return False
        return True

    if holds("dataset_dict.json") or holds("state.json"):
        return True
    return holds("dataset_info.json") and any(folder.glob("*.arrow"))


def open_saved(folder: Path, split: str) -> tuple[Any, bool]:
    """Return a split of what ``datasets`` has saved to a folder, or a slice of one such as ``train[:90%]``.

    Also whether it has that: of one data set without splits, all rows are returned for a name that is not its own.

    Raises:
        ValueError: It is damaged, or an interrupted copy, or has other splits.
    """
    from datasets import DatasetDict, ReadInstruction, concatenate_datasets, load_from_disk

    try:
        saved = load_from_disk(str(folder))
    except Exception as error:  # of json, pyarrow and datasets, each its own
        reason = get_first_line(error)
        raise ValueError(
            f"{folder}: damaged, as a data set of save_to_disk: {reason}: copy it or save it once more"
        ) from error
    name, bracket, _ = split.partition("[")
    has_splits = isinstance(saved, DatasetDict)
    if has_splits:
        if name not in saved:
            raise ValueError(f"{folder}: has no split {name!r}; it has {', '.join(saved)}")
        saved = saved[name]
    if bracket:
        try:
            places = ReadInstruction.from_spec(split).to_absolute({name: len(saved)})
        except ValueError as error:
            raise ValueError(f"{folder}: split {split!r}: {error}") from error
        saved = concatenate_datasets([saved.select(range(place.from_, place.to)) for place in places])
    return saved, has_splits or bool(bracket) or name == str(saved.split)


def _list_fields(batch: Any) -> list[dict[str, Any] | None]:
    """Return the rows of a batch; ``None`` for those with text that is none, which Arrow does not check."""
    try:
        return [drop_filled(fields) for fields in batch.to_pylist()]
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [None]
    return [fields for i in range(batch.num_rows) for fields in _list_fields(batch.slice(i, 1))]


def drop_filled(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a row without the nulls that Arrow fills objects with, to give all of a column the same keys.

    Columns stay, whatever they hold.
    """

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: clean(inner) for name, inner in value.items() if inner is not None}
        # Of long lists of numbers only the first is looked at.
        first = next((inner for inner in value if inner is not None), None) if isinstance(value, list) else None
        return [clean(inner) for inner in value] if isinstance(first, dict | list) else value

    return {name: clean(value) for name, value in fields.items()}


def show_controls(text: str) -> str:
    """Return text with pictures of its control characters, so that no data commands the terminal."""
    return _CONTROL.sub(lambda found: _draw_control(ord(found[0])), text)


def _draw_control(code: int) -> str:
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else f"\\x{code:02x}"


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


def list_files(folder: Path, suffixes: Sequence[str], *, is_deep: bool = True) -> list[Path]:
    """Return the files of a folder that have one of these endings in any case, sorted.

    Hidden ones are left out, such as ``._a.png`` of macOS, and what is in hidden folders.

    Args:
        folder: Where they are.
        suffixes: With their dots.
        is_deep: Also those in folders below it, and in folders that links there lead to, of each folder once.

    Raises:
        ValueError: A folder cannot be read, or rows would be missing: behind a broken link, whatever it is named, or in
            something else of that ending, such as a pipe.
    """
    found = []
    for path, is_file in sorted(_walk(folder, is_deep=is_deep)):
        is_wanted = path.suffix.lower() in suffixes
        if not is_file and (is_wanted or path.is_symlink()):
            refuse_special_file(path, str(path))
        if is_wanted:
            found.append(path)
    return found


def list_folders(folder: Path) -> list[str]:
    """Return the names of the folders in a folder, and of links to some, sorted; hidden ones are left out.

    Raises:
        ValueError: It cannot be read, or has a broken link, behind which one would be missing.
    """
    found = _scan(folder)
    for path, is_folder, is_file in found:
        if not is_folder and not is_file and path.is_symlink():
            refuse_special_file(path, str(path))
    return [path.name for path, is_folder, _ in found if is_folder]


def _walk(folder: Path, *, is_deep: bool, seen: set[tuple[int, int]] | None = None) -> Iterator[tuple[Path, bool]]:
    """Yield what is in a folder and those below it, but for folders, and whether it is a file."""
    found = _scan(folder)
    state = folder.stat()
    place = state.st_dev, state.st_ino
    seen = set() if seen is None else seen
    if place in seen:  # a link leads back up, or to what another has led to: all paths there would be very many
        return
    seen.add(place)
    for path, is_folder, is_file in found:
        if not is_folder:
            yield path, is_file
        elif is_deep:
            yield from _walk(path, is_deep=True, seen=seen)


def _scan(folder: Path) -> list[tuple[Path, bool, bool]]:
    """Return what is in a folder and not hidden, sorted, each with whether it is a folder, and whether it is a file."""
    try:
        with os.scandir(folder) as entries:
            # The other is at the top of volumes, and for root only.
            names = (entry for entry in entries if not entry.name.startswith(".") and entry.name != "lost+found")
            shown = sorted(names, key=lambda entry: entry.name)
    except OSError as error:
        raise ValueError(f"{folder}: cannot be read: {error.strerror}") from error
    found = []
    for entry in shown:
        try:  # of the entry: of a path, each question is a round trip on a network disk
            found.append((Path(entry.path), entry.is_dir(), entry.is_file()))
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise ValueError(f"{entry.path}: cannot be read: {error.strerror}") from error
            found.append((Path(entry.path), False, False))  # a link to itself
    return found


def refuse_splits(folder: Location, names: Iterable[str]) -> None:
    """Refuse to read a folder as one whose files are all named like rows to train on or rows to hold out.

    Args:
        folder: Where they are.
        names: Of the files, relative to it.

    Raises:
        ValueError: With the patterns to name instead.
    """
    found: dict[bool, tuple[str, str]] = {}
    for name in names:
        parts = name.split("/")
        places = ((number, part, match) for number, part in enumerate(parts) if (match := _SPLIT.search(part)))
        if (place := next(places, None)) is None:
            return
        number, part, match = place
        wanted = f"{part[: match.end()]}*{Path(part).suffix}" if number == len(parts) - 1 else part
        found.setdefault(match[1] is not None, (name, "/".join([*parts[:number], wanted])))
    if len(found) == 2:
        (trained, wanted), (held_out, other) = found[True], found[False]
        raise ValueError(
            f"{folder}: holds several splits, such as {trained} and {held_out}: expected one, such as "
            f"{folder / wanted} or {folder / other}; or name all of their files as a list"
        )
