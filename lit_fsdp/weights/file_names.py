"""Names of files that come from checkpoints and from folders of models, which may be anybody's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

NAME_RULE = (
    "one to 255 printable characters, or several such parts with a single / between them, none of them . or .., and "
    "without \\ or spaces at the ends"
)


def is_plain_name(name: object) -> bool:
    """Whether a name, followed from any folder, leads to something below that folder.

    It is pure text: links in that folder lead where they lead.
    """
    return isinstance(name, str) and all(map(_is_plain_part, name.split("/")))


def join_name(folder: Path, name: object, *, source: Path | str) -> Path:
    """Return the path of a file in a folder; every name that a checkpoint or a folder of a model tells goes through it.

    Args:
        folder: Where the file is, or will be written.
        name: As it was read.
        source: What tells it, for the error.

    Raises:
        ValueError: It would lead out of the folder, or is no name at all.
    """
    check_names([name], source=source)
    return folder / str(name)


def check_names(names: Iterable[object], *, source: Path | str) -> None:
    """Refuse names of files that would lead out of a folder, as ``join_name`` does."""
    for name in names:
        if not is_plain_name(name):
            raise ValueError(f"{source}: got {name!r} for the name of a file: expected {NAME_RULE}; do not use it")


def _is_plain_part(part: str) -> bool:
    # Neither NUL nor lone surrogates, which no file system takes, are printable.
    is_named = part not in ("", ".", "..") and part.isprintable() and part == part.strip() and "\\" not in part
    return is_named and len(part.encode()) <= 255
