"""Sequence classification: one or several labels of a text, a number, or a reward."""

from lit_fsdp.tasks.sequence_classification.data import LabeledTextData
from lit_fsdp.tasks.sequence_classification.rows import LabeledColumns
from lit_fsdp.tasks.sequence_classification.task import SequenceClassification

__all__ = ["LabeledColumns", "LabeledTextData", "SequenceClassification"]
