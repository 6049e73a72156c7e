"""The model that a run starts from: where its files are, and what tells it from others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from lit_fsdp.errors import nearest
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.weights.safetensors_io import compute_fingerprint

BASE = "base"  # in the metadata of a checkpoint: the model below its adapters
LORA = "lora"  # there too: the settings of the adapters
IMAGE_SIZE = "image_size"  # there too: height and width to which position embeddings were interpolated
_PATTERNS = ("model*.safetensors", "*.json")  # not copies in other layouts
_PROCESSOR = ("preprocessor_config.json", "processor_config.json", "config.json")


def fetch_pretrained(pretrained: str, setting: str = "pretrained", patterns: Sequence[str] = _PATTERNS) -> None:
    """Download a model unless it is a folder or in the cache.

    Args:
        pretrained: Name on the Hub, or a folder.
        setting: What the user calls it.
        patterns: Of its files.

    Raises:
        ValueError: It is neither.
    """
    _fetch(pretrained, setting, patterns)


def _fetch(pretrained: str, setting: str, patterns: Sequence[str]) -> None:
    folder = Path(pretrained).expanduser()
    if folder.is_dir():
        return
    try:
        snapshot_download(pretrained, allow_patterns=list(patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        if _is_meant_locally(pretrained):
            guess = nearest(folder.name, [path.name for path in folder.parent.glob("*/")])
            hint = f"did you mean {folder.parent / guess}?" if guess else f"seen from {Path.cwd()}"
            raise ValueError(f"{setting}: got {pretrained!r}: there is no such folder: {hint}") from error
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"{setting}: got {pretrained!r}: no such folder, and the Hub says: {first}") from error


def fetch_config(pretrained: str) -> None:
    """Download the configuration of a model unless it is a folder or in the cache, without its weights.

    Raises:
        ValueError: There is no such model.
    """
    _fetch(pretrained, "pretrained", ("config.json",))


def fetch_processor(pretrained: str) -> None:
    """Download how a model wants its images, unless it is a folder or in the cache, without its weights.

    Raises:
        ValueError: There is no such model.
    """
    _fetch(pretrained, "processor", _PROCESSOR)


def find_processor(pretrained: str) -> Path:
    """Return the folder of what ``fetch_processor`` has fetched."""
    return _find(pretrained, _PROCESSOR)


def find_pretrained(pretrained: str, patterns: Sequence[str] = _PATTERNS) -> Path:
    """Return the folder of a model that is there or has been fetched, with the same patterns."""
    return _find(pretrained, patterns)


def _find(pretrained: str, patterns: Sequence[str]) -> Path:
    folder = Path(pretrained).expanduser()
    if folder.is_dir():
        return folder
    return Path(snapshot_download(pretrained, allow_patterns=list(patterns), local_files_only=True))


def describe_base(pretrained: str, quantization: Quantization | None) -> dict[str, Any]:
    """Return what tells the model below adapters from others, in plain types."""
    return {
        "name": pretrained,
        "fingerprint": compute_fingerprint(find_pretrained(pretrained)),
        "quantization": None if quantization is None else asdict(quantization),
    }


def _is_meant_locally(pretrained: str) -> bool:
    """Tell from names on the Hub, which are ``name`` or ``owner/name``."""
    is_in_folder = "/" in pretrained and Path(pretrained).parent.is_dir()
    return pretrained.startswith((".", "/", "~")) or pretrained.count("/") > 1 or is_in_folder
