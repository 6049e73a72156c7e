"""A run leaves as a Hugging Face folder: whole, as an adapter, merged, or quantized."""

from lit_fsdp.export.model import Exported, export_model

__all__ = ["Exported", "export_model"]
