"""The exact engine: the run's own step on tensors without values."""
