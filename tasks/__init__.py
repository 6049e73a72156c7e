"""Tasks: what is trained, on what data, by which loss."""

from lit_fsdp.optim.factory import Optimizer
from lit_fsdp.tasks.base import Task
from lit_fsdp.tasks.causal_lm import CausalLM, TextData, TrainTokenizer
from lit_fsdp.tasks.image_classification import Augmentation, ImageClassification, ImageData, Mixup, Pixels
from lit_fsdp.tasks.lr_schedule import LRSchedule
from lit_fsdp.tasks.tts import Sampling, SpeechData, SpeechEval, TextToSpeech

__all__ = [
    "Augmentation",
    "CausalLM",
    "ImageClassification",
    "ImageData",
    "LRSchedule",
    "Mixup",
    "Optimizer",
    "Pixels",
    "Sampling",
    "SpeechData",
    "SpeechEval",
    "Task",
    "TextData",
    "TextToSpeech",
    "TrainTokenizer",
]
