"""Files of users: which can be read, and how one is written whole or not at all.

Nothing heavy is imported here, as the front door needs it before torch loads.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

# What a disk says that takes no more, one that may not be written to, and one that may not be read either.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CLOSED = (errno.EROFS,)
_EITHER = (errno.EACCES, errno.EPERM, errno.EIO)
_PART = re.compile(r"\.[0-9a-f]{8}\.part$")
_NATIVE = re.compile(r"\(os error (\d+)\)")  # of libraries written in Rust, which raise errors of their own


class UnwritableError(ValueError):
    """A disk is full, or may not be written to."""


class DiskFullError(RuntimeError):
    """A rank found a disk or quota full while it wrote."""


def find_disk_full(error: BaseException | None) -> BaseException | None:
    """Return what says that a disk, or a quota that no free space tells of, takes no more: an error or what led to it.

    Torch writes tensors through code that ends in errors of its own.
    """
    while error is not None:
        if isinstance(error, DiskFullError) or (isinstance(error, OSError) and error.errno in _FULL):
            return error
        error = error.__cause__ or error.__context__
    return None


def describe_special_file(path: Path) -> str | None:
    """Return what is wrong with a link to nothing, and with pipes and devices, which cannot be read twice."""
    if path.is_symlink() and not path.exists():
        return f"is a link to {path.readlink()}, which is not there; mend the link"
    if path.exists() and not path.is_file() and not path.is_dir():
        return "is a pipe, a socket or a device; write it to a file first"
    return None


def refuse_special_file(path: Path, named: str) -> None:
    """Refuse what ``describe_special_file`` has something to say about.

    Raises:
        ValueError: With that; ``named`` begins the text.
    """
    if (problem := describe_special_file(path)) is not None:
        raise ValueError(f"{named}: {problem}")


def refuse_no_folder(setting: str, folder: Path) -> None:
    """Refuse a place for a folder where none can be made or written to, before anything runs. Nothing is made.

    Raises:
        ValueError: ``setting`` begins the text.
    """
    whole = folder.absolute()
    there = next(parent for parent in (whole, *whole.parents) if os.path.lexists(parent))
    if not there.is_dir():
        raise ValueError(f"{setting}: got {str(folder)!r}: {there} is no folder: expected one")
    if not os.access(there, os.W_OK):
        raise ValueError(f"{setting}: got {str(folder)!r}: {there} cannot be written to")


@contextmanager
def refuse_unwritable(setting: str, folder: Path) -> Iterator[None]:
    """Say in one line that a disk does not take what the body writes; what it reads may lie elsewhere.

    Args:
        setting: What the user calls the folder.
        folder: The folder, or file.

    Raises:
        UnwritableError: The disk is full, or may not be written to.
    """
    try:
        yield
    except Exception as error:
        number = _find_number(error, folder)
        if number is None:
            raise
        fix = "free some, or choose another disk" if number in _FULL else "choose another folder"
        raise UnwritableError(f"{setting}: {folder}: {os.strerror(number)}: {fix}") from error


@contextmanager
def open_whole(path: Path, mode: Literal["w", "wb"] = "w") -> Iterator[IO[Any]]:
    """Give a file that takes the place of ``path`` once the body has ended well, also where the power goes.

    Else nothing of it is left.
    """
    path = path.resolve()  # what a link leads to
    begin = os.fsencode(path.name)[:200].decode(errors="ignore")  # a name has up to 255 bytes
    beside = path.with_name(f"{begin}.{uuid.uuid4().hex[:8]}.part")
    try:
        with beside.open(mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.exists() and path.stat().st_mode != beside.stat().st_mode:
            shutil.copymode(path, beside)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a file with ``open_whole``."""
    with open_whole(path) as file:
        file.write(text)


def remove_parts(folder: Path) -> None:
    """Remove what killed processes have left of ``open_whole`` in a folder that only this process writes."""
    for path in folder.glob("*.part"):
        if _PART.search(path.name):
            path.unlink(missing_ok=True)


def sync_path(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk and outlast a power cut.

    File systems that know no such thing for folders are left to themselves.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(file)


@contextmanager
def hold_lock(file: Path, *, is_needed: bool = True) -> Iterator[None]:
    """Be the only process that holds a lock while the body runs.

    The kernel lets go of it when the process dies, however it dies; processes that it has forked do not hold it.

    Args:
        file: The lock. It is made, and removed at the end.
        is_needed: Whether a lock of a lesser kind, which outlasts a killed process, is better than none where the
            file system has no others.

    Raises:
        filelock.Timeout: Another process holds it.
        OSError: It cannot be made, or the file system has no locks.
    """
    from filelock import FileLock

    lock = FileLock(file, thread_local=False, fallback_to_soft=is_needed)
    lock.acquire(blocking=False)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)  # while it is held: a lock on what has no name any more is no lock, and is retried
        lock.release()


def _find_number(error: Exception, folder: Path) -> int | None:
    """Return what a disk said of writing to a folder, or beside it; ``None`` of all other errors."""
    if isinstance(error, OSError):
        if not isinstance(error.filename, str | bytes):
            return error.errno if error.errno in (*_FULL, *_CLOSED) else None
        is_known = error.errno in (*_FULL, *_CLOSED, *_EITHER)
        return error.errno if is_known and _is_part(Path(os.fsdecode(error.filename)), folder) else None
    found = None if isinstance(error, ValueError) else _NATIVE.search(str(error))  # that one says it already
    number = int(found[1]) if found else None
    return number if number in (*_FULL, *_CLOSED) else None


def _is_part(path: Path, folder: Path) -> bool:
    """Whether a path lies in a folder, or above it, or beside it under a name made of its own."""
    path, folder = path.resolve(), folder.resolve()
    if path.is_relative_to(folder) or folder.is_relative_to(path):
        return True
    return path.is_relative_to(folder.parent) and folder.name in path.relative_to(folder.parent).parts[0]
