"""Causal language models: pretraining and fine-tuning on plain text, prompts with completions, and chats."""

from lit_fsdp.tasks.causal_lm.task import CausalLM
from lit_fsdp.tasks.text import Columns, RayTextData, TextData, TrainTokenizer

__all__ = ["CausalLM", "Columns", "RayTextData", "TextData", "TrainTokenizer"]
