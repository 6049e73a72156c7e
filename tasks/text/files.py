"""Documents, prompts and chats out of files, by their suffix."""

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from lit_fsdp.checkpoint.remote import Location
from lit_fsdp.tasks.row_files import (
    Row,
    check_object,
    describe_json_error,
    make_bad,
    parse_json,
    read_csv,
    read_jsonl,
    read_lines,
    read_parquet,
)


def read_file(path: Location, *, txt_documents: str, num_skipped: int = 0) -> Iterator[Row]:
    """Yield the rows of a file by its suffix. A file without rows yields one row that says so.

    Args:
        path: A file, or an object at an address. It must exist and end in one of ``READERS``.
        txt_documents: What is one document in a ``.txt`` file: ``file``, ``line`` or ``paragraph``.
        num_skipped: Leave out so many rows in front.
    """
    reader = READERS[path.suffix.lower()]
    if reader is read_jsonl:  # which knows rows without parsing them
        rows = read_jsonl(path, num_skipped)
    else:
        rows = islice(_read_txt(path, txt_documents) if reader is None else reader(path), num_skipped, None)
    num_rows = num_skipped
    for row in rows:
        num_rows += 1
        yield row
    if not num_rows:
        is_empty = isinstance(path, Path) and not path.stat().st_size
        yield make_bad(str(path), "the file is empty" if is_empty else "the file has no rows")


def _read_txt(path: Location, documents: str) -> Iterator[Row]:
    begin = 1
    lines: list[str] = []
    for number, text, problem in read_lines(path):
        if text is None:
            yield make_bad(f"{path} line {number}", problem)
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


def _read_json(path: Location) -> Iterator[Row]:
    lines = []
    for number, text, problem in read_lines(path):
        if text is None:
            yield make_bad(f"{path} line {number}", problem)
            return
        lines.append(text)
    whole = "".join(lines)
    if not whole.lstrip().startswith("["):
        if _is_one_object(whole):
            yield make_bad(str(path), "one object of several lines: expected a list of rows, or one row in each line")
        else:
            yield from read_jsonl(path)  # many tools write JSON lines under this suffix
        return
    try:
        values = parse_json(whole)
    except json.JSONDecodeError as error:
        yield make_bad(f"{path} line {error.lineno}", describe_json_error(error))
        return
    for number, value in enumerate(values, start=1):
        yield check_object(f"{path} row {number}", value)


def _is_one_object(text: str) -> bool:
    """Return whether a text that begins with no list is one value of JSON, on several lines."""
    try:
        parse_json(text)
    except json.JSONDecodeError:
        return False
    return "\n" in text.strip()


# By suffix; .txt takes one more argument.
READERS: dict[str, Callable[[Location], Iterator[Row]] | None] = {
    ".txt": None,
    ".jsonl": read_jsonl,
    ".json": _read_json,
    ".csv": read_csv,
    ".parquet": read_parquet,
}
