"""What follows from the model that a run starts from: how it is quantized, and which adapters belong to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.weights.base_weights import describe_base, get_pretrained_folder
from lit_fsdp.weights.prequantized import read_quantization


def load_config(pretrained: str) -> PreTrainedConfig:
    """Return the configuration of a model, a folder or of the Hub.

    Raises:
        ValueError: There is none, or no model has such a one.
    """
    try:
        return drop_quantization(AutoConfig.from_pretrained(get_pretrained_folder(pretrained)))
    except StrictDataclassError as error:
        raise ValueError(f"pretrained: {pretrained}: config.json: {error.__cause__ or error}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"pretrained: got {pretrained!r}: {str(error).strip().splitlines()[0]}") from error


def make_config(settings: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the configuration that settings describe, ``model_type`` among them.

    Raises:
        ValueError: No model has such a one.
    """
    settings = dict(settings)
    model_type = settings.pop("model_type")
    try:
        config = AutoConfig.for_model(model_type)
    except ValueError:
        raise ValueError(f"config.model_type: got {model_type!r}: Transformers has no such model") from None
    if unknown := sorted(name for name in settings if not hasattr(config, name)):
        raise ValueError(f"config: {', '.join(unknown)}: no settings of {type(config).__name__}")
    try:
        return AutoConfig.for_model(model_type, **settings)
    except StrictDataclassError as error:
        raise ValueError(f"config: {error.__cause__ or error}") from error


def choose_quantization(folder: Path, model: nn.Module, given: Quantization | None) -> Quantization | None:
    """Return how the weights of a model are to be quantized: as they are stored, if they are stored so.

    Args:
        folder: Of the pretrained model.
        model: On the meta device.
        given: What the user asks for.

    Raises:
        ValueError: The files have it otherwise.
    """
    return _compare_quantization(read_quantization(folder, model), given)


def plan_quantization(folder: Path, model: nn.Module, given: Quantization | None) -> Quantization | None:  # noqa: ARG001
    """Return the same by what ``config.json`` says of the files, which need not be there.

    Args:
        folder: Of ``config.json``.
        model: Not looked at.
        given: What the user asks for.

    Raises:
        ValueError: The configuration has it otherwise.
    """
    settings = json.loads((folder / "config.json").read_text()).get("quantization_config") or {}
    if settings.get("quant_method") != "bitsandbytes":
        return given
    skip = settings.get("llm_int8_skip_modules")
    options: dict[str, Any] = {"type": "int8"}
    if settings.get("load_in_4bit"):
        options = {"type": settings["bnb_4bit_quant_type"]}
        options["double_quant"] = settings.get("bnb_4bit_use_double_quant", False)
    return _compare_quantization(Quantization(**options, skip_modules=None if skip is None else tuple(skip)), given)


def _compare_quantization(stored: Quantization | None, given: Quantization | None) -> Quantization | None:
    if stored is None or given is None:
        return stored or given
    for setting, name in (("type", "type"), ("block_size", "block_size"), ("double_quant", "is_double")):
        ours, theirs = getattr(given, name), getattr(stored, name)
        if ours != theirs:
            raise ValueError(
                f"quantization.{setting}: got {ours!r}: the weights of pretrained are stored with {theirs!r}; leave "
                "quantization out"
            )
    if given.skip_modules is not None:
        raise ValueError("quantization.skip_modules: the weights of pretrained are quantized already; leave it out")
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
    names = ["alpha", "alpha_pattern", "use_rslora"]
    if not {stored["init_lora_weights"], own["init_lora_weights"]} <= {"default", "gaussian", "loftq"}:
        names.append("init_lora_weights")  # also says what was taken out of the base
    for name in names:
        if stored[name] != own[name]:
            raise ValueError(
                f"lora.{name}: got {own[name]!r}: the adapters of the checkpoint were trained with {stored[name]!r}; "
                "set that"
            )


def drop_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a configuration without that of bitsandbytes, whose layers we have ourselves."""
    settings: Any = getattr(config, "quantization_config", None)
    if isinstance(settings, dict) and settings.get("quant_method") == "bitsandbytes":
        del config.quantization_config
    return config
