"""Batches for the model: documents packed into rows or cut to them, and rows as tensors."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_fsdp.tasks.loading import PADDING

IGNORED = -100  # the label that Transformers and PyTorch take no loss on

Ints = NDArray[np.int64]
TokenRow = Mapping[str, Ints]
Batch = dict[str, Tensor]
DOCUMENT_LENGTHS = "document_lengths"  # in a batch on its way to the device
DocumentLengths = Sequence[Sequence[int]]  # tokens of each document, of each row


class Documents(Protocol):
    """Documents by number, as ids and whether each is learned; and the length of each."""

    lengths: Ints

    def __getitem__(self, document: int, /) -> tuple[NDArray[np.int32], NDArray[np.bool_]]: ...


class PackedRows:
    """Documents one after the other, cut into rows of exactly ``seq_length`` tokens.

    A document that does not fit goes on in the next row as a new piece. Each piece has positions from 0, by
    which Transformers keeps attention inside it, and no label at its first token, which nothing predicts. The
    end of the last row is filled up with a piece without labels.

    Args:
        store: Where the documents are.
        documents: Which of them, in order.
        seq_length: Tokens in a row.
        pad_id: Fills the last row up.
    """

    def __init__(self, store: Documents, documents: Ints, *, seq_length: int, pad_id: int) -> None:
        self.store = store
        self.documents = documents
        self.seq_length = seq_length
        self.pad_id = pad_id
        self._ends = np.cumsum(store.lengths[documents])

    def __len__(self) -> int:
        num_tokens = int(self._ends[-1]) if len(self._ends) else 0
        return math.ceil(num_tokens / self.seq_length)

    def __getitem__(self, row: int) -> dict[str, Ints]:
        """Return ``input_ids``, ``labels`` (not shifted) and ``position_ids``, each [seq_length]."""
        if not 0 <= row < len(self):
            raise IndexError(row)
        input_ids = np.full(self.seq_length, self.pad_id, dtype=np.int64)
        labels = np.full(self.seq_length, IGNORED, dtype=np.int64)
        position_ids = np.zeros(self.seq_length, dtype=np.int64)
        begin = row * self.seq_length
        filled = 0
        place = int(np.searchsorted(self._ends, begin, side="right"))
        while filled < self.seq_length and place < len(self.documents):
            ids, learn = self.store[self.documents[place]]
            offset = begin + filled - (int(self._ends[place]) - len(ids))
            cut = slice(offset, offset + self.seq_length - filled)
            ids, learn = ids[cut], learn[cut]
            piece = slice(filled, filled + len(ids))
            input_ids[piece] = ids
            labels[piece] = np.where(learn, ids, IGNORED)
            labels[filled] = IGNORED
            position_ids[piece] = np.arange(len(ids))
            filled += len(ids)
            place += 1
        position_ids[filled:] = np.arange(self.seq_length - filled)
        return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}


class DocumentRows:
    """One document a row, cut to ``seq_length`` tokens: at the end, or with ``keep_end``, for prompts, in front."""

    def __init__(self, store: Documents, documents: Ints, *, seq_length: int, keep_end: bool = False) -> None:
        self.store = store
        self.documents = documents
        self.seq_length = seq_length
        self.keep_end = keep_end

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def lengths(self) -> Ints:
        """Tokens of each row, [rows]."""
        return np.minimum(self.store.lengths[self.documents], self.seq_length)

    def __getitem__(self, row: int) -> dict[str, Ints]:
        """Return ``input_ids`` and ``labels`` (not shifted), each [length]."""
        ids, learn = self.store[self.documents[row]]
        kept = slice(-self.seq_length, None) if self.keep_end else slice(self.seq_length)
        labels = np.where(learn, ids, IGNORED)[kept]
        return {"input_ids": ids[kept].astype(np.int64), "labels": labels.astype(np.int64)}

    def count_cuts(self) -> tuple[int, int]:
        """Return how many rows are cut, and how many of these have nothing left to learn."""
        cut = self.documents[self.store.lengths[self.documents] > self.seq_length]
        num_empty = 0 if self.keep_end else sum(not self.store[d][1][: self.seq_length].any() for d in cut)
        return len(cut), num_empty

    def describe_cuts(self) -> str | None:
        """Say how many documents are cut, and how many have nothing left to learn; None if none is."""
        num_cut, num_empty = self.count_cuts()
        if not num_cut:
            return None
        what = f"{num_cut} of {len(self)} rows are longer than seq_length {self.seq_length} and are cut"
        return f"{what}; {num_empty} of them keep no token to learn" if num_empty else what


def keep_exact(numbers: Tensor) -> Tensor:
    """Return float32 numbers as their bits, in int32, for :func:`read_exact`.

    Floats of a batch are cast to the dtype that the model computes in, as its inputs must be; bfloat16 has 3 digits.
    """
    return numbers.float().view(torch.int32)


def read_exact(numbers: Tensor) -> Tensor:
    """Return what :func:`keep_exact` was given; floats stay as they are."""
    return numbers if numbers.is_floating_point() else numbers.view(torch.float32)


def stack_rows(rows: Sequence[TokenRow]) -> Batch:
    """Return packed rows as ``input_ids``, ``labels``, ``position_ids``, each [batch, seq_length].

    There is no attention mask on purpose: only without one does Transformers read from the positions where a
    document begins, and with a cache it does not look either, so call the model with ``use_cache=False``.
    """
    return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}


def add_document_lengths(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch with ``document_lengths``, if it is packed: numbers of Python, for attention on the host.

    Args:
        batch: Still on the CPU: a GPU that was asked for them would be waited for. Packed rows have ``position_ids``
            [batch, length] and no ``attention_mask``.
    """
    positions = batch.get("position_ids")
    if positions is None or positions.dim() != 2 or DOCUMENT_LENGTHS in batch or "attention_mask" in batch:
        return dict(batch)
    return {**batch, DOCUMENT_LENGTHS: list_document_lengths(positions)}


def list_document_lengths(positions: Tensor) -> DocumentLengths:
    """Return how many tokens the documents of each row have, whose positions do not go on from one to the next.

    Args:
        positions: [batch, length], with values.
    """
    is_new = torch.diff(positions.cpu()) != 1
    ends = (torch.cat([row.nonzero().flatten() + 1, torch.tensor([positions.shape[1]])]) for row in is_new)
    return tuple(tuple(torch.diff(own, prepend=torch.tensor([0])).tolist()) for own in ends)


@dataclass(frozen=True, kw_only=True)
class PadRows:
    """Pads rows to the longest: ``input_ids``, ``labels``, ``attention_mask``, each [batch, length].

    Args:
        pad_id: Fills ``input_ids``.
        multiple_of: The length is rounded up to a multiple of this.
        on_left: Pad before the row, as generation needs it.
    """

    pad_id: int
    multiple_of: int = 1
    on_left: bool = False

    def __call__(self, rows: Sequence[TokenRow]) -> Batch:
        """Return the batch."""
        length = max(len(row["input_ids"]) for row in rows)
        length = -(-length // self.multiple_of) * self.multiple_of
        shape = (len(rows), length)
        batch = {
            "input_ids": torch.full(shape, self.pad_id),
            "labels": torch.full(shape, IGNORED),
            "attention_mask": torch.zeros(shape, dtype=torch.int64),
        }
        for i, row in enumerate(rows):
            size = len(row["input_ids"])
            place = slice(length - size, None) if self.on_left else slice(size)
            batch["input_ids"][i, place] = torch.from_numpy(row["input_ids"])
            batch["labels"][i, place] = torch.from_numpy(row["labels"])
            batch["attention_mask"][i, place] = 1
        return batch


@dataclass(frozen=True, kw_only=True)
class EvalRows:
    """Takes the labels off rows that only fill up a batch, then collates; packed rows keep their length."""

    collate: Callable[[Sequence[TokenRow]], Batch]
    is_packed: bool

    def __call__(self, rows: Sequence[tuple[int, TokenRow]]) -> Batch:
        """Return the batch."""
        silent = [row if index != PADDING else silence(row, keeps_length=self.is_packed) for index, row in rows]
        return self.collate(silent)


def silence(row: TokenRow, *, keeps_length: bool = False) -> TokenRow:
    """Return a row that only fills up a batch: without labels, and of one token unless it keeps its length."""
    row = row if keeps_length else {name: values[:1] for name, values in row.items()}
    return {**row, "labels": np.full_like(row["labels"], IGNORED)}


@dataclass(frozen=True, kw_only=True)
class PromptRows:
    """Collates prompts: ``input_ids`` and ``attention_mask``, padded on the left, and ``index`` [batch].

    ``index`` is the place of each prompt in its source; -1 marks rows that only fill up the batch.

    Args:
        pad_id: Fills ``input_ids``.
        places: Of all rows in the source.
        multiple_of: The length is rounded up to a multiple of this.
    """

    pad_id: int
    places: Ints
    multiple_of: int = 1

    def __call__(self, rows: Sequence[tuple[int, Any]]) -> Batch:
        """Return the batch."""
        pad = PadRows(pad_id=self.pad_id, multiple_of=self.multiple_of, on_left=True)
        batch = pad([row for _, row in rows])
        del batch["labels"]
        return {**batch, "index": find_places([index for index, _ in rows], self.places)}


def find_places(rows: Sequence[int], places: Ints) -> Tensor:
    """Return the places of rows in their source; of those that only fill up a batch -1."""
    return torch.tensor([row if row == PADDING else int(places[row]) for row in rows])
