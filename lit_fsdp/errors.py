"""What a user got wrong: the error for it, and the name that was probably meant."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence


class ConfigError(SystemExit):
    """A command line or configuration that cannot be run; ``line`` says why.

    A ``SystemExit`` because jsonargparse turns most exceptions raised while parsing into text of its own.
    """

    def __init__(self, line: str) -> None:
        super().__init__(2)
        self.line = line


def is_debugging() -> bool:
    """Whether every error shall keep its traceback, on ``LIT_FSDP_DEBUG=1``."""
    return os.environ.get("LIT_FSDP_DEBUG") == "1"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that ``name`` was probably meant to be."""
    lowered = {k.lower(): k for k in known}
    close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return lowered[close[0]] if close else None


def suggest(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return ``did you mean x?`` where a known name is near, else what was expected."""
    guess = nearest(name, known)
    return f"did you mean {guess}?" if guess else otherwise


def get_first_line(error: BaseException) -> str:
    """Return what a library says of its error, without lines of advice behind it; its type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def join_names(names: Sequence[str]) -> str:
    """Return names for an error: the first five, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def describe_unknown_metric(name: str, known: Iterable[str]) -> str:
    """Return what is wrong with a metric that nothing logs."""
    names = sorted(set(known))
    guess = nearest(name, names)
    hint = f"did you mean {guess}? Logged are" if guess else "expected one of"
    return f"got {name!r}: nothing logs it: {hint} {', '.join(names)}"
