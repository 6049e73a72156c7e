"""What a checkpoint of speech says besides its tensors, so that it can be resumed, spoken with and exported alone."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.checkpoint.reader import EXPORT
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.tasks.pretrained import check_adapters, read_tokenizer_files
from lit_fsdp.tasks.tts.families.family import FamilyConfig
from lit_fsdp.tasks.tts.pretrained import find_speech_model
from lit_fsdp.weights.base_weights import BASE, LORA, describe_base

SPEECH = "speech"
GENERATION = "generation_config.json"


def describe_run(
    config: FamilyConfig,
    data: Any,
    *,
    pretrained: str | None,
    lora: LoRA | None,
    quantization: Quantization | None,
) -> dict[str, Any]:
    """Return what goes into a checkpoint, in plain types.

    ``export`` holds the small files of the model's folder by name; ``speech`` the ``voices`` (mean embedding or
    number of each speaker of the training data), ``streaming``, ``text_dropout`` and ``pretrained``.

    Args:
        config: Of the model.
        data: The data module, if there is one.
        pretrained: The model that the run started from.
        lora: Of the run.
        quantization: Of the run.
    """
    files: dict[str, str | bytes] = {"config.json": json.dumps(config.raw, indent=2)}
    if hasattr(data, "tokenizer"):
        files |= read_tokenizer_files(data.tokenizer)
    if (given := read_generation_config(pretrained)) is not None:
        files[GENERATION] = given
    voices = {name: np.asarray(voice).tolist() for name, voice in getattr(data, "voices", {}).items()}
    speech = {"voices": voices, "streaming": bool(getattr(data, "streaming", False)), "pretrained": pretrained}
    speech["text_dropout"] = getattr(data, "text_dropout", None)
    found: dict[str, Any] = {EXPORT: files, SPEECH: speech}
    if lora is not None:
        found[LORA] = asdict(lora)
        if pretrained is not None:
            found[BASE] = describe_base(pretrained, quantization)
    return found


def read_generation_config(pretrained: str | None) -> str | None:
    """Return how a model says that it wants to generate, as text; ``None`` where it does not."""
    path = find_speech_model(pretrained) / GENERATION if pretrained is not None else None
    return path.read_text() if path is not None and path.is_file() else None


def check_run(
    checkpoint: dict[str, Any],
    data: Any,
    *,
    pretrained: str | None,
    lora: LoRA | None,
    quantization: Quantization | None,
) -> None:
    """Refuse adapters that were trained over other weights, or that would mean something else.

    Warns of a share of dropped texts, and of roundings of the base, that are not those of the checkpoint.

    Args:
        checkpoint: Its metadata.
        data: The data module, if it will train.
        pretrained: The model of this run.
        lora: Of this run.
        quantization: Of this run.

    Raises:
        ValueError: With what it was.
    """
    before, now = checkpoint.get(SPEECH, {}).get("text_dropout"), getattr(data, "text_dropout", None)
    if None not in (before, now) and before != now:
        rank_zero_warn(f"data.text_dropout: {now} is used from here on; the checkpoint was trained with {before}")
    check_adapters(checkpoint, pretrained=pretrained, quantization=quantization, lora=lora)
