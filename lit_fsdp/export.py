"""From the shards of a checkpoint to one Hugging Face folder, without a process group or a GPU.

Tensors are read, cast, converted to the Hub's names and written one after the other: the host holds the largest of
them, and the piece of it that one rank has saved, never the model.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import AutoConfig, PreTrainedModel

from lit_fsdp.checkpoint import META
from lit_fsdp.hub_names import Part, convert_part, list_saved_names, plan_parts
from lit_fsdp.last_checkpoint import find_last_checkpoint
from lit_fsdp.manifest import check_contents, check_sizes
from lit_fsdp.model_card import write_model_card
from lit_fsdp.tensor_writer import TensorWriter

Dtype = Literal["keep", "float32", "bfloat16", "float16"]
EXPORT = "export"  # in the metadata of a checkpoint: the small files of the folder, by name

_STATE = "state_dict."
_MODEL = "model."  # a task holds its Transformers model under this name
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written.

    Args:
        checkpoint: Where it came from.
        folder: Where it is.
        files: Their names.
        num_parameters: Shared ones counted once.
        dtype: Of the weights; of several, one that holds all their values.
        num_bytes: Of all files.
    """

    checkpoint: Path
    folder: Path
    files: list[str]
    num_parameters: int
    dtype: str
    num_bytes: int


def export_model(
    checkpoint: Path, out: Path, *, dtype: Dtype = "keep", max_shard_gb: float = 5.0, overwrite: bool = False
) -> Exported:
    """Write the model of a sharded checkpoint as a folder that ``from_pretrained`` reads.

    It is written beside its place and renamed when it is complete. The disk needs room for it, the host memory for
    its largest tensor. All files of the checkpoint are read once to verify them, those of the optimizer too.

    Args:
        checkpoint: Folder of a checkpoint, or of a run, of which the newest complete one is taken.
        out: The folder to make.
        dtype: Of the weights; ``keep`` leaves them as they were stored.
        max_shard_gb: Begin another file of weights above this size, in 10^9 bytes.
        overwrite: Replace an exported model that is there.

    Raises:
        ValueError: With what is wrong with the checkpoint or a setting.
    """
    if dtype not in get_args(Dtype):
        raise ValueError(f"dtype: got {dtype!r}: expected one of {', '.join(get_args(Dtype))}")
    if not max_shard_gb > 0:
        raise ValueError(f"max_shard_gb: got {max_shard_gb}: expected above 0, such as 5")
    source = find_checkpoint(Path(checkpoint))
    out = Path(out).resolve()
    _check_out(out, source, overwrite=overwrite)
    stored = _open_checkpoint(source)
    model = _build_on_meta(stored.files, source)
    parts = plan_parts(model, _choose_tensors(model, stored, dtype))
    with _make_beside(out) as folder:
        num_bytes = _write_weights(folder, parts, stored, model, max_bytes=int(max_shard_gb * 1e9))
        num_parameters = sum(p.numel() for p in model.parameters())
        name = _find_dtype(parts)
        _write_small_files(folder, stored.files, dtype=name)
        card = write_model_card(
            out.name,
            architecture=type(model).__name__,
            dtype=name,
            num_parameters=num_parameters,
            meta=stored.meta,
            run=_find_run(source),
        )
        (folder / "README.md").write_text(card)
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return Exported(
        checkpoint=source, folder=out, files=files, num_parameters=num_parameters, dtype=name, num_bytes=num_bytes
    )


def find_checkpoint(path: Path) -> Path:
    """Return the folder of a checkpoint: ``path`` itself, or the newest complete one of the run there.

    Raises:
        ValueError: There is none.
    """
    if not path.exists():
        raise ValueError(f"checkpoint: {path} does not exist: expected the folder of a checkpoint or of a run")
    if path.is_file():
        raise ValueError(f"checkpoint: {path} is a file: expected a folder that FSDP2Strategy has written")
    if (path / META).is_file() or (path / ".metadata").is_file():
        return path.resolve()
    found = find_last_checkpoint([path, path / "checkpoints", *path.glob("version_*/checkpoints")])
    if found is None or found.is_file():
        raise ValueError(
            f"checkpoint: {path} is no checkpoint, and no run that wrote one: expected a folder with {META}, or one "
            "with version_*/checkpoints/*.ckpt"
        )
    return found


# Checkpoint


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """A checkpoint that was found to be complete."""

    path: Path
    meta: dict[str, Any]
    files: dict[str, str | bytes]
    metadata: Metadata
    tensors: dict[str, TensorStorageMetadata]  # by their names in the Transformers model


class _Reader(FileSystemReader):
    """Does not read the metadata again for every tensor."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        return self._metadata


def _open_checkpoint(path: Path) -> _Stored:
    check_contents(path, check_sizes(path))  # reading alone would not notice damage
    meta = torch.load(path / META, weights_only=True)
    if EXPORT not in meta:
        raise ValueError(
            f"{path} holds no files to export: its task is not one of ours; a task of your own puts them into "
            f"checkpoint[{EXPORT!r}] in on_save_checkpoint: config.json and those of the tokenizer, by name"
        )
    metadata = FileSystemReader(path).read_metadata()
    tensors: dict[str, TensorStorageMetadata] = {}
    for key, value in metadata.state_dict_metadata.items():
        if key.startswith(_STATE) and isinstance(value, TensorStorageMetadata):
            name = key.removeprefix(_STATE)
            if not name.startswith(_MODEL):
                raise ValueError(f"{path} holds {name}, which is no part of its Transformers model")
            tensors[name.removeprefix(_MODEL)] = value
    return _Stored(path=path, meta=meta, files=meta[EXPORT], metadata=metadata, tensors=tensors)


def _build_on_meta(files: Mapping[str, str | bytes], path: Path) -> PreTrainedModel:
    """Return the model without weights, for its names, shapes and ties."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "config.json").write_text(str(files["config.json"]))
        config = AutoConfig.from_pretrained(name)
    architecture = (config.architectures or ["?"])[0]
    model_class = getattr(transformers, architecture, None)
    if model_class is None or not hasattr(model_class, "base_model_prefix"):
        raise ValueError(f"{path} holds a {architecture}, which transformers {transformers.__version__} does not know")
    with torch.device("meta"):
        return model_class(config)


def _choose_tensors(model: PreTrainedModel, stored: _Stored, dtype: Dtype) -> dict[str, Tensor]:
    """Return what to read, on the meta device, in the model's order; refuse a checkpoint of another model."""
    expected = model.state_dict()
    aliases = _find_aliases(model)
    unknown = [name for name in stored.tensors if name not in expected]
    missing = [n for n in expected if not any(alias in stored.tensors for alias in aliases.get(n, [n]))]
    for what, names in (("lacks", missing), ("holds", unknown)):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(f"{stored.path} {what} {', '.join(names[:5])}{more}: it is no {type(model).__name__}")
    chosen: dict[str, Tensor] = {}
    for name in list_saved_names(model):
        there = stored.tensors[_find_stored_name(name, aliases, stored)]
        if there.size != expected[name].shape:
            shapes = f"{tuple(there.size)}, that of {type(model).__name__} {tuple(expected[name].shape)}"
            raise ValueError(f"{stored.path}: {name} has shape {shapes}")
        is_cast = dtype != "keep" and there.properties.dtype.is_floating_point
        wanted = getattr(torch, dtype) if is_cast else there.properties.dtype
        chosen[name] = torch.empty(there.size, dtype=wanted, device="meta")
    return chosen


def _find_aliases(model: PreTrainedModel) -> dict[str, list[str]]:
    """Map each parameter's name to all names it has; those of a tied one are several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: group for group in names.values() for name in group}


def _find_stored_name(name: str, aliases: Mapping[str, list[str]], stored: _Stored) -> str:
    return next(alias for alias in [name, *aliases.get(name, [])] if alias in stored.tensors)


# Folder


def _check_out(out: Path, checkpoint: Path, *, overwrite: bool) -> None:
    if checkpoint.is_relative_to(out) or out.is_relative_to(checkpoint):
        raise ValueError(f"out: {out} holds or lies in the checkpoint: expected another folder")
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"out: {out} is a file: expected a folder to make")
    if any(out.iterdir()) and not overwrite:
        raise ValueError(f"out: {out} is not empty: expected a new folder, or set overwrite to true")
    if any(out.iterdir()) and not (out / "config.json").is_file():
        raise ValueError(f"out: {out} has no config.json: it is not replaced, as it holds no exported model")


@contextmanager
def _make_beside(out: Path) -> Iterator[Path]:
    """Give an empty folder that takes the place of ``out`` once the body has ended well."""
    beside, old = out.with_name(f".{out.name}.incomplete"), out.with_name(f".{out.name}.replaced")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    if out.exists():
        shutil.rmtree(old, ignore_errors=True)
        out.rename(old)
    beside.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def _write_weights(folder: Path, parts: list[Part], stored: _Stored, model: PreTrainedModel, *, max_bytes: int) -> int:
    outputs = {name: tensor for part in parts for name, tensor in part.outputs.items()}
    num_bytes = sum(t.numel() * t.element_size() for t in outputs.values())
    if (free := shutil.disk_usage(folder).free) < num_bytes:
        needed = f"{num_bytes / 2**30:.2f} GiB, the disk has {free / 2**30:.2f} GiB left"
        raise ValueError(f"out: the model needs {needed}; free some, or choose another disk or dtype")
    pattern = "model{suffix}.safetensors"
    split = split_torch_state_dict_into_shards(outputs, filename_pattern=pattern, max_shard_size=max_bytes)
    by_file = {file: {n: outputs[n] for n in names} for file, names in split.filename_to_tensors.items()}
    reader = _Reader(stored.path, stored.metadata)
    aliases = _find_aliases(model)
    with TensorWriter(folder, by_file) as files:
        for part in tqdm(parts, desc="writing tensors", delay=2.0):
            sources = {name: _find_stored_name(name, aliases, stored) for name in part.inputs}
            tensors = _read_tensors(reader, part.inputs, sources)
            for name, tensor in convert_part(model, tensors).items():
                files.write(name, tensor)
    if split.is_sharded:
        num_parameters = sum(p.numel() for p in model.parameters())
        metadata = {"total_parameters": num_parameters, **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return num_bytes


def _read_tensors(reader: _Reader, wanted: Mapping[str, Tensor], sources: Mapping[str, str]) -> dict[str, Tensor]:
    """Read whole tensors, cast on the way to the dtype of ``wanted``."""
    tensors = {name: torch.empty_like(like, device="cpu") for name, like in wanted.items()}
    state = {f"{_STATE}{_MODEL}{sources[name]}": tensor for name, tensor in tensors.items()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # meant
            load(state, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        reasons = "; ".join(str(reason).splitlines()[0] for reason, _ in error.failures.values())
        raise ValueError(f"{reader.path}: cannot read {', '.join(sources.values())}: {reasons}") from error
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float16 and not torch.isfinite(tensor).all():
            raise ValueError(f"dtype: {name} holds values beyond those of float16: expected bfloat16 or float32")
    return tensors


def _find_dtype(parts: list[Part]) -> str:
    """Return the name of the narrowest dtype that all weights can be loaded in without loss."""
    dtypes = {tensor.dtype for part in parts for tensor in part.outputs.values() if tensor.is_floating_point()}
    return str(reduce(torch.promote_types, dtypes)).removeprefix("torch.")


def _write_small_files(folder: Path, files: Mapping[str, str | bytes], *, dtype: str) -> None:
    for name, content in files.items():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"checkpoint: its file {name} would lie outside of the folder")
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name == "config.json":
            config = {**json.loads(content), "dtype": dtype}
            content = json.dumps(config, indent=2, sort_keys=True) + "\n"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def _find_run(checkpoint: Path) -> Path | None:
    """Return the folder of the run that wrote a checkpoint, if it lies where runs put them."""
    run = checkpoint.parent.parent
    return run if (run / "config.yaml").is_file() else None
