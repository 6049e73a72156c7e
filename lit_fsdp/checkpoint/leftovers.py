"""What saves find in their place, and what killed ones left.

The latter is put back in place if it is complete, else removed, as it has the size of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from lit_fsdp.checkpoint.latest import enter, is_whole, list_folders, measure_age
from lit_fsdp.checkpoint.manifest import is_complete
from lit_fsdp.checkpoint.places import (
    ClaimedError,
    claim,
    get_place,
    is_being_written,
    list_saves,
    name_beside,
    name_replaced,
    put_in_place,
    remove_beside,
)
from lit_fsdp.checkpoint.remote import Location, RemotePath, leave_what_stays


def tidy_folders(folders: Iterable[Location], report: Callable[[str], None]) -> None:
    """Put back or remove what saves left in these folders whose process is gone; one process must call it.

    What a living process writes is left alone, also one of another run, see Note [Claims].

    Args:
        folders: Where checkpoints lie; they need not exist.
        report: Called with a line about each that is put back or removed.
    """
    for folder in dict.fromkeys(place for given in folders for place in list_folders(given)):
        if isinstance(folder, RemotePath):
            for checkpoint in folder.glob("*.ckpt"):
                _tidy_saves(checkpoint, report)
            for replaced in folder.glob(".*.ckpt.replaced"):
                if (newer := get_place(replaced)) is not None and is_whole(newer):
                    with leave_what_stays(replaced):
                        replaced.remove()
            continue
        places = {place for path in folder.glob(".*.ckpt.*") if (place := get_place(path)) is not None}
        for place in sorted(places):
            try:
                with suppress(ClaimedError), claim(place) as is_held:
                    if is_held:
                        _tidy_place(place, report)
            except OSError as error:  # such as of another user: it is no reason not to train
                report(f"{place}: what an interrupted save left beside it stays there: {error.strerror or error}")


def make_room(path: RemotePath, *, is_folder: bool) -> None:
    """Move a file aside that lies where a folder is to be written, or the other way, if the store cannot hold both.

    ``find_last_checkpoint`` finds it there until ``remove_older`` removes it.
    """
    if not path.has_folders() or not (path.is_file() if is_folder else path.is_dir()):
        return
    if is_whole(path):
        name_replaced(path).remove()
        path.rename(name_replaced(path))
    else:  # what was moved aside before is all there is
        path.remove()


def _tidy_saves(checkpoint: RemotePath, report: Callable[[str], None]) -> None:
    """Leave the newest complete save at an address, and those that somebody may still write."""
    newest = enter(checkpoint)
    for save in list_saves(checkpoint):
        if isinstance(save, RemotePath) and save != newest and not is_being_written(save):
            with leave_what_stays(save):
                whole = is_complete(save)
                save.remove()
                if not whole:
                    report(f"{save}: a save that was interrupted: removed")
    if newest != checkpoint and checkpoint.is_file():
        with leave_what_stays(checkpoint):
            checkpoint.remove_object()


def _tidy_place(place: Path, report: Callable[[str], None]) -> None:
    beside, old = name_beside(place), name_replaced(place)
    whole = [path for path in (place, beside, old) if path.exists() and is_whole(path)]
    newest = max(whole, key=lambda path: measure_age(path).key, default=None)
    if newest is not None and (newest == beside or not place.exists()):
        put_in_place(place, newest)
        report(f"{place}: the save of it was interrupted when it was complete: put in its place")
    # The older one goes only where a whole one is left.
    for path in (beside, *([old] if is_whole(place) else [])):
        if remove_beside(path) and path == beside:
            report(f"{path}: a save that was interrupted: removed")
