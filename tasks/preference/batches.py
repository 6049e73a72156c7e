"""Pairs and labelled completions as rows and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lit_fsdp.tasks.loading import PADDING
from lit_fsdp.tasks.text.batches import IGNORED, Batch, Documents, Ints, PadRows, keep_exact, silence

# Beside ``input_ids``, ``labels`` and ``attention_mask``, [2 * rows, length]: the chosen, or desirable and undesirable,
# completions of all rows, then the rejected ones, or those of other prompts.
DESIRABLE, REFERENCE = "desirable", "reference_logps"  # [rows] and, in the order of the ids, [2 * rows]
_MISMATCH_SEED = 0  # not the seed setting: it decides what is learned, not in which order

PreferenceRow = Mapping[str, Any]
# A function, as Lightning may build the loader, to count the steps of an epoch, before there is a reference.
ReadReference = Callable[[], NDArray[np.float32] | None]


class PairRows:
    """Pairs of documents that begin with the same prompt.

    Args:
        store: Where the documents are.
        documents: The chosen ones; each is followed by the rejected one.
        seq_length: Longer documents are cut there.
        read_reference: Returns the log-probabilities of chosen and rejected by a reference, [pairs, 2], if there are
            any by now.
    """

    def __init__(
        self, store: Documents, documents: Ints, *, seq_length: int, read_reference: ReadReference = lambda: None
    ) -> None:
        self.store, self.documents, self.seq_length = store, documents, seq_length
        self.read_reference = read_reference

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Return ``rows``, each with ``input_ids`` and ``labels`` (not shifted), [length], and what else is known."""
        chosen = int(self.documents[row])
        pair = [_cut(*self.store[document], self.seq_length) for document in (chosen, chosen + 1)]
        return {"rows": pair, **_add_reference(self.read_reference, row)}


class LabelledRows:
    """Completions, good or bad, each beside one of another prompt.

    For the latter all documents follow each other in a random order, always the same, and each prompt gets the
    completion of the document before it: which it is depends neither on batches nor on the number of ranks.

    Args:
        store: Where the documents are.
        documents: Which of them, in order.
        is_desirable: Whether each of these is a good one.
        seq_length: Longer documents are cut there.
        read_reference: Returns the log-probabilities of both by a reference, [documents, 2], if there are any by now.
    """

    def __init__(
        self,
        store: Documents,
        documents: Ints,
        is_desirable: NDArray[np.bool_],
        *,
        seq_length: int,
        read_reference: ReadReference = lambda: None,
    ) -> None:
        self.store, self.documents, self.seq_length = store, documents, seq_length
        self.is_desirable, self.read_reference = is_desirable, read_reference
        order = np.random.default_rng(_MISMATCH_SEED).permutation(len(documents))
        self._other = np.empty_like(documents)
        self._other[order] = documents[np.roll(order, 1)]

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Return ``rows``, each with ``input_ids`` and ``labels`` (not shifted), [length], and what else is known."""
        ids, learn = self.store[self.documents[row]]
        other_ids, other_learn = self.store[self._other[row]]
        prompt, begin = _find_completion(learn), _find_completion(other_learn)
        mixed = np.concatenate([ids[:prompt], other_ids[begin:]])
        mixed_learn = np.concatenate([learn[:prompt], other_learn[begin:]])
        pair = [_cut(ids, learn, self.seq_length), _cut(mixed, mixed_learn, self.seq_length)]
        return {"rows": pair, DESIRABLE: self.is_desirable[row], **_add_reference(self.read_reference, row)}


def _add_reference(read: ReadReference, row: int) -> dict[str, Any]:
    reference = read()
    return {} if reference is None else {REFERENCE: reference[row]}


def keeps_completion(store: Documents, documents: Ints, seq_length: int) -> NDArray[np.bool_]:
    """Return which documents have a token to learn left when they are cut; the first token is predicted by nothing."""
    kept = np.ones(len(documents), dtype=np.bool_)
    for place in np.flatnonzero(store.lengths[documents] > seq_length):
        kept[place] = store[documents[place]][1][1:seq_length].any()
    return kept


@dataclass(frozen=True, kw_only=True)
class StackPairs:
    """Makes a batch of rows of two documents each.

    Args:
        pad: Makes tensors of documents.
        is_indexed: Rows come as ``(index, row)``; those of ``PADDING`` only fill up the batch, and learn nothing.
        keeps_index: The batch has the ``index`` of each, [rows].
    """

    pad: PadRows
    is_indexed: bool = False
    keeps_index: bool = False

    def __call__(self, rows: Sequence[Any]) -> Batch:
        """Return the batch."""
        indices = [index for index, _ in rows] if self.is_indexed else list(range(len(rows)))
        found: list[PreferenceRow] = [row for _, row in rows] if self.is_indexed else list(rows)
        pairs = [
            row["rows"] if index != PADDING else [silence(one) for one in row["rows"]]
            for index, row in zip(indices, found, strict=True)
        ]
        batch = self.pad([one for side in zip(*pairs, strict=True) for one in side])
        if DESIRABLE in found[0]:
            batch[DESIRABLE] = torch.tensor([bool(row[DESIRABLE]) for row in found])
        if REFERENCE in found[0]:
            logps = np.stack([row[REFERENCE] for row in found], axis=1).reshape(-1)
            batch[REFERENCE] = keep_exact(torch.from_numpy(logps))
        if self.keeps_index:
            batch["index"] = torch.tensor(indices)
        return batch


def _cut(ids: NDArray[np.int32], learn: NDArray[np.bool_], seq_length: int) -> dict[str, Ints]:
    labels = np.where(learn, ids, IGNORED)[:seq_length]
    return {"input_ids": ids[:seq_length].astype(np.int64), "labels": labels.astype(np.int64)}


def _find_completion(learn: NDArray[np.bool_]) -> int:
    return int(learn.argmax())
