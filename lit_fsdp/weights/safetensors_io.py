"""Rows of tensors from the safetensors files of one model, read straight into the memory where they stay.

Files are not mapped into memory: pages of a mapped file count as a process's memory until the kernel takes them
back, and reading them one by one is slow on network file systems.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import xxhash
from safetensors import SafetensorError, safe_open

# Private, seen in safetensors 0.8: what its names of dtypes mean.
from safetensors.torch import _TYPES
from torch import Tensor

from lit_fsdp.cache import compute_once, get_cache_dir
from lit_fsdp.weights.file_names import check_names, join_name

DTYPES: dict[str, torch.dtype] = {name: dtype for name, dtype in _TYPES.items() if dtype is not None}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# What is read at once where it cannot be read into place: small beside a model, large enough for any disk.
MAX_BLOCK_BYTES = 32 * 2**20
FULL = "xxh3:"  # before a fingerprint of all values
_SAMPLE_BYTES = 4 * 2**10
_WARNED_OF: set[Path] = set()  # caches that take no digests

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where one tensor lies: ``begin`` is its first byte in the file."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int

    @property
    def num_rows(self) -> int:
        """Its size along dimension 0; a scalar is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class TensorFiles:
    """The tensors of a model's files, by their stored names; a context that keeps the files open.

    Args:
        folder: Holds ``model.safetensors`` or ``model.safetensors.index.json`` with its parts.
        file: Instead, the one file of another name that it holds, such as ``adapter_model.safetensors``.

    Raises:
        ValueError: Files are missing, cut short, or lack what the index says they hold.
    """

    def __init__(self, folder: Path, file: str | None = None) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self._files: dict[Path, int] = {}
        self._stack = ExitStack()
        if file is not None and not (folder / file).is_file():
            raise ValueError(f"{folder}: expected {file} in this folder")
        for path, names in (_list_files(folder) if file is None else {folder / file: []}).items():
            found = _read_header(path)
            if absent := [name for name in names if name not in found]:
                raise ValueError(f"{path}: cannot read {absent[0]}: {INDEX} says it is there; download the file again")
            self.tensors.update({name: found[name] for name in names or found})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()
        self._files.clear()

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU, in the dtype in which it is stored."""
        return self.read_rows(name, 0, self.tensors[name].num_rows)

    def read_rows(self, name: str, begin: int, end: int) -> Tensor:
        """Return rows of a tensor on the CPU, in the dtype in which they are stored."""
        tensor = self.tensors[name]
        rows = torch.empty((end - begin, *tensor.shape[1:]) if tensor.shape else (), dtype=tensor.dtype)
        self.copy_rows(name, begin, rows)
        return rows

    def copy_rows(self, name: str, begin: int, out: Tensor) -> None:
        """Fill ``out`` with the rows of a tensor from ``begin`` on, cast to its dtype.

        Takes no memory beside ``out`` if that is on the CPU and of the stored dtype; else up to 32 MiB, or one row.
        """
        tensor = self.tensors[name]
        if not tensor.shape:
            out = out.view(1)
        if not out.numel():
            return
        if out.device.type == "cpu" and out.dtype == tensor.dtype and out.is_contiguous():
            self._read(name, begin, out)
            return
        for first, last in split_rows(0, len(out), tensor.row_bytes):
            block = torch.empty(out[first:last].shape, dtype=tensor.dtype)
            self._read(name, begin + first, block)
            out[first:last].copy_(block)

    def _read(self, name: str, row: int, out: Tensor) -> None:
        tensor = self.tensors[name]
        if tensor.path not in self._files:
            self._files[tensor.path] = os.open(tensor.path, os.O_RDONLY)
            self._stack.callback(os.close, self._files[tensor.path])
        left = out.detach().view(-1).view(torch.uint8).numpy().data
        place = tensor.begin + row * tensor.row_bytes
        while left:
            num_bytes = os.preadv(self._files[tensor.path], [left[:MAX_BLOCK_BYTES]], place)
            if not num_bytes:
                raise ValueError(f"{tensor.path}: ends inside {name}: it was changed while it was read")
            left, place = left[num_bytes:], place + num_bytes


def split_rows(begin: int, end: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield first row and row after the last of blocks of up to 32 MiB, or of one row."""
    step = max(1, MAX_BLOCK_BYTES // max(row_bytes, 1))
    return ((first, min(first + step, end)) for first in range(begin, end, step))


def compute_fingerprint(folder: Path, file: str | None = None) -> str:
    """Return a digest that tells models apart: of names, shapes, dtypes and all values, however files divide them.

    Every file is read in full once; a digest of each tensor is kept in the cache folder until the file changes.
    ``file`` is that of ``TensorFiles``.
    """
    tensors = TensorFiles(folder, file).tensors
    found: dict[str, str] = {}
    for path in sorted({tensor.path for tensor in tensors.values()}):
        found |= _hash_once(path)
    lines = (f"{name} {t.shape} {t.dtype} {found[name]}\n" for name, t in sorted(tensors.items()))
    return FULL + xxhash.xxh3_128("".join(lines).encode()).hexdigest()


def sample_fingerprint(folder: Path) -> str:
    """Return what checkpoints of earlier releases hold as the fingerprint: it knows a few values of each tensor."""
    digest = hashlib.sha256()
    with TensorFiles(folder) as files:
        for name in sorted(files.tensors):
            tensor = files.tensors[name]
            digest.update(f"{name} {tensor.shape} {tensor.dtype}".encode())
            num_rows = min(tensor.num_rows, max(1, _SAMPLE_BYTES // max(tensor.row_bytes, 1)))
            begin = (tensor.num_rows - num_rows) // 2
            if tensor.shape and 0 < tensor.row_bytes <= MAX_BLOCK_BYTES:
                digest.update(files.read_rows(name, begin, begin + num_rows).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _hash_once(path: Path) -> dict[str, str]:
    compute, cache = partial(_hash_tensors, path), get_cache_dir(None)
    try:
        return dict(compute_once(cache, "tensors", [path], compute))
    except (OSError, ValueError) as error:  # a full or read-only disk, maybe of another process: it only saves time
        found = compute()  # raises what is wrong with the file itself
        if cache not in _WARNED_OF and os.environ.get("LOCAL_RANK", "0") == "0":
            _WARNED_OF.add(cache)
            log.warning("%s: the digests of a model cannot be kept, and are computed each time: %s", cache, error)
        return found


def _hash_tensors(path: Path) -> dict[str, str]:
    """Return a digest of the bytes of each tensor in a file, read from its begin to its end."""
    found = {}
    with path.open("rb", buffering=0) as file:
        for name, tensor in sorted(_read_header(path).items(), key=lambda item: item[1].begin):
            digest, left = xxhash.xxh3_128(), tensor.num_rows * tensor.row_bytes
            file.seek(tensor.begin)
            while left:
                block = file.read(min(left, MAX_BLOCK_BYTES))
                if not block:
                    raise ValueError(f"{path}: ends inside {name}: it was changed while it was read")
                digest.update(block)
                left -= len(block)
            found[name] = digest.hexdigest()
    return found


def _list_files(folder: Path) -> dict[Path, list[str]]:
    """Map the files to the names that the index gives them; no names where there is no index."""
    index, single = folder / INDEX, folder / SINGLE
    name = None  # of models with other weights too, the configuration names the files
    with suppress(OSError, ValueError, AttributeError):
        name = json.loads((folder / "config.json").read_text()).get("transformers_weights")
    if name is not None:
        named = join_name(folder, name, source=folder / "config.json")
        is_index = named.suffix == ".json"
        index, single = (named, single) if is_index else (named.with_name(f"{named.name}.index.json"), named)
    if index.is_file():
        try:
            parts: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{index}: no index of safetensors files: {error!r}; download the file again") from error
        check_names(parts.values(), source=index)
        missing = sorted({part for part in parts.values() if not (folder / part).is_file()})
        if missing:
            raise ValueError(f"{folder}: {index.name} names files that are not there: {', '.join(missing)}")
        files: dict[Path, list[str]] = {}
        for name, part in parts.items():
            files.setdefault(folder / part, []).append(name)
        return files
    if single.is_file():
        return {single: []}
    raise ValueError(f"{folder}: expected {single.name} or {index.name} in this folder")


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(path, framework="pt"):
            pass  # checks that the file is whole, and its header in order
    except SafetensorError as error:
        raise ValueError(f"{path}: cannot read it: {error}; download the file again") from error
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    found: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{path}: {name} has dtype {entry['dtype']}, which torch does not have")
        begin = 8 + size + entry["data_offsets"][0]
        found[name] = StoredTensor(path=path, shape=tuple(entry["shape"]), dtype=DTYPES[entry["dtype"]], begin=begin)
    return found
