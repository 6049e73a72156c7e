"""The files of a pretrained speech model: its own, its tokenizer's and its codec's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_fsdp.tasks.tts.config import CONFIG, read_raw_config
from lit_fsdp.weights.base_weights import fetch_pretrained, get_pretrained_folder

CODEC_FOLDER = "speech_tokenizer"  # beside the model's own files
_CONFIG = (CONFIG,)
_BESIDE = ("*.json", "*.jinja", "merges.txt", f"{CODEC_FOLDER}/*")


def fetch_speech_model(pretrained: str, setting: str = "pretrained") -> None:
    """Download a model with its tokenizer and codec, unless it is a folder or in the cache.

    Some have their weights twice: then those that ``config.json`` names for Transformers are fetched.

    Args:
        pretrained: Name on the Hub, or a folder.
        setting: What the user calls it.

    Raises:
        ValueError: There is no such model.
    """
    if Path(pretrained).expanduser().is_dir():
        return
    fetch_pretrained(pretrained, setting, _CONFIG)
    fetch_pretrained(pretrained, setting, (_name_weights(get_pretrained_folder(pretrained, _CONFIG)), *_BESIDE))


def _name_weights(folder: Path) -> str:
    """Return a pattern of the names of the files with the weights."""
    named = read_raw_config(folder).get("transformers_weights") if (folder / CONFIG).is_file() else None
    stem = named.partition(".safetensors")[0] if isinstance(named, str) else "model"
    return f"{stem}*.safetensors"


def check_stored(raw: Mapping[str, Any], pretrained: str) -> None:
    """Refuse a model whose weights are stored quantized: exports need what they were made of.

    Args:
        raw: Its ``config.json``.
        pretrained: Its name.

    Raises:
        ValueError: They are.
    """
    if raw.get("quantization_config") is not None:
        raise ValueError(
            f"pretrained: got {pretrained!r}: its weights are stored quantized, which is not read for speech: "
            "set pretrained to the model that it was made of, and quantization, such as {type: nf4}"
        )
