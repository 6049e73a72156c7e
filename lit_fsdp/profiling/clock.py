"""Marks in the time of a device, set without making the host wait for it."""

from __future__ import annotations

import time
from typing import TypeAlias

import torch

Mark: TypeAlias = float | torch.cuda.Event


class Clock:
    """Sets marks in the work of a device, and measures between them.

    A GPU gets its work long before it does it, so a mark there is an event in the current stream: it costs
    microseconds to set, and says when the work that was given before it had been done. On the CPU, work is done when
    it is given, and a mark is the time.

    Args:
        device: Whose time.
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
