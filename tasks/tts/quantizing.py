"""Which weights of a speech model are kept in 4 or 8 bits, and with which adapters that goes."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from lit_fsdp.adapters import LoRA
from lit_fsdp.quantization import Quantization
from lit_fsdp.quantized_layers import find_candidates
from lit_fsdp.tasks.tts.family import Family

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
    if quantization is not None and lora.init not in _KEEPS_BASE:
        raise ValueError(
            f"lora.init: got {lora.init!r} with quantization: speech is exported over the model in full, which is not "
            f"what such adapters belong to: set {' or '.join(_KEEPS_BASE)}"
        )


def skip_rest(settings: Quantization, model: nn.Module, family: Family) -> Quantization:
    """Return settings that leave all but blocks as it is: projections, and the heads of all codebooks.

    Args:
        settings: ``skip`` names what else to leave.
        model: On the meta device.
        family: Of it.
    """
    blocks = [n for n, m in model.named_modules() if any(fnmatchcase(type(m).__name__, p) for p in family.blocks)]
    inside = tuple(f"{name}." for name in blocks)
    rest = [name for name in find_candidates(model) if not name.startswith(inside)]
    return replace(settings, skip=(*(settings.skip or ()), *rest))
