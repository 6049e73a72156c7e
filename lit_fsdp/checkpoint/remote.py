"""Where a checkpoint lies: a path of this machine, or an address that fsspec knows, such as ``s3://bucket/run``.

Note [Remote checkpoints]: object stores have no rename and no locks, and what is written there appears at once when
it is whole. So a checkpoint at an address is a folder of folders, ``<name>.ckpt/save-<number>-<token>``: each save
makes a new one, with the manifest last. The newest that is complete is the checkpoint; older ones are removed once
it is. A run that is killed at any moment leaves the older one as it was.

A checkpoint in a single file is one object, ``<name>.ckpt``. Object stores can hold both under one name: the higher
number of a save counts, and each removes the other kind when it is complete. Stores with folders cannot: there the
older one lies beside it until then, under a hidden name.
"""

from __future__ import annotations

import errno
import io
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeAlias

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.core import url_to_fs
from fsspec.registry import get_filesystem_class, known_implementations
from typing_extensions import Buffer, override

from lit_fsdp.errors import get_first_line

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_HERE = ("file", "local")  # schemes of this machine
_EXTRAS = {"s3": "s3", "s3a": "s3"}
# What stores call that which changes with an object, the surest first.
_STATES = (
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "blob_id",
    "LastModified",
    "last_modified",
    "updated",
    "mtime",
    "created",
)
_READ_BYTES = 1 << 25  # what is asked for ahead, where all is read


class UnreachableError(RuntimeError):
    """A store did not answer, or refused access. Neither an ``OSError`` nor taken for a missing file."""


@dataclass(frozen=True)
class RemotePath:
    """An address, with as much of ``pathlib.Path`` as checkpoints need.

    It is no ``os.PathLike``: what takes it for a path of this machine fails, and makes no local folder of its name.
    Nothing but the address is kept, so it survives a fork and can be sent to other ranks.

    Args:
        url: With its scheme, without a slash at the end.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The folder that it lies in; of a bucket, the bucket itself."""
        folder = self.url.rpartition("/")[0]
        return self if folder.endswith("/") else RemotePath(folder)

    def with_name(self, name: str) -> RemotePath:
        """Return the address beside this one."""
        return self.parent / name

    def resolve(self) -> RemotePath:
        """Return the address itself: there are no links."""
        return self

    def exists(self) -> bool:
        """Whether there is an object of this name, or any below it."""
        return self._get_info() is not None

    def is_file(self) -> bool:
        """Whether it is one object."""
        info = self._get_info()
        return info is not None and info["type"] == "file"

    def is_dir(self) -> bool:
        """Whether objects lie below it."""
        info = self._get_info()
        return info is not None and info["type"] == "directory"

    def is_symlink(self) -> bool:
        """Return false: there are none."""
        return False

    def glob(self, pattern: str) -> list[RemotePath]:
        """Return what lies in this folder, not deeper, and has a name of this pattern; empty if there is no folder."""
        return [self / name for name in sorted(self.measure_files()) if fnmatchcase(name, pattern)]

    def measure_files(self) -> dict[str, int | None]:
        """Return the names in this folder with their sizes in bytes, ``None`` for those of folders."""
        found: dict[str, int | None] = {}
        with _plain_errors(self):
            fs, path = self._open_store()
            try:
                infos = fs.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        for info in infos:
            inside = str(info["name"]).rstrip("/")
            if inside.strip("/") != str(path).strip("/"):  # some stores have an object for the folder itself
                found[inside.rpartition("/")[2]] = int(info["size"] or 0) if info["type"] == "file" else None
        return found

    def find(self) -> dict[RemotePath, tuple[int, str]]:
        """Return the objects that it names, sorted: itself, all below it, or those that a pattern with ``*`` matches.

        Beside each stands its size in bytes, and what changes with it, as far as the store tells: ETag, checksum or
        time.
        """
        with _plain_errors(self):
            fs, path = self._open_store()
            if "*" in path.partition("?")[0]:
                infos = fs.glob(path, detail=True).values()
            elif (info := self._get_info()) is None or info["type"] == "file":
                return {} if info is None else {self: _read_state(info)}
            else:
                infos = fs.find(path, detail=True).values()
            files = {str(info["name"]): _read_state(info) for info in infos if info["type"] == "file"}
            return {self._name_found(fs, name, path): files[name] for name in sorted(files)}

    def _name_found(self, fs: Any, name: str, path: str) -> RemotePath:
        begin = f"{path.strip('/')}/"
        name = name.lstrip("/")
        return self / name[len(begin) :] if name.startswith(begin) else RemotePath(str(fs.unstrip_protocol(name)))

    @property
    def suffix(self) -> str:
        """The ending of its name, without what a signed address has behind it."""
        return PurePosixPath(self.url.partition("?")[0]).suffix

    def get_written_ns(self) -> int:
        """Return when an object was written, in nanoseconds since 1970; 0 where nobody knows, as of folders."""
        if not self.is_file():
            return 0
        with _plain_errors(self):
            fs, path = self._open_store()
            try:
                modified = fs.modified(path)
            except NotImplementedError:
                return 0
        return int(modified.timestamp() * 1e9) if isinstance(modified, datetime) else 0

    def open(self, mode: str, wanted_bytes: int = _READ_BYTES) -> IO[Any]:
        """Open an object, ``rb`` or ``wb``. What was written is there when it is closed, whole or not.

        Args:
            mode: One of them.
            wanted_bytes: How much will be read, where that is known: stores are asked for no more ahead.
        """
        with _plain_errors(self):
            fs, path = self._open_store()
            if mode == "wb":
                make_folder(self.parent)
                stream: IO[Any] = fs.open(path, "wb")
            else:
                stream = io.BufferedReader(
                    _Reading(self, fs.open(path, mode, block_size=min(wanted_bytes, _READ_BYTES)))
                )
        return stream

    @contextmanager
    def replace_contents(self) -> Iterator[IO[bytes]]:
        """Write an object that takes the place of an older one when this context is left without an error."""
        with _plain_errors(self):
            fs, path = self._open_store()
            make_folder(self.parent)
            with fs.transaction, fs.open(path, "wb") as file:
                yield file

    def read_text(self) -> str:
        """Return what a small object holds."""
        with _plain_errors(self):
            fs, path = self._open_store()
            return bytes(fs.cat_file(path)).decode()

    def write_bytes(self, data: bytes) -> None:
        """Write a small object at once."""
        with _plain_errors(self):
            fs, path = self._open_store()
            make_folder(self.parent)
            fs.pipe_file(path, data)

    def rename(self, target: RemotePath) -> None:
        """Copy a small object, or a folder where the store has folders, and remove it here."""
        with _plain_errors(self):
            (fs, path), (_, new) = self._open_store(), target._open_store()
            if self.has_folders():
                fs.mv(path, new, recursive=self.is_dir())
                return
            fs.copy(path, new)
        with leave_what_stays(self):
            self.remove_object()

    def remove(self) -> None:
        """Remove the object of this name and all below it; nothing is there is fine."""
        with _plain_errors(self):
            fs, path = self._open_store()
            try:
                fs.rm(path, recursive=True)
            except FileNotFoundError:
                return

    def remove_object(self) -> None:
        """Remove the object of this name, and nothing below it; nothing is there is fine."""
        with _plain_errors(self):
            fs, path = self._open_store()
            try:
                fs.rm_file(path)
            except FileNotFoundError:
                return

    def has_folders(self) -> bool:
        """Whether the store has folders, so that no object has the name of one; object stores have none."""
        with _plain_errors(self):
            return not isinstance(self._open_store()[0], AsyncFileSystem)

    def _get_info(self) -> dict[str, Any] | None:
        with _plain_errors(self):
            fs, path = self._open_store()
            try:
                return dict(fs.info(path))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def _open_store(self) -> tuple[Any, str]:
        # fsspec keeps one for each process; not kept here, as one of before a fork cannot be used after it.
        fs, path = url_to_fs(self.url)
        return fs, path


class _Reading(io.RawIOBase):
    """A stream that fails with ``UnreachableError``: what reads archives takes an ``OSError`` for their end.

    It fails with it again when it is closed: torch makes another error of the first one, seen in 2.13 to 2.15.
    """

    def __init__(self, path: RemotePath, stream: IO[bytes]) -> None:
        self._path = path
        self._stream = stream
        self._failure: UnreachableError | None = None

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer).cast("B")
        try:
            with _plain_errors(self._path):
                data = self._stream.read(len(view))
        except UnreachableError as error:
            self._failure = error
            raise
        view[: len(data)] = data
        return len(data)

    @override
    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        try:
            return self._stream.seek(offset, whence)
        except ValueError as error:  # before the beginning, where files raise this
            raise OSError(errno.EINVAL, str(error)) from error

    @override
    def close(self) -> None:
        if not self.closed:
            self._stream.close()
            super().close()
            if self._failure is not None:
                raise self._failure


Location: TypeAlias = Path | RemotePath


def locate(given: str | os.PathLike[str] | RemotePath) -> Location:
    """Return where something lies that a user, or Lightning, has named.

    Raises:
        ValueError: It has a scheme that fsspec does not know, or whose package is missing, or is an address that was
            taken for a path before.
    """
    if isinstance(given, RemotePath):
        return given
    text = os.fspath(given)
    if "::" in text and "://" in text:
        raise ValueError(f"got {text!r}: expected one address, without ::")
    found = _ADDRESS.fullmatch(text)
    if found is None:
        if mangled := _find_mangled(text):
            wanted = "" if mangled in _HERE else f"a str with {mangled}:// in front, or "
            raise ValueError(
                f"got {text!r}, where an address was taken for a path: expected {wanted}for a folder of this machine "
                "no scheme"
            )
        return Path(text)
    scheme, rest = found[1].lower(), found[2].rstrip("/")
    if scheme in _HERE:
        if not found[2].startswith("/"):
            raise ValueError(f"got {text!r}: expected the path alone, or {scheme}:// and a path from the root on")
        return Path(found[2])
    _import_store(scheme, text)
    if not rest.strip("/"):
        raise ValueError(f"got {text!r}: expected an address with a name, such as {scheme}://bucket/run")
    return RemotePath(f"{scheme}://{rest}")


def _read_state(info: Mapping[str, Any]) -> tuple[int, str]:
    return int(info.get("size") or 0), next((str(info[name]) for name in _STATES if info.get(name)), "")


def locate_local(given: str | os.PathLike[str] | RemotePath) -> Path:
    """Return the path of something that only this machine can hold.

    Raises:
        ValueError: It is an address.
    """
    text = str(given)
    if _ADDRESS.fullmatch(text) or _find_mangled(text):
        raise ValueError(describe_local_only(text))
    return Path(text)


def describe_local_only(given: str) -> str:
    """Return what is wrong with an address where only a path of this machine can be."""
    if (found := _ADDRESS.fullmatch(given)) is not None and found[1].lower() in _HERE:
        return f"got {given!r}: expected the path alone, without {found[1]}://"
    return (
        f"got {given!r}: only checkpoints can lie at an address (dirpath of ModelCheckpoint, ckpt_path), and text and "
        "images to train on: expected a folder or file of this machine"
    )


def is_remote(given: object) -> bool:
    """Whether it is written as an address."""
    return isinstance(given, RemotePath) or _ADDRESS.fullmatch(str(given)) is not None


def make_folder(folder: Location) -> None:
    """Make a folder and those above it, where the store has folders."""
    if isinstance(folder, Path):
        folder.mkdir(parents=True, exist_ok=True)
        return
    if not folder.has_folders():  # s3fs would make a bucket of a misspelt one
        return
    with _plain_errors(folder):
        fs, path = folder._open_store()
        fs.makedirs(path, exist_ok=True)


def check_writable(folder: RemotePath) -> None:
    """Refuse an address that cannot be written to, by writing a small object there and removing it.

    Raises:
        ValueError: With what the store says.
    """
    probe = folder / f".probe-{os.urandom(4).hex()}"
    try:
        probe.write_bytes(b"lit_fsdp looks whether it can write here\n")
        probe.remove()
    except (UnreachableError, OSError) as error:
        raise ValueError(f"dirpath: got {str(folder)!r}, which cannot be written to: {error}") from error


def _find_mangled(text: str) -> str | None:
    """Return the scheme of ``s3:/bucket``, which is what a path makes of an address."""
    path = Path(text)
    for folder in (path, *path.parents):
        scheme = folder.name.removesuffix(":")
        if scheme != folder.name and scheme in known_implementations and not folder.exists():
            return scheme
    return None


def _import_store(scheme: str, text: str) -> None:
    try:
        kind = get_filesystem_class(scheme)
    except ValueError:
        raise ValueError(
            f"got {text!r}: fsspec knows no scheme {scheme!r}: expected a folder, or an address such as s3://bucket/run"
        ) from None
    except ImportError as error:
        if scheme in _EXTRAS:
            raise ValueError(
                f'got {text!r}: a package is missing: pip install "lit_fsdp[{_EXTRAS[scheme]}]"'
            ) from error
        raise ValueError(f"got {text!r}: a package is missing: {get_first_line(error)}") from error
    if issubclass(kind, AsyncFileSystem):
        # Other ranks write what this one lists, and Lightning keeps stores of its own.
        for name in kind.protocol if isinstance(kind.protocol, tuple | list) else [kind.protocol]:
            fsspec.config.conf.setdefault(name, {}).setdefault("use_listings_cache", False)


@contextmanager
def leave_what_stays(path: RemotePath) -> Iterator[None]:
    """Go on with a warning where a store does not remove what nobody needs any more."""
    try:
        yield
    except UnreachableError as error:
        warnings.warn(
            f"{path} could not be tidied, and takes space until a later save or start removes what is left: {error}",
            stacklevel=4,
        )


@contextmanager
def _plain_errors(path: RemotePath) -> Iterator[None]:
    """Turn what stores raise, each its own, into ``FileNotFoundError`` or ``UnreachableError`` of one line."""
    try:
        yield
    except (UnreachableError, io.UnsupportedOperation):
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "there is no such object", str(path)) from error
    except NotImplementedError as error:
        raise UnreachableError(f"{path}: fsspec can only read there") from error
    except Exception as error:
        raise UnreachableError(f"{path}: {get_first_line(error)}") from error
