"""Adapters of the LoRA family, by peft: settings, injection into a model, first values."""

from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.adapters.lora import LoRA

__all__ = ["LoRA", "add_adapters"]
