"""The model that a run starts from: where its files are, and what tells it from others."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from lit_fsdp.errors import get_first_line, nearest
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.weights.safetensors_io import FULL, compute_fingerprint, sample_fingerprint

BASE = "base"  # in the metadata of a checkpoint: the model below its adapters
LORA = "lora"  # there too: the settings of the adapters
IMAGE_SIZE = "image_size"  # there too: height and width to which position embeddings were interpolated
WEIGHTS = ("model*.safetensors", "*.json")  # the files of a model, without copies in other layouts
CONFIG = ("config.json",)
_PATIENCE_S = 5.0  # of a save, which a scheduler may give 30 s in all
_BEGUN: dict[Path, Future[str]] = {}  # not in a task, which may be copied
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
        files = "config.json" + " and safetensors" * (patterns is WEIGHTS)
        raise ValueError(f"{setting}: got {pretrained!r}: no folder: expected one with {files}")
    try:
        snapshot_download(pretrained, allow_patterns=list(patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        guess = nearest(folder.name, [path.name for path in folder.parent.glob("*/")])
        near = folder.parent / guess if guess else None
        if _is_meant_locally(pretrained):
            hint = f"did you mean {near}?" if near else f"seen from {Path.cwd()}"
            raise ValueError(f"{setting}: got {pretrained!r}: there is no such folder: {hint}") from error
        first = get_first_line(error)
        hint = f"; did you mean the folder {near}?" if near else ""
        raise ValueError(f"{setting}: got {pretrained!r}: no such folder, and the Hub says: {first}{hint}") from error


def fetch_base(recorded: str, given: str | None, fetch: Callable[[str, str], None] = fetch_pretrained) -> str:
    """Download the model below adapters, and return its name or folder.

    Args:
        recorded: What the run called it, which may have been a folder seen from elsewhere.
        given: Where it is instead, if the user says it.
        fetch: Downloads it, called with its name and what the user calls it.

    Raises:
        ValueError: It is not there.
    """
    name = given or recorded
    try:
        fetch(name, "base")
    except ValueError as error:
        hint = "" if given else "; if it is elsewhere, set --base to its folder"
        raise ValueError(f"{error}{hint}") from error
    return name


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


def begin_fingerprint(pretrained: str) -> Future[str]:
    """Read a model in a thread, beside training, so that ``describe_base`` need not: from a disk it may take minutes.

    One that is under way is returned again.
    """
    folder = get_pretrained_folder(pretrained)
    if folder not in _BEGUN or _BEGUN[folder].done():
        _BEGUN[folder] = Future()
        # A daemon, as the end of a process does not wait for it; not of an executor, where it does.
        threading.Thread(target=_fill_fingerprint, args=(_BEGUN[folder], folder), daemon=True).start()
    return _BEGUN[folder]


def describe_base(pretrained: str, quantization: Quantization | None) -> dict[str, Any]:
    """Return what tells the model below adapters from others, in plain types.

    Its fingerprint is of all values, or of samples if these are not read after 5 s: no checkpoint waits for a disk.
    """
    folder = get_pretrained_folder(pretrained)
    found = _BEGUN.get(folder) or begin_fingerprint(pretrained)
    wait([found], timeout=_PATIENCE_S)
    if found.done():
        _BEGUN.pop(folder, None)  # its files may change
        fingerprint = found.result()
    else:
        log.info("%s: still being read: this checkpoint knows it by samples of its weights", folder)
        fingerprint = sample_fingerprint(folder)
    own = None if quantization is None else asdict(quantization)
    return {"name": pretrained, "fingerprint": fingerprint, "quantization": own}


def knows_all_values(base: dict[str, Any]) -> bool:
    """Whether the fingerprint in what ``describe_base`` returned is of all values."""
    return str(base["fingerprint"]).startswith(FULL)


def is_base(fingerprint: str, folder: Path) -> bool:
    """Whether a model has the weights that ``describe_base`` has seen."""
    if fingerprint.startswith(FULL):
        return compute_fingerprint(folder) == fingerprint
    log.warning(
        "%s: compared by samples of its weights only: the checkpoint is of an earlier release, or of a run's first "
        "minutes",
        folder,
    )
    return sample_fingerprint(folder) == fingerprint


def _fill_fingerprint(found: Future[str], folder: Path) -> None:
    try:
        found.set_result(compute_fingerprint(folder))
    except Exception as error:  # noqa: BLE001  raised where the result is asked for
        found.set_exception(error)


def _is_meant_locally(pretrained: str) -> bool:
    """Tell from names on the Hub, which are ``name`` or ``owner/name``."""
    is_in_folder = "/" in pretrained and Path(pretrained).parent.is_dir()
    return pretrained.startswith((".", "/", "~")) or pretrained.count("/") > 1 or is_in_folder
