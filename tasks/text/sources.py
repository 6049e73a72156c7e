"""Where rows come from: files, folders, patterns, saved data sets, the Hub, or Python's own manual."""

import glob
import hashlib
import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lit_fsdp.cache import sample_file
from lit_fsdp.checkpoint.remote import Location, RemotePath, UnreachableError, is_remote, locate
from lit_fsdp.errors import get_first_line, nearest
from lit_fsdp.files import refuse_special_file
from lit_fsdp.redaction import redact
from lit_fsdp.tasks.row_files import (
    Row,
    drop_filled,
    is_saved,
    list_class_names,
    list_files,
    open_saved,
    read_class_names,
    read_parquet,
    refuse_splits,
    tell_retries_once,
)
from lit_fsdp.tasks.text.files import READERS, read_file

TxtDocuments = Literal["file", "line", "paragraph"]
Source = str | list[str]
AnyPath = TypeVar("AnyPath", Path, RemotePath)

# What datasets writes beside rows.
_ABOUT_ROWS = ("dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")
_UNREAD = (".arrow", ".bz2", ".gz", ".ndjson", ".tsv", ".xz", ".zip", ".zst")  # which hold rows, too
_ROWS_AT_ONCE = 64  # that datasets hands over together


class Part(ABC):
    """One place to read rows from."""

    has_splits = False  # whether it is a data set, of which the setting chose a split

    @abstractmethod
    def identify(self) -> Any:
        """Return what changes if the rows may have changed, besides the contents of files, as JSON."""

    def list_files(self) -> list[Path]:
        """Return the files that the rows are read from."""
        return []

    def read(self) -> Iterator[Row]:
        """Yield all rows, in a fixed order."""
        return self.read_after(0)

    @abstractmethod
    def read_after(self, num_rows: int) -> Iterator[Row]:
        """Yield the rows after the first ones."""

    def identify_unread(self) -> Any:
        """Return what tells it from others without reading all of it, wherever it lies, as JSON."""
        return self.identify()

    def list_class_names(self, field: str) -> list[str] | None:
        """Return the names that it has for the numbers of a field, of the kind ``ClassLabel`` or lists of it."""
        del field
        return None


@dataclass(frozen=True, kw_only=True)
class FilePart(Part):
    """A local file, known by its path and contents."""

    path: Path
    txt_documents: TxtDocuments

    @override
    def identify(self) -> Any:
        return [str(self.path.resolve()), self.txt_documents]

    @override
    def list_files(self) -> list[Path]:
        return [self.path]

    @override
    def read_after(self, num_rows: int) -> Iterator[Row]:
        return read_file(self.path, txt_documents=self.txt_documents, num_skipped=num_rows)

    @override
    def identify_unread(self) -> Any:
        return [self.path.name, *sample_file(self.path), self.txt_documents]

    @override
    def list_class_names(self, field: str) -> list[str] | None:
        return _read_class_names(self.path, field)


@dataclass(frozen=True, kw_only=True)
class ObjectPart(Part):
    """A file at an address, known by what its store says of it.

    Args:
        path: Where it lies.
        state: Its size in bytes, and what else changes with it.
        txt_documents: What is one document in a ``.txt`` file.
    """

    path: RemotePath
    state: tuple[int, str]
    txt_documents: TxtDocuments

    @override
    def identify(self) -> Any:
        # Without what signs an address, which is another one each time.
        return [str(self.path).partition("?")[0], *self.state, self.txt_documents]

    @override
    def read_after(self, num_rows: int) -> Iterator[Row]:
        rows = read_file(self.path, txt_documents=self.txt_documents, num_skipped=num_rows)
        shown = redact(str(self.path))  # as the places of bad rows are kept on disk
        return rows if shown == str(self.path) else (_rename(row, str(self.path), shown) for row in rows)

    @override
    def list_class_names(self, field: str) -> list[str] | None:
        return _read_class_names(self.path, field)


@dataclass(frozen=True, kw_only=True)
class DatasetPart(Part):
    """A split of a data set of the ``datasets`` library, known by its name, number of rows and Arrow files."""

    name: str
    dataset: Any
    has_splits: bool = True

    @override
    def identify(self) -> Any:
        return [self.name, len(self.dataset)]

    @override
    def list_files(self) -> list[Path]:
        return [Path(file["filename"]) for file in self.dataset.cache_files]

    @override
    def identify_unread(self) -> Any:
        # Without its folder, which may move, as that of a file may.
        places = sorted({0, len(self.dataset) // 2, len(self.dataset) - 1}) if len(self.dataset) else []
        stored = self.dataset.with_format("arrow")  # as images and audio are not the same when they are decoded twice
        rows = repr([stored[place].to_pydict() for place in places])
        return [self.name.rpartition("/")[2], len(self.dataset), hashlib.sha256(rows.encode()).hexdigest()]

    @override
    def read_after(self, num_rows: int) -> Iterator[Row]:
        for number, fields in islice(enumerate(self.dataset, start=1), num_rows, None):
            yield Row(where=f"{self.name} row {number}", fields=drop_filled(fields))

    @override
    def list_class_names(self, field: str) -> list[str] | None:
        return list_class_names(self.dataset.features.get(field))


@dataclass(frozen=True, kw_only=True)
class StreamedPart(Part):
    """One shard of a data set that ``datasets`` streams, such as a file of it on the Hub.

    Args:
        name: Of the data set, and its shard.
        dataset: An ``IterableDataset`` of one shard.
        revision: What changes with the data set.
    """

    name: str
    dataset: Any
    revision: str
    has_splits: bool = True

    @override
    def identify(self) -> Any:
        return [self.name, self.revision]

    @override
    def read_after(self, num_rows: int) -> Iterator[Row]:
        # Not iter(dataset), which in a worker gives only the shards that datasets deals out to that one.
        number = num_rows
        batches = self.dataset.skip(num_rows).iter(batch_size=_ROWS_AT_ONCE)
        while (batch := self._fetch(batches, number)) is not None:
            for values in zip(*batch.values(), strict=True):
                number += 1
                fields = drop_filled(dict(zip(batch, values, strict=True)))
                yield Row(where=f"{self.name} row {number}", fields=fields)

    def _fetch(self, batches: Iterator[dict[str, list[Any]]], number: int) -> dict[str, list[Any]] | None:
        try:
            return next(batches, None)
        except Exception as error:  # of httpx, fsspec, pyarrow and datasets, each its own
            reason = (str(error).strip().splitlines() or ["no reason given"])[0]
            raise ValueError(
                f"{self.name} after row {number}: cannot be read on: {type(error).__name__}: {reason}; --ckpt_path "
                "last goes on from the last checkpoint"
            ) from error


@dataclass(frozen=True, kw_only=True)
class PydocPart(Part):
    """The language reference that CPython ships for ``help("topic")``: 0.5 MB of English on any machine.

    Args:
        txt_documents: What is one document of it: a topic, a line or a paragraph.
    """

    txt_documents: TxtDocuments = "file"

    @override
    def identify(self) -> Any:
        pieces = [self.txt_documents] if self.txt_documents != "file" else []
        return [sys.version, hashlib.sha256(json.dumps(self._get_topics()).encode()).hexdigest(), *pieces]

    @override
    def read_after(self, num_rows: int) -> Iterator[Row]:
        return islice(self.iterate_rows(), num_rows, None)

    def iterate_rows(self) -> Iterator[Row]:
        """Yield all rows, topic by topic."""
        for name, text in sorted(self._get_topics().items()):
            where = f'pydoc topic "{name}"'
            if self.txt_documents == "file":
                yield Row(where=where, fields={"text": text})
                continue
            pieces = text.splitlines() if self.txt_documents == "line" else re.split(r"\n\s*\n", text)
            for number, piece in enumerate(filter(str.strip, pieces), start=1):
                yield Row(where=f"{where} {self.txt_documents} {number}", fields={"text": piece})

    def _get_topics(self) -> dict[str, str]:
        from pydoc_data.topics import topics

        return dict(topics)


def list_parts(source: Source, *, split: str, txt_documents: TxtDocuments, is_streamed: bool = False) -> list[Part]:
    """Return what a source setting names, files sorted by path; raise if it names nothing.

    Args:
        source: One or several of: a file, a folder, a pattern, the name of a data set, ``pydoc``.
        split: Of saved and Hub data sets with several.
        txt_documents: What is one document in a ``.txt`` file.
        is_streamed: Do not download data sets; they are read from the Hub, a part for each of their shards.
    """
    if isinstance(source, list):
        if not source:
            raise ValueError("the list of sources is empty; name at least one file or data set")
        options: dict[str, Any] = {"split": split, "txt_documents": txt_documents, "is_streamed": is_streamed}
        return [part for one in source for part in list_parts(one, **options)]
    if source == "pydoc":
        return [PydocPart(txt_documents=txt_documents)]
    if is_remote(source):
        where = locate(source)
        if isinstance(where, RemotePath):
            found = _find_objects(where)
            return [ObjectPart(path=path, state=state, txt_documents=txt_documents) for path, state in found.items()]
        source = str(where)
    path = Path(source).expanduser()
    if is_saved(path):
        rows, has_split = open_saved(path, split)
        return [DatasetPart(name=f"{path} [{split}]" if has_split else str(path), dataset=rows, has_splits=has_split)]
    paths = _find_files(source, path)
    if paths is None:
        return list_shards(source, split) if is_streamed else [_open_hub(source, split)]
    return [FilePart(path=path, txt_documents=txt_documents) for path in paths]


def check_source(source: Source) -> None:
    """Refuse what is missing; data sets on the Hub are not asked for."""
    for one in [source] if isinstance(source, str) else source:
        where = locate(one) if is_remote(one) else Path(one).expanduser()
        if isinstance(where, RemotePath):
            _find_objects(where)
        elif one != "pydoc" and not is_saved(where):
            _find_files(str(where) if is_remote(one) else one, where)


def read_parts(parts: Iterable[Part], what: str) -> Iterable[Row]:
    """Return the rows of all parts, in a terminal with a progress bar when it takes long."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    rows = (row for part in parts for row in part.read())
    return tqdm(rows, desc=what, unit=" rows", mininterval=1.0, delay=2.0, disable=None)


def _find_objects(where: RemotePath) -> dict[RemotePath, tuple[int, str]]:
    """Return the files at an address, each with what changes with it."""
    kinds = ", ".join(READERS)
    try:
        found = where.find()
    except UnreachableError as error:
        raise ValueError(f"{error}; see whether it is there, and whether you may read it") from error
    if not found:
        raise ValueError(f"{where}: there is no such object, and none below it")
    is_folder = where not in found and not glob.has_magic(str(where))
    read = _choose_files(where, list(found)) if is_folder else [p for p in found if p.suffix.lower() in READERS]
    if not read:
        what = (
            f"cannot read {where.suffix or 'a file without a suffix'}"
            if where in found
            else "nothing there can be read"
        )
        raise ValueError(f"{where}: {what}; known are {kinds}")
    return {path: found[path] for path in read}


def _read_class_names(path: Location, field: str) -> list[str] | None:
    return read_class_names(path, field) if READERS[path.suffix.lower()] is read_parquet else None


def _rename(row: Row, path: str, shown: str) -> Row:
    return replace(row, where=row.where.replace(path, shown))


def _choose_files(folder: AnyPath, found: list[AnyPath]) -> list[AnyPath]:
    """Return which files of a folder are read; warn of others that seem to hold rows."""
    read = [path for path in found if path.suffix.lower() in READERS and path.name not in _ABOUT_ROWS]
    refuse_splits(folder, (str(path).removeprefix(f"{folder}/") for path in read))
    if read and (unread := [path for path in found if path.suffix.lower() in _UNREAD]):
        rank_zero_warn(
            f"{folder}: {len(unread)} files there are not read, such as {unread[0].name}: expected "
            f"{', '.join(READERS)}; unpack or convert them, or move them away"
        )
    return read


def _find_files(source: str, path: Path) -> list[Path] | None:
    """Return the files a path or pattern names, or None if it must be the name of a data set."""
    kinds = ", ".join(READERS)
    if path.is_file():
        if path.suffix.lower() not in READERS:
            raise ValueError(f"{source}: cannot read {path.suffix or 'a file without a suffix'}; known are {kinds}")
        return [path]
    if path.is_dir():
        found = _choose_files(path, list_files(path, [*READERS, *_UNREAD]))
        if not found:
            raise ValueError(f"{source}: no file in this folder ends in {kinds}")
        return found
    if glob.has_magic(source):
        found = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if not p.is_dir())  # noqa: PTH207  # may be absolute
        if not found:
            raise ValueError(f"no file matches {source}; the pattern is taken from {Path.cwd()}")
        return [p for one in found for p in _find_files(str(one), one) or []]
    refuse_special_file(path, source)
    if path.suffix.lower() in READERS or path.is_absolute() or source.startswith(("~", ".")) or source.count("/") > 1:
        names = [other.name for other in path.parent.glob("*") if other.is_dir() or other.suffix.lower() in READERS]
        near = nearest(path.name, names)
        hint = f"; did you mean {path.parent / near}?" if near else ""
        raise ValueError(f"{source}: no such file or folder, seen from {Path.cwd()}{hint}")
    return None


def list_shards(source: str, split: str) -> list[Part]:
    """Return the shards of a data set of the Hub, to be read from there."""
    from datasets import load_dataset_builder

    name, _, config = source.partition(":")
    with _plain_errors(source, split):
        builder = load_dataset_builder(name, config or None)
        whole = builder.as_streaming_dataset(split=split)
    number = whole.num_shards
    shards = [whole.shard(num_shards=number, index=i) for i in range(number)]
    where = f"{source} [{split}]"
    return [
        StreamedPart(name=f"{where} shard {i} of {number}", dataset=shard, revision=str(builder.hash))
        for i, shard in enumerate(shards, start=1)
    ]


def _open_hub(source: str, split: str) -> DatasetPart:
    from datasets import load_dataset

    name, _, config = source.partition(":")
    with _plain_errors(source, split):
        return DatasetPart(name=f"{source} [{split}]", dataset=load_dataset(name, config or None, split=split))


@contextmanager
def _plain_errors(source: str, split: str) -> Iterator[None]:
    try:
        with tell_retries_once():
            yield
    except (OSError, ValueError) as error:
        reason = get_first_line(error)
        raise ValueError(
            f"{source!r} is neither a file or folder here (seen from {Path.cwd()}) nor a data set that could "
            f"be loaded from the Hugging Face Hub, split {split!r}: {reason}"
        ) from error
