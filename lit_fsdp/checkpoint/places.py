"""Where a checkpoint lies while it takes the place of another one, and whether somebody still writes it.

Note [Claims]: for as long as rank 0 writes or removes a checkpoint, or tidies what lies beside it, it holds a lock
beside its place. So what lies there when somebody gets the lock was left by a killed process.

Stores at an address have no locks: there a file says on which machine which process writes, and when that process
began, as a container that restarts has the same names and numbers again. What another machine writes is taken for
abandoned only when nothing was added to it for a day. See also Note [Remote checkpoints].
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from filelock import Timeout

from lit_fsdp.checkpoint.manifest import MANIFEST, is_complete
from lit_fsdp.checkpoint.remote import Location, RemotePath, leave_what_stays
from lit_fsdp.files import hold_lock, refuse_unwritable, sync_path

LOCK = "writer.lock"
_HIDDEN = re.compile(r"\.(.+)\.(incomplete|replaced|lock)")
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)  # what file systems without them say
_SAVE = re.compile(r"save-(\d+)-[0-9a-f]{8}")
_ABANDONED_S = 86400.0
_Place = TypeVar("_Place", Path, RemotePath)


class ClaimedError(ValueError):
    """A living process writes a checkpoint there."""


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


@contextmanager
def write_beside(path: Location, save_number: int = 0) -> Iterator[Location]:
    """Give a name beside the place of a checkpoint that is to be written; at an address, inside that place.

    What was complete when its writer was killed takes its place first: it may be all there is. What is not complete
    at the end is removed.

    Raises:
        ClaimedError: Another process writes the same checkpoint.
    """
    if isinstance(path, RemotePath):
        save = path / f"save-{save_number}-{secrets.token_hex(4)}"
        with _claim_at_address(save / LOCK):
            try:
                yield save
            except BaseException:
                with leave_what_stays(save):
                    if not is_complete(save):
                        save.remove()
                raise
        return
    with ExitStack() as held:
        with refuse_unwritable(f"checkpoint {path.name}", path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(claim(path))
        beside = name_beside(path)
        if is_complete(beside):
            put_in_place(path, beside)
        remove_beside(beside)
        try:
            yield beside
        finally:
            if not is_complete(beside):
                remove_beside(beside)


def remove_beside(beside: Path) -> bool:
    """Remove a folder or file, as far as the disk lets go of it; whether there was one."""
    if beside.is_dir():
        shutil.rmtree(beside, ignore_errors=True)
    elif beside.exists():
        beside.unlink()
    else:
        return False
    return True


def discard(path: Location) -> None:
    """Remove a checkpoint that nobody needs any more, as far as disk or store let go of it; warn of what stays."""
    if isinstance(path, RemotePath):
        with leave_what_stays(path):
            path.remove()
        return
    gone = path
    with suppress(OSError, ClaimedError):  # such as of another run in this folder, which removes or writes it, too
        if path.is_dir() and not path.is_symlink():
            with _claim_if_there_is_room(path):
                # There the next start removes what is left of it, if this is killed, and does not put it back.
                remove_beside(name_beside(path))
                gone = path.rename(name_beside(path))
                (gone / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(gone, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if gone.exists():
        warnings.warn(f"{gone} could not be removed, and takes space until you remove it", stacklevel=2)


@contextmanager
def _claim_if_there_is_room(path: Path) -> Iterator[None]:
    """Claim a checkpoint that is to go, if the disk takes a lock; a full one shall let go of it all the same."""
    with ExitStack() as held:
        with suppress(OSError):
            held.enter_context(claim(path))
        yield


def put_in_place(path: Path, beside: Path) -> None:
    """Let a complete folder or file take the place of what is there, if anything, so that a power cut leaves one."""
    sync_path(beside)
    old = name_replaced(path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    elif beside.is_dir():
        path.unlink(missing_ok=True)
    beside.rename(path)
    sync_path(path.parent)
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
def claim(path: Path) -> Iterator[bool]:
    """Hold the lock of a place, see Note [Claims]; give whether there is one, as not all file systems have locks.

    Raises:
        ClaimedError: Another process holds it.
    """
    file = path.with_name(f".{path.name}.lock")
    with ExitStack() as held:
        try:
            held.enter_context(hold_lock(file, is_needed=False))
            is_held = True
        except Timeout:
            raise ClaimedError(
                f"{path}: another process writes this checkpoint: end that one, or set another dirpath or filename of "
                "ModelCheckpoint"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            file.unlink(missing_ok=True)  # it was made, and is of no use
            is_held = False
        yield is_held


@contextmanager
def _claim_at_address(file: RemotePath) -> Iterator[None]:
    file.write_bytes(f"{socket.gethostname()} {os.getpid()} {_read_start(os.getpid())}\n".encode())
    try:
        yield
    finally:
        with leave_what_stays(file):
            file.remove()


def is_being_written(folder: RemotePath) -> bool:
    """Whether a living process writes this save; in doubt it does, see Note [Claims]."""
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
