"""Tasks: what is trained, on what data, by which loss."""

from lit_fsdp.optimizers import Optimizer
from lit_fsdp.tasks.base import Schedule, Task
from lit_fsdp.tasks.causal_lm import CausalLM, TextData, TrainTokenizer
from lit_fsdp.tasks.image_classification import Augmentation, ImageClassification, ImageData, Mixing, Pixels

__all__ = [
    "Augmentation",
    "CausalLM",
    "ImageClassification",
    "ImageData",
    "Mixing",
    "Optimizer",
    "Pixels",
    "Schedule",
    "Task",
    "TextData",
    "TrainTokenizer",
]
