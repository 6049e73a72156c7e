"""Text for tasks: documents, prompts with completions and chats, as tokens; packed or padded. No task of its own."""

from lit_fsdp.tasks.text.data import TextData
from lit_fsdp.tasks.text.ray_text import RayTextData
from lit_fsdp.tasks.text.rows import Columns
from lit_fsdp.tasks.text.tokenizer import TrainTokenizer

__all__ = ["Columns", "RayTextData", "TextData", "TrainTokenizer"]
