"""What follows from the model that a run starts from: how it is quantized, and which adapters belong to it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lit_fsdp.adapters import LoRA
from lit_fsdp.base_model import describe_base
from lit_fsdp.quantization import Quantization
from lit_fsdp.quantized_files import read_quantization


def choose_quantization(folder: Path, model: nn.Module, given: Quantization | None) -> Quantization | None:
    """Return how the weights of a model are to be quantized: as they are stored, if they are stored so.

    Args:
        folder: Of the pretrained model.
        model: On the meta device.
        given: What the user asks for.

    Raises:
        ValueError: The files have it otherwise.
    """
    stored = read_quantization(folder, model)
    if stored is None or given is None:
        return stored or given
    for name in ("type", "block_size", "is_double"):
        ours, theirs = getattr(given, name), getattr(stored, name)
        if ours != theirs:
            raise ValueError(
                f"quantization.{name.removeprefix('is_')}: got {ours!r}: the weights of pretrained are stored with "
                f"{theirs!r}; leave quantization out"
            )
    if given.skip is not None:
        raise ValueError("quantization.skip: the weights of pretrained are quantized already; leave it out")
    return stored


def check_base(stored: dict[str, Any], pretrained: str, quantization: Quantization | None) -> None:
    """Refuse adapters of another model; warn of those trained over other roundings of it.

    Args:
        stored: From ``describe_base``, in the checkpoint.
        pretrained: The model of this run.
        quantization: Of this run.

    Raises:
        ValueError: Its weights are not those that the adapters were trained with.
    """
    own = describe_base(pretrained, quantization)
    if stored["fingerprint"] != own["fingerprint"]:
        raise ValueError(
            f"pretrained: got {pretrained!r}: the checkpoint holds adapters of {stored['name']!r}, whose weights are "
            "other ones; set pretrained to that model"
        )
    if stored["quantization"] != own["quantization"]:
        rank_zero_warn(
            f"quantization: the adapters of the checkpoint were trained with {stored['quantization']}, this run has "
            f"{own['quantization']}: losses will differ"
        )


def check_lora(stored: dict[str, Any], lora: LoRA) -> None:
    """Refuse settings with which the adapters of a checkpoint would mean something else, though they would fit.

    Args:
        stored: The settings that they were trained with.
        lora: Of this run.

    Raises:
        ValueError: With the setting and what it was.
    """
    own = asdict(lora)
    names = ["alpha", "alpha_pattern", "rslora"]
    if not {stored["init"], own["init"]} <= {"default", "gaussian", "loftq"}:
        names.append("init")  # also says what was taken out of the base
    for name in names:
        if stored[name] != own[name]:
            raise ValueError(
                f"lora.{name}: got {own[name]!r}: the adapters of the checkpoint were trained with {stored[name]!r}; "
                "set that"
            )
