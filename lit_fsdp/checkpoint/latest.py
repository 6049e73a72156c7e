"""Which checkpoint a run goes on from: the newest that is complete."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.serialization import skip_data

from lit_fsdp.checkpoint.manifest import MANIFEST, is_complete, read_position
from lit_fsdp.checkpoint.places import get_save_number, is_hidden, list_saves
from lit_fsdp.checkpoint.remote import Location, RemotePath
from lit_fsdp.checkpoint.untrusted import load_plain

SAVE_NUMBER = "save_number"  # in a single file
_NUM_LOOKS = 5
_MAX_DEPTH = 2  # of folders below one of checkpoints that are searched
_OF_RANK_0, _OF_DEEPSPEED = "meta.pt", "checkpoint"  # in folders of Lightning's strategies, seen in lightning 2.6.6
_OF_OTHERS = "was saved by another strategy, which numbers no saves (set its path to go on from it)"


@dataclass(frozen=True, kw_only=True)
class Age:
    """What tells newer checkpoints from older ones.

    Saves are numbered through the life of a run, so clocks and copies change nothing. Those without a number were
    written before there was one, or by Lightning: for them the time counts, and all others are newer.
    """

    save_number: int  # 0: it has none
    step: int  # -1: unknown
    written_ns: int

    @property
    def key(self) -> tuple[int, int, int, int]:
        """What to sort by, the newest last."""
        return self.save_number, 0 if self.save_number else self.written_ns, self.step, self.written_ns


def find_last_checkpoint(
    folders: Iterable[Location],
    report: Callable[[str], None] = print,
    describe_misfit: Callable[[Location], str | None] = lambda _: None,
) -> Location | None:
    """Return the newest complete checkpoint in these folders that fits, ``None`` if there is none.

    Newest is what was saved last, by the number of the save, see ``Age``. Links such as ``last.ckpt`` count as what
    they point to. What was complete when its writer was killed counts too, under its hidden name, until a run puts it
    in its place.

    Args:
        folders: Where checkpoints lie, not those that are checkpoints themselves; they need not exist.
        report: Called with a line about each newer one that is passed over, the newest first.
        describe_misfit: Returns why a complete one does not fit, ``None`` where it does. Not reported where none does.
    """
    misfits: dict[Location, str] = {}

    def is_wanted(entry: Location) -> bool:
        if not is_whole(entry):
            return False
        target = entry.resolve()  # of which links are others' names
        if target not in misfits and (why := describe_misfit(target)) is not None:
            misfits[target] = why
        return target not in misfits

    ages = _measure_ages(folders)

    def sort_key(entry: Location) -> tuple[Any, ...]:
        # A link after its target, so that only a link that leads nowhere is reported.
        return (*ages[entry].key, not entry.is_symlink(), str(entry))

    ordered = sorted(ages, key=sort_key, reverse=True)
    found = next(filter(is_wanted, ordered), None)
    # What is not complete may well have no number, and what another strategy has saved has none.
    limit = -1 if found is None else ages[found].written_ns
    before = ordered if found is None else ordered[: ordered.index(found)]
    unnumbered = (e for e in ordered if not ages[e].save_number and ages[e].written_ns > limit)
    passed_over: dict[Location, int] = {}
    for entry in (*before, *unnumbered):
        if not is_whole(entry):  # maybe a link to itself
            passed_over[entry] = ages[entry].written_ns
        elif (target := entry.resolve()) in misfits or (target.is_file() and not ages[entry].save_number):
            is_wanted(entry)  # which finds out whether it fits
            passed_over[target] = ages[entry].written_ns
    said: set[str] = set()
    for entry in sorted(passed_over, key=lambda e: passed_over[e], reverse=True):
        why = _describe_passed_over(entry, misfits.get(entry))
        if (found is None and entry in misfits) or why in said:
            continue
        if why == _OF_OTHERS:  # of which there may be many: the newest
            said.add(why)
        if found is None:
            report(f"{entry} {why}, and there is no other checkpoint")
        else:
            report(f"{entry} {why}: taking the newest complete checkpoint before it, {found.resolve()}")
    return None if found is None else found.resolve()


def _describe_passed_over(entry: Location, misfit: str | None) -> str:
    if misfit is not None:
        return f"does not fit: {misfit}"
    if is_whole(entry):
        return _OF_OTHERS
    return "leads nowhere" if entry.is_symlink() and not entry.exists() else "is not complete"


def list_run_folders(path: Location) -> list[Location]:
    """Return where checkpoints lie of the run, or the version of it, that has this folder."""
    return [path, path / "checkpoints", *path.glob("version_*/checkpoints")]


def find_other_checkpoint(folders: Iterable[Location]) -> Location | None:
    """Return the newest folder that another strategy of Lightning has saved, if nothing was saved after it.

    ``ModelParallelStrategy``, ``FSDPStrategy`` and DeepSpeed do not mark what is complete, so
    :func:`find_last_checkpoint` passes over their folders. What else they write are single files.

    Args:
        folders: As there.
    """
    entries = [entry for folder in folders for entry in _list_entries(folder)]
    others = [e for e in entries if ((e / _OF_RANK_0).is_file() or (e / _OF_DEEPSPEED).is_dir()) and not _is_own(e)]
    newest = max(others, key=_measure_written_ns, default=None)
    saved_ns = [_measure_written_ns(enter(entry)) for entry in entries if is_whole(entry)]
    if newest is None or max(saved_ns, default=-1) > _measure_written_ns(newest):
        return None
    return newest.resolve()


def find_last_number(folders: Iterable[Location]) -> int:
    """Return the highest number of a save in these folders, 0 if there is none."""
    return max((age.save_number for age in _measure_ages(folders).values()), default=0)


def describe_interruption(folders: Iterable[Location]) -> str:
    """Return what a run that its user has ended leaves, and how to go on."""
    folders = list(folders)
    found, other = find_last_checkpoint(folders, report=lambda _: None), find_other_checkpoint(folders)
    if other is not None:
        return f"interrupted: --ckpt_path {other} goes on from what was saved last, if that is complete"
    if found is None:
        return "interrupted before there was a checkpoint"
    is_below = isinstance(found, Path) and found.is_relative_to(Path.cwd())
    path = found.relative_to(Path.cwd()) if isinstance(found, Path) and is_below else found
    return f"interrupted: --ckpt_path last goes on from {path}"


def enter(path: Location) -> Location:
    """Return what holds the files of a checkpoint: its newest complete save, or ``path`` itself.

    Folders of saves are also entered where they were copied to this machine. Where an object store has a single file
    of the same name too, the higher number counts.
    """
    if (isinstance(path, Path) and path.is_file()) or (path / MANIFEST).is_file():
        return path
    newest = next(filter(is_complete, list_saves(path)), None)
    if newest is None:
        return path
    single = _read_single_file(path)
    return path if single is not None and single[0] > get_save_number(newest) else newest


def measure_age(entry: Location) -> Age:
    """Return how old a checkpoint is, whole or not."""
    folder = enter(entry)
    position = read_position(folder) if folder.is_dir() else _read_single_file(folder)
    name = entry.name if isinstance(entry, RemotePath) else os.path.basename(os.path.realpath(entry))  # noqa: PTH119  of a link to itself
    if position is None and (saves := list_saves(entry)):
        position = get_save_number(saves[0]), None  # it is not complete
    in_name = re.search(r"step=(\d+)", name)
    number, step = position or (0, None)
    if step is None:
        step = int(in_name[1]) if in_name else -1
    return Age(save_number=number, step=step, written_ns=_measure_written_ns(folder))


def is_whole(entry: Location) -> bool:
    """Whether a folder has all its files, or a single file its end."""
    # A single file is what torch.save writes, with the table of its contents last.
    found = enter(entry)
    return is_complete(found) if found.is_dir() else found.is_file() and has_end(found)


def has_end(path: Location) -> bool:
    """Whether a file ends as ``torch.save`` ends it, with the table of its contents."""
    if not isinstance(path, RemotePath):
        return zipfile.is_zipfile(path)
    with path.open("rb") as file:
        return zipfile.is_zipfile(file)


def _is_own(folder: Location) -> bool:
    """Whether ``FSDP2Strategy`` has saved a folder, complete or not: it keeps random states beside the weights."""
    return (folder / MANIFEST).is_file() or any(folder.glob("random_*.pt"))


def _measure_written_ns(entry: Location) -> int:
    marker = entry / MANIFEST
    if isinstance(entry, RemotePath) or isinstance(marker, RemotePath):
        dated = marker if marker.is_file() else entry
        return dated.get_written_ns() if isinstance(dated, RemotePath) else 0
    dated = marker if marker.is_file() else entry
    return (dated.stat() if dated.exists() else entry.lstat()).st_mtime_ns


def list_folders(folder: Location, depth: int = _MAX_DEPTH) -> list[Location]:
    """Return a folder and those below it that hold checkpoints, too, such as ``step=6-val``.

    A metric ``val/loss`` in the name of a file makes them.
    """
    if not depth:
        return [folder]
    pattern = "*=*" if depth == _MAX_DEPTH else "*"
    below = (e for e in folder.glob(pattern) if not e.name.startswith(".") and e.suffix != ".ckpt" and e.is_dir())
    return [folder, *(found for other in below for found in list_folders(other, depth - 1))]


def _list_entries(folder: Location) -> list[Location]:
    """Return what may be a checkpoint; of hidden names only what is whole, whoever may be about to put it in place."""
    found: list[Location] = []
    for place in list_folders(folder):
        hidden = (e for e in place.glob(".*.ckpt.*") if is_hidden(e))
        found += [*(e for e in place.glob("*.ckpt") if not e.name.startswith(".")), *filter(is_whole, hidden)]
    return found


def _measure_ages(folders: Iterable[Location]) -> dict[Location, Age]:
    """Return how old all checkpoints in folders are; looks again where one gets another name meanwhile, or goes."""
    folders = list(folders)
    for _ in range(_NUM_LOOKS - 1):
        with suppress(FileNotFoundError):
            return {entry: measure_age(entry) for folder in folders for entry in _list_entries(folder)}
    return {entry: measure_age(entry) for folder in folders for entry in _list_entries(folder)}


def _read_single_file(path: Location) -> tuple[int, int | None] | None:
    if not path.is_file() or not has_end(path):
        return None
    try:
        if isinstance(path, RemotePath):
            with skip_data():  # reads no tensor
                checkpoint = load_plain(path, path)
        else:
            checkpoint = load_plain(path, path, is_mapped=True)  # maps the tensors only
    except (ValueError, OSError):
        return None
    found = checkpoint if isinstance(checkpoint, dict) else {}
    number, step = found.get(SAVE_NUMBER), found.get("global_step")
    return (number if isinstance(number, int) else 0), (step if isinstance(step, int) else None)
