"""Masked language models: encoders that learn to fill gaps in text."""

from lit_fsdp.tasks.masked_lm.task import MaskedLM

__all__ = ["MaskedLM"]
