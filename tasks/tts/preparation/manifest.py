"""What is to be prepared: JSON lines with an audio file each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lit_fsdp.tasks.data import parse_json, refuse_special_file


@dataclass(frozen=True, kw_only=True)
class ManifestRow:
    """One line of a manifest.

    Args:
        line: Its number, from 1.
        audio: As written there.
        folder: Of the manifest, where relative paths begin.
        text: What is said; ``None`` if it is to be transcribed.
        ref_audio: Another clip of the speaker, to take the embedding from.
        speaker: Who it is.
        language: Of the text.
        problem: Why the line cannot be used.
    """

    line: int
    audio: str = ""
    folder: Path = Path()
    text: str | None = None
    ref_audio: str | None = None
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
        ValueError: There is no such file, or nothing in it.
    """
    path = path.expanduser()
    lines = read_lines(path, "manifest")
    rows = [_parse(line, number, path.parent) for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise ValueError(f'manifest: {path}: empty: expected lines such as {{"audio": "a.wav", "text": "Hello."}}')
    return rows


def read_lines(path: Path, setting: str) -> list[str]:
    """Return the lines of a text file, which only a line feed ends: a JSON string may hold other breaks as they are.

    Args:
        path: The file, in UTF-8.
        setting: What the user calls it.

    Raises:
        ValueError: It cannot be read.
    """
    refuse_special_file(path, f"{setting}: {path}")
    try:
        return path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{setting}: {path}: cannot read it: expected UTF-8: {error}") from error
    except OSError as error:
        raise ValueError(f"{setting}: {path}: cannot read it: {error.strerror}") from error


def _parse(line: str, number: int, folder: Path) -> ManifestRow:
    try:
        fields = parse_json(line)
    except ValueError as error:
        return ManifestRow(line=number, problem=f"no JSON: {error}")
    if not isinstance(fields, dict) or not isinstance(fields.get("audio"), str) or not fields["audio"]:
        return ManifestRow(line=number, problem="audio: missing: expected the path of a file")
    names = ("text", "ref_audio", "speaker", "language")
    given = {name: fields[name] for name in names if fields.get(name) is not None}
    if wrong := [name for name, value in given.items() if not isinstance(value, str)]:
        return ManifestRow(line=number, audio=fields["audio"], problem=f"{wrong[0]}: expected text")
    return ManifestRow(line=number, audio=fields["audio"], folder=folder, **given)
