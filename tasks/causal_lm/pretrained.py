"""Where the files of a pretrained model are: a local folder, or the cache of the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

_PATTERNS = ("model*.safetensors", "*.json")  # not copies in other layouts


def fetch_pretrained(pretrained: str) -> None:
    """Download a model unless it is a folder or in the cache.

    Args:
        pretrained: Name on the Hub, or a folder.

    Raises:
        ValueError: It is neither.
    """
    if Path(pretrained).is_dir():
        return
    try:
        snapshot_download(pretrained, allow_patterns=list(_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        first = str(error).strip().splitlines()[0]
        raise ValueError(f"pretrained: got {pretrained!r}: no such folder, and the Hub says: {first}") from error


def find_pretrained(pretrained: str) -> Path:
    """Return the folder of a model that is there or has been fetched."""
    if Path(pretrained).is_dir():
        return Path(pretrained)
    return Path(snapshot_download(pretrained, allow_patterns=list(_PATTERNS), local_files_only=True))
