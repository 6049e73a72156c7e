"""Reads checkpoints that may be anybody's: tensors, plain values and where they lie. Nothing in them is run.

``torch.distributed.checkpoint`` unpickles ``.metadata``, and every stored value that is no tensor, without restriction,
seen in torch 2.13 to 2.15; drop the two classes of it below when it no longer does.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

# Private, seen in torch 2.13 to 2.15: a part of what `.metadata` holds.
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future
from typing_extensions import override

from lit_fsdp.checkpoint.manifest import LocationFileSystem
from lit_fsdp.checkpoint.remote import Location, RemotePath, UnreachableError
from lit_fsdp.weights.file_names import check_names

METADATA = ".metadata"
_NAMED = re.compile(r"GLOBAL (\S+)")  # in the errors of torch.load
_DCP = "torch.distributed.checkpoint"
_KNOWN = {
    *((f"{_DCP}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *((f"{_DCP}.metadata", f"{kind}Metadata") for kind in ("TensorStorage", "BytesStorage", "ChunkStorage")),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("builtins", "getattr"),  # by which early releases of Python 3.11 stored members of enums
    # Where it was written, maybe on another system. `_local` is of Python 3.13.
    *((m, n) for m in ("pathlib", "pathlib._local") for n in ("PosixPath", "WindowsPath")),
}
_T = TypeVar("_T")


def load_plain(file: Location | IO[bytes], name: Location | str, *, is_mapped: bool = False) -> Any:
    """Return what ``torch.save`` has written, on the CPU: tensors and plain values.

    Args:
        file: To read from its beginning.
        name: Of the file, for the error.
        is_mapped: Leave tensors in the file until they are used.

    Raises:
        ValueError: It holds something else, whose code would have to run, or is damaged.
        UnreachableError: A store failed.
    """
    if isinstance(file, RemotePath):
        with file.open("rb") as stream:
            return load_plain(stream, name)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected pickle protocol")  # an error follows, where it matters
            return torch.load(file, map_location="cpu", mmap=is_mapped, weights_only=True)
    except UnreachableError:
        raise
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
        raise ValueError(
            f"checkpoint: its metadata has another form ({_shorten(error)}): another version of lit_fsdp wrote it, or "
            "it is damaged; use that version, or choose another checkpoint"
        ) from error


def read_metadata(path: Location) -> Metadata:
    """Return what tensors a checkpoint folder holds, and where they lie.

    Raises:
        ValueError: It is damaged, or names what no checkpoint needs, such as a file outside the folder.
    """
    try:
        with (path / METADATA).open("rb") as file:
            metadata = _make_metadata(_Unpickler(file).load())
    except UnreachableError:
        raise
    except OSError as error:
        raise ValueError(f"{path / METADATA}: {error.strerror}; choose another checkpoint") from error
    except _ForeignError as error:
        raise ValueError(f"{path / METADATA} cannot be read safely: {error}; choose another checkpoint") from error
    except Exception as error:  # pickles that are damaged, or made to be, raise anything
        raise ValueError(
            f"{path}: torch {torch.__version__} cannot read its {METADATA} ({_shorten(error)}): a newer torch wrote "
            "it, or it is damaged; use the newest torch, or choose another checkpoint"
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
        RuntimeError: The disk or store failed.
    """
    no_dist = not dist.is_initialized() if no_dist is None else no_dist
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # meant: there is one process
            load(state, storage_reader=_Reader(path, metadata), planner=_Planner(path), no_dist=no_dist)
    except CheckpointException as error:  # a BaseException: no `except Exception` would see it
        rank, (cause, _) = min(error.failures.items())
        kind = RuntimeError if isinstance(cause, OSError | UnreachableError) else ValueError
        raise kind(f"{path} could not be read: rank {rank}: {_shorten(cause)}; choose another checkpoint") from error


class _ForeignError(pickle.UnpicklingError):
    """It holds what torch does not write."""


class _Unpickler(pickle.Unpickler):
    """Makes a tree of stand-ins for the objects in ``.metadata``; see Note [Stand-ins].

    Note [Stand-ins]: a pickle may set any attribute of whatever it can name, be it a class, a function or a member of
    an enum, and of what those return. So each unpickler makes classes of its own for the known names. They hold what
    they are given, and nothing outlives the reading. What cannot be changed, dtypes and ``torch.Size``, needs none.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._classes: dict[str, type] = {}

    @override
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (name == "Size" or isinstance(vars(torch).get(name), torch.dtype)):
            return vars(torch)[name]
        if (module, name) not in _KNOWN:
            raise _ForeignError(f"it names {module}.{name}, which is no part of a checkpoint")
        return self._classes.setdefault(name, _make_stand_in(name))


def _make_stand_in(name: str) -> type:
    """Return a class of that name whose objects take whatever torch's are made from, and keep their ``state``."""

    class StandIn:
        def __init__(self, *_: Any) -> None:
            pass

        def __setstate__(self, state: Any) -> None:
            self.state = state

    StandIn.__name__ = name
    return StandIn


class _Reader(FileSystemReader):
    """Reads tensors; has the metadata from ``read_metadata``."""

    def __init__(self, path: Location, metadata: Metadata) -> None:
        super().__init__(path.name)
        self.fs = self._files = LocationFileSystem()
        self.path: Any = path
        self._metadata = metadata

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        places = [self._metadata.storage_data[item.storage_index] for item in plan.items]
        wanted = Counter[str]()
        for place in places:
            wanted[place.relative_path] += place.length
        self._files.wanted_bytes = wanted
        return super().read_data(plan, planner)


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


def _make_metadata(found: Any) -> Metadata:
    """Make what reading needs from its stand-in; leave the rest, such as where the checkpoint was written."""
    parts = _check(found.state, dict)
    return Metadata(
        state_dict_metadata={
            _check(name, str): _make_tensor(value.state)
            if type(value).__name__ != BytesStorageMetadata.__name__
            else BytesStorageMetadata()
            for name, value in _check(parts["state_dict_metadata"], dict).items()
        },
        storage_data={
            _make_index(index.state): _StorageInfo(
                relative_path=place.state["relative_path"],  # for `check_names`
                offset=_check(place.state["offset"], int),
                length=_check(place.state["length"], int),
                # By which torch finds code of its own, in its own table.
                transform_descriptors=[_check(name, str) for name in place.state.get("transform_descriptors", ())],
            )
            for index, place in _check(parts["storage_data"], dict).items()
        },
    )


def _make_tensor(state: Any) -> TensorStorageMetadata:
    # The first of the properties is the dtype. Their number differs between releases, and reading needs no other.
    dtype, *_ = _check(state["properties"].state, tuple)
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=_check(dtype, torch.dtype)),
        size=_check(state["size"], torch.Size),
        chunks=[
            ChunkStorageMetadata(
                offsets=_check(chunk.state["offsets"], torch.Size), sizes=_check(chunk.state["sizes"], torch.Size)
            )
            for chunk in _check(state["chunks"], list)
        ],
    )


def _make_index(state: Any) -> MetadataIndex:
    offset, index = state.get("offset"), state.get("index")
    return MetadataIndex(
        _check(state["fqn"], str),
        None if offset is None else _check(offset, torch.Size),
        None if index is None else _check(index, int),
    )


def _check(value: Any, kind: type[_T]) -> _T:
    """Refuse a part of another type than torch gives it: then it was not torch that wrote it."""
    if not isinstance(value, kind):
        raise TypeError(f"it holds a {type(value).__name__} where a {kind.__name__} belongs")
    return value


def _shorten(error: BaseException) -> str:
    """Return one line of an error; torch advises over many to read the file all the same."""
    text = (f"no {error}" if isinstance(error, KeyError) else str(error).strip()) or type(error).__name__
    named = _NAMED.search(text)
    if named:
        return f"it names {named[1]}"
    is_advice = text.startswith("Weights only load failed")
    return "it holds more than tensors and plain values" if is_advice else text.splitlines()[0].removesuffix(".")
