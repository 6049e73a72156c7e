"""The largest of several differences, of which one that is no number is the largest: ``max`` passes over it."""

import math
from collections.abc import Iterable


def find_largest(differences: Iterable[float]) -> float:
    """Return the largest difference, infinity if one is NaN: whatever a test compares that with, it fails."""
    found = list(differences)
    return math.inf if any(map(math.isnan, found)) else max(found)
