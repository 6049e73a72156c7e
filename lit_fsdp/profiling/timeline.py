"""Cuts the time of a device into named stretches, step by step, without waiting for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lit_fsdp.profiling.clock import Clock, Mark


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step took.

    Args:
        parts: Seconds by the name of the part.
        tag: What ``Timeline.close`` was given.
    """

    parts: Mapping[str, float]
    tag: Any

    @property
    def total_s(self) -> float:
        """All parts together."""
        return sum(self.parts.values())


@dataclass
class _Stretch:
    name: str
    begin: Mark
    end: Mark | None = None
    is_dropped: bool = False


@dataclass
class _Open:
    stretches: list[_Stretch] = field(default_factory=list)
    tag: Any = None


class Timeline:
    """Stretches of time without gaps, each with a name, collected into steps.

    Args:
        clock: Sets the marks.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open = _Open()
        self._closed: deque[_Open] = deque()

    @property
    def name(self) -> str | None:
        """Of the present stretch."""
        return self._open.stretches[-1].name if self._open.stretches else None

    def cut(self, name: str) -> None:
        """End the present stretch, and begin one of this name."""
        mark = self._clock.mark()
        if self._open.stretches:
            self._open.stretches[-1].end = mark
        self._open.stretches.append(_Stretch(name, mark))

    def rename(self, name: str) -> None:
        """Give the present stretch another name."""
        if self._open.stretches:
            self._open.stretches[-1].name = name

    def drop(self) -> None:
        """Let the present stretch count nowhere."""
        if self._open.stretches:
            self._open.stretches[-1].is_dropped = True

    def close(self, tag: Any = None) -> None:
        """End a step here, with the present stretch; the next one begins with a stretch of the same name.

        Args:
            tag: Given back with the step.
        """
        name = self.name
        if name is None:
            return
        self.cut(name)
        last = self._open.stretches.pop()
        self._open.tag = tag
        self._closed.append(self._open)
        self._open = _Open(stretches=[last])

    def take(self, *, wait: bool = False) -> list[Step]:
        """Return the steps that ended since the last call and that the device has come to the end of.

        Args:
            wait: Also those that it has not, which waits for it.
        """
        steps = []
        while self._closed:
            end = self._closed[0].stretches[-1].end
            assert end is not None
            if not wait and not self._clock.is_past(end):
                break
            steps.append(self._measure(self._closed.popleft()))
        return steps

    def _measure(self, step: _Open) -> Step:
        parts: dict[str, float] = {}
        for stretch in step.stretches:
            assert stretch.end is not None
            if not stretch.is_dropped:
                parts[stretch.name] = parts.get(stretch.name, 0.0) + self._clock.measure_s(stretch.begin, stretch.end)
        return Step(parts=parts, tag=step.tag)
