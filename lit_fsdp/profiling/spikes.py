"""Finds numbers that stand out from those before them."""

from __future__ import annotations

import math
import statistics
from collections import deque

_MAD_TO_SIGMA = 1.4826  # of a normal distribution
_MIN_RELATIVE_SIGMA = 0.01


class SpikeDetector:
    """Judges each number by the ones before it: median plus so many standard deviations is a spike.

    The deviation is estimated by the median absolute deviation, so that one spike does not hide the next, and is taken
    to be at least 1 % of the median: a run that hardly varies shall not stop at noise. All finite numbers are kept,
    spikes too, so a lasting change is taken as normal after half a window.

    Args:
        sigmas: How far above the median a spike begins; ``None`` finds none.
        window: How many numbers are looked back at. Before half of them are there, nothing is a spike.
    """

    def __init__(self, sigmas: float | None, window: int) -> None:
        self.sigmas = sigmas
        self._values: deque[float] = deque(maxlen=window)
        self._num_needed = max(2, window // 2)

    def find_limit(self) -> float:
        """Return above which the next number is a spike."""
        if self.sigmas is None or len(self._values) < self._num_needed:
            return math.inf
        median = statistics.median(self._values)
        deviation = statistics.median(abs(value - median) for value in self._values)
        return median + self.sigmas * max(_MAD_TO_SIGMA * deviation, _MIN_RELATIVE_SIGMA * abs(median))

    def add(self, value: float) -> None:
        """Look back at this number from now on."""
        if math.isfinite(value):
            self._values.append(value)

    def state_dict(self) -> list[float]:
        """Return the numbers that it looks back at."""
        return list(self._values)

    def load_state_dict(self, values: list[float]) -> None:
        """Look back at these instead; of more than fit, at the last."""
        self._values.clear()
        self._values.extend(values)
