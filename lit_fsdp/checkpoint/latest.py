"""Which checkpoint a run goes on from: the newest that is complete."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_fsdp.checkpoint.manifest import MANIFEST, is_complete, read_position
from lit_fsdp.checkpoint.places import get_place, is_being_written
from lit_fsdp.checkpoint.untrusted import load_plain

SAVE_NUMBER = "save_number"  # in a single file


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


def find_last_checkpoint(folders: Iterable[Path], report: Callable[[str], None] = print) -> Path | None:
    """Return the newest complete checkpoint in these folders, ``None`` if there is none.

    Newest is what was saved last, by the number of the save, see ``Age``. Links such as ``last.ckpt`` count as what
    they point to. What was complete when its writer was killed counts too, under its hidden name, until a run puts it
    in its place.

    Args:
        folders: Where checkpoints lie, not those that are checkpoints themselves; they need not exist.
        report: Called with a line about each newer one that is passed over, the newest first.
    """
    ages = {entry: measure_age(entry) for folder in folders for entry in _list_entries(folder)}

    def sort_key(entry: Path) -> tuple[Any, ...]:
        # A link after its target, so that only a link that leads nowhere is reported.
        return (*ages[entry].key, not entry.is_symlink(), str(entry))

    ordered = sorted(ages, key=sort_key, reverse=True)
    found = next(filter(is_whole, ordered), None)
    # What is not complete may well have no number.
    limit = -1 if found is None else ages[found].written_ns
    before = ordered if found is None else ordered[: ordered.index(found)]
    unnumbered = (e for e in ordered if not ages[e].save_number and ages[e].written_ns > limit)
    passed_over = {e: None for e in (*before, *unnumbered) if not is_whole(e)}
    for entry in sorted(passed_over, key=lambda e: ages[e].written_ns, reverse=True):
        why = "leads nowhere" if entry.is_symlink() and not entry.exists() else "is not complete"
        if found is None:
            report(f"{entry} {why}, and there is no other checkpoint")
        else:
            report(f"{entry} {why}: taking the newest complete checkpoint before it, {found.resolve()}")
    return None if found is None else found.resolve()


def find_last_number(folders: Iterable[Path]) -> int:
    """Return the highest number of a save in these folders, 0 if there is none."""
    ages = (measure_age(entry) for folder in folders for entry in _list_entries(folder))
    return max((age.save_number for age in ages), default=0)


def describe_interruption(folders: Iterable[Path]) -> str:
    """Return what a run that its user has ended leaves, and how to go on."""
    found = find_last_checkpoint(folders, report=lambda _: None)
    if found is None:
        return "interrupted before there was a checkpoint"
    path = found.relative_to(Path.cwd()) if found.is_relative_to(Path.cwd()) else found
    return f"interrupted: --ckpt_path last goes on from {path}"


def measure_age(entry: Path) -> Age:
    """Return how old a checkpoint is, whole or not."""
    position = read_position(entry) if entry.is_dir() else _read_single_file(entry)
    in_name = re.search(r"step=(\d+)", os.path.basename(os.path.realpath(entry)))  # noqa: PTH119  of a link to itself
    marker = entry / MANIFEST
    dated = marker if marker.is_file() else entry
    stat = dated.stat() if dated.exists() else entry.lstat()
    number, step = position or (0, None)
    if step is None:
        step = int(in_name[1]) if in_name else -1
    return Age(save_number=number, step=step, written_ns=stat.st_mtime_ns)


def is_whole(entry: Path) -> bool:
    """Whether a folder has all its files, or a single file its end."""
    # A single file is what torch.save writes, with the table of its contents last.
    return is_complete(entry) if entry.is_dir() else entry.is_file() and zipfile.is_zipfile(entry)


def _list_entries(folder: Path) -> list[Path]:
    """Return what may be a checkpoint; of hidden names only what is whole and has no living writer."""
    hidden = (e for e in folder.glob(".*.ckpt.*") if get_place(e) is not None)
    shown = (e for e in folder.glob("*.ckpt") if not e.name.startswith("."))
    return [*shown, *(e for e in hidden if is_whole(e) and not is_being_written(e))]


def _read_single_file(path: Path) -> tuple[int, int | None] | None:
    if not path.is_file() or not zipfile.is_zipfile(path):
        return None
    try:
        checkpoint = load_plain(path, path, is_mapped=True)  # maps the tensors only
    except ValueError:
        return None
    found = checkpoint if isinstance(checkpoint, dict) else {}
    number, step = found.get(SAVE_NUMBER), found.get("global_step")
    return (number if isinstance(number, int) else 0), (step if isinstance(step, int) else None)
