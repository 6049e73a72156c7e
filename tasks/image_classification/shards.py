"""Tar shards in the layout of WebDataset, read in place by an index, also over a network: nothing is unpacked."""

from __future__ import annotations

import glob
import json
import re
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from PIL import Image

from lit_fsdp.checkpoint.remote import locate
from lit_fsdp.checkpoint.sharded import agree
from lit_fsdp.files import refuse_special_file
from lit_fsdp.tasks.image_classification.images import SUFFIXES, Images, UnansweredError, decode
from lit_fsdp.tasks.image_classification.manifests import get_label
from lit_fsdp.tasks.row_files import describe_json_error, list_files, parse_json, refuse_splits

_LABELS = ("cls", "label", "json")  # endings of members that say the class, the first that does counts
_MAX_LABEL_BYTES = 1 << 20
_CHECKED_BYTES = 1 << 16  # at once, of the padding at the end
_TRIES, _WAIT_S = 4, 0.5  # over a network; each wait is twice that before
_LASTING = (ValueError, FileNotFoundError, PermissionError)  # not tried again

T = TypeVar("T")
_Place = tuple[int, int, int, str]  # shard, offset and size of the image, name of the member


def read_shards(source: str, *, needs_labels: bool) -> Images:
    """Return the images of tar files, in the order in which they lie there.

    Members with one name up to its first dot are one sample: an image, and its class in ``.cls`` or ``.label`` (a
    number or name) or ``.json`` (its field ``label`` or ``cls``); of several, the first of these counts. Headers are
    read once, each shard's by one rank, images when they are needed, from their place in the file: so samples are
    shuffled, resumed and counted as those of any other source. All ranks must call it.

    Args:
        source: A tar file, a folder of them, or a pattern such as ``shard-*.tar`` or ``shard-{000..012}.tar``; or a
            URL that fsspec knows, such as ``https://``, ``hf://`` or ``s3://``, of the same form.
        needs_labels: Whether classes are read.

    Raises:
        ValueError: There are none, or samples that lack what others have, or a file is cut short or several in one.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    shards = agree(lambda: _list_shards(source) if rank == 0 else [])[0]  # a listing may change meanwhile
    own = range(rank, len(shards), world_size)
    parts = agree(lambda: {number: _read_index(shards[number], needs_labels) for number in own})
    indices = {number: index for part in parts for number, index in part.items()}
    places: list[_Place] = []
    labels: list[str] = []
    for number in range(len(shards)):
        places += [(number, offset, size, name) for name, offset, size, _ in indices[number]]
        labels += [label for *_, label in indices[number] if label is not None]
    if not places:
        raise ValueError(f"{source}: no images: expected members such as 000.jpg and 000.cls")
    if labels and len(labels) != len(places):
        raise ValueError(
            f"{source}: {len(places) - len(labels)} of {len(places)} images have no .cls or .json with a label"
        )

    def open_image(i: int) -> Image.Image:
        number, offset, size, _ = places[i]
        return decode(_read_part(shards[number], offset, size))

    return Images(
        locate=lambda i: f"{_drop_query(shards[places[i][0]])} member {places[i][3]}",
        open=open_image,
        labels=labels or None,
        measure=lambda i: places[i][2],
        num_images=len(places),
    )


def is_url(source: str) -> bool:
    """Whether a source is not a path of this machine."""
    return "://" in source


class _ShardError(ValueError):
    """What is wrong with a shard; the message names it."""


def _list_shards(source: str) -> list[str]:
    if is_url(source):
        return _list_urls(source)
    path = Path(source).expanduser()
    if path.is_dir():
        files = list_files(path, (".tar",), is_deep=False)
        refuse_splits(path, [file.name for file in files])
        return [str(file) for file in files]
    names = list(_expand_braces(str(path)))
    found = [hit for name in names for hit in (sorted(glob.glob(name)) if "*" in name else [name])]  # noqa: PTH207
    for name in found:
        refuse_special_file(Path(name), name)
    missing = [name for name in found if not Path(name).is_file()]
    if missing or not found:
        raise ValueError(f"{missing[0] if missing else source}: no such file, of {len(found)} shards of {source}")
    return found


def _list_urls(source: str) -> list[str]:
    found: list[str] = []
    for url in _expand_braces(source):
        path = _drop_query(url)
        pattern = url if path.endswith(".tar") else f"{url.rstrip('/')}/*.tar"
        if "*" not in (path if path.endswith(".tar") else pattern):
            found.append(pattern)
            continue
        try:
            hits = _retry(partial(_glob, pattern))
        except _ShardError:
            raise
        except Exception as error:
            raise ValueError(f"{path}: not to be listed: {_say(error)}; see whether it is there") from error
        if pattern != url:  # a folder
            refuse_splits(locate(url), [hit.rpartition("/")[2] for hit in hits])
        found += hits
    if not found:
        raise ValueError(f"{_drop_query(source)}: no .tar files there")
    return found


def _glob(pattern: str) -> list[str]:
    files, path = _open_filesystem(pattern)
    return [str(files.unstrip_protocol(hit)) for hit in sorted(files.glob(path))]


def _drop_query(url: str) -> str:
    """Return a URL without what may be a signature, which belongs in no message and no file."""
    path = url.partition("?")[0]
    return path if is_url(url) and path.endswith(".tar") else url


def _retry(work: Callable[[], T]) -> T:
    """Return what a file system gives, asked again after errors that may pass."""
    for attempt in range(_TRIES - 1):
        try:
            return work()
        except _LASTING:
            raise
        except Exception:  # noqa: BLE001  of any library that a file system is made with
            time.sleep(_WAIT_S * 2**attempt)
    return work()


def _say(error: Exception) -> str:
    """Return the first line of an error, without signatures."""
    return re.sub(r"\.tar\?[^\s'\")]*", ".tar", (str(error) or type(error).__name__).splitlines()[0])


def _open_filesystem(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, of this process, and the path in it."""
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise _ShardError(f"{_drop_query(url)}: not to be read: {_say(error)}") from error


def _read_part(shard: str, offset: int, size: int) -> bytes:
    """Return a part of a shard. One over a network that does not answer ends the run: it is no bad image."""
    if not is_url(shard):
        with Path(shard).open("rb") as file:  # not kept open: workers are forked, and would share its position
            file.seek(offset)
            return file.read(size)
    try:
        return _retry(partial(_fetch_part, shard, offset, size))
    except Exception as error:
        tries = "" if isinstance(error, _LASTING) else f", tried {_TRIES} times"
        raise UnansweredError(
            f"{_drop_query(shard)}: {size} bytes at {offset} could not be read{tries}: {_say(error)}"
        ) from error


def read_object(url: str) -> bytes:
    """Return all of an object at an address. One that does not answer ends the run: it is no bad image."""

    def fetch() -> bytes:
        files, path = _open_filesystem(url)
        return bytes(files.cat_file(path))

    try:
        return _retry(fetch)
    except Exception as error:
        tries = "" if isinstance(error, _LASTING) else f", tried {_TRIES} times"
        raise UnansweredError(f"{url}: could not be read{tries}: {_say(error)}") from error


def _fetch_part(shard: str, offset: int, size: int) -> bytes:
    files, path = _open_filesystem(shard)
    data = bytes(files.cat_file(path, start=offset, end=offset + size))
    if len(data) != size:
        raise OSError(f"{len(data)} bytes came")
    return data


def _expand_braces(pattern: str) -> Iterator[str]:
    """Yield ``a-00.tar``, ``a-01.tar`` of ``a-{00..01}.tar``, as shells and WebDataset do."""
    found = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if found is None:
        yield pattern
        return
    first, last = found.groups()
    for number in range(int(first), int(last) + 1):
        yield from _expand_braces(f"{pattern[: found.start()]}{number:0{len(first)}d}{pattern[found.end() :]}")


def _read_index(shard: str, needs_labels: bool) -> list[tuple[str, int, int, str | None]]:
    """Return name, offset, size and label of each image of a shard."""
    name = _drop_query(shard)
    if not is_url(shard):
        with Path(shard).open("rb") as file:
            return list(_read_members(shard, file, needs_labels))
    try:
        return _retry(partial(_fetch_index, shard, name, needs_labels))
    except _ShardError:
        raise
    except Exception as error:
        reason = _say(error).removeprefix(f"{name}: ")
        raise ValueError(
            f"{name}: not to be read in parts: {reason}; see whether it is there, or download it"
        ) from error


def _fetch_index(shard: str, name: str, needs_labels: bool) -> list[tuple[str, int, int, str | None]]:
    files, path = _open_filesystem(shard)
    with files.open(path, "rb") as file:
        return list(_read_members(name, file, needs_labels))


@dataclass(kw_only=True)
class _Sample:
    """What was met of the members with one name up to its first dot."""

    image: tuple[str, int, int] | None = None
    other_image: str | None = None
    labels: dict[str, str] = field(default_factory=dict)  # by ending
    problem: _ShardError | None = None  # with one member that says the class; another may say it too

    def finish(self, path: str) -> Iterator[tuple[str, int, int, str | None]]:
        """Yield it if it has an image."""
        if self.image is not None:
            label = next((self.labels[ending] for ending in _LABELS if ending in self.labels), None)
            if label is None and self.problem is not None:
                raise self.problem
            yield *self.image, label
        elif self.other_image is not None:
            raise _ShardError(
                f"{path} member {self.other_image}: is no image of a sample, whose name ends at its first dot, as in "
                "WebDataset; rename it"
            )


def _read_members(path: str, file: Any, needs_labels: bool) -> Iterator[tuple[str, int, int, str | None]]:
    key, sample = "", _Sample()
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                folder, _, name = member.name.rpartition("/")
                if not member.isfile() or name.startswith("."):
                    _refuse_link(path, member)
                    continue
                stem, _, ending = name.partition(".")
                ending = ending.lower()
                if f"{folder}/{stem}" != key:
                    yield from sample.finish(path)
                    key, sample = f"{folder}/{stem}", _Sample()
                if f".{ending}" in SUFFIXES:
                    if sample.image is not None:
                        raise _ShardError(f"{path} member {member.name}: another image of that name came before")
                    sample.image = (member.name, member.offset_data, member.size)
                elif ending.endswith(SUFFIXES):
                    sample.other_image = member.name
                elif needs_labels and ending in _LABELS and member.size <= _MAX_LABEL_BYTES:
                    content = tar.extractfile(member)
                    assert content is not None
                    try:
                        if label := _read_label(content.read(), ending, where=f"{path} member {member.name}"):
                            sample.labels[ending] = label
                    except _ShardError as error:
                        sample.problem = error
            _check_end(path, file, tar.offset)
            yield from sample.finish(path)
    except tarfile.TarError as error:
        raise _ShardError(f"{path}: not readable as a tar file without compression: {error}") from error


def _refuse_link(path: str, member: tarfile.TarInfo) -> None:
    """Refuse an image that is a link to another member: it has no bytes of its own, and would be left out."""
    ending = member.name.rpartition("/")[2].partition(".")[2].lower()
    if (member.islnk() or member.issym()) and f".{ending}" in SUFFIXES:
        raise _ShardError(
            f"{path} member {member.name}: is a link to {member.linkname}: expected the image itself, as `tar "
            "--dereference --hard-dereference` packs it"
        )


def _check_end(path: str, file: Any, offset: int) -> None:
    """Refuse an archive without an end, or with more behind it: ``tarfile`` reads both in part."""
    file.seek(offset)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise _ShardError(
            f"{path}: has no end at byte {offset:,}: it was cut short or damaged, or its writer was not closed; make "
            "it again, or download it again"
        )
    place = offset + tarfile.BLOCKSIZE
    while block := file.read(_CHECKED_BYTES):
        if rest := block.lstrip(b"\0"):
            raise _ShardError(
                f"{path}: goes on behind its end, at byte {place + len(block) - len(rest):,}, as several archives "
                "joined do; list them one by one, or pack their files into one"
            )
        place += len(block)


def _read_label(content: bytes, ending: str, *, where: str) -> str | None:
    try:
        text = content.decode().strip()
        if ending != "json":
            return text
        fields = parse_json(text)
        value = fields.get("label", fields.get("cls")) if isinstance(fields, dict) else None
        return None if value in (None, "") else get_label(value, where=where, field="label")
    except UnicodeDecodeError as error:
        raise _ShardError(f"{where}: not UTF-8 (byte 0x{content[error.start]:02x}); convert the file") from error
    except json.JSONDecodeError as error:
        raise _ShardError(f"{where}: {describe_json_error(error)}") from error
    except ValueError as error:
        raise _ShardError(str(error)) from error
