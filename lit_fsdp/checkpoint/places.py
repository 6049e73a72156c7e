"""Where a checkpoint lies while it takes the place of another one, and whether somebody still writes it.

Note [Claims]: rank 0 holds a lock on a file for as long as it writes: ``writer.lock`` in a folder, or the file of a
single-file checkpoint itself. The kernel lets go of it when the process dies, however it dies. So what nobody holds
was left by a killed process. A file that is still empty is left alone: its writer may be about to lock it.

Stores at an address have no locks: there the file says on which machine which process writes, and when that process
began, as a container that restarts has the same names and numbers again. What another machine writes is taken for
abandoned only when nothing was added to it for a day. See also Note [Remote checkpoints].
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from lit_fsdp.checkpoint.manifest import is_complete
from lit_fsdp.checkpoint.remote import Location, RemotePath, leave_what_stays

LOCK = "writer.lock"
_HIDDEN = re.compile(r"\.(.+)\.(incomplete|replaced)")
_SAVE = re.compile(r"save-(\d+)-[0-9a-f]{8}")
_ABANDONED_S = 86400.0
_Place = TypeVar("_Place", Path, RemotePath)


def name_beside(path: Path) -> Path:
    """Return where a checkpoint is written before it takes its place."""
    return path.with_name(f".{path.name}.incomplete")


def name_replaced(path: _Place) -> _Place:
    """Return where an older checkpoint goes while a newer one takes its place."""
    return path.with_name(f".{path.name}.replaced")


def list_saves(path: Location) -> list[Location]:
    """Return the folders of saves in one, the newest first, see Note [Remote checkpoints]."""
    found = [inner for inner in path.glob("save-*") if _SAVE.fullmatch(inner.name)]
    return sorted(found, key=lambda inner: (get_save_number(inner), inner.name), reverse=True)


def get_save_number(save: Location) -> int:
    """Return the number in the name of the folder of a save."""
    return int(save.name.split("-")[1])


def is_hidden(path: Location) -> bool:
    """Whether it lies beside its place, see ``get_place``."""
    return _HIDDEN.fullmatch(path.name) is not None


def get_place(path: _Place) -> _Place | None:
    """Return the place that a hidden folder or file is meant for, or comes from; ``None`` if it is neither."""
    found = _HIDDEN.fullmatch(path.name)
    return path.with_name(found[1]) if found else None


def follow(path: Location) -> Location:
    """Return where a checkpoint lies now that was found under a hidden name and put back in place since."""
    place = get_place(path) if isinstance(path, Path) else None
    return place if place is not None and place.exists() and not path.exists() else path


def make_beside(path: Location, save_number: int = 0) -> Location:
    """Return an empty folder beside the place of one that is to be written; at an address, inside that place.

    One that was complete when its writer was killed takes its place first: it may be all there is.
    """
    if isinstance(path, RemotePath):
        return path / f"save-{save_number}-{secrets.token_hex(4)}"
    beside = name_beside(path)
    if is_complete(beside):
        replace_folder(path, beside)
    if beside.is_file():  # of a single-file checkpoint
        beside.unlink()
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    return beside


def replace_folder(path: Location, beside: Location) -> None:
    """Let a complete folder take the place of what is there, if anything."""
    if isinstance(path, RemotePath) or isinstance(beside, RemotePath):
        if isinstance(path, RemotePath):
            remove_older(path, beside, get_save_number(beside))
        return
    old = name_replaced(path)
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    beside.rename(path)
    (path / LOCK).unlink(missing_ok=True)
    shutil.rmtree(old, ignore_errors=True)


def remove_older(path: RemotePath, newest: Location, number: int | None) -> None:
    """Remove what a complete save at an address has replaced; leave what was begun after it.

    What the store does not let go of stays, with a warning: the save is complete all the same.

    Args:
        path: The checkpoint.
        newest: The folder of the save, or ``path`` itself if it is a single file.
        number: Of the save; without one, all saves are older.
    """
    with leave_what_stays(path):
        for inner in list_saves(path):
            is_older = number is None or get_save_number(inner) <= number
            if isinstance(inner, RemotePath) and inner != newest and is_older:
                with leave_what_stays(inner):
                    inner.remove()
        if newest != path and path.is_file():  # object stores have both, see Note [Remote checkpoints]
            path.remove_object()
        if path.has_folders():
            name_replaced(path).remove()


@contextmanager
def claim(path: Location) -> Iterator[None]:
    """Hold the lock on a file, which is created, see Note [Claims]. Without a lock, it stays empty."""
    if isinstance(path, RemotePath):
        path.write_bytes(f"{socket.gethostname()} {os.getpid()} {_read_start(os.getpid())}\n".encode())
        try:
            yield
        finally:
            with leave_what_stays(path):
                path.remove()
        return
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


def is_being_written(path: Location) -> bool:
    """Whether a living process writes this folder or file; in doubt it does."""
    if isinstance(path, RemotePath):
        return _is_claimed(path)
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


def _is_claimed(folder: RemotePath) -> bool:
    try:
        host, process, start = [*(folder / LOCK).read_text().split(), "", "", ""][:3]
    except FileNotFoundError:
        return False
    if host != socket.gethostname() or not process.isdecimal():
        written_ns = max((inner.get_written_ns() for inner in folder.glob("*")), default=0)
        return time.time() - written_ns / 1e9 < _ABANDONED_S
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, but alive
    return start == _read_start(int(process))


def _read_start(process: int) -> str:
    """Return what tells a process from an earlier one of the same number; nothing where the system has no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The name, which is in brackets, may have spaces; the 22nd value is the time since the boot.
        return f"{boot}/{Path(f'/proc/{process}/stat').read_text().rpartition(')')[2].split()[19]}"
    except OSError:
        return ""
