"""What is to be prepared: JSON lines with an audio file each."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from lit_fsdp.tasks.row_files import describe_json_error, parse_json, read_lines


@dataclass(frozen=True, kw_only=True)
class ManifestRow:
    """One line of a manifest.

    Args:
        line: Its number, from 1.
        audio: As written there.
        folder: Of the manifest, where relative paths begin; the same however the manifest was named.
        text: What is said; ``None`` if it is to be transcribed.
        ref_audio: Another clip of the speaker, to take the embedding from.
        ref_text: What is said there; the row then goes on from that clip.
        instruct: How the text is said.
        speaker: Who it is.
        language: Of the text.
        problem: Why the line cannot be used.
    """

    line: int
    audio: str = ""
    folder: Path = Path()
    text: str | None = None
    ref_audio: str | None = None
    ref_text: str | None = None
    instruct: str | None = None
    speaker: str = "default"
    language: str = "auto"
    problem: str | None = None

    def resolve(self, name: str) -> Path:
        """Return where a file of the manifest is."""
        path = Path(name).expanduser()
        return path if path.is_absolute() else self.folder / path


def read_manifest(path: Path) -> list[ManifestRow]:
    """Return the rows of a manifest, those that cannot be used too.

    Raises:
        ValueError: There is no such file, or nothing in it that can be used.
    """
    path = path.expanduser()
    lines = read_lines(path, f"manifest: {path}")
    folder = Path(os.path.realpath(path.parent))
    rows = [_parse(text, number, problem, folder) for number, text, problem in lines if text is None or text.strip()]
    if not rows:
        raise ValueError(f'manifest: {path}: empty: expected lines such as {{"audio": "a.wav", "text": "Hello."}}')
    if all(row.problem is not None for row in rows):
        raise ValueError(f"manifest: {path} line {rows[0].line}: {rows[0].problem}: no line of it can be used")
    return rows


def _parse(line: str | None, number: int, problem: str, folder: Path) -> ManifestRow:
    if line is None:
        return ManifestRow(line=number, problem=problem)
    try:
        fields = parse_json(line)
    except json.JSONDecodeError as error:
        return ManifestRow(line=number, problem=describe_json_error(error))
    audio = fields.get("audio") if isinstance(fields, dict) else None
    if not isinstance(audio, str) or not audio:
        what = "missing" if audio is None or audio == "" else f"got {audio!r}"
        return ManifestRow(line=number, problem=f"audio: {what}: expected the path of a file")
    names = ("text", "ref_audio", "ref_text", "instruct", "speaker", "language")
    given = {name: fields[name] for name in names if fields.get(name) is not None}
    if wrong := [name for name, value in given.items() if not isinstance(value, str)]:
        return ManifestRow(line=number, audio=fields["audio"], problem=f"{wrong[0]}: expected text")
    # White space around a name would make it another voice.
    labels = {name: given.pop(name).strip() for name in ("speaker", "language") if name in given}
    given |= {name: value for name, value in labels.items() if value}
    if "ref_text" in given and "ref_audio" not in given:
        problem = "ref_text: not used without ref_audio, in which it is said"
        return ManifestRow(line=number, audio=fields["audio"], problem=problem)
    return ManifestRow(line=number, audio=fields["audio"], folder=folder, **given)
