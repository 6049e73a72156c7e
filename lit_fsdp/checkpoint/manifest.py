"""What makes a checkpoint folder complete: a list of its files with sizes and checksums, written last."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypedDict

from lit_fsdp.weights.file_names import check_names

MANIFEST = "complete.json"
_BLOCK_BYTES = 1 << 22


class FileEntry(TypedDict):
    """One file of a checkpoint."""

    bytes: int
    crc32: int


def describe_files(paths: Iterable[Path]) -> dict[str, FileEntry]:
    """Return size and checksum of files, by name. Reads them once; they are still in the page cache."""
    return {path.name: {"bytes": path.stat().st_size, "crc32": _compute_crc32(path)} for path in paths}


def write_manifest(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """Mark a folder as complete."""
    with (folder / MANIFEST).open("w") as file:
        json.dump({"files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> dict[str, FileEntry]:
    """Return the files of a complete checkpoint; refuse a folder whose manifest is missing or damaged."""
    path = folder / MANIFEST
    try:
        files = dict(json.loads(path.read_text())["files"])
    except FileNotFoundError:
        raise ValueError(f"{folder} is no complete checkpoint: {MANIFEST} is missing; choose another one") from None
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} is damaged; choose another checkpoint") from None
    check_names(folder, files, source=path)
    return files


def check_sizes(folder: Path) -> dict[str, FileEntry]:
    """Return the files of a checkpoint; refuse one with a file missing or cut short. Takes milliseconds."""
    files = read_manifest(folder)
    for name, entry in files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            raise ValueError(f"{path} is missing; choose another checkpoint")
        if size != entry["bytes"]:
            raise ValueError(f"{path} has {size} bytes of {entry['bytes']}; choose another checkpoint")
    return files


def check_contents(folder: Path, files: Mapping[str, FileEntry], *, part: int = 0, num_parts: int = 1) -> None:
    """Refuse files whose checksums differ; every ``num_parts``-th is read, so that ranks can share the reading."""
    for name in sorted(files)[part::num_parts]:
        if _compute_crc32(folder / name) != files[name]["crc32"]:
            raise ValueError(f"{folder / name} is damaged: its checksum differs; choose another checkpoint")


def is_complete(folder: Path) -> bool:
    """Whether all files of a checkpoint are there in full length."""
    try:
        check_sizes(folder)
    except (ValueError, OSError):
        return False
    return True


def _compute_crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            value = zlib.crc32(block, value)
    return value
