"""What a checkpoint of a classifier holds beside tensors: its classes, and the small files of an exported folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.export.adapter import describe_adapters
from lit_fsdp.export.folder import ADAPTER_CONFIG
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.tasks.image_classification.preprocessing import PROCESSOR_FILE, Preprocessing
from lit_fsdp.tasks.pretrained import check_base, check_lora
from lit_fsdp.weights.base_weights import BASE, LORA

CLASSES = "classes"  # in the metadata of a checkpoint: their names, in the order of the model's outputs


def collect_export_files(
    model: PreTrainedModel,
    class_names: Sequence[str],
    *,
    preprocessing: Preprocessing | None,
    lora: LoRA | None,
    pretrained: str | None,
) -> dict[str, str | bytes]:
    """Return the small files of a Hugging Face folder by name, so that a checkpoint is enough to export.

    Args:
        model: As it trains.
        class_names: In the order of its outputs.
        preprocessing: Of the images, if it is known.
        lora: Settings of its adapters, if it has any.
        pretrained: Name of the model below them.
    """
    config = type(model.config).from_dict(model.config.to_dict())
    # FSDP2 puts a class of its own in front of the model's.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    files: dict[str, str | bytes] = {"config.json": config.to_json_string()}
    if preprocessing is not None:
        files[PROCESSOR_FILE] = preprocessing.describe()
    if lora is not None:
        files[ADAPTER_CONFIG] = describe_adapters(model, lora, pretrained)
        files["classes.json"] = json.dumps(list(class_names), indent=1)  # without config.json, which names them
    return files


def check_run(checkpoint: Mapping[str, Any], class_names: Sequence[str]) -> None:
    """Refuse a checkpoint of other classes.

    Args:
        checkpoint: Its metadata.
        class_names: Of this run.

    Raises:
        ValueError: The classes are others, or in another order.
    """
    stored = checkpoint.get(CLASSES)
    if stored is not None and list(stored) != list(class_names):
        raise ValueError(
            f"classes: the checkpoint was trained for {len(stored)} classes ({', '.join(stored[:5])} ...), and the "
            f"data has {len(class_names)} ({', '.join(class_names[:5])} ...); set data.classes to those"
        )


def check_pretrained(
    checkpoint: Mapping[str, Any], *, pretrained: str | None, quantization: Quantization | None, lora: LoRA | None
) -> None:
    """Refuse a checkpoint of adapters over another model, or of other adapters.

    Args:
        checkpoint: Its metadata.
        pretrained: The model of this run.
        quantization: Of that.
        lora: The adapters of this run.

    Raises:
        ValueError: With what differs.
    """
    if BASE in checkpoint and pretrained is not None:
        check_base(checkpoint[BASE], pretrained, quantization)
    if LORA in checkpoint and lora is not None:
        check_lora(checkpoint[LORA], lora)
