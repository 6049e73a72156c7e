"""A method of torch, Lightning or Transformers that another one stands in for, until it is given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ReplacedMethod:
    """A method of one object in place of which another runs, which is given the one it had.

    Several may stand in for one method, and be removed in any order.

    Args:
        owner: The object; others of its class keep theirs.
        name: Of the method.
        run: Called with the method that was there, and then the arguments.
    """

    def __init__(self, owner: Any, name: str, run: Callable[..., Any]) -> None:
        self._owner, self._name, self._run = owner, name, run
        self._before = owner.__dict__.get(name)  # what the object itself had, not its class
        self._original = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run in the place of the method."""
        return self._run(self._original, *args, **kwargs)

    def remove(self) -> None:
        """Give the method back, to its owner or to what stands in for it since; not where others took its place."""
        current = self._owner.__dict__.get(self._name)
        if current is self:
            delattr(self._owner, self._name)
            if self._before is not None:
                setattr(self._owner, self._name, self._before)
        while isinstance(current, ReplacedMethod):
            if current._before is self:
                current._before, current._original = self._before, self._original
            current = current._before
