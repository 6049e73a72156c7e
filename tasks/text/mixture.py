"""Several sources of one split: each with its own columns, and with a weight, its share of the rows of an epoch.

Note [Weights]: a weight is the share of rows (documents, not tokens) that a source gives, as the probabilities of
``interleave_datasets`` are, but exact. An epoch has as many rows as all sources together; each source gives its share
of them to within one row, and they are spread evenly. Rows of a small source come several times, some rows of a large
one not at all. Which ones is drawn once, so every epoch has the same rows, and an order of its own. The result is a
list of documents like that of a single source: packing, ranks and resumes know nothing of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from os import PathLike, fspath
from typing import Any

import numpy as np
from lightning.pytorch import LightningDataModule
from numpy.typing import NDArray

from lit_fsdp.parsing.mappings import read_mappings
from lit_fsdp.tasks.data import DEFAULT_SPLITS, SPLITS_OF_STAGE, Split, TaskData
from lit_fsdp.tasks.text.rows import Columns, Format
from lit_fsdp.tasks.text.sources import Part, TxtDocuments, check_source, list_parts
from lit_fsdp.tasks.text.tokens import NUM_NAMED, TokenStore

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """One of several sources.

    Args:
        path: A source as a split takes it, or a list of files that are one source.
        weight: Share of the rows of an epoch that come from here, in proportion to the other weights. All sources of
            ``train`` have one, or none has: then each row comes once.
        split: Which split of a data set to take; that of the setting beside, such as ``train_split``, if not given.
        format: How its rows are read; the data's ``format`` if not given.
        columns: The fields of its rows; the data's ``columns`` if not given.
    """

    path: str | list[str]
    weight: int | float | None = None  # as it is given: a stream is known by it
    split: str | None = None
    format: Format | None = None
    columns: Columns | None = None

    @property
    def name(self) -> str:
        """What it is called in errors and figures."""
        return ", ".join(map(str, self.path)) if isinstance(self.path, list) else str(self.path)


# Mappings, not ``DataSource``: where a list may hold a dataclass, jsonargparse 4.53 takes any path for that of a file
# with settings, and reads all of it.
Sources = str | list[str | dict[str, Any]]


def list_groups(split: str, sources: Sources) -> list[tuple[str, DataSource]]:
    """Return sources one by one, each with its place in the settings; plain texts alone are one source.

    Raises:
        ValueError: A key, a value or a weight cannot be.
    """
    if isinstance(sources, str | PathLike):
        return [(split, DataSource(path=fspath(sources)))]
    paths = [fspath(one) for one in sources if isinstance(one, str | PathLike)]
    if len(paths) == len(sources):
        return [(split, DataSource(path=paths))]
    places = [f"{split}[{n}]" for n in range(len(sources))]
    groups = [
        DataSource(path=fspath(one)) if isinstance(one, str | PathLike) else _read_source(place, one)
        for place, one in zip(places, sources, strict=True)
    ]
    _check_weights(split, [group.weight for group in groups])
    return list(zip(places, groups, strict=True))


def check_sources(data: TaskData, stage: str) -> None:
    """Refuse what is not set or not there for a command of Trainer, where nothing is made by ``prepare_data`` first.

    Raises:
        ValueError: With the place of the source in the settings.
    """
    needed = {"fit": "train", "validate": "validation"}.get(stage, stage)
    is_made_later = type(data).prepare_data is not LightningDataModule.prepare_data
    for split in SPLITS_OF_STAGE.get(stage, ()):  # plans need no data
        sources = data.sources[split][0]
        if sources is None and split == needed and not (split == "validation" and data.holds_out):
            raise data.describe_missing(split)
        for place, group in [] if sources is None or is_made_later else list_groups(split, sources):
            try:
                check_source(group.path)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error


def _read_source(place: str, given: object) -> DataSource:
    if not isinstance(given, Mapping):
        what = "expected a path, or a mapping such as {path: a.jsonl, weight: 1}"
        raise ValueError(f"{place}: got {given!r}: {what}")  # noqa: TRY004  of a setting
    if isinstance(columns := given.get("columns"), str):  # which would be read as the name of a class
        raise ValueError(f"{place}.columns: got {columns!r}: expected a mapping of our names to the fields of the rows")  # noqa: TRY004
    source: DataSource = read_mappings({place: given}, {place: DataSource})[place]
    return source


def _check_weights(split: str, weights: Sequence[float | None]) -> None:
    if all(weight is None for weight in weights):
        return
    for n, weight in enumerate(weights):
        if weight is None:
            raise ValueError(
                f"{split}[{n}].weight: missing: expected one for each source, as others have one; or leave all out to "
                "take each row once"
            )
        if not 0 < weight < math.inf:
            raise ValueError(
                f"{split}[{n}].weight: got {weight}: expected more than 0; leave the source out to take nothing of it"
            )
    if split != "train":
        raise ValueError(f"{split}: weights are for train, all other rows are read once; leave weight out")


def list_group_parts(
    groups: Sequence[tuple[str, DataSource]],
    *,
    split: Split,
    split_name: str | None,
    txt_documents: TxtDocuments,
    is_streamed: bool = False,
) -> list[list[Part]]:
    """Return the parts of each source; see ``list_parts``.

    Args:
        groups: The sources, each with its place in the settings.
        split: What they are read for.
        split_name: Of data sets, where a source names no split of its own.
        txt_documents: What is one document in a ``.txt`` file.
        is_streamed: Whether rows are read while the model trains.

    Raises:
        ValueError: A source is not there, or has no splits to choose one of.
    """
    found: list[list[Part]] = []
    for place, group in groups:
        own = group.split or split_name or DEFAULT_SPLITS[split]
        try:
            parts = list_parts(group.path, split=own, txt_documents=txt_documents, is_streamed=is_streamed)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        if group.split is not None and not any(part.has_splits for part in parts):
            raise ValueError(f"{place}.split: got {group.split!r}: {group.name} has no splits; leave it out")
        found.append(parts)
    others = [(group.name, parts) for (_, group), parts in zip(groups, found, strict=True) if group.split is None]
    if split_name is not None and not any(part.has_splits for _, parts in others for part in parts):
        reason = f"{', '.join(name for name, _ in others)} has no splits" if others else "each source has its own split"
        raise ValueError(f"{split}_split: got {split_name!r}: {reason}; leave it out")
    return found


class JoinedTokens:
    """Documents of several stores, one store after the other, as one.

    Args:
        stores: Of each source.
    """

    def __init__(self, stores: Sequence[TokenStore]) -> None:
        self.stores = stores
        self.lengths: Ints = np.concatenate([store.lengths for store in stores])
        self.ends: Ints = np.cumsum([len(store) for store in stores])  # of documents, by store

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, document: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return ids of a document and whether each is learned; views of the file, not copies."""
        number = int(np.searchsorted(self.ends, document, side="right"))
        return self.stores[number][int(document - self.ends[number])]  # from the end

    @property
    def num_tokens(self) -> int:
        """Of all documents."""
        return sum(store.num_tokens for store in self.stores)

    @property
    def places(self) -> Ints:
        """Of prompts: which row of all sources, one after the other, each is."""
        num_rows = [len(store) + store.summary["num_bad"] for store in self.stores]
        begins = np.cumsum([0, *num_rows[:-1]])
        return np.concatenate([store.places + begin for store, begin in zip(self.stores, begins, strict=True)])

    @property
    def summary(self) -> dict[str, Any]:
        """What all stores tell: numbers added up, of named rows the first of each in turn."""
        found = [store.summary for store in self.stores]
        rows = [row for several in zip_longest(*(one["bad"] for one in found)) for row in several if row is not None]
        num_unread: Counter[str] = Counter()
        for one in found:
            num_unread.update(one["num_unread"])
        return {"num_bad": sum(one["num_bad"] for one in found), "bad": rows[:NUM_NAMED], "num_unread": num_unread}

    def list_digests(self) -> list[str]:
        """Return what tells the tokens from others."""
        return [digest for store in self.stores for digest in store.list_digests()]

    def split(self, documents: Ints) -> list[Ints]:
        """Return of some documents those of each store, still numbered as here."""
        numbers = np.searchsorted(self.ends, documents, side="right")
        return [documents[numbers == number] for number in range(len(self.stores))]

    def count_learned(self, documents: Ints, longest: int | None = None) -> int:
        """Return how many tokens of some documents are learned; of each only the first ones, if it is longer."""
        return sum(
            store.count_learned(own - (end - len(store)), longest)
            for store, end, own in zip(self.stores, self.ends, self.split(documents), strict=True)
        )


def mix_documents(store: JoinedTokens, documents: Ints, groups: Sequence[DataSource], *, seed: int | None) -> Ints:
    """Return the documents of an epoch, in which each source has its share: Note [Weights].

    Args:
        store: Of all sources.
        documents: Those that may be trained on.
        groups: The sources, each with a weight.
        seed: Draws which rows of a large source are taken; ``None`` takes its first ones.

    Raises:
        ValueError: A source would give no row.
    """
    own = store.split(documents)
    counts = share_out(len(documents), [group.weight or 0.0 for group in groups])
    for n, (group, rows, count) in enumerate(zip(groups, own, counts, strict=True)):
        if not len(rows):
            raise ValueError(
                f"train[{n}] ({group.name}): validation_fraction holds out all of its rows; lower it, or set validation"
            )
        if not count:
            raise ValueError(
                f"train[{n}].weight: got {group.weight}: of {len(documents)} rows that is less than one; raise it, or "
                "leave the source out"
            )
    return draw_rows(own, counts, seed=seed)


def share_out(total: int, weights: Sequence[float]) -> list[int]:
    """Return whole numbers in proportion to weights that add up to a total, each right to within one."""
    exact = np.asarray(weights, dtype=np.float64) / math.fsum(weights) * total
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]] += 1
    return [int(count) for count in counts]


def draw_rows(rows: Sequence[Ints], counts: Sequence[int], *, seed: int | None) -> Ints:
    """Return so many rows of each source, evenly spread; those of a source in its order, again from its first one.

    Args:
        rows: Of each source, at least one.
        counts: How many of them to return.
        seed: Draws which rows come once more than others; ``None`` takes the first ones.
    """
    drawn = []
    for number, (own, count) in enumerate(zip(rows, counts, strict=True)):
        times, rest = divmod(count, len(own))
        chosen = np.arange(len(own)) if seed is None else np.random.default_rng([seed, number]).permutation(len(own))
        drawn += [*[own] * times, own[np.sort(chosen[:rest])]]
    places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    return np.concatenate(drawn)[np.argsort(places, kind="stable")]


@dataclass(frozen=True, kw_only=True)
class SourceCount:
    """What one of several sources gives to an epoch.

    Args:
        name: Its path, and its split if it names one.
        num_documents: That it has to train on.
        num_used: Of these, how many come at all.
        num_drawn: Rows of an epoch that come from it.
        num_tokens: Of these rows.
        share: Of all rows of the epoch.
    """

    name: str
    num_documents: int
    num_used: int
    num_drawn: int
    num_tokens: int
    share: float

    def describe(self) -> str:
        """Return it as a line."""
        line = f"{self.name}: {self.num_drawn:,} rows ({self.share:.1%}), {self.num_tokens:,} tokens, of "
        line += f"{self.num_documents:,} rows"
        if self.num_used < self.num_documents:
            return f"{line}: {self.num_documents - self.num_used:,} are left out"
        times = self.num_drawn / self.num_documents
        return line if times == 1 else f"{line}: each comes {times:.4g} times"


def count_sources(
    store: JoinedTokens, groups: Iterable[DataSource], own: Ints, documents: Ints, longest: int | None
) -> list[SourceCount]:
    """Return what each source gives.

    Args:
        store: Of all sources.
        groups: The sources.
        own: The documents that may be taken.
        documents: Those of an epoch.
        longest: Of a longer document, only so many tokens count.
    """
    found = []
    for group, rows, drawn in zip(groups, store.split(own), store.split(documents), strict=True):
        lengths = store.lengths[drawn] if longest is None else np.minimum(store.lengths[drawn], longest)
        found.append(
            SourceCount(
                name=group.name if group.split is None else f"{group.name} [{group.split}]",
                num_documents=len(rows),
                num_used=len(np.unique(drawn)),
                num_drawn=len(drawn),
                num_tokens=int(lengths.sum()),
                share=len(drawn) / len(documents),
            )
        )
    return found
