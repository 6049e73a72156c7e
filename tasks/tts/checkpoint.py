"""Checkpoints of speech: what they say besides their tensors, and how they are read to speak with or to export."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.adapters.layers import iterate_adapters
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.checkpoint.manifest import Verify
from lit_fsdp.checkpoint.reader import EXPORT, StoredCheckpoint, open_checkpoint, resolve_checkpoint
from lit_fsdp.checkpoint.remote import Location, RemotePath
from lit_fsdp.checkpoint.untrusted import refuse_other_forms
from lit_fsdp.export.merge import open_base
from lit_fsdp.quantization.layers import ABSMAX, NESTED
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.tasks.pretrained import check_adapters, read_tokenizer_files
from lit_fsdp.tasks.tts.families.family import Family, FamilyConfig
from lit_fsdp.tasks.tts.families.model_types import parse_family
from lit_fsdp.tasks.tts.pretrained import fetch_speech_model
from lit_fsdp.weights.base_weights import BASE, LORA, describe_base, get_pretrained_folder
from lit_fsdp.weights.load import materialize
from lit_fsdp.weights.safetensors_io import TensorFiles

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
    number of each speaker of the training data), ``pretrained``, and how the data is laid out: ``streaming``,
    ``speaker_embedding`` and ``text_dropout``.

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
    speech |= {name: getattr(data, name, None) for name in ("speaker_embedding", "text_dropout")}
    found: dict[str, Any] = {EXPORT: files, SPEECH: speech}
    if lora is not None:
        found[LORA] = asdict(lora)
        if pretrained is not None:
            found[BASE] = describe_base(pretrained, quantization)
    return found


def read_generation_config(pretrained: str | None) -> str | None:
    """Return how a model says that it wants to generate, as text; ``None`` where it does not."""
    path = get_pretrained_folder(pretrained) / GENERATION if pretrained is not None else None
    return path.read_text() if path is not None and path.is_file() else None


def check_run(
    checkpoint: dict[str, Any],
    data: Any,
    *,
    pretrained: str | None,
    lora: LoRA | None,
    quantization: Quantization | None,
    will_train: bool,
) -> None:
    """Refuse adapters that were trained over other weights, or that would mean something else.

    Warns of a layout of the data, and of roundings of the base, that are not those of the checkpoint.

    Args:
        checkpoint: Its metadata.
        data: The data module, if there is one.
        pretrained: The model of this run.
        lora: Of this run.
        quantization: Of this run.
        will_train: Whether it trains; nothing else leaves texts out.

    Raises:
        ValueError: With what it was.
    """
    for name in ("streaming", "speaker_embedding", *(("text_dropout",) if will_train else ())):
        before, now = checkpoint.get(SPEECH, {}).get(name), getattr(data, name, None)
        if None not in (before, now) and before != now:
            rank_zero_warn(f"data.{name}: {now} is used; the checkpoint was trained with {before}")
    check_adapters(checkpoint, pretrained=pretrained, quantization=quantization, lora=lora)


@dataclass(frozen=True, kw_only=True)
class SpeechCheckpoint:
    """A checkpoint of ``TextToSpeech``, read in full.

    Args:
        path: Where it is.
        weights: By official name, adapters merged.
        family: What kind of model it is.
        config: Of the model.
        files: Small files of the model's folder by name.
        voices: Mean embedding, or number, of each speaker of the training data.
        pretrained: The model that the run started from.
        is_streaming: Which layout it was trained with.
    """

    path: Location
    weights: dict[str, Tensor]
    family: Family
    config: Any
    files: dict[str, str | bytes]
    voices: dict[str, Tensor]
    pretrained: str | None
    is_streaming: bool


def read_checkpoint(
    path: str | Path | RemotePath, base: str | None = None, verify: Verify = "sizes"
) -> SpeechCheckpoint:
    """Return a checkpoint on the CPU; adapters are merged into the weights that they were trained over.

    Args:
        path: Folder of a checkpoint, or of a run, of which the newest complete one is taken.
        base: Where the model is that the run started from, by name or folder, if not where it was.
        verify: ``full`` compares the checksums of all files, ``sizes`` only those of small ones.

    Raises:
        ValueError: It is damaged, or holds no speech, or its base model is not there, or has other weights.
    """
    stored = open_checkpoint(resolve_checkpoint(path), verify)
    if SPEECH not in stored.meta:
        raise ValueError(f"checkpoint: {stored.path} was not written by TextToSpeech: expected one that was")
    about: dict[str, Any] = stored.meta[SPEECH]
    with refuse_other_forms():
        voices = {name: torch.tensor(voice) for name, voice in about["voices"].items()}
        started_from, is_streaming = about["pretrained"], about["streaming"]
        lora = LoRA(**stored.meta[LORA]) if LORA in stored.meta else None
    family, config = parse_family(json.loads(stored.files["config.json"]))
    weights = stored.read({name: stored.describe(name) for name in stored.tensors})
    if base is not None and started_from is None:
        raise ValueError(f"base: got {base!r}: {stored.path} started from no model; leave it out")
    weights = _drop_quantized(weights, stored)
    pretrained = base or started_from
    if lora is not None:
        folder = open_base(stored, pretrained, fetch_speech_model) if BASE in stored.meta else None
        weights = _merge(weights, lora, (family, config), folder)
    return SpeechCheckpoint(
        path=stored.path,
        weights=weights,
        family=family,
        config=config,
        files=stored.files,
        voices=voices,
        pretrained=pretrained,
        is_streaming=is_streaming,
    )


def build_model(checkpoint: SpeechCheckpoint) -> nn.Module:
    """Return the model of a checkpoint, ready to speak."""
    model = checkpoint.family.build_model(checkpoint.config)
    model.load_state_dict(checkpoint.weights)
    return model.float().eval()


def _drop_quantized(weights: dict[str, Tensor], stored: StoredCheckpoint) -> dict[str, Tensor]:
    """Leave out what a checkpoint holds of a quantized base, which is read in full instead."""
    quantized = {name.removesuffix(ABSMAX) for name in weights if name.endswith(ABSMAX)}
    if quantized and BASE not in stored.meta:
        raise ValueError(
            f"checkpoint: {stored.path} holds quantized weights that are of no model: start from pretrained"
        )
    left_out = {name + end for name in quantized for end in ("", ABSMAX, NESTED)}
    return {name: tensor for name, tensor in weights.items() if name not in left_out}


def _merge(trained: dict[str, Tensor], lora: LoRA, opened: tuple[Family, Any], base: Path | None) -> dict[str, Tensor]:
    """Add adapters to the weights that they were trained over, by peft's own layers.

    Args:
        trained: Adapters, and without ``base`` all other weights too.
        lora: Their settings.
        opened: Family and configuration of the model.
        base: Folder of the model with the weights that ``trained`` leaves out, whose dtypes are kept.
    """
    family, config = opened
    with torch.device("meta"):
        model = family.build_model(config)
        add_adapters(model, lora)
    materialize(model, torch.device("cpu"))
    if base is not None:
        family.load_weights(model, base)
    missing = set(trained) - set(model.state_dict())
    assert not missing, missing
    model.load_state_dict(trained, strict=False)
    for _, layer in iterate_adapters(model):
        layer.merge()
    state = model.state_dict()
    clean = {name.replace(".base_layer.", "."): tensor for name, tensor in state.items() if "lora_" not in name}
    dtypes: dict[str, torch.dtype] = {}
    if base is not None:
        with TensorFiles(base) as files:
            dtypes = {name: tensor.dtype for name, tensor in files.tensors.items()}
    return {name: tensor.to(dtypes.get(name, tensor.dtype), copy=True) for name, tensor in clean.items()}
