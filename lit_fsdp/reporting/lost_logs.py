"""A log is never worth a run: what a disk or server does not take is said once, and training goes on."""

from __future__ import annotations

import errno
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO
from weakref import WeakKeyDictionary

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from lit_fsdp.files import find_disk_full

# All that a Trainer calls of a logger, and that may write.
_WRITING = ("log_metrics", "log_hyperparams", "log_graph", "save", "finalize", "after_save_checkpoint")
_LOST: WeakKeyDictionary[Trainer, dict[str, str]] = WeakKeyDictionary()


@contextmanager
def outlive_lost_log(trainer: Trainer, what: str, folder: str | Path) -> Iterator[None]:
    """Let a run go on where the body cannot write; warn the first time, and note it for the summary.

    Args:
        trainer: Of the run.
        what: Who writes.
        folder: Where to.
    """
    try:
        yield
    except Exception as raised:
        error = _find_cause(raised)
        if error is None:
            raise
        lost = _LOST.setdefault(trainer, {})
        reason = error.strerror or str(error) or type(error).__name__
        if not lost:
            warnings.warn(
                f"{what} cannot write to {folder}: {reason}: training goes on, but what is logged from here "
                "on may be lost; the summary names all that could not write",
                stacklevel=3,
            )
        lost.setdefault(what, reason)


@contextmanager
def outlive_lost_output() -> Iterator[None]:
    """Let a run go on where the file that it prints to takes no more, as on the disk that its checkpoints fill.

    A pipe that nobody reads ends it as before.
    """
    whole: TextIO | None = sys.stdout  # none where it was closed before Python began
    if whole is None:
        yield
        return
    lenient: Any = _LenientOutput(whole)
    sys.stdout = lenient
    try:
        yield
    finally:
        if sys.stdout is lenient and not lenient.is_lost:  # else Python, which flushes it last, would end with 120
            sys.stdout = whole


class _LenientOutput:
    """A stream that says once that its disk is full; all else is that of the stream inside."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.is_lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._outlive_full_disk():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._outlive_full_disk():
            self._stream.flush()

    @contextmanager
    def _outlive_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if find_disk_full(error) is None:
                raise
            if not self.is_lost:
                self.is_lost = True
                warnings.warn(
                    f"stdout cannot be written to: {error.strerror}: training goes on, but what is printed from here "
                    "on may be lost",
                    stacklevel=5,
                )


def list_lost_logs(trainer: Trainer) -> list[str]:
    """Return who could not write during this run, and why, on this rank."""
    return [f"{what}: {why}" for what, why in _LOST.get(trainer, {}).items()]


def check_log_folders(trainer: Trainer) -> None:
    """Refuse to start a run whose logs have no place.

    Raises:
        ValueError: A folder of a logger may not be written to.
    """
    for logger in trainer.loggers if trainer.is_global_zero else ():
        folder = logger.save_dir
        if not isinstance(logger, CSVLogger | TensorBoardLogger):  # others may know another place
            continue
        if folder is None or "://" in str(folder):
            continue
        place = Path(folder).absolute()
        while not place.exists() and not place.is_symlink():
            place = place.parent
        why = None
        if not place.is_dir():
            why = f"{place} is no folder"
        elif not os.access(place, os.W_OK | os.X_OK):
            why = "it is not writable"
        if why is not None:
            raise ValueError(
                f"logger: {type(logger).__name__} cannot write to {folder}: {why}: choose another default_root_dir, or "
                "set logger to false"
            )


def guard_loggers(trainer: Trainer) -> None:
    """Let no logger of a Trainer end its run. They go on trying, as room may be made meanwhile."""
    if getattr(threading.excepthook, "func", None) is not _report_thread:
        threading.excepthook = partial(_report_thread, threading.excepthook)
    for logger in trainer.loggers:
        for name in _WRITING:
            # On the object, not its class: others of that class may belong to another Trainer.
            method = getattr(logger, name)
            if isinstance(method, partial) and method.func is _call:  # of an earlier Trainer
                method = method.args[-1]
            setattr(logger, name, partial(_call, trainer, logger, name, method))


def _find_cause(error: BaseException | None) -> OSError | None:
    """Return what a file or connection said: Lightning's TensorBoardLogger calls it a bad value, seen in 2.6.6."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error


def _report_thread(report: Callable[[Any], Any], args: Any) -> None:
    """Leave out what a thread of TensorBoard died of: who logs next is told the same."""
    if not (isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard.")):
        report(args)


def _call(trainer: Trainer, logger: Logger, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    folder = Path(logger.log_dir or "") if isinstance(logger, CSVLogger | TensorBoardLogger) else None
    with outlive_lost_log(trainer, type(logger).__name__, folder or logger.save_dir or "its server"):
        method(*args, **kwargs)
        # A file that is open goes on taking what nobody will ever see.
        is_written = name == "log_metrics" and trainer.is_global_zero
        if folder is not None and is_written and "://" not in str(logger.save_dir) and not folder.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the folder was removed")
