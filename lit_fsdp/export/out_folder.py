"""The folder that a command fills: written by one process at a time, and an exported one whole or not at all.

Note [Who owns an out folder]: a file lock, which the kernel lets go when its process dies, says who writes a folder.
So whoever holds it may remove what lies half-written beside that folder, and nobody else may. An export is written into
a folder of its own beside its place. It replaces another export only, and of that only files which it has listed.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import Timeout

from lit_fsdp.checkpoint.places import name_beside, name_replaced, remove_beside
from lit_fsdp.checkpoint.remote import Location, RemotePath, locate_local
from lit_fsdp.errors import join_names
from lit_fsdp.files import hold_lock, refuse_unwritable, sync_path

MANIFEST = "export_manifest.json"  # in an exported folder: the names of all files in it
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux


def locate_out(out: str | Path) -> Path:
    """Return the absolute path of a folder to make; refuse an address."""
    try:
        return locate_local(out).resolve()
    except ValueError as error:
        raise ValueError(f"out: {error}") from None


def check_out(out: Path, *sources: Location, overwrite: bool) -> None:
    """Refuse a folder that holds something else than an exported model, or lies in what is read, or the reverse."""
    for source, what in zip(sources, ("the checkpoint", "the base model"), strict=False):
        if isinstance(source, RemotePath):
            continue
        if source.resolve().is_relative_to(out) or out.is_relative_to(source.resolve()):
            raise ValueError(f"out: {out} holds or lies in {what}: expected another folder")
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"out: {out} is a file: expected a folder to make")
    if out.is_mount():
        raise ValueError(f"out: {out} is a mount point, which nothing can take the place of: choose a folder in it")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise ValueError(f"out: {out} is not empty: expected a new folder, or set overwrite to true")
    if foreign := _list_foreign(out):
        raise ValueError(
            f"out: {out} is not replaced, as no export wrote {join_names(foreign)} in it: move that elsewhere, or "
            "choose another folder"
        )


@contextmanager
def write_beside(out: Path, *sources: Location, overwrite: bool) -> Iterator[Path]:
    """Give an empty folder that takes the place of ``out`` once the body has ended well.

    ``out`` is checked again at both ends, as another export may have ended meanwhile.

    Raises:
        ValueError: Another process exports to the same place, ``check_out`` refuses it, or the disk is full.
    """
    with lock_out(out, out.with_name(f".{out.name}.lock")), refuse_unwritable("out", out):
        _clear_leftovers(out)
        check_out(out, *sources, overwrite=overwrite)
        beside = name_beside(out)  # not of tempfile, whose folders nobody else may read
        try:
            beside.mkdir()
            yield beside
            names = sorted([*list_files(beside), MANIFEST])
            (beside / MANIFEST).write_text(json.dumps({"files": names}, indent=1) + "\n")
            for path in (*beside.rglob("*"), beside):  # else a power cut could leave its names without their contents
                if not path.is_symlink():
                    sync_path(path)
            check_out(out, *sources, overwrite=overwrite)
            _replace(out, beside)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise


@contextmanager
def lock_out(out: Path, file: Path) -> Iterator[None]:
    """Be the only process that writes ``out`` while the body runs; see Note [Who owns an out folder].

    Args:
        out: For errors.
        file: The lock. Its folder is made if need be, and it is removed at the end.

    Raises:
        ValueError: Another process holds the lock, or nothing can be written there.
    """
    with ExitStack() as held:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(hold_lock(file))
        except Timeout:
            raise ValueError(
                f"out: {out} is being written by another process: wait for that one, or choose another folder"
            ) from None
        except OSError as error:
            raise ValueError(f"out: got {out}: {error.strerror}: choose another folder") from error
        yield


def exchange(one: Path, other: Path) -> bool:
    """Let two paths swap what lies there, at once; whether this system and its file system can."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2  # Python has no name for it
    except (AttributeError, OSError, TypeError):  # another system
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def list_files(folder: Path) -> list[str]:
    """Return the names of all files below a folder, of links to whatever, and of empty folders."""
    paths = (p for p in folder.rglob("*") if p.is_symlink() or not p.is_dir() or not any(p.iterdir()))
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def _list_foreign(out: Path) -> list[str]:
    """Return the files in a folder that no export has written; refuse one in which nobody can tell."""
    try:
        written = set(json.loads((out / MANIFEST).read_text())["files"])
    except FileNotFoundError:
        raise ValueError(
            f"out: {out} is not replaced, as it has no {MANIFEST}, in which an export lists its files (one of an "
            "earlier version has none): remove the folder yourself, or choose another one"
        ) from None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"out: {out} is not replaced, as its {MANIFEST} is damaged: remove the folder yourself, or choose another"
        ) from error
    return [name for name in list_files(out) if name not in written]


def _replace(out: Path, beside: Path) -> None:
    if not out.exists():
        beside.rename(out)
        sync_path(out.parent)
        return
    shutil.copymode(out, beside)
    if exchange(beside, out):
        sync_path(out.parent)
        shutil.rmtree(beside, ignore_errors=True)
        return
    old = name_replaced(out)
    try:
        out.rename(old)
        beside.rename(out)
    except BaseException:  # an interrupt between the two is one
        if not out.exists():
            old.rename(out)
        raise
    sync_path(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def _clear_leftovers(out: Path) -> None:
    """Remove what killed exports have left beside ``out``; put back what one of them was about to replace."""
    if not out.exists() and name_replaced(out).exists():
        name_replaced(out).rename(out)
    for path in (name_beside(out), name_replaced(out)):
        remove_beside(path)
