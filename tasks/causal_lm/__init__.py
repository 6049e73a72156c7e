"""Causal language models: pretraining and fine-tuning on plain text, prompts with completions, and chats."""

from lit_fsdp.tasks.causal_lm.data import TextData
from lit_fsdp.tasks.causal_lm.task import CausalLM
from lit_fsdp.tasks.causal_lm.tokenizer import TrainTokenizer

__all__ = ["CausalLM", "TextData", "TrainTokenizer"]
