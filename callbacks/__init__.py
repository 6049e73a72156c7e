from lit_fsdp.callbacks.predictions import WritePredictions
from lit_fsdp.callbacks.preemption import Preemption
from lit_fsdp.callbacks.progress import ProgressBar
from lit_fsdp.callbacks.report import RunReport
from lit_fsdp.callbacks.summary import RunSummary

__all__ = ["Preemption", "ProgressBar", "RunReport", "RunSummary", "WritePredictions"]
