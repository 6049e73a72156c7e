"""What tells the files that data is read from from others, wherever they lie, without reading all of them.

Note [Long folders]: a folder says how much is in it only when all its names are read, which takes minutes for millions
of them, while other ranks wait. Its order is that of a disk, so its first names are others on another machine. So of a
folder with more than ``_MOST_FILES`` entries nothing is compared but that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from glob import glob, has_magic
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash

from lit_fsdp.cache import sample_file
from lit_fsdp.checkpoint.remote import is_remote
from lit_fsdp.redaction import redact

_MOST_FILES = 10_000  # of a source that are listed
_MOST_OPENED = 32  # of these
_ELSEWHERE = "a path"
_LEFT = (".lock", ".tmp", ".part")  # by programs that are not done


def describe_source(source: Any) -> str:
    """Return number and size of files, and a digest of their names and samples; what is no file, by its name.

    Reads at most 1.5 MiB, so two files that differ in between are the same here.

    Args:
        source: A file, folder, pattern, address or name of a data set, or a list of them.
    """
    parts = [str(part) for part in (source if isinstance(source, list | tuple) else [source])]
    long: list[Path] = []  # see Note [Long folders]
    found = {part: [] if is_remote(part) else _match(part, long) for part in parts}
    names = [_name(part) for part, paths in found.items() if not paths]
    listed = (file for paths in found.values() for path in paths for file in _list_files(path, long))
    files = list(islice(listed, _MOST_FILES))
    if long:
        folders = f"{len(long)} folder{'s' if len(long) > 1 else ''}"
        names.append(f"{folders} of more than {_MOST_FILES:,} entries, which are not compared")
    if not files:
        return ", ".join(names)
    digest, step = xxhash.xxh3_64(), -(-len(files) // _MOST_OPENED)
    digest.update(os.fsencode("\0".join(name for name, _ in files)))
    num_bytes = sum(_add_samples(digest, path) for _, path in files[::step])
    size = f" of {num_bytes:,} bytes" if step == 1 else ""
    count = f"{len(files):,} file{'s' if len(files) > 1 else ''}{' or more' if len(files) == _MOST_FILES else ''}"
    return ", ".join([*names, f"{count}{size} (digest {digest.hexdigest()})"])


def _match(part: str, long: list[Path]) -> list[Path]:
    path = Path(part).expanduser()
    # Not ``path.exists``, which raises of what is too long for a name.
    if os.path.exists(path):  # noqa: PTH110
        return [path]
    folder = path.parent
    if has_magic(path.name) and not has_magic(str(folder)) and folder.is_dir() and _list_names(folder) is None:
        long.append(folder)
        return []
    return sorted(map(Path, glob(str(path))))  # noqa: PTH207


def _name(part: str) -> str:
    is_place = not is_remote(part) and (part.startswith(("/", "~", ".")) or any(letter in part for letter in "*{"))
    return _ELSEWHERE if is_place else redact(part)


def _list_files(source: Path, long: list[Path]) -> Iterator[tuple[str, Path]]:
    """Yield name below the source, and path, of its files in a fixed order; folders too long for it are noted."""
    if not source.is_dir():
        yield "", source
        return
    seen, waiting = set(), [source]
    while waiting:
        folder = waiting.pop()
        place = folder.resolve()
        if place in seen:  # a link may lead back up
            continue
        seen.add(place)
        names = _list_names(folder)
        if names is None:
            long.append(folder)
            continue
        inner = [folder / name for name, is_folder in names if is_folder and not name.startswith(".")]
        waiting += reversed(inner)
        for name, is_folder in names:
            # cache-*: of the datasets library
            if not is_folder and not name.startswith((".", "cache-")) and not name.endswith(_LEFT):
                yield str((folder / name).relative_to(source)), folder / name


def _list_names(folder: Path) -> list[tuple[str, bool]] | None:
    """Return the names in a folder, and whether each is a folder, sorted; ``None`` if there are too many."""
    try:
        with os.scandir(folder) as entries:
            found = [(entry.name, entry.is_dir()) for entry in islice(entries, _MOST_FILES + 1)]
    except OSError:  # who reads it later says so
        return []
    return None if len(found) > _MOST_FILES else sorted(found)


def _add_samples(digest: xxhash.xxh3_64, path: Path) -> int:
    """Add size and samples of a file to a digest, and return the size in bytes."""
    try:
        size, found = sample_file(path)
    except OSError as error:  # who reads it later says so
        size, found = 0, f"error {error.errno or 0}"
    digest.update(found.encode())
    return size
