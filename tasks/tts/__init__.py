"""Speech: fine-tuning of text-to-speech models."""

from lit_fsdp.tasks.tts.data import SpeechData
from lit_fsdp.tasks.tts.evaluation.speech_eval import SpeechEval
from lit_fsdp.tasks.tts.generation import Sampling
from lit_fsdp.tasks.tts.task import TextToSpeech

__all__ = ["Sampling", "SpeechData", "SpeechEval", "TextToSpeech"]
