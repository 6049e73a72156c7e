"""Preference tuning: DPO, IPO, ORPO, SimPO and KTO of a causal language model."""

from lit_fsdp.tasks.preference.data import PreferenceData
from lit_fsdp.tasks.preference.rows import PreferenceColumns
from lit_fsdp.tasks.preference.task import PreferenceTuning

__all__ = ["PreferenceColumns", "PreferenceData", "PreferenceTuning"]
