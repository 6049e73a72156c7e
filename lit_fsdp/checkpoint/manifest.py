"""What makes a checkpoint folder complete: a list of its files with sizes and checksums, written last."""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypedDict, get_args

from torch.distributed.checkpoint.filesystem import FileSystem
from typing_extensions import Buffer, override

from lit_fsdp.checkpoint.remote import Location, RemotePath, make_folder
from lit_fsdp.files import write_whole
from lit_fsdp.weights.file_names import check_names

Verify = Literal["sizes", "full"]

MANIFEST = "complete.json"
VERIFIED_BYTES = 1 << 24  # files up to this size are read to verify them in any case: it takes milliseconds
_BLOCK_BYTES = 1 << 22


class FileEntry(TypedDict):
    """One file of a checkpoint."""

    bytes: int
    crc32: int


class LocationFileSystem(FileSystem):
    """What ``torch.distributed.checkpoint`` opens files with, here or at an address.

    ``wanted_bytes`` has how much will be read of files, by name, where that is known.
    """

    def __init__(self) -> None:
        self.wanted_bytes: dict[str, int] = {}

    @contextmanager
    @override
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        wanted = self.wanted_bytes.get(path.name) if isinstance(path, RemotePath) else None
        with path.open(mode) if wanted is None else path.open(mode, wanted) as stream:
            yield stream

    @override
    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    @override
    def init_path(self, path: Any) -> Any:
        return path

    @override
    def mkdir(self, path: Any) -> None:
        make_folder(path)

    @override
    def exists(self, path: Any) -> bool:
        return bool(path.exists())

    @override
    def rename(self, path: Any, new_path: Any) -> None:
        path.rename(new_path)


class ChecksumFileSystem(LocationFileSystem):
    """What ``torch.distributed.checkpoint`` writes files with; computes their checksums on the way.

    ``files`` has the entries of what was written, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, FileEntry] = {}

    @contextmanager
    @override
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _ChecksumFile(path) as file:
            yield file  # torch closes it
        self.files[path.name] = file.entry

    @override
    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.files[new_path.name] = self.files.pop(path.name)


class _ChecksumFile(io.BufferedWriter):
    """A file that is written from its beginning to its end, and on the disk when it is closed."""

    _is_done = False

    def __init__(self, path: Location) -> None:
        raw: Any = path.open("wb") if isinstance(path, RemotePath) else io.FileIO(path, "wb")
        super().__init__(raw)
        self.entry: FileEntry = {"bytes": 0, "crc32": 0}

    @override
    def write(self, data: Buffer, /) -> int:
        num_bytes = super().write(data)  # all of them
        self.entry = {"bytes": self.entry["bytes"] + num_bytes, "crc32": zlib.crc32(data, self.entry["crc32"])}
        return num_bytes

    @override
    def close(self) -> None:
        if not self._is_done:  # files of some stores never say that they are closed
            self._is_done = True
            if isinstance(self.raw, io.FileIO):
                self.flush()
                os.fsync(self.fileno())
            super().close()

    @override
    def seek(self, *_: Any) -> int:
        raise io.UnsupportedOperation("the checksum is of bytes in the order of the file")


def describe_files(paths: Iterable[Location]) -> dict[str, FileEntry]:
    """Return size and checksum of files, by name. Reads them once: for small ones."""
    files: dict[str, FileEntry] = {}
    for path in paths:
        size = path.parent.measure_files()[path.name] if isinstance(path, RemotePath) else path.stat().st_size
        files[path.name] = {"bytes": size or 0, "crc32": compute_crc32(path)}
    return files


def write_manifest(
    folder: Location, files: Mapping[str, FileEntry], *, save_number: int = 0, step: int | None = None
) -> None:
    """Mark a folder as complete.

    Args:
        folder: The checkpoint.
        files: What it holds.
        save_number: Grows with every save of a run, also after it was resumed; 0 is none.
        step: The step that the run has reached.
    """
    content = {"save_number": save_number, "step": step, "files": files}
    if isinstance(folder, RemotePath):
        (folder / MANIFEST).write_bytes(json.dumps(content, indent=1).encode())
        return
    write_whole(folder / MANIFEST, json.dumps(content, indent=1))


def read_manifest(folder: Location) -> dict[str, FileEntry]:
    """Return the files of a complete checkpoint; refuse a folder whose manifest is missing or damaged."""
    path = folder / MANIFEST
    if not path.exists():
        raise ValueError(f"{folder} is no complete checkpoint: {MANIFEST} is missing; choose another one")
    found = _read_values(path)
    stored = found.get("files") if isinstance(found, dict) else None
    # One that lists nothing would vouch for whatever lies there.
    if not isinstance(stored, dict) or not stored or not all(map(_is_entry, stored.values())):
        raise ValueError(f"{path} is damaged; choose another checkpoint")
    files: dict[str, FileEntry] = {name: {"bytes": e["bytes"], "crc32": e["crc32"]} for name, e in stored.items()}
    check_names(files, source=str(path))
    return files


def read_position(folder: Location) -> tuple[int, int | None] | None:
    """Return the number of the save and its step, ``None`` if there is no manifest that has them."""
    found = _read_values(folder / MANIFEST)
    number, step = (found.get("save_number"), found.get("step")) if isinstance(found, dict) else (None, None)
    return (number, step if isinstance(step, int) else None) if isinstance(number, int) else None


def _read_values(path: Location) -> Any:
    """Return what a JSON file holds, ``None`` where it is none; a pipe of that name is not waited for."""
    try:
        return json.loads(path.read_text()) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None


def _is_entry(found: Any) -> bool:
    numbers = [found.get(name) for name in ("bytes", "crc32")] if isinstance(found, dict) else [None]
    return all(type(number) is int and number >= 0 for number in numbers)


def check_verify(verify: Verify) -> None:
    """Refuse what is no way to verify."""
    if verify not in get_args(Verify):
        raise ValueError(f"verify: got {verify!r}: expected one of {', '.join(get_args(Verify))}")


def check_sizes(folder: Location) -> dict[str, FileEntry]:
    """Return the files of a checkpoint; refuse one with a file missing or cut short. Takes milliseconds."""
    files = read_manifest(folder)
    there = folder.measure_files() if isinstance(folder, RemotePath) else {}  # one question instead of one a file
    for name, entry in files.items():
        path = folder / name
        size = there.get(name) if isinstance(path, RemotePath) else path.stat().st_size if path.is_file() else None
        if size is None:
            raise ValueError(f"{path} is missing; choose another checkpoint")
        if size != entry["bytes"]:
            raise ValueError(f"{path} has {size} bytes of {entry['bytes']}; choose another checkpoint")
    return files


def check_files(folder: Location, verify: Verify, *, part: int = 0, num_parts: int = 1) -> None:
    """Refuse a checkpoint with a file missing, cut short or changed.

    Args:
        folder: The checkpoint.
        verify: ``full`` compares the checksums of all files, ``sizes`` those of files up to ``VERIFIED_BYTES``; of
            larger ones it compares the sizes alone.
        part: Of the files to read, this and every ``num_parts``-th after it are read, so that ranks share the reading.
        num_parts: In how many parts they are read.
    """
    files = check_sizes(folder)
    names = [name for name in sorted(files) if verify == "full" or files[name]["bytes"] <= VERIFIED_BYTES]
    for name in names[part::num_parts]:
        if compute_crc32(folder / name) != files[name]["crc32"]:
            raise ValueError(f"{folder / name} is damaged: its checksum differs; choose another checkpoint")


def is_complete(folder: Location) -> bool:
    """Whether all files of a checkpoint are there in full length."""
    try:
        check_sizes(folder)
    except (ValueError, OSError):
        return False
    return True


def compute_crc32(path: Location) -> int:
    """Read a file and return its checksum."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            value = zlib.crc32(block, value)
    return value
