"""Texts to speak: lines of a file, or JSON lines that say by whom and in which language."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lit_fsdp.tasks.data import parse_json
from lit_fsdp.tasks.tts.preparation.manifest import read_lines

_LINES, _ROWS = (".txt", ""), ".jsonl"


@dataclass(frozen=True, kw_only=True)
class PromptRow:
    """A text to speak."""

    text: str
    speaker: str | None = None
    language: str | None = None


def read_prompts(path: Path, setting: str = "predict") -> list[PromptRow]:
    """Return the texts in a file: its lines, or the rows of JSON lines.

    Args:
        path: The file.
        setting: What the user calls it.

    Raises:
        ValueError: It cannot be read, or a row has no text.
    """
    if path.suffix not in (*_LINES, _ROWS):
        raise ValueError(f"{setting}: {path}: expected lines of text in a .txt file, or rows in a {_ROWS} file")
    lines = [(i, line) for i, line in enumerate(read_lines(path.expanduser(), setting), start=1) if line.strip()]
    if path.suffix != _ROWS:
        return [PromptRow(text=line.strip()) for _, line in lines]
    rows = []
    for i, line in lines:
        where = f"{setting}: {path} line {i}"
        try:
            fields = parse_json(line)
            found = {name: fields.get(name) for name in ("text", "speaker", "language")}
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{where}: no JSON object: {error}") from error
        if not found["text"]:
            raise ValueError(f"{where}: text: missing")
        if wrong := [name for name, value in found.items() if value is not None and not isinstance(value, str)]:
            raise ValueError(f"{where}: {wrong[0]}: got {found[wrong[0]]!r}: expected text")
        rows.append(PromptRow(**found))
    return rows
