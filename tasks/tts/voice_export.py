"""From a checkpoint to a folder that other tools speak with: the full model, or one with voices built in.

Note [Official folders]: ``qwen-tts`` builds its configuration of the speaker encoder from ``config.json`` and refuses
names that it writes itself, so the configuration is the one that the run started from, with only what changes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.adapters.layers import iterate_adapters
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.checkpoint.reader import StoredCheckpoint, open_checkpoint, resolve_checkpoint
from lit_fsdp.quantization.layers import ABSMAX, NESTED
from lit_fsdp.tasks.tts.checkpoint_files import GENERATION, SPEECH
from lit_fsdp.tasks.tts.families.family import Family
from lit_fsdp.tasks.tts.families.model_types import parse_family
from lit_fsdp.tasks.tts.pretrained import CODEC_FOLDER, fetch_speech_model, find_speech_model, has_codec
from lit_fsdp.weights.base_weights import BASE, LORA
from lit_fsdp.weights.load import materialize
from lit_fsdp.weights.safetensors_io import TensorFiles, compute_fingerprint

FIRST_ROW = 3000  # of the codec embedding, where official fine-tuning puts its voice
_CODEC_EMBEDDING = "talker.model.codec_embedding.weight"
_SPEAKER_ENCODER = "speaker_encoder."
# Files of a model's folder that no run writes.
_BESIDE = (
    "preprocessor_config.json",
    "processor_config.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, kw_only=True)
class ExportedVoice:
    """What an export made.

    Args:
        folder: Where.
        notes: What to know to speak with it.
    """

    folder: Path
    notes: list[str]


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

    path: Path
    weights: dict[str, Tensor]
    family: Family
    config: Any
    files: dict[str, str | bytes]
    voices: dict[str, Tensor]
    pretrained: str | None
    is_streaming: bool


def read_checkpoint(path: Path, base: str | None = None) -> SpeechCheckpoint:
    """Return a checkpoint on the CPU; adapters are merged into the weights that they were trained over.

    Args:
        path: Folder of a checkpoint, or of a run, of which the newest complete one is taken.
        base: Where the model is that the run started from, by name or folder, if not where it was.

    Raises:
        ValueError: It holds no speech, or its base model is not there, or has other weights.
    """
    stored = open_checkpoint(resolve_checkpoint(path))
    if SPEECH not in stored.meta:
        raise ValueError(f"checkpoint: {stored.path} was not written by TextToSpeech: expected one that was")
    about: dict[str, Any] = stored.meta[SPEECH]
    family, config = parse_family(json.loads(stored.files["config.json"]))
    weights = _read_tensors(stored)
    if base is not None and about["pretrained"] is None:
        raise ValueError(f"base: got {base!r}: {stored.path} started from no model; leave it out")
    weights = _drop_quantized(weights, stored)
    pretrained = base or about["pretrained"]
    if LORA in stored.meta:
        folder = _open_base(pretrained, stored) if BASE in stored.meta else None
        weights = _merge(weights, LoRA(**stored.meta[LORA]), (family, config), folder)
    return SpeechCheckpoint(
        path=stored.path,
        weights=weights,
        family=family,
        config=config,
        files=stored.files,
        voices={name: torch.tensor(voice) for name, voice in about["voices"].items()},
        pretrained=pretrained,
        is_streaming=about["streaming"],
    )


def build_model(checkpoint: SpeechCheckpoint) -> nn.Module:
    """Return the model of a checkpoint, ready to speak."""
    model = checkpoint.family.build_model(checkpoint.config)
    model.load_state_dict(checkpoint.weights)
    return model.float().eval()


def export_voice(
    checkpoint: Path,
    out: Path,
    *,
    kind: Literal["custom_voice", "base"] | None = None,
    speakers: list[str] | None = None,
    first_row: int = FIRST_ROW,
    dtype: Literal["keep", "float32", "bfloat16"] = "keep",
    base: str | None = None,
    overwrite: bool = False,
) -> ExportedVoice:
    """Write the model of a speech checkpoint as a folder that ``qwen-tts``, or for CSM Transformers, loads.

    The whole model is held in host memory. The codec is copied from the model that the run started from.

    Args:
        checkpoint: Folder of a checkpoint, or of a run, of which the newest complete one is taken.
        out: The folder to make.
        kind: ``custom_voice`` builds the speakers of the training data in, and leaves the speaker encoder out.
            ``base`` keeps it, to clone voices or to train on. ``custom_voice`` if not given. Only of Qwen3-TTS.
        speakers: Which voices to build in; all of the training data if not given.
        first_row: Of the codec embedding: the voices go there and after it.
        dtype: Of the weights; ``keep`` leaves them as they were stored, and merged ones as their base has them.
        base: Where the model is that the run started from, by name or folder, if not where it was.
        overwrite: Replace a folder that was exported before.

    Raises:
        ValueError: With what is wrong with the checkpoint or a setting.
    """
    out = Path(out).resolve()
    _check_out(out, overwrite=overwrite)
    source = read_checkpoint(Path(checkpoint), base)
    raw, weights = deepcopy(source.config.raw), dict(source.weights)
    raw.pop("transformers_weights", None)  # a name that the file of the base had
    if not source.family.has_kinds:
        if kind is not None or speakers is not None:
            name = "kind" if kind is not None else "speakers"
            raise ValueError(f"{name}: {source.family.model_type} has no built-in voices; leave it out")
    elif kind == "base":
        if speakers is not None:
            raise ValueError("speakers: not used by kind 'base', which has no built-in voices; leave it out")
        raw["tts_model_type"] = "base"
    else:
        _build_in(raw, weights, source, speakers, first_row)
    if dtype != "keep":
        weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights.items()}
    beside = out.with_name(f".{out.name}.part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    _write(beside, raw, weights, source)
    if out.exists():
        shutil.rmtree(out)
    beside.replace(out)
    return ExportedVoice(folder=out, notes=_describe_use(out, source))


def _build_in(
    raw: dict[str, Any], weights: dict[str, Tensor], source: SpeechCheckpoint, speakers: list[str] | None, first: int
) -> None:
    """Put voices into rows of the codec embedding, and their names into the configuration."""
    names = [name.lower() for name in speakers] if speakers is not None else sorted(source.voices)
    if unknown := [name for name in names if name not in source.voices]:
        known = ", ".join(sorted(source.voices)) or "none"
        raise ValueError(f"speakers: got {', '.join(unknown)}: expected some of those of the training data: {known}")
    if not names:
        raise ValueError("speakers: the training data had no embeddings of any: export with kind base")
    embedding = weights[_CODEC_EMBEDDING].clone()
    taken = set(vars(source.config.ids).values()) | set(source.config.languages.values())
    taken |= set(range(source.config.predictor.vocab_size)) | set(source.config.speakers.values())  # codes, and voices
    rows = range(first, first + len(names))
    if rows.start < 0 or rows.stop > len(embedding) or taken & set(rows):
        raise ValueError(
            f"first_row: got {first}: {len(names)} voices from there on do not fit the {len(embedding)} rows of the "
            f"codec embedding, of which {len(taken)} are codes, special, or voices already: expected such as "
            f"{len(embedding) - len(names)}"
        )
    for row, name in zip(rows, names, strict=True):
        embedding[row] = source.voices[name].to(embedding.dtype)
    weights[_CODEC_EMBEDDING] = embedding
    for name in [name for name in weights if name.startswith(_SPEAKER_ENCODER)]:
        del weights[name]
    raw["tts_model_type"] = "custom_voice"
    raw["talker_config"] |= {
        "spk_id": {**(raw["talker_config"].get("spk_id") or {}), **dict(zip(names, rows, strict=True))},
        "spk_is_dialect": {**(raw["talker_config"].get("spk_is_dialect") or {}), **dict.fromkeys(names, False)},
    }


def _describe_use(folder: Path, source: SpeechCheckpoint) -> list[str]:
    """Return what a folder cannot say about itself, in sentences."""
    notes = []
    if not has_codec(folder):
        notes.append("no codec, as the run did not start from a model with one: speak takes --codec")
    if source.is_streaming:
        notes.append("trained with data.streaming: speak with --streaming true, with qwen-tts non_streaming_mode=False")
    return notes


def _open_base(name: str, stored: StoredCheckpoint) -> Path:
    """Return the folder of the model below adapters.

    Raises:
        ValueError: It is not there, or has other weights than those that they were trained over.
    """
    fetch_speech_model(name, "base")
    folder = find_speech_model(name)
    if compute_fingerprint(folder) != stored.meta[BASE]["fingerprint"]:
        raise ValueError(
            f"base: got {name!r}: its weights are not those of {stored.meta[BASE]['name']!r} that the adapters were "
            "trained over; set base to a copy of that model"
        )
    return folder


def _write(folder: Path, raw: Mapping[str, Any], weights: Mapping[str, Tensor], source: SpeechCheckpoint) -> None:
    from safetensors.torch import save_file

    base = None
    if source.pretrained is not None:
        fetch_speech_model(source.pretrained, "base")
        base = find_speech_model(source.pretrained)
        weights = {**source.family.read_extra(base), **weights}
    save_file({n: t.contiguous() for n, t in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    for name, text in source.files.items():
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    (folder / "config.json").write_text(json.dumps(raw, indent=2, ensure_ascii=False) + "\n")
    if GENERATION not in source.files:  # the official package does not load without one
        (folder / GENERATION).write_text("{}\n")
    if base is None:
        return
    if (base / CODEC_FOLDER).is_dir():
        shutil.copytree(base / CODEC_FOLDER, folder / CODEC_FOLDER)
    for name in _BESIDE:
        if (base / name).is_file() and not (folder / name).exists():
            shutil.copy(base / name, folder / name)


def _check_out(out: Path, *, overwrite: bool) -> None:
    if not out.exists():
        return
    is_ours = (out / "config.json").is_file() and (out / "model.safetensors").is_file()
    if not overwrite:
        raise ValueError(f"out: {out} exists: expected another folder, or overwrite: true")
    if not is_ours:
        raise ValueError(f"out: {out} is no exported model, so it is not replaced: expected another folder")


def _read_tensors(stored: StoredCheckpoint) -> dict[str, Tensor]:
    return stored.read({name: stored.describe(name) for name in stored.tensors})


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
    dtypes = _read_dtypes(base) if base is not None else {}
    return {name: tensor.to(dtypes.get(name, tensor.dtype), copy=True) for name, tensor in clean.items()}


def _read_dtypes(folder: Path) -> dict[str, torch.dtype]:
    with TensorFiles(folder) as files:
        return {name: tensor.dtype for name, tensor in files.tensors.items()}
