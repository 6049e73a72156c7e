"""The model that a run starts from: where its files are, and what tells it from others."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from lit_fsdp.errors import nearest
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.weights.safetensors_io import FULL, compute_fingerprint, sample_fingerprint

BASE = "base"  # in the metadata of a checkpoint: the model below its adapters
LORA = "lora"  # there too: the settings of the adapters
IMAGE_SIZE = "image_size"  # there too: height and width to which position embeddings were interpolated
WEIGHTS = ("model*.safetensors", "*.json")  # the files of a model, without copies in other layouts
CONFIG = ("config.json",)
PROCESSOR = ("preprocessor_config.json", "processor_config.json", "config.json")  # how it wants its images

log = logging.getLogger(__name__)


def fetch_pretrained(pretrained: str, setting: str = "pretrained", patterns: Sequence[str] = WEIGHTS) -> None:
    """Download a model unless it is a folder or in the cache.

    Args:
        pretrained: Name on the Hub, or a folder.
        setting: What the user calls it.
        patterns: Of its files.

    Raises:
        ValueError: It is neither.
    """
    folder = Path(pretrained).expanduser()
    try:
        if folder.is_dir():
            return
        is_file = os.path.lexists(folder)
    except OSError as error:  # too long for a name of either kind
        raise ValueError(
            f"{setting}: got {pretrained[:40]!r}...: {error.strerror}: expected a folder or model"
        ) from error
    if is_file:
        raise ValueError(f"{setting}: got {pretrained!r}: no folder: expected one with config.json and safetensors")
    try:
        snapshot_download(pretrained, allow_patterns=list(patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        if _is_meant_locally(pretrained):
            guess = nearest(folder.name, [path.name for path in folder.parent.glob("*/")])
            hint = f"did you mean {folder.parent / guess}?" if guess else f"seen from {Path.cwd()}"
            raise ValueError(f"{setting}: got {pretrained!r}: there is no such folder: {hint}") from error
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"{setting}: got {pretrained!r}: no such folder, and the Hub says: {first}") from error


def get_pretrained_folder(pretrained: str, patterns: Sequence[str] = WEIGHTS) -> Path:
    """Return the folder of a model that is there or has been fetched, with the same patterns."""
    folder = Path(pretrained).expanduser()
    if folder.is_dir():
        return folder
    return Path(snapshot_download(pretrained, allow_patterns=list(patterns), local_files_only=True))


def check_config_file(folder: Path) -> None:
    """Refuse a ``config.json`` that holds no settings, for which libraries have no words.

    Raises:
        ValueError: With what it holds.
    """
    path = folder / CONFIG[0]
    if not path.is_file():
        return
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}; copy or download it again") from error
    if not isinstance(content, dict):
        got = type(content).__name__
        raise ValueError(f'{path}: got {got}: expected an object such as {{"model_type": "llama"}}')  # noqa: TRY004


def describe_base(pretrained: str, quantization: Quantization | None) -> dict[str, Any]:
    """Return what tells the model below adapters from others, in plain types."""
    return {
        "name": pretrained,
        "fingerprint": compute_fingerprint(get_pretrained_folder(pretrained)),
        "quantization": None if quantization is None else asdict(quantization),
    }


def is_base(fingerprint: str, folder: Path) -> bool:
    """Whether a model has the weights that ``describe_base`` has seen."""
    if fingerprint.startswith(FULL):
        return compute_fingerprint(folder) == fingerprint
    log.warning("%s: compared by samples of its weights only: the checkpoint is of an earlier release", folder)
    return sample_fingerprint(folder) == fingerprint


def _is_meant_locally(pretrained: str) -> bool:
    """Tell from names on the Hub, which are ``name`` or ``owner/name``."""
    is_in_folder = "/" in pretrained and Path(pretrained).parent.is_dir()
    return pretrained.startswith((".", "/", "~")) or pretrained.count("/") > 1 or is_in_folder
