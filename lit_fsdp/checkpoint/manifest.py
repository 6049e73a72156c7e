"""What makes a checkpoint folder complete: a list of its files with sizes and checksums, written last."""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from torch.distributed.checkpoint.filesystem import FileSystem
from typing_extensions import Buffer, override

from lit_fsdp.weights.file_names import check_names

Verify = Literal["sizes", "full"]

MANIFEST = "complete.json"
VERIFIED_BYTES = 1 << 24  # files up to this size are read to verify them in any case: it takes milliseconds
_BLOCK_BYTES = 1 << 22


class FileEntry(TypedDict):
    """One file of a checkpoint."""

    bytes: int
    crc32: int


class ChecksumFileSystem(FileSystem):
    """What ``torch.distributed.checkpoint`` writes files with; computes their checksums on the way.

    ``files`` has the entries of what was written, by name.
    """

    def __init__(self) -> None:
        self.files: dict[str, FileEntry] = {}

    @contextmanager
    @override
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _ChecksumFile(path) as file:
            yield file  # torch closes it
        self.files[Path(path).name] = file.entry

    @override
    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class _ChecksumFile(io.BufferedWriter):
    """A file that is written from its beginning to its end."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.entry: FileEntry = {"bytes": 0, "crc32": 0}

    @override
    def write(self, data: Buffer, /) -> int:
        num_bytes = super().write(data)  # all of them
        self.entry = {"bytes": self.entry["bytes"] + num_bytes, "crc32": zlib.crc32(data, self.entry["crc32"])}
        return num_bytes

    @override
    def seek(self, *_: Any) -> int:
        raise io.UnsupportedOperation("the checksum is of bytes in the order of the file")


def describe_files(paths: Iterable[Path]) -> dict[str, FileEntry]:
    """Return size and checksum of files, by name. Reads them once: for small ones."""
    return {path.name: {"bytes": path.stat().st_size, "crc32": compute_crc32(path)} for path in paths}


def write_manifest(
    folder: Path, files: Mapping[str, FileEntry], *, save_number: int = 0, step: int | None = None
) -> None:
    """Mark a folder as complete.

    Args:
        folder: The checkpoint.
        files: What it holds.
        save_number: Grows with every save of a run, also after it was resumed; 0 is none.
        step: The step that the run has reached.
    """
    with (folder / MANIFEST).open("w") as file:
        json.dump({"save_number": save_number, "step": step, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> dict[str, FileEntry]:
    """Return the files of a complete checkpoint; refuse a folder whose manifest is missing or damaged."""
    path = folder / MANIFEST
    try:
        stored = json.loads(path.read_text())["files"]
        files: dict[str, FileEntry] = {
            str(name): {"bytes": int(e["bytes"]), "crc32": int(e["crc32"])} for name, e in stored.items()
        }
    except FileNotFoundError:
        raise ValueError(f"{folder} is no complete checkpoint: {MANIFEST} is missing; choose another one") from None
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
        raise ValueError(f"{path} is damaged; choose another checkpoint") from None
    check_names(folder, files, source=path)
    return files


def read_position(folder: Path) -> tuple[int, int | None] | None:
    """Return the number of the save and its step, ``None`` if there is no manifest that has them."""
    try:
        found = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    number, step = (found.get("save_number"), found.get("step")) if isinstance(found, dict) else (None, None)
    return (number, step if isinstance(step, int) else None) if isinstance(number, int) else None


def check_verify(name: str, verify: Verify) -> None:
    """Refuse what is no way to verify; ``name`` is that of the setting."""
    if verify not in get_args(Verify):
        raise ValueError(f"{name}: got {verify!r}: expected one of {', '.join(get_args(Verify))}")


def check_sizes(folder: Path) -> dict[str, FileEntry]:
    """Return the files of a checkpoint; refuse one with a file missing or cut short. Takes milliseconds."""
    files = read_manifest(folder)
    for name, entry in files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            raise ValueError(f"{path} is missing; choose another checkpoint")
        if size != entry["bytes"]:
            raise ValueError(f"{path} has {size} bytes of {entry['bytes']}; choose another checkpoint")
    return files


def check_files(folder: Path, verify: Verify, *, part: int = 0, num_parts: int = 1) -> None:
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


def is_complete(folder: Path) -> bool:
    """Whether all files of a checkpoint are there in full length."""
    try:
        check_sizes(folder)
    except (ValueError, OSError):
        return False
    return True


def compute_crc32(path: Path) -> int:
    """Read a file and return its checksum."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            value = zlib.crc32(block, value)
    return value
