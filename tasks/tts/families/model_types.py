"""Which families of speech models there are, by the ``model_type`` in ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lit_fsdp.tasks.tts.config import CONFIG, read_raw_config
from lit_fsdp.tasks.tts.families.csm import CsmFamily
from lit_fsdp.tasks.tts.families.dia import DiaFamily
from lit_fsdp.tasks.tts.families.family import Family, FamilyConfig
from lit_fsdp.tasks.tts.families.qwen3 import Qwen3Family
from lit_fsdp.weights.load import materialize

FAMILIES: dict[str, Family] = {f.model_type: f for f in (Qwen3Family(), CsmFamily(), DiaFamily())}


def get_family(model_type: Any, *, where: str = "config") -> Family:
    """Return the family of a model type.

    Raises:
        ValueError: There is none.
    """
    if model_type not in FAMILIES:
        known = ", ".join(repr(name) for name in FAMILIES)
        raise ValueError(f"{where}: model_type: got {model_type!r}: expected one of {known}")
    return FAMILIES[model_type]


def parse_family(raw: Mapping[str, Any], *, where: str = "config") -> tuple[Family, FamilyConfig]:
    """Return the family of a ``config.json`` with the configuration that this gives.

    Raises:
        ValueError: No family knows it, or it cannot be.
    """
    family = get_family(raw.get("model_type"), where=where)
    return family, family.parse_config(raw, where=where)


def read_family(folder: Path) -> tuple[Family, FamilyConfig]:
    """Return the same of the ``config.json`` in a folder.

    Raises:
        ValueError: There is none, or no family knows it.
    """
    return parse_family(read_raw_config(folder), where=str(folder / CONFIG))


def is_speech_model(folder: Path) -> bool:
    """Tell whether a folder holds a model of a family."""
    return (folder / CONFIG).is_file() and read_raw_config(folder).get("model_type") in FAMILIES


def load_speech_model(folder: Path) -> tuple[Family, FamilyConfig, nn.Module]:
    """Return a model with the weights of a folder, on the CPU in float32, whole: for what is not trained.

    Raises:
        ValueError: The files do not fit, tensor by tensor.
    """
    family, config = read_family(folder)
    with torch.device("meta"):
        model = family.build_model(config).float()
    materialize(model, torch.device("cpu"))
    family.load_weights(model, folder)
    return family, config, model.eval()
