"""What a user got wrong: the error for it, and the name that was probably meant."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


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


def check_choices(settings: Any, path: str) -> None:
    """Refuse words that the fields of a dataclass do not know, in those of a parser; ``None`` has no fields.

    Raises:
        ValueError: With the words that there are.
    """
    kind: Any = type(settings)
    for name, hint in _list_types(kind).items():
        value, words = getattr(settings, name), list_words(hint)
        if value is None or value in words or isinstance(value, _list_kinds(hint)):
            continue
        *names, last = [*(["int"] if int in get_args(hint) else []), *words]
        guess = nearest(str(value).rpartition(".")[2], words)  # torch.bfloat16 is meant for bfloat16
        expected = f"{'one of ' if len(names) > 1 else ''}{', '.join(names)}{' or ' if names else ''}{last}"
        raise ValueError(
            f"{path}.{name}: got {value!r}: expected {expected}" + (f": did you mean {guess}?" if guess else "")
        )


def list_words(hint: Any) -> list[str]:
    """Return the words that a type allows; none where any text may stand."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    words = [word for part in parts if get_origin(part) is Literal for word in get_args(part) if isinstance(word, str)]
    return [] if str in parts else words


def _list_kinds(hint: Any) -> tuple[type, ...]:
    """Return what may stand beside the words of a type, such as numbers."""
    kinds = [part for part in get_args(hint) if isinstance(part, type)]
    return (*kinds, int) if float in kinds else tuple(kinds)


@cache
def _list_types(kind: Any) -> dict[str, Any]:
    """Return the types of the fields that have words for values."""
    return {name: hint for name, hint in get_type_hints(kind).items() if list_words(hint)}


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
