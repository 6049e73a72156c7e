"""The time of a device: marks in it, and named stretches between them, step by step. The host never waits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Mark: TypeAlias = float | torch.cuda.Event


class Clock:
    """Sets marks in the work of a device, and measures between them.

    A GPU gets its work long before it does it. So a mark there is an event in the current stream: it costs
    microseconds, and says when the work given before it was done. A CPU does its work when it is given; there a mark is
    the time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> Mark:
        """Set a mark at the end of what the current stream was given so far."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def is_past(self, mark: Mark) -> bool:
        """Return whether the device has come to a mark, without waiting for it."""
        return mark.query() if isinstance(mark, torch.cuda.Event) else True

    def wait(self, mark: Mark) -> None:
        """Wait until the device has come to a mark."""
        if isinstance(mark, torch.cuda.Event):
            mark.synchronize()

    def measure_s(self, begin: Mark, end: Mark) -> float:
        """Return the seconds from one mark to another, which may lie in two streams; waits for the later one."""
        if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            begin.synchronize()
            end.synchronize()
            return begin.elapsed_time(end) / 1000
        assert isinstance(begin, float) and isinstance(end, float)  # noqa: PT018
        return end - begin


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step took."""

    parts: Mapping[str, float]  # seconds by the name of the part
    tag: Any  # what ``Timeline.close`` was given

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


class Timeline:
    """Stretches of time without gaps, each with a name, collected into steps."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: list[_Stretch] = []
        self._closed: deque[tuple[list[_Stretch], Any]] = deque()  # with their tags

    @property
    def name(self) -> str | None:
        """Of the present stretch."""
        return self._open[-1].name if self._open else None

    def cut(self, name: str) -> None:
        """End the present stretch, and begin one of this name."""
        mark = self._clock.mark()
        if self._open:
            self._open[-1].end = mark
        self._open.append(_Stretch(name, mark))

    def rename(self, name: str) -> None:
        """Give the present stretch another name."""
        if self._open:
            self._open[-1].name = name

    def drop(self) -> None:
        """Let the present stretch count nowhere."""
        if self._open:
            self._open[-1].is_dropped = True

    def close(self, tag: Any = None) -> None:
        """End a step, and its present stretch, here. The next step begins with a stretch of the same name."""
        if self.name is None:
            return
        self.cut(self.name)
        last = self._open.pop()
        self._closed.append((self._open, tag))
        self._open = [last]

    def take(self, *, wait: bool = False) -> list[Step]:
        """Return the steps that ended since the last call. Without ``wait``, only those the device has finished."""
        steps = []
        while self._closed:
            stretches, tag = self._closed[0]
            end = stretches[-1].end
            assert end is not None
            if not wait and not self._clock.is_past(end):
                break
            self._closed.popleft()
            steps.append(self._measure(stretches, tag))
        return steps

    def _measure(self, stretches: list[_Stretch], tag: Any) -> Step:
        parts: dict[str, float] = {}
        for stretch in stretches:
            assert stretch.end is not None
            if not stretch.is_dropped:
                parts[stretch.name] = parts.get(stretch.name, 0.0) + self._clock.measure_s(stretch.begin, stretch.end)
        return Step(parts=parts, tag=tag)
