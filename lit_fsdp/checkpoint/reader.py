"""The tensors of a sharded checkpoint, one after the other, without a process group or a model with memory."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.serialization import skip_data
from transformers import AutoConfig, PreTrainedModel

from lit_fsdp.checkpoint.latest import enter, find_last_checkpoint, list_run_folders
from lit_fsdp.checkpoint.manifest import Verify, check_files
from lit_fsdp.checkpoint.remote import Location, RemotePath, UnreachableError, locate
from lit_fsdp.checkpoint.sharded import META, read_meta
from lit_fsdp.checkpoint.single_file import read_single_file
from lit_fsdp.checkpoint.untrusted import METADATA, load_state, read_metadata
from lit_fsdp.errors import nearest
from lit_fsdp.files import refuse_special_file

EXPORT = "export"  # in the metadata of a checkpoint: the small files of the folder, by name

_HINT = "resume the run with trainer.strategy.checkpoint_format: sharded, and take what it saves then"
_STATE = "state_dict."
_MODEL = "model."  # a task holds its Transformers model under this name

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StoredCheckpoint:
    """A checkpoint that was found to be complete."""

    path: Location
    meta: dict[str, Any]  # what it holds beside tensors
    files: dict[str, str | bytes]  # the small files of a Hugging Face folder, by name
    metadata: Metadata  # where its tensors lie
    tensors: dict[str, TensorStorageMetadata]  # what they are, by their names in the Transformers model

    def read(self, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors on the CPU, cast on the way to the dtype of ``wanted``."""
        tensors = {name: torch.empty_like(like, device="cpu") for name, like in wanted.items()}
        state = {f"{_STATE}{_MODEL}{name}": tensor for name, tensor in tensors.items()}
        load_state(self.path, self.metadata, state, no_dist=True)
        return tensors

    def describe(self, name: str) -> Tensor:
        """Return a tensor on the meta device."""
        there = self.tensors[name]
        return torch.empty(there.size, dtype=there.properties.dtype, device="meta")


def resolve_checkpoint(given: str | Path | RemotePath) -> Location:
    """Return the folder of a checkpoint: the given one, or the newest complete one of the run there."""
    try:
        path = locate(given)
    except ValueError as error:
        raise ValueError(f"checkpoint: {error}") from error
    if isinstance(path, Path):
        refuse_special_file(path, f"checkpoint: {path}")
    try:
        is_there = path.exists()
    except UnreachableError as error:
        raise ValueError(f"checkpoint: {error}; see whether it is there, and whether you may read it") from error
    if not is_there:
        names = [other.name for other in path.parent.glob("*/")] if isinstance(path, Path) else ()
        guess = nearest(path.name, names)
        hint = f"did you mean {path.parent / guess}?" if guess else "expected the folder of a checkpoint or of a run"
        raise ValueError(f"checkpoint: {path} does not exist: {hint}")
    inner = enter(path)
    if inner.is_file():
        raise ValueError(f"checkpoint: {path} is a file: expected a folder that FSDP2Strategy has written; {_HINT}")
    if (inner / META).is_file() or (inner / METADATA).is_file():
        return inner.resolve()
    found = find_last_checkpoint(list_run_folders(path), log.warning)  # not to stdout, which may be an audio file
    if found is not None and enter(found).is_file():
        raise ValueError(f"checkpoint: the newest checkpoint of {path} is a single file, {enter(found)}; {_HINT}")
    if found is None:
        raise ValueError(
            f"checkpoint: {path} is no checkpoint, and no run that wrote one: expected a folder with {META}, or one "
            "with version_*/checkpoints/*.ckpt"
        )
    return enter(found)


def check_checkpoint(path: Location) -> None:
    """Refuse a folder or single file that is damaged or cannot be read safely. Tensors are not read."""
    path = enter(path)
    if path.is_file():
        # From an address all would be read, only to be read again by the first rank.
        with skip_data() if isinstance(path, RemotePath) else nullcontext():
            read_single_file(path)
        return
    check_files(path, "sizes")
    read_metadata(path)
    read_meta(path)


def read_plain(path: Location) -> dict[str, Any]:
    """Return what a complete folder or single file holds beside tensors.

    Raises:
        ValueError: It is damaged, or cannot be read safely.
    """
    path = enter(path)
    if not path.is_file():
        return read_meta(path)
    with skip_data() if isinstance(path, RemotePath) else nullcontext():
        return read_single_file(path)


def open_checkpoint(path: Location, verify: Verify = "sizes") -> StoredCheckpoint:
    """Read what a checkpoint holds; refuse one that is not of our tasks, or damaged: see ``check_files``."""
    check_files(path, verify)  # reading alone would not notice damage
    meta = read_meta(path)
    if EXPORT not in meta:
        raise ValueError(
            f"{path} holds no files to export: its task is not one of ours; a task of your own puts them into "
            f"checkpoint[{EXPORT!r}] in on_save_checkpoint: config.json and those of the tokenizer, by name"
        )
    metadata = read_metadata(path)
    tensors: dict[str, TensorStorageMetadata] = {}
    for key, value in metadata.state_dict_metadata.items():
        if key.startswith(_STATE) and isinstance(value, TensorStorageMetadata):
            name = key.removeprefix(_STATE)
            if not name.startswith(_MODEL):
                raise ValueError(f"{path} holds {name}, which is no part of its Transformers model")
            tensors[name.removeprefix(_MODEL)] = value
    return StoredCheckpoint(path=path, meta=meta, files=meta[EXPORT], metadata=metadata, tensors=tensors)


def build_on_meta(checkpoint: StoredCheckpoint, **changes: Any) -> PreTrainedModel:
    """Return the model of ``config.json`` without weights, for names, shapes and ties; with a changed configuration."""
    with tempfile.TemporaryDirectory() as name:
        content = checkpoint.files["config.json"]
        (Path(name) / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
        config = AutoConfig.from_pretrained(name, trust_remote_code=False, **changes)
    architecture = (config.architectures or ["?"])[0]
    model_class = getattr(transformers, architecture, None)
    if model_class is None or not hasattr(model_class, "base_model_prefix"):
        raise ValueError(
            f"{checkpoint.path} holds a {architecture}, which transformers {transformers.__version__} does not know"
        )
    with torch.device("meta"):
        return model_class(config)


def find_run(checkpoint: Location) -> Path | None:
    """Return the folder of the run that wrote a checkpoint, if it lies where runs put them."""
    if isinstance(checkpoint, RemotePath):
        return None
    folder = checkpoint.parent
    for place in (folder, folder.parent):
        if "=" in place.name:  # made by a metric such as ``val/loss`` in the name of the file, see ``list_folders``
            folder = place.parent
    runs = (checkpoint.parent.parent, folder.parent)
    return next((run for run in runs if (run / "config.yaml").is_file()), None)
