"""Lightning callbacks: what a run logs, prints and writes beside training. Add them under ``trainer.callbacks``."""

from lit_fsdp.callbacks.classes import ClassReport
from lit_fsdp.callbacks.communication import CommunicationLogger
from lit_fsdp.callbacks.ema import EMA
from lit_fsdp.callbacks.memory import MemoryLogger
from lit_fsdp.callbacks.oom import OOMReport
from lit_fsdp.callbacks.predictions import WritePredictions
from lit_fsdp.callbacks.preemption import Preemption
from lit_fsdp.callbacks.profile import Profile
from lit_fsdp.callbacks.progress import ProgressBar
from lit_fsdp.callbacks.ray_report import RayReport
from lit_fsdp.callbacks.report import RunReport
from lit_fsdp.callbacks.speech import SpokenReport
from lit_fsdp.callbacks.stability import StabilityMonitor, UnstableTrainingError
from lit_fsdp.callbacks.summary import RunSummary
from lit_fsdp.callbacks.throughput import ThroughputLogger

__all__ = [
    "EMA",
    "ClassReport",
    "CommunicationLogger",
    "MemoryLogger",
    "OOMReport",
    "Preemption",
    "Profile",
    "ProgressBar",
    "RayReport",
    "RunReport",
    "RunSummary",
    "SpokenReport",
    "StabilityMonitor",
    "ThroughputLogger",
    "UnstableTrainingError",
    "WritePredictions",
]
