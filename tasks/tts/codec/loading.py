"""Codecs by the name or folder of a model that has one: fetched, measured, loaded."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from lit_fsdp.tasks.tts.codec.codec_12hz import MODEL_TYPE, Codec
from lit_fsdp.tasks.tts.codec.formants import SPOKEN, build_codec_config, build_small_codec
from lit_fsdp.tasks.tts.codec.frame_codec import FrameCodec
from lit_fsdp.tasks.tts.codec.hub_codec import holds_codec, is_hub_codec, load_hub_codec, measure_hub_codec
from lit_fsdp.tasks.tts.config import CONFIG, read_raw_config
from lit_fsdp.tasks.tts.pretrained import CODEC_FOLDER, fetch_speech_model
from lit_fsdp.weights.base_weights import get_pretrained_folder


def fetch_codec(name: str, setting: str) -> None:
    """Download a model with its codec, unless it is ``formants``; see ``fetch_speech_model``."""
    if name != SPOKEN:
        fetch_speech_model(name, setting)


def open_codec(name: str, device: str | torch.device = "cpu") -> FrameCodec:
    """Return a codec by the name or folder of its model, which has been fetched; ``formants`` is the small one."""
    codec = build_small_codec() if name == SPOKEN else load_codec(get_pretrained_folder(name))
    return codec.to(device)


def measure_codec(name: str) -> tuple[int, int]:
    """Return the number of codebooks of a codec and their size, from its configuration alone."""
    folder = None if name == SPOKEN else find_codec(get_pretrained_folder(name))
    if folder is not None and is_hub_codec(folder):
        return measure_hub_codec(folder)
    raw = build_codec_config() if folder is None else read_raw_config(folder)
    return raw["encoder_valid_num_quantizers"], raw["decoder_config"]["codebook_size"]


def check_codec(name: str, setting: str, *, num_codebooks: int, codebook_size: int) -> None:
    """Refuse a codec that other codes belong to.

    Args:
        name: Of a codec that has been fetched.
        setting: What the user calls it.
        num_codebooks: Of the model.
        codebook_size: Codes of the model are below it.

    Raises:
        ValueError: With what the codec has, and what the model needs.
    """
    own, size = measure_codec(name)
    if own != num_codebooks:
        raise ValueError(f"{setting}: got {name!r}: it has {own} codebooks: expected {num_codebooks}, the model's")
    if size < codebook_size:
        raise ValueError(
            f"{setting}: got {name!r}: its codes end at {size - 1}: expected those of the model, up to "
            f"{codebook_size - 1}"
        )


def load_codec(folder: Path) -> FrameCodec:
    """Return the codec in a folder, ready to use, on the CPU in float32.

    Args:
        folder: Of the codec itself, or of a model that has one: a folder ``speech_tokenizer``, or Mimi inside of CSM.

    Raises:
        ValueError: The files are missing or do not fit, tensor by tensor.
    """
    folder = find_codec(folder)
    if is_hub_codec(folder):
        return load_hub_codec(folder)
    codec, path = Codec(read_raw_config(folder)), folder / "model.safetensors"
    try:
        codec.load_state_dict(load_file(path))
    except RuntimeError as error:
        raise ValueError(f"codec: {path} does not fit its {CONFIG}: {error}") from error
    return codec.float().eval()


def find_codec(folder: Path) -> Path:
    """Return the folder of a codec: that of a model, or the folder itself.

    Raises:
        ValueError: There is none.
    """
    if is_hub_codec(folder):
        return folder
    found = folder / CODEC_FOLDER if (folder / CODEC_FOLDER).is_dir() else folder
    missing = next((name for name in (CONFIG, "model.safetensors") if not (found / name).is_file()), None)
    problem = f"{found / str(missing)} is missing"
    if missing is None:
        if (kind := read_raw_config(found).get("model_type")) == MODEL_TYPE:
            return found
        problem = f"{found / CONFIG} is that of a model of type {kind!r}"
    raise ValueError(
        f"codec: {problem}: expected the folder {CODEC_FOLDER} of a Qwen3-TTS model, or a codec of Transformers: Mimi, "
        "as CSM has it, or DAC, such as descript/dac_44khz for Dia"
    )


def has_codec(folder: Path) -> bool:
    """Tell whether a folder holds a codec."""
    return holds_codec(folder) if is_hub_codec(folder) else (folder / CODEC_FOLDER / CONFIG).is_file()
