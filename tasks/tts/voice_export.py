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
from safetensors.torch import save_file
from torch import Tensor

from lit_fsdp.checkpoint.manifest import Verify, check_verify
from lit_fsdp.checkpoint.reader import resolve_checkpoint
from lit_fsdp.export.folder import join_dtypes, write_small_files
from lit_fsdp.export.out_folder import check_out, locate_out, write_beside
from lit_fsdp.tasks.tts.checkpoint import GENERATION, SpeechCheckpoint, read_checkpoint
from lit_fsdp.tasks.tts.codec.loading import has_codec
from lit_fsdp.tasks.tts.pretrained import CODEC_FOLDER, fetch_speech_model
from lit_fsdp.weights.base_weights import get_pretrained_folder

FIRST_ROW = 3000  # of the codec embedding, where official fine-tuning puts its voice
_CODEC_EMBEDDING = "talker.model.codec_embedding.weight"
_SPEAKER_ENCODER = "speaker_encoder."
_DTYPE = {"dtype", "torch_dtype"}  # in a configuration: what Transformers loads it in; the second in old ones
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


def export_voice(
    checkpoint: str | Path,
    out: Path,
    *,
    kind: Literal["custom_voice", "base", "voice_design"] | None = None,
    speakers: list[str] | None = None,
    first_row: int = FIRST_ROW,
    dtype: Literal["keep", "float32", "bfloat16"] = "keep",
    base: str | None = None,
    overwrite: bool = False,
    verify: Verify = "full",
) -> ExportedVoice:
    """Write the model of a speech checkpoint as a folder that ``qwen-tts``, or for CSM Transformers, loads.

    The whole model is held in host memory. The codec is copied from the model that the run started from.

    Args:
        checkpoint: Folder of a checkpoint, or of a run, of which the newest complete one is taken.
        out: The folder to make.
        kind: ``custom_voice`` builds the speakers of the training data in, and leaves the speaker encoder out. A model
            that has built-in voices keeps them, also where the training data has no embeddings to add.
            ``base`` keeps it, to clone voices or to train on. ``voice_design`` is what a model that makes voices of
            instructions stays. ``custom_voice`` if not given and the model is not one of these. Only of Qwen3-TTS.
        speakers: Which voices to build in; all of the training data if not given.
        first_row: Of the codec embedding: the voices go there and after it.
        dtype: Of the weights; ``keep`` leaves them as they were stored, and merged ones as their base has them.
        base: Where the model is that the run started from, by name or folder, if not where it was.
        verify: ``full`` first reads all files of the checkpoint, those of the optimizer too, to compare their
            checksums. ``sizes`` does so only for files up to 16 MiB, and compares the sizes of the others.
        overwrite: Replace a folder that was exported before. One with files that no export wrote is refused.

    Raises:
        ValueError: With what is wrong with the checkpoint or a setting.
    """
    out = locate_out(out)
    source_path = resolve_checkpoint(checkpoint)
    check_out(out, source_path, overwrite=overwrite)
    check_verify(verify)
    source = read_checkpoint(source_path, base, verify)
    raw, weights = deepcopy(source.config.raw), dict(source.weights)
    raw.pop("transformers_weights", None)  # a name that the file of the base had
    if not source.family.has_kinds:
        if kind is not None or speakers is not None:
            name = "kind" if kind is not None else "speakers"
            raise ValueError(f"{name}: {source.family.model_type} has no built-in voices; leave it out")
    elif kind == "voice_design" or (kind is None and speakers is None and source.config.designs_voices):
        if not source.config.designs_voices:
            raise ValueError("kind: got 'voice_design': the model makes no voices of instructions; leave it out")
        if speakers is not None:
            raise ValueError("speakers: not used by kind 'voice_design', which has no built-in voices; leave it out")
    elif kind == "base" and source.config.speaker_encoder is None:
        raise ValueError("kind: got 'base': the model has no speaker encoder, which clones voices; leave it out")
    elif kind == "base":
        if speakers is not None:
            raise ValueError("speakers: not used by kind 'base', which has no built-in voices; leave it out")
        raw["tts_model_type"] = "base"
    elif speakers is not None or source.voices or not _has_voices(source):
        _build_in(raw, weights, source, speakers, first_row)
    if dtype != "keep":
        weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights.items()}
    with write_beside(out, source_path, overwrite=overwrite) as beside:
        _write(beside, raw, weights, source)
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
        other = "leave kind out" if source.config.speaker_encoder is None else "export with kind base"
        raise ValueError(f"speakers: the training data had no embeddings of any: {other}")
    embedding = weights[_CODEC_EMBEDDING].clone()
    taken = set(vars(source.config.ids).values()) | set(source.config.languages.values())
    taken |= set(range(source.config.predictor.vocab_size)) | set(source.config.speakers.values())  # codes, and voices
    rows = range(first, first + len(names))
    if rows.start < 0 or rows.stop > len(embedding) or taken & set(rows):
        fits = (i for i in range(len(embedding) - len(names), -1, -1) if taken.isdisjoint(range(i, i + len(names))))
        place = next((f"such as {i}" for i in fits), "fewer speakers, as so many rows are free nowhere")
        raise ValueError(
            f"first_row: got {first}: {len(names)} voices from there on do not fit the {len(embedding)} rows of the "
            f"codec embedding, of which {len(taken)} are codes, special, or voices already: expected {place}"
        )
    for row, name in zip(rows, names, strict=True):
        embedding[row] = source.voices[name].to(embedding.dtype)
    weights[_CODEC_EMBEDDING] = embedding
    for name in [name for name in weights if name.startswith(_SPEAKER_ENCODER)]:
        del weights[name]
    raw["tts_model_type"] = "custom_voice"
    added = dict(zip(names, rows, strict=True))
    before = {n: i for n, i in (raw["talker_config"].get("spk_id") or {}).items() if n.lower() not in added}
    raw["talker_config"] |= {
        # The first speaks where nobody is named: as in the run, that of the training data.
        "spk_id": {**{name: added[name] for name in source.voices if name in added}, **before},
        "spk_is_dialect": {**(raw["talker_config"].get("spk_is_dialect") or {}), **dict.fromkeys(names, False)},
    }


def _has_voices(source: SpeechCheckpoint) -> bool:
    """Whether the model has built-in voices, which it keeps where the training data has none to put beside them."""
    return source.config.raw.get("tts_model_type") == "custom_voice" and bool(source.config.speakers)


def _describe_use(folder: Path, source: SpeechCheckpoint) -> list[str]:
    """Return what a folder cannot say about itself, in sentences."""
    notes = []
    if not has_codec(folder):
        notes.append("no codec, as the run did not start from a model with one: speak takes --codec")
    if source.is_streaming:
        notes.append("trained with data.streaming: speak with --streaming true, with qwen-tts non_streaming_mode=False")
    return notes


def _write(folder: Path, raw: Mapping[str, Any], weights: Mapping[str, Tensor], source: SpeechCheckpoint) -> None:
    base = None
    if source.pretrained is not None:
        fetch_speech_model(source.pretrained, "base")
        base = get_pretrained_folder(source.pretrained)
        weights = {**source.family.read_extra(base), **weights}
    if named := raw.keys() & _DTYPE:
        raw = {**{n: v for n, v in raw.items() if n not in named}, "dtype": join_dtypes(weights.values())}
    save_file({n: t.contiguous() for n, t in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.dumps(raw, indent=2, ensure_ascii=False) + "\n"
    # The official package does not load without settings of generation.
    write_small_files(folder, {GENERATION: "{}\n", **source.files, "config.json": config})
    if base is None:
        return
    if (base / CODEC_FOLDER).is_dir():
        shutil.copytree(base / CODEC_FOLDER, folder / CODEC_FOLDER)
    for name in _BESIDE:
        if (base / name).is_file() and not (folder / name).exists():
            shutil.copy(base / name, folder / name)
