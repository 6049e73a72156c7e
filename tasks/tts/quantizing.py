"""Which weights of a speech model are kept in 4 or 8 bits, and with which adapters that goes."""

from __future__ import annotations

from fnmatch import fnmatchcase

from torch import nn

from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.tasks.tts.families.family import Family

_KEEPS_BASE = ("default", "gaussian")


def check_adapters(lora: LoRA | None, quantization: Quantization | None) -> None:
    """Refuse settings that mean nothing, or that could not be exported.

    Raises:
        ValueError: With the setting and the nearest fix.
    """
    if quantization is not None:
        quantization.check()
    if lora is None:
        return
    lora.check(is_quantized=quantization is not None)
    if quantization is not None and lora.init_lora_weights not in _KEEPS_BASE:
        raise ValueError(
            f"lora.init_lora_weights: got {lora.init_lora_weights!r} with quantization: speech "
            "is exported over the model in full, which is not "
            f"what such adapters belong to: set {' or '.join(_KEEPS_BASE)}"
        )


def list_rest(model: nn.Module, family: Family) -> list[str]:
    """Return what lies outside of blocks, by name: embeddings, projections, and the heads of all codebooks."""
    blocks = [n for n, m in model.named_modules() if any(fnmatchcase(type(m).__name__, p) for p in family.blocks)]
    inside = tuple(f"{name}." for name in blocks)
    owners = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    return sorted(name for name in owners if not name.startswith(inside))
