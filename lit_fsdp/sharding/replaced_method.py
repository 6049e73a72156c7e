"""A method of torch, Lightning or Transformers that another one stands in for, until it is given back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


class ReplacedMethod:
    """A method of one object in place of which another runs, which is given the one it had.

    Args:
        owner: The object; others of its class keep theirs.
        name: Of the method.
        run: Called with the method that was there, and then the arguments.
    """

    def __init__(self, owner: Any, name: str, run: Callable[..., Any]) -> None:
        self._owner, self._name = owner, name
        self._before = owner.__dict__.get(name)  # what the object itself had, not its class
        self._mine = partial(run, getattr(owner, name))
        setattr(owner, name, self._mine)

    def remove(self) -> None:
        """Give the method back, unless somebody else has replaced it since."""
        if self._owner.__dict__.get(self._name) is self._mine:
            delattr(self._owner, self._name)
            if self._before is not None:
                setattr(self._owner, self._name, self._before)
