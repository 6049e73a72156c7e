"""Reads checkpoints that may be anybody's: tensors, plain values and where they lie. Nothing in them is run.

``torch.distributed.checkpoint`` unpickles ``.metadata``, and every stored value that is no tensor, without restriction,
seen in torch 2.13 to 2.15; drop the two classes of it below when it no longer does.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

# Private, seen in torch 2.13 to 2.15: parts of what `.metadata` holds.
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from typing_extensions import override

from lit_fsdp.checkpoint.manifest import LocationFileSystem
from lit_fsdp.checkpoint.remote import Location, RemotePath
from lit_fsdp.weights.file_names import check_names

METADATA = ".metadata"
_NAMED = re.compile(r"GLOBAL (\S+)")  # in the errors of torch.load


def load_plain(file: Location | IO[bytes], name: Location | str, *, is_mapped: bool = False) -> Any:
    """Return what ``torch.save`` has written, on the CPU: tensors and plain values.

    Args:
        file: To read from its beginning.
        name: Of the file, for the error.
        is_mapped: Leave tensors in the file until they are used.

    Raises:
        ValueError: It holds something else, whose code would have to run, or is damaged.
    """
    if isinstance(file, RemotePath):
        with file.open("rb") as stream:
            return load_plain(stream, name)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")  # an error follows, where it matters
            return torch.load(file, map_location="cpu", mmap=is_mapped, weights_only=True)
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror}; choose another checkpoint") from error
    except Exception as error:  # pickles and archives that are damaged, or made to be, raise anything
        raise ValueError(f"{name} cannot be read safely: {_shorten(error)}; choose another checkpoint") from error


@contextmanager
def refuse_other_forms() -> Iterator[None]:
    """Refuse metadata in one line whose parts, read inside this context, are missing or have other types or names.

    Keep what it surrounds short: an error of our own in there would be taken for one of the checkpoint.
    """
    try:
        yield
    except (AttributeError, KeyError, TypeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"checkpoint: its metadata has another form ({reason}): another version of lit_fsdp wrote it, or it is "
            "damaged; use that version, or choose another checkpoint"
        ) from error


def read_metadata(path: Location) -> Metadata:
    """Return what tensors a checkpoint folder holds, and where they lie.

    Raises:
        ValueError: This torch cannot read it, it is damaged, or names what no checkpoint needs, such as a file outside
            the folder. Torch 2.15 writes what 2.13 and 2.14 cannot read.
    """
    try:
        with (path / METADATA).open("rb") as file, _kept_classes():
            metadata: Metadata = _Unpickler(file).load()
        _check_metadata(metadata)
    except OSError as error:
        raise ValueError(f"{path / METADATA}: {error.strerror}; choose another checkpoint") from error
    except _ForeignError as error:
        raise ValueError(f"{path / METADATA} cannot be read safely: {error}; choose another checkpoint") from error
    except Exception as error:  # pickles that are damaged, or made to be, raise anything
        raise ValueError(
            f"{path}: torch {torch.__version__} cannot read its {METADATA} ({_shorten(error)}): a newer torch wrote "
            "it, or it is damaged; use torch 2.15 or later, or choose another checkpoint"
        ) from error
    check_names((place.relative_path for place in metadata.storage_data.values()), source=str(path / METADATA))
    return metadata


def load_state(path: Location, metadata: Metadata, state: dict[str, Any], *, no_dist: bool | None = None) -> None:
    """Fill a state in place from a checkpoint folder. All ranks must call it, unless ``no_dist``.

    Args:
        path: The folder.
        metadata: From ``read_metadata``.
        state: Tensors and plain values in nested containers, under the names that they have in the checkpoint.
        no_dist: Whether to read in this process alone; by default where there is no process group.

    Raises:
        ValueError: It is damaged, or holds what is neither a tensor nor a plain value; on all ranks.
        RuntimeError: The disk failed.
    """
    no_dist = not dist.is_initialized() if no_dist is None else no_dist
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # meant: there is one process
            load(state, storage_reader=_Reader(path, metadata), planner=_Planner(path), no_dist=no_dist)
    except CheckpointException as error:  # a BaseException: no `except Exception` would see it
        rank, (cause, _) = min(error.failures.items())
        kind = RuntimeError if isinstance(cause, OSError) else ValueError
        raise kind(f"{path} could not be read: rank {rank}: {_shorten(cause)}; choose another checkpoint") from error


class _ForeignError(pickle.UnpicklingError):
    """It holds what torch does not write."""


class _Unpickler(pickle.Unpickler):
    """Makes what torch puts into ``.metadata``, and calls nothing else."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise _ForeignError(f"it names {module}.{name}, which is no part of a checkpoint")


class _Reader(FileSystemReader):
    """Reads tensors; has the metadata from ``read_metadata``."""

    def __init__(self, path: Location, metadata: Metadata) -> None:
        super().__init__(path.name)
        self.fs = LocationFileSystem()
        self.path: Any = path
        self._metadata = metadata

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


class _Planner(DefaultLoadPlanner):
    """Puts plain values where they belong; torch's own would unpickle whatever is there."""

    def __init__(self, path: Location) -> None:
        super().__init__()
        self._path = path

    @override
    def load_bytes(self, read_item: ReadItem, value: IO[bytes]) -> None:
        name = read_item.dest_index.fqn
        *parents, last = self.mappings[name]
        holder: Any = self.original_state_dict
        for key in parents:
            holder = holder[key]
        holder[last] = load_plain(value, f"{self._path}: {name}")


def _check_metadata(metadata: Any) -> None:
    """Raise where a part is of another type than torch gives it, in any way: then it was not torch that wrote it."""
    there, places = metadata.state_dict_metadata, metadata.storage_data
    for part, kind in ((metadata, Metadata), (there, dict), (places, dict)):
        _check_type(part, kind)
    for name, value in there.items():
        _check_type(name, str)
        _check_type(value, TensorStorageMetadata | BytesStorageMetadata)
        if isinstance(value, TensorStorageMetadata):
            _check_type(value.properties.dtype, torch.dtype)
            _check_type(value.size, torch.Size)
            for chunk in value.chunks:
                _check_type(chunk.offsets, torch.Size)
                _check_type(chunk.sizes, torch.Size)
    for index, place in places.items():
        _check_type(index, MetadataIndex)
        _check_type(index.fqn, str)
        _check_type(place.offset, int)
        _check_type(place.length, int)


def _check_type(value: Any, kind: Any) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"it holds a {type(value).__name__} where {getattr(kind, '__name__', kind)} belongs")


def _shorten(error: BaseException) -> str:
    """Return one line of an error; torch advises over many to read the file all the same."""
    text = str(error).strip() or type(error).__name__
    named = _NAMED.search(text)
    if named:
        return f"it names {named[1]}"
    is_advice = text.startswith("Weights only load failed")
    return "it holds more than tensors and plain values" if is_advice else text.splitlines()[0].removesuffix(".")


@contextmanager
def _kept_classes() -> Iterator[None]:
    """Undo and refuse what a pickle does to a class instead of an object: it may set any attribute of either."""
    before = [(kind, dict(vars(kind))) for kind in _CLASSES]
    try:
        yield
    finally:
        changed = []
        for kind, attributes in before:
            for name in vars(kind).keys() | attributes.keys():
                if name not in attributes:
                    delattr(kind, name)
                elif vars(kind).get(name) is not attributes[name]:
                    setattr(kind, name, attributes[name])
                else:
                    continue
                changed.append(f"{kind.__name__}.{name}")
    if changed:
        raise _ForeignError(f"it changes {changed[0]}")


def _get_layout(name: str) -> torch.layout:
    return {str(v): v for v in vars(torch).values() if isinstance(v, torch.layout)}[name]


def _get_memory_format(value: int) -> _MEM_FORMAT_ENCODING:
    return _MEM_FORMAT_ENCODING(value)


def _get_memory_format_by_name(kind: Any, name: str) -> _MEM_FORMAT_ENCODING:
    """Stand in for ``getattr``, by which early releases of Python 3.11 stored members of enums."""
    if kind is not _get_memory_format:
        raise _ForeignError("it names an attribute, which is no part of a checkpoint")
    return _MEM_FORMAT_ENCODING[name]


def _drop_path(*_: str) -> None:
    """Stand in for where a checkpoint was written, which may be on another system, and is not followed."""


_CLASSES = (
    *(BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties),
    *(TensorStorageMetadata, _StorageInfo),
)
# No other class than these: of one written in Python, such as Path, a pickle could change attributes for all.
_KNOWN: Mapping[tuple[str, str], Callable[..., Any]] = {
    **{(kind.__module__, kind.__name__): kind for kind in (*_CLASSES, torch.Size)},
    (_MEM_FORMAT_ENCODING.__module__, _MEM_FORMAT_ENCODING.__name__): _get_memory_format,
    ("builtins", "getattr"): _get_memory_format_by_name,
    ("torch.serialization", "_get_layout"): _get_layout,
    # `_local` is of Python 3.13.
    **{(m, n): _drop_path for m in ("pathlib", "pathlib._local") for n in ("PosixPath", "WindowsPath")},
}
