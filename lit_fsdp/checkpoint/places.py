"""Where a checkpoint lies while it takes the place of another one, and whether somebody still writes it.

Note [Claims]: rank 0 holds a lock on a file for as long as it writes: ``writer.lock`` in a folder, or the file of a
single-file checkpoint itself. The kernel lets go of it when the process dies, however it dies. So what nobody holds
was left by a killed process. A file that is still empty is left alone: its writer may be about to lock it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lit_fsdp.checkpoint.manifest import is_complete

LOCK = "writer.lock"
_HIDDEN = re.compile(r"\.(.+)\.(incomplete|replaced)")


def name_beside(path: Path) -> Path:
    """Return where a checkpoint is written before it takes its place."""
    return path.with_name(f".{path.name}.incomplete")


def name_replaced(path: Path) -> Path:
    """Return where an older checkpoint goes while a newer one takes its place."""
    return path.with_name(f".{path.name}.replaced")


def get_place(path: Path) -> Path | None:
    """Return the place that a hidden folder or file is meant for, or comes from; ``None`` if it is neither."""
    found = _HIDDEN.fullmatch(path.name)
    return path.with_name(found[1]) if found else None


def follow(path: Path) -> Path:
    """Return where a checkpoint lies now that was found under a hidden name and put back in place since."""
    place = get_place(path)
    return place if place is not None and place.exists() and not path.exists() else path


def make_beside(path: Path) -> Path:
    """Return an empty folder beside the place of one that is to be written.

    One that was complete when its writer was killed takes its place first: it may be all there is.
    """
    beside = name_beside(path)
    if is_complete(beside):
        replace_folder(path, beside)
    if beside.is_file():  # of a single-file checkpoint
        beside.unlink()
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    return beside


def replace_folder(path: Path, beside: Path) -> None:
    """Let a complete folder take the place of what is there, if anything."""
    old = name_replaced(path)
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    beside.rename(path)
    (path / LOCK).unlink(missing_ok=True)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def claim(path: Path) -> Iterator[None]:
    """Hold the lock on a file, which is created, see Note [Claims]. Without a lock, it stays empty."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        with suppress(OSError):  # a file system without locks, where nothing can be told from what is being written
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(file, f"{socket.gethostname()} {os.getpid()}\n".encode())  # for people
        yield
    finally:
        with suppress(OSError):  # closing is not enough: processes that were forked meanwhile have it open too
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def is_being_written(path: Path) -> bool:
    """Whether a living process writes this folder or file; in doubt it does."""
    try:
        file = os.open(path / LOCK if path.is_dir() else path, os.O_RDONLY)
    except FileNotFoundError:
        return path.is_dir() and not any(path.iterdir())
    except OSError:
        return True
    try:
        if not os.fstat(file).st_size:
            return True
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: all ranks look at once
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(file)
