"""Tasks: what is trained, on what data, by which loss. Each is a LightningModule with its data and their settings."""

from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.optim.factory import Optimizer
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.tasks.base import Task
from lit_fsdp.tasks.causal_lm import CausalLM, Columns, RayTextData, TextData, TrainTokenizer
from lit_fsdp.tasks.data import TaskData
from lit_fsdp.tasks.image_classification import Augmentation, ImageClassification, ImageData, Mixup, Pixels
from lit_fsdp.tasks.lr_schedule import LRSchedule
from lit_fsdp.tasks.masked_lm import MaskedLM
from lit_fsdp.tasks.preference import PreferenceColumns, PreferenceData, PreferenceTuning
from lit_fsdp.tasks.pretrained import PretrainedTask
from lit_fsdp.tasks.sequence_classification import LabeledColumns, LabeledTextData, SequenceClassification
from lit_fsdp.tasks.text_model import ModelKind
from lit_fsdp.tasks.text_task import TextTask
from lit_fsdp.tasks.tts import Sampling, SpeechData, SpeechEval, TextToSpeech

__all__ = [
    "Augmentation",
    "CausalLM",
    "Columns",
    "ImageClassification",
    "ImageData",
    "LRSchedule",
    "LabeledColumns",
    "LabeledTextData",
    "LoRA",
    "MaskedLM",
    "Mixup",
    "ModelKind",
    "Optimizer",
    "Pixels",
    "PreferenceColumns",
    "PreferenceData",
    "PreferenceTuning",
    "PretrainedTask",
    "Quantization",
    "RayTextData",
    "Sampling",
    "SequenceClassification",
    "SpeechData",
    "SpeechEval",
    "Task",
    "TaskData",
    "TextData",
    "TextTask",
    "TextToSpeech",
    "TrainTokenizer",
]
