"""Rows as the model sees them, and what is in all of them: for eyes, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_fsdp.redaction import redact
from lit_fsdp.reporting.sections import Section, Table
from lit_fsdp.tasks.length_groups import compute_efficiency
from lit_fsdp.tasks.row_files import show_controls
from lit_fsdp.tasks.text.batches import IGNORED, DocumentRows, PackedRows
from lit_fsdp.tasks.text.mixture import JoinedTokens, SourceCount
from lit_fsdp.tasks.text.streaming import HeldDocuments
from lit_fsdp.tasks.text.tokens import TokenStore, describe_unread

_NUM_BINS = 8
# Of a row in the report; a row may have 100,000 tokens.
_NUM_PIECES, _NUM_CHARACTERS = 16, 400


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Tokens that follow each other, all learned or none.

    Args:
        text: What they say, special tokens included.
        ids: Of the tokens.
        is_learned: Whether loss is taken on them.
        begins_document: Whether attention begins anew here.
    """

    text: str
    ids: Sequence[int]
    is_learned: bool
    begins_document: bool

    def mark(self) -> str:
        """Return its text, with marks around what is learned: for where there are no colors."""
        return f"⟦{self.text}⟧" if self.is_learned else self.text


@dataclass(frozen=True, kw_only=True)
class Preview:
    """What a split holds.

    Args:
        rows: The first ones.
        num_rows: Of all.
        is_packed: Whether a row holds several documents.
        lengths: Tokens of each document, [documents], before any is cut.
        seq_length: The longest that a row can be.
        num_learned: Tokens of rows that loss is taken on, without what is cut off; ``None`` if not tokens are learned.
        efficiency: The share of all positions of batches that hold a token, not padding.
        num_bad: Rows that were left out.
        bad: The first of them, each with its place and reason.
        is_grouped: Whether rows of like lengths are in a batch.
        other_efficiency: With ``group_by_length`` the other way; ``None`` if it cannot be.
        sources: What each of several gives.
        num_left_over: Rows of an epoch that fill no batch of all ranks, so that it leaves them out; ``None`` if the
            ranks are not known.
        num_empty: Rows that have nothing left to learn, as they are cut.
        num_unread: How many rows have a field that is not read, by its name.
        is_begin: Whether this is only what a stream begins with.
        labels: What labels there are of whole rows, a line each.
    """

    rows: Sequence[Sequence[Piece]]
    num_rows: int
    is_packed: bool
    lengths: NDArray[np.int64]
    seq_length: int
    num_learned: int | None
    efficiency: float
    num_bad: int
    bad: Sequence[str]
    is_grouped: bool = False
    other_efficiency: float | None = None
    sources: Sequence[SourceCount] = ()
    num_left_over: int | None = None
    num_empty: int = 0
    num_unread: Mapping[str, int] = field(default_factory=dict)
    is_begin: bool = False
    labels: Sequence[str] = ()

    @property
    def num_cut(self) -> int:
        """How many documents are longer than a row."""
        return int((self.lengths > self.seq_length).sum())

    @property
    def num_kept(self) -> int:
        """How many tokens the rows hold, without what is cut off."""
        return int((self.lengths if self.is_packed else np.minimum(self.lengths, self.seq_length)).sum())

    def describe(self) -> list[str]:
        """Return what all rows hold, a line each."""
        num_tokens = int(self.lengths.sum())
        way = "packed into" if self.is_packed else "as"
        begin = "what the stream begins with: " if self.is_begin else ""
        lines = [
            f"{begin}{len(self.lengths):,} documents, {num_tokens:,} tokens, {way} {self.num_rows:,} rows",
            *self.labels,
            *(
                []
                if self.num_learned is None
                else [f"{self.num_learned / self.num_kept:.1%} of the tokens are learned"]
            ),
            f"{self.efficiency:.1%} of what is computed are tokens, the rest is padding",
        ]
        if self.other_efficiency is not None:
            other = "without group_by_length" if self.is_grouped else "with group_by_length: true"
            lines.append(f"{self.other_efficiency:.1%} would be {other}")
        lines += [source.describe() for source in self.sources]
        if self.num_cut:
            kept = "go on in the next row" if self.is_packed else "are cut there"
            lost = f"; {self.num_empty:,} of them keep no token to learn" if self.num_empty else ""
            lines.append(f"{self.num_cut:,} documents are longer than seq_length {self.seq_length} and {kept}{lost}")
        if self.num_left_over:
            lines.append(f"{self.num_left_over:,} rows at the end of an epoch fill no batch and are left out")
        lines += describe_unread(self.num_unread)
        return [*lines, f"{self.num_bad:,} bad rows were left out; the first:", *self.bad] if self.num_bad else lines

    def make_section(self) -> Section:
        """Return it as a part of the report."""
        rows = [
            (
                f"row {number}: {describe_row(row, has_learned=self.num_learned is not None)}",
                _shorten(row).replace("\n", "↵ "),
            )
            for number, row in enumerate(self.rows, start=1)
        ]
        numbers = {
            "num_documents": len(self.lengths),
            "num_tokens": int(self.lengths.sum()),
            "num_learned": self.num_learned,
            "num_rows": self.num_rows,
            "num_cut": self.num_cut,
            "num_cut_off_tokens": int(self.lengths.sum()) - self.num_kept,
            "num_empty": self.num_empty,
            "num_left_over": self.num_left_over,
            "num_bad": self.num_bad,
            "num_unread": self.num_unread,
            "efficiency": self.efficiency,
            "group_by_length": self.is_grouped,
            "other_efficiency": self.other_efficiency,
            "sources": [asdict(source) for source in self.sources],
        }
        first = Table(
            title="The first rows" + ", ⟦learned⟧ tokens marked" * (self.num_learned is not None), columns=(), rows=rows
        )
        return Section(title="Training data", name="data", numbers=numbers, tables=[first], notes=self.describe())

    def count_lengths(self) -> Iterator[tuple[int, int, int]]:
        """Yield the shortest and longest of a range of lengths, and how many documents have one of them."""
        shortest, longest = int(self.lengths.min()), int(self.lengths.max())
        edges = np.unique(np.linspace(shortest, longest + 1, _NUM_BINS + 1).astype(np.int64))
        for begin, end, count in zip(edges, edges[1:], np.histogram(self.lengths, edges)[0], strict=False):
            yield int(begin), int(end) - 1, int(count)


def describe_row(row: Sequence[Piece], *, has_learned: bool = True) -> str:
    """Return how long a row is, and how much of it is learned, where tokens are."""
    num_learned = sum(len(piece.ids) for piece in row if piece.is_learned)
    return f"{sum(len(piece.ids) for piece in row)} tokens" + f", {num_learned} learned" * has_learned


def make_preview(
    rows: PackedRows | DocumentRows,
    store: TokenStore | JoinedTokens | HeldDocuments,
    *,
    tokenizer: Any,
    num_shown: int,
    batch_size: int,
    pad_to_multiple_of: int,
    draw_order: Callable[[NDArray[np.int64], bool], NDArray[np.int64]] | None,
    is_grouped: bool,
    sources: Sequence[SourceCount],
    is_begin: bool = False,
) -> Preview:
    """Return the preview of rows.

    Args:
        rows: Of one split.
        store: That they are read from.
        tokenizer: Turns tokens into text.
        num_shown: How many rows to turn into text, at most all.
        batch_size: Rows in a batch, all of which are padded to the longest.
        pad_to_multiple_of: The length of a padded batch is rounded up to a multiple of this.
        draw_order: Returns rows as an epoch has them, of their lengths and whether like ones are grouped; ``None`` of
            rows that keep their order.
        is_grouped: Whether they are in this run.
        sources: What each of several gives.
        is_begin: Whether the rows are only what a stream begins with.
    """
    documents = rows.documents
    is_packed = isinstance(rows, PackedRows)
    lengths = store.lengths[documents]
    # Of what a stream begins with, the last row is filled up only because nothing is read that follows.
    num_tokens, num_places = int(lengths.sum()), len(rows) * rows.seq_length
    efficiency, other = num_tokens / (min(num_places, num_tokens) if is_begin else num_places), None
    if isinstance(rows, DocumentRows):
        kept = rows.lengths
        orders = [kept] if draw_order is None else [kept[draw_order(kept, way)] for way in (is_grouped, not is_grouped)]
        efficiency, *others = (compute_efficiency(order, batch_size, pad_to_multiple_of) for order in orders)
        other = others[0] if others else None
    return Preview(
        rows=[list(_cut(rows[row], tokenizer)) for row in range(min(num_shown, len(rows)))],
        num_rows=len(rows),
        is_packed=is_packed,
        lengths=lengths,
        seq_length=rows.seq_length,
        num_learned=store.count_learned(documents, None if is_packed else rows.seq_length),
        efficiency=efficiency,
        is_grouped=is_grouped,
        other_efficiency=other,
        sources=sources,
        num_empty=rows.count_cuts()[1] if isinstance(rows, DocumentRows) else 0,
        num_unread=store.summary["num_unread"],
        num_bad=store.summary["num_bad"],
        bad=store.summary["bad"],
        is_begin=is_begin,
    )


def _cut(row: dict[str, NDArray[np.int64]], tokenizer: Any) -> Iterator[Piece]:
    ids, is_learned = row["input_ids"], row["labels"] != IGNORED
    positions = row.get("position_ids", np.arange(len(ids)))
    document = np.cumsum(positions == 0)
    for (_, learned), group in groupby(range(len(ids)), key=lambda n: (document[n], is_learned[n])):
        places = list(group)
        yield Piece(
            text=show_controls(tokenizer.decode(ids[places], clean_up_tokenization_spaces=False)),
            ids=ids[places].tolist(),
            is_learned=bool(learned),
            begins_document=bool(positions[places[0]] == 0),
        )


def _shorten(row: Sequence[Piece]) -> str:
    """Return a row with its marks, of its many and long pieces the first and both ends."""
    half = _NUM_CHARACTERS // 2
    shown = []
    for piece in row[:_NUM_PIECES]:
        text = redact(piece.text)  # first: half a credential is not known as one
        text = text if len(text) <= _NUM_CHARACTERS else f"{text[:half]} […] {text[-half:]}"
        shown.append(replace(piece, text=text).mark())
    return "".join(shown) + " […]" * (len(row) > _NUM_PIECES)
