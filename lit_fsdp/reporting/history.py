"""What a run logged, kept in bounded memory."""

from __future__ import annotations

import math

Point = tuple[int, float]  # step, value


class Series:
    """The values of one metric over the steps, thinned as they become many.

    Once there are more than ``max_points``, every stretch of steps keeps its lowest and its highest value only, so
    that a peak of a single step is never lost. A value that is not finite counts as higher than any other.

    Args:
        max_points: How many are kept at most; a multiple of 4.
    """

    def __init__(self, max_points: int = 2000) -> None:
        assert max_points >= 4
        assert max_points % 4 == 0
        self.max_points = max_points
        self.num_values = 0
        self.num_not_finite = 0
        self.first_not_finite: int | None = None  # step
        self.last: Point | None = None
        self.low: Point | None = None  # of the finite ones
        self.high: Point | None = None
        self._kept: list[Point] = []
        self._stretch: list[Point] = []  # the lowest and the highest of the values that are not kept yet
        self._num_in_stretch = 0
        self._stretch_length = 2  # values that become two points

    def add(self, step: int, value: float) -> None:
        """Add the value of a step, the steps in their order."""
        point = (step, value)
        self.num_values += 1
        self.last = point
        if math.isfinite(value):
            self.low = point if self.low is None else min(self.low, point, key=_rank)
            self.high = point if self.high is None else max(self.high, point, key=_rank)
        else:
            self.num_not_finite += 1
            self.first_not_finite = step if self.first_not_finite is None else self.first_not_finite
        self._stretch = _find_extremes([*self._stretch, point])
        self._num_in_stretch += 1
        if self._num_in_stretch < self._stretch_length:
            return
        if len(self._kept) == self.max_points:
            quads = (self._kept[i : i + 4] for i in range(0, self.max_points, 4))
            self._kept = [point for quad in quads for point in _find_extremes(quad)]
            self._stretch_length *= 2
            return  # the stretch is only half as long now as they are from here on
        self._kept += self._stretch
        self._stretch, self._num_in_stretch = [], 0

    def list_points(self) -> list[Point]:
        """Return the points that are left, the last value always among them."""
        points = [*self._kept, *self._stretch]
        if self.last is not None and (not points or points[-1] != self.last):
            points.append(self.last)
        return points

    @property
    def is_thinned(self) -> bool:
        """Whether points have been left out."""
        return self._stretch_length > 2


def _rank(point: Point) -> float:
    return point[1] if math.isfinite(point[1]) else math.inf


def _find_extremes(points: list[Point]) -> list[Point]:
    """Return the points of the lowest and the highest value, in their order."""
    if len(points) < 2:
        return points
    low, high = min(points, key=_rank), max(points, key=_rank)
    if low == high:
        return [points[0], points[-1]]
    return sorted([low, high], key=lambda point: point[0])
