"""Rows of test_bad_inputs.py that do not hold yet, and what happens today. Mended rows must leave."""

EARLY = "lines of Lightning come before the message"
LATE = "lines of Lightning come before the message, and the folder of a run is left"

OPEN: dict[str, str] = {}
