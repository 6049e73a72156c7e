from lit_fsdp.callbacks.predictions import WritePredictions
from lit_fsdp.callbacks.progress import ProgressBar
from lit_fsdp.callbacks.summary import RunSummary

__all__ = ["ProgressBar", "RunSummary", "WritePredictions"]
