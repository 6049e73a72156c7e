"""Which checkpoint ``--ckpt_path`` means: a path, an address, the folder of a run, or ``last``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lit_fsdp.checkpoint.latest import find_last_checkpoint, find_other_checkpoint, is_whole, list_run_folders
from lit_fsdp.checkpoint.manifest import MANIFEST
from lit_fsdp.checkpoint.reader import check_checkpoint, read_plain
from lit_fsdp.checkpoint.remote import Location, is_remote, locate
from lit_fsdp.errors import ConfigError, nearest
from lit_fsdp.files import describe_special_file
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy
from lit_fsdp.strategy.lightning_internals import has_requeue_checkpoint
from lit_fsdp.tasks.base import Task

CKPT_PATH_HELP = (
    "Checkpoint to take the weights of, and with fit also the step and all state: its path or address, the folder of a "
    "run, or `last`, the newest of the runs of this name."
)


def choose_checkpoint(
    given: str | None,
    *,
    command: str,
    trainer: Trainer,
    model: LightningModule,
    run_root: Path,
    list_folders: Callable[[], list[Location]],
) -> str | None:
    """Return the checkpoint that a command begins with, as its strategy can read it.

    Args:
        given: What ``--ckpt_path`` has.
        command: Such as ``fit``, which goes on from the last one where the same job was requeued.
        trainer: Whose strategy is to read it.
        model: What it has to fit.
        run_root: The folder of the runs of this name.
        list_folders: Returns where these runs leave their checkpoints.

    Raises:
        ConfigError: If there is none where one is expected, or it cannot be read.
    """
    if command == "fit" and int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0:  # the same job, requeued
        if given not in (None, "last", "hpc"):
            rank_zero_warn(
                f"ckpt_path: {given}: this job was requeued, and begins there again: without a path, or with last, "
                "it would go on from what it has saved since"
            )
        given = given or "last"
    if given == "best":
        raise ConfigError(
            "ckpt_path: got 'best': only the process that trained knows its best checkpoint: expected its path, "
            f"below {run_root}, or last"
        )
    if given == "hpc":
        if has_requeue_checkpoint(trainer):
            return given
        raise ConfigError(
            f"ckpt_path: got 'hpc': no hpc_ckpt_<n>.ckpt lies in {trainer.default_root_dir}: expected a path, or last"
        )
    if given == "last":
        given = _find_last(command, model, run_root, list_folders())
    elif given:
        given = _check_place(given)
    if given:
        _check_readable(given, trainer)
    return given


def locate_checkpoint(given: str) -> Location:
    """Return the place of a checkpoint; refuse an address that no library here reads."""
    try:
        return locate(given)
    except ValueError as error:
        raise ConfigError(f"ckpt_path: {error}") from None


def _find_last(command: str, model: LightningModule, run_root: Path, folders: list[Location]) -> str | None:
    """Return the newest complete checkpoint of the runs of a name; Lightning would look into that of the new run."""
    for folder in (*run_root.glob("version_*"), *folders):  # a search would pass over it
        if isinstance(folder, Path) and folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):
            raise ConfigError(
                f"ckpt_path: got 'last': {folder} cannot be read, and may hold the newest checkpoint: make it "
                "readable, or give the path of a checkpoint"
            )
    if (other := find_other_checkpoint(folders)) is not None:  # to start afresh would lose what it has
        raise ConfigError(
            f"ckpt_path: got 'last': the newest checkpoint, {other}, was not saved by FSDP2Strategy, and says not "
            "whether it is complete: expected a path, such as its own"
        )
    misfits: dict[str, Location] = {}  # the newest for each reason

    def describe_misfit(place: Location) -> str | None:
        meta = _read_plain(place)
        why = model.describe_misfit(meta) if isinstance(model, Task) else None
        if command == "fit" and meta and "lr_schedulers" not in meta:
            why = "it was saved with save_weights_only, and has no optimizer to go on with"
        if why is not None:
            misfits.setdefault(why, place)
        return why

    found = find_last_checkpoint(folders, rank_zero_info, describe_misfit)
    if found is not None:
        return str(found)
    if misfits:  # to start afresh beside them is for the user to choose
        listed = "; ".join(f"{place} does not fit: {why}" for why, place in misfits.items())
        ways = "set it as there, or take another --run_name"
        if command == "fit":
            ways = "set it as there, take another --run_name, or leave --ckpt_path out to start afresh"
        raise ConfigError(f"ckpt_path: got 'last': {listed}: {ways}")
    if command != "fit":
        raise ConfigError(
            f"ckpt_path: got 'last': no run below {run_root} has a checkpoint: expected the path of "
            "one, or the --run_name of the run that wrote one"
        )
    rank_zero_info(f"ckpt_path last: no run below {run_root} has a checkpoint: starting afresh")
    return None


def _read_plain(place: Location) -> dict[str, Any]:
    """Return what a complete checkpoint holds beside tensors; nothing of one that cannot be read, as is said later."""
    try:
        return read_plain(place)
    except ValueError:
        return {}


def _check_place(given: str) -> str:
    """Return the name of a checkpoint as all know it, of a run that of its newest; refuse one that is not there."""
    place = locate_checkpoint(given)
    if isinstance(place, Path) and (problem := describe_special_file(place)) is not None:
        raise ConfigError(f"ckpt_path: {given!r} {problem}")
    if not place.exists():
        folder = place.parent
        guess = nearest(place.name, [p.name for p in folder.glob("*")]) if folder.is_dir() else None
        hint = f"did you mean {folder / guess}?" if guess else "expected a checkpoint, or last"
        raise ConfigError(f"ckpt_path: {given!r} does not exist: {hint}")
    if place.is_dir() and not is_whole(place):
        found = find_last_checkpoint(list_run_folders(place), rank_zero_info)
        if found is not None:
            rank_zero_info(f"ckpt_path: taking the newest of {given}, {found}")
            return str(found)
    return str(place) if is_remote(given) else given


def _check_readable(path: str, trainer: Trainer) -> None:
    """Refuse what the strategy could not read, before other ranks are started."""
    place = locate_checkpoint(path)
    if isinstance(trainer.strategy, FSDP2Strategy):
        try:
            check_checkpoint(place)
        except ValueError as error:
            raise ConfigError(f"ckpt_path: {error}") from error
    elif (place / MANIFEST).is_file():
        name = type(trainer.strategy).__name__
        raise ConfigError(
            f"ckpt_path: got {path}: it holds shards, which {name} does not read: set trainer.strategy to fsdp2, on "
            "any number of devices"
        )
