"""Signals that ask a run to end: noted by the handler, acted upon later, at a moment when all ranks can."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Those that a listener of this process takes; copied into every process that is forked from it.
_LISTENED: set[signal.Signals] = set()


class SignalListener:
    """Replaces the handlers of some signals by one that only hands the signal on.

    Processes that are forked meanwhile (data workers) are shielded from these signals: schedulers send them to all
    processes of a job, and a rank whose data worker is gone could not save any more.

    Args:
        note: Called with the signal, inside its handler: it must do next to nothing.
    """

    def __init__(self, note: Callable[[signal.Signals], None]) -> None:
        self._note = note
        self._before: dict[signal.Signals, Any] = {}

    def start(self, signals: Collection[signal.Signals]) -> bool:
        """Listen to these; again to all of them if called again. Returns whether that is possible in this thread.

        Lets through what was held back since this process was started, see ``hold_signals``.
        """
        if threading.current_thread() is not threading.main_thread():
            return False
        for number in signals:
            self._before.setdefault(number, signal.getsignal(number))
            signal.signal(number, self._handle)
        _LISTENED.update(signals)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        return True

    def stop(self, *, ignore: bool = False) -> None:
        """Give the signals back to their earlier handlers, or ignore them until the process ends, but for Ctrl-C."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            # None: it was not set from Python, so it cannot be set back.
            is_ignored = ignore and number != signal.SIGINT
            signal.signal(number, signal.SIG_IGN if is_ignored else handler or signal.SIG_DFL)
        _LISTENED.difference_update(before)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self._note(signal.Signals(number))


@contextmanager
def hold_signals(signals: Collection[signal.Signals]) -> Iterator[None]:
    """Hold signals back, also from processes started inside this context, until these listen themselves.

    So a signal that comes while a process still imports its modules is noted there instead of ending it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def put_off_interrupt() -> Iterator[None]:
    """Raise the ``KeyboardInterrupt`` of a Ctrl-C inside this context when it ends, whichever thread gets it."""
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def _shield() -> None:
    if _LISTENED:
        signals = frozenset(_LISTENED)
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        threading.Thread(target=_end_for_parent, args=(signals, os.getppid()), daemon=True).start()


def _end_for_parent(signals: frozenset[signal.Signals], parent: int) -> None:
    """Take what is held back, and end only when the parent wants it: that is how loaders end a stuck worker."""
    while True:
        info = signal.sigwaitinfo(signals)
        if info.si_signo == signal.SIGTERM and info.si_pid == parent:
            os._exit(0)


os.register_at_fork(after_in_child=_shield)
