"""Language models that predict the next token: pretraining and fine-tuning."""

from lit_fsdp.tasks.causal_lm.data import TextData
from lit_fsdp.tasks.causal_lm.task import CausalLM
from lit_fsdp.tasks.causal_lm.tokenizer import TrainTokenizer

__all__ = ["CausalLM", "TextData", "TrainTokenizer"]
