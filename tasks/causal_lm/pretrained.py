"""Where the files of a pretrained model are: a local folder, or the cache of the Hugging Face Hub; which they are."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from lightning.pytorch.utilities import rank_zero_warn

from lit_fsdp.cli_errors import nearest
from lit_fsdp.quantization import Quantization
from lit_fsdp.tensor_files import compute_fingerprint

BASE = "base"  # in the metadata of a checkpoint: the model below its adapters
_PATTERNS = ("model*.safetensors", "*.json")  # not copies in other layouts


def fetch_pretrained(pretrained: str) -> None:
    """Download a model unless it is a folder or in the cache.

    Args:
        pretrained: Name on the Hub, or a folder.

    Raises:
        ValueError: It is neither.
    """
    folder = Path(pretrained).expanduser()
    if folder.is_dir():
        return
    try:
        snapshot_download(pretrained, allow_patterns=list(_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        if _is_meant_locally(pretrained):
            guess = nearest(folder.name, [path.name for path in folder.parent.glob("*/")])
            hint = f"did you mean {folder.parent / guess}?" if guess else f"seen from {Path.cwd()}"
            raise ValueError(f"pretrained: got {pretrained!r}: there is no such folder: {hint}") from error
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"pretrained: got {pretrained!r}: no such folder, and the Hub says: {first}") from error


def find_pretrained(pretrained: str) -> Path:
    """Return the folder of a model that is there or has been fetched."""
    folder = Path(pretrained).expanduser()
    if folder.is_dir():
        return folder
    return Path(snapshot_download(pretrained, allow_patterns=list(_PATTERNS), local_files_only=True))


def describe_base(pretrained: str, quantization: Quantization | None) -> dict[str, Any]:
    """Return what tells the model below adapters from others, in plain types."""
    return {
        "name": pretrained,
        "fingerprint": compute_fingerprint(find_pretrained(pretrained)),
        "quantization": None if quantization is None else asdict(quantization),
    }


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


def _is_meant_locally(pretrained: str) -> bool:
    """Tell from names on the Hub, which are ``name`` or ``owner/name``."""
    is_in_folder = "/" in pretrained and Path(pretrained).parent.is_dir()
    return pretrained.startswith((".", "/", "~")) or pretrained.count("/") > 1 or is_in_folder
