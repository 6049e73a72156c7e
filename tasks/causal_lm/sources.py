"""Where rows come from: files, folders, patterns, saved data sets, the Hub, or Python's own manual."""

import glob
import hashlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from lit_fsdp.files import refuse_special_file
from lit_fsdp.tasks.causal_lm.files import READERS, read_file
from lit_fsdp.tasks.row_files import Row, list_files

TxtDocuments = Literal["file", "line", "paragraph"]
Source = str | list[str]

SAVED_MARKERS = ("dataset_dict.json", "state.json")  # what datasets' save_to_disk leaves


class Part(ABC):
    """One place to read rows from."""

    has_splits = False  # whether it is a data set, of which the setting chose a split

    @abstractmethod
    def identify(self) -> Any:
        """Return what changes if the rows may have changed, besides the contents of files, as JSON."""

    def list_files(self) -> list[Path]:
        """Return the files that the rows are read from."""
        return []

    @abstractmethod
    def read(self) -> Iterator[Row]:
        """Yield all rows, in a fixed order."""


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
    def read(self) -> Iterator[Row]:
        return read_file(self.path, txt_documents=self.txt_documents)


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
    def read(self) -> Iterator[Row]:
        for number, fields in enumerate(self.dataset, start=1):
            yield Row(where=f"{self.name} row {number}", fields=fields)


class PydocPart(Part):
    """The language reference that CPython ships for ``help("topic")``: 0.5 MB of English on any machine."""

    @override
    def identify(self) -> Any:
        return [sys.version, hashlib.sha256(json.dumps(self._get_topics()).encode()).hexdigest()]

    @override
    def read(self) -> Iterator[Row]:
        for name, text in sorted(self._get_topics().items()):
            yield Row(where=f'pydoc topic "{name}"', fields={"text": text})

    def _get_topics(self) -> dict[str, str]:
        from pydoc_data.topics import topics

        return dict(topics)


def list_parts(source: Source, *, split: str, txt_documents: TxtDocuments) -> list[Part]:
    """Return what a source setting names, files sorted by path; raise if it names nothing.

    Args:
        source: One or several of: a file, a folder, a pattern, the name of a data set, ``pydoc``.
        split: Of saved and Hub data sets with several.
        txt_documents: What is one document in a ``.txt`` file.
    """
    if isinstance(source, list):
        if not source:
            raise ValueError("the list of sources is empty; name at least one file or data set")
        return [part for one in source for part in list_parts(one, split=split, txt_documents=txt_documents)]
    if source == "pydoc":
        return [PydocPart()]
    path = Path(source).expanduser()
    if path.is_dir() and any((path / marker).exists() for marker in SAVED_MARKERS):
        return [_open_saved(path, split)]
    paths = _find_files(source, path)
    if paths is None:
        return [_open_hub(source, split)]
    return [FilePart(path=path, txt_documents=txt_documents) for path in paths]


def check_source(source: Source) -> None:
    """Refuse what is missing on this machine; data sets on the Hub are not asked for."""
    for one in [source] if isinstance(source, str) else source:
        path = Path(one).expanduser()
        if one != "pydoc" and not (path.is_dir() and any((path / marker).exists() for marker in SAVED_MARKERS)):
            _find_files(one, path)


def read_parts(parts: Iterable[Part], what: str) -> Iterable[Row]:
    """Return the rows of all parts, with a progress bar when it takes long."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    rows = (row for part in parts for row in part.read())
    return tqdm(rows, desc=what, unit=" rows", mininterval=1.0, delay=2.0)


def _find_files(source: str, path: Path) -> list[Path] | None:
    """Return the files a path or pattern names, or None if it must be the name of a data set."""
    kinds = ", ".join(READERS)
    if path.is_file():
        if path.suffix.lower() not in READERS:
            raise ValueError(f"{source}: cannot read {path.suffix or 'a file without a suffix'}; known are {kinds}")
        return [path]
    if path.is_dir():
        found = list_files(path.rglob("*"), list(READERS))
        if not found:
            raise ValueError(f"{source}: no file in this folder ends in {kinds}")
        return found
    if glob.has_magic(source):
        found = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if not p.is_dir())  # noqa: PTH207  # may be absolute
        if not found:
            raise ValueError(f"no file matches {source}; the pattern is taken from {Path.cwd()}")
        return [p for one in found for p in _find_files(str(one), one) or []]
    refuse_special_file(path, source)
    if path.suffix in READERS or path.is_absolute() or source.startswith(("~", ".")) or source.count("/") > 1:
        names = [other.name for other in path.parent.glob("*") if other.is_dir() or other.suffix in READERS]
        near = get_close_matches(path.name, names, n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ValueError(f"{source}: no such file or folder, seen from {Path.cwd()}{hint}")
    return None


def _open_saved(path: Path, split: str) -> DatasetPart:
    from datasets import DatasetDict, load_from_disk

    saved = load_from_disk(str(path))
    if not isinstance(saved, DatasetDict):
        return DatasetPart(name=str(path), dataset=saved, has_splits=False)
    if split not in saved:
        raise ValueError(f"{path}: has no split {split!r}; it has {', '.join(saved)}")
    return DatasetPart(name=f"{path} [{split}]", dataset=saved[split])


def _open_hub(source: str, split: str) -> DatasetPart:
    from datasets import load_dataset

    name, _, config = source.partition(":")
    try:
        dataset = load_dataset(name, config or None, split=split)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{source!r} is neither a file or folder here (seen from {Path.cwd()}) nor a data set that could "
            f"be loaded from the Hugging Face Hub, split {split!r}: {reason}"
        ) from error
    return DatasetPart(name=f"{source} [{split}]", dataset=dataset)
