"""Texts to speak: lines of a file, or JSON lines that say by whom, in which language and how."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lit_fsdp.tasks.row_files import Row, check_rows, read_jsonl, read_lines

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
    named = f"{setting}: {path}"
    if suffix == _ROWS:
        return [_parse(row) for row in check_rows(read_jsonl(path, named=named))]
    texts = []
    for i, line, problem in read_lines(path, named):
        if line is None:
            raise ValueError(f"{named} line {i}: {problem}")
        texts.append(line.strip())
    return [PromptRow(text=text) for text in texts if text]


def _parse(row: Row) -> PromptRow:
    found = {name: row.fields.get(name) for name in ("text", "speaker", "language", "instruct")}
    if not found["text"]:
        raise ValueError(f"{row.where}: text: missing")
    if wrong := [name for name, value in found.items() if value is not None and not isinstance(value, str)]:
        raise ValueError(f"{row.where}: {wrong[0]}: got {found[wrong[0]]!r}: expected text")
    labels = {name: (found[name] or "").strip() or None for name in ("speaker", "language")}
    return PromptRow(**{**found, **labels, "text": row.fields["text"]})
