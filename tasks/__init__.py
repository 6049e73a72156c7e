"""Tasks: what is trained, on what data, by which loss."""

from lit_fsdp.optim.factory import Optimizer
from lit_fsdp.tasks.base import Task
from lit_fsdp.tasks.causal_lm import CausalLM, TextData, TrainTokenizer
from lit_fsdp.tasks.image_classification import Augmentation, ImageClassification, ImageData, Mixing, Pixels
from lit_fsdp.tasks.schedule import Schedule
from lit_fsdp.tasks.tts import Listening, Sampling, SpeechData, TextToSpeech

__all__ = [
    "Augmentation",
    "CausalLM",
    "ImageClassification",
    "ImageData",
    "Listening",
    "Mixing",
    "Optimizer",
    "Pixels",
    "Sampling",
    "Schedule",
    "SpeechData",
    "Task",
    "TextData",
    "TextToSpeech",
    "TrainTokenizer",
]
