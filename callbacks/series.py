"""Numbers over the steps of a run, however long it is."""

from __future__ import annotations

from lit_fsdp.callbacks.sections import Curve

MAX_POINTS = 2000


class Series:
    """Keeps at most so many points: when it is full every second one goes, and from then on fewer are taken.

    Args:
        label: What it is.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.x: list[float] = []
        self.y: list[float] = []
        self._stride, self._num_seen = 1, 0

    def append(self, x: float, y: float) -> None:
        """Add a point."""
        if self._num_seen % self._stride == 0:
            self.x.append(x)
            self.y.append(y)
        self._num_seen += 1
        if len(self.x) > MAX_POINTS:
            self.x, self.y, self._stride = self.x[::2], self.y[::2], 2 * self._stride

    def draw(self) -> Curve:
        """Return it as a curve."""
        return Curve(label=self.label, x=list(self.x), y=list(self.y))
