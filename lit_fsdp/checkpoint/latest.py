"""Which checkpoint a run goes on from: the newest that is complete."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

from lit_fsdp.checkpoint.manifest import MANIFEST, is_complete


def find_last_checkpoint(folders: Iterable[Path], report: Callable[[str], None] = print) -> Path | None:
    """Return the newest complete checkpoint in these folders, ``None`` if there is none.

    Newest is what was completed last; of those completed at the same time, the one of the highest step. Links such as
    ``last.ckpt`` count as what they point to.

    Args:
        folders: Where checkpoints lie, not those that are checkpoints themselves; they need not exist.
        report: Called with a line about each newer one that is passed over, the newest first.
    """
    entries = {entry for folder in folders for entry in folder.glob("*.ckpt") if not entry.name.startswith(".")}
    passed_over: list[tuple[Path, str]] = []
    # A link after its target, so that only a link that leads nowhere is reported.
    for entry in sorted(entries, key=_measure_age, reverse=True):
        if _is_whole(entry):
            found = entry.resolve()
            for path, why in passed_over:
                report(f"{path} {why}: taking the newest complete checkpoint before it, {found}")
            return found
        passed_over.append((entry, "leads nowhere" if entry.is_symlink() and not entry.exists() else "is not complete"))
    for path, why in passed_over:
        report(f"{path} {why}, and there is no other checkpoint")
    return None


def describe_interruption(folders: Iterable[Path]) -> str:
    """Return what a run that its user has ended leaves, and how to go on."""
    found = find_last_checkpoint(folders, report=lambda _: None)
    if found is None:
        return "interrupted before there was a checkpoint"
    path = found.relative_to(Path.cwd()) if found.is_relative_to(Path.cwd()) else found
    return f"interrupted: --ckpt_path last goes on from {path}"


def _measure_age(entry: Path) -> tuple[int, int, bool, str]:
    step = re.search(r"step=(\d+)", entry.resolve().name)
    marker = entry / MANIFEST
    dated = marker if marker.is_file() else entry
    stat = dated.stat() if dated.exists() else entry.lstat()
    return stat.st_mtime_ns, int(step[1]) if step else -1, not entry.is_symlink(), str(entry)


def _is_whole(entry: Path) -> bool:
    # A single file is what torch.save writes, with the table of its contents last.
    return is_complete(entry) if entry.is_dir() else entry.is_file() and zipfile.is_zipfile(entry)
