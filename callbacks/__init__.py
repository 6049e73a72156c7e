from lit_fsdp.callbacks.predictions import WritePredictions
from lit_fsdp.callbacks.preemption import Preemption
from lit_fsdp.callbacks.profile import Profile
from lit_fsdp.callbacks.progress import ProgressBar
from lit_fsdp.callbacks.stability import StabilityMonitor, UnstableTrainingError
from lit_fsdp.callbacks.summary import RunSummary
from lit_fsdp.callbacks.throughput import ThroughputLogger

__all__ = [
    "Preemption",
    "Profile",
    "ProgressBar",
    "RunSummary",
    "StabilityMonitor",
    "ThroughputLogger",
    "UnstableTrainingError",
    "WritePredictions",
]
