"""Texts to speak: lines of a file, or JSON lines that say by whom, in which language and how."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from lit_fsdp.tasks.row_files import describe, describe_json_error, parse_json, read_lines

_ROWS = ".jsonl"
_OTHERS = (".csv", ".tsv", ".json", ".parquet", ".arrow", ".xlsx")  # no line of which is a text to speak


@dataclass(frozen=True, kw_only=True)
class PromptRow:
    """A text to speak."""

    text: str
    speaker: str | None = None
    language: str | None = None
    instruct: str | None = None


def read_prompts(path: Path, setting: str = "predict") -> list[PromptRow]:
    """Return the texts in a file: its lines, or the rows of JSON lines.

    Args:
        path: The file.
        setting: What the user calls it.

    Raises:
        ValueError: It cannot be read, or a row has no text.
    """
    path = path.expanduser()
    suffix = path.suffix.lower()
    if suffix in _OTHERS:
        raise ValueError(f"{setting}: {path}: expected lines of text in a .txt file, or rows in a {_ROWS} file")
    rows = []
    for i, line, problem in read_lines(path, f"{setting}: {path}"):
        if line is None:
            raise ValueError(f"{setting}: {path} line {i}: {problem}")
        if line.strip():
            where = f"{setting}: {path} line {i}"
            rows.append(_parse(line, where) if suffix == _ROWS else PromptRow(text=line.strip()))
    return rows


def _parse(line: str, where: str) -> PromptRow:
    try:
        fields = parse_json(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: {describe_json_error(error)}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: got {describe(fields)}: expected a JSON object")  # noqa: TRY004
    found = {name: fields.get(name) for name in ("text", "speaker", "language", "instruct")}
    if not found["text"]:
        raise ValueError(f"{where}: text: missing")
    if wrong := [name for name, value in found.items() if value is not None and not isinstance(value, str)]:
        raise ValueError(f"{where}: {wrong[0]}: got {found[wrong[0]]!r}: expected text")
    return PromptRow(**{**found, "text": fields["text"]})
