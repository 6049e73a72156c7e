"""From rows to batches of tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_fsdp.tasks.causal_lm.packing import IGNORED, Ints
from lit_fsdp.tasks.loading import PADDING

TokenRow = Mapping[str, Ints]
Batch = dict[str, Tensor]


def stack_rows(rows: Sequence[TokenRow]) -> Batch:
    """Return packed rows as ``input_ids``, ``labels``, ``position_ids``, each [batch, seq_length].

    There is no attention mask on purpose: only without one does Transformers read from the positions where a
    document begins, and with a cache it does not look either, so call the model with ``use_cache=False``.
    """
    return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}


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
    """Takes the labels off rows that only fill up a batch, then collates.

    Args:
        collate: Makes the batch.
        is_packed: Rows must keep their length.
    """

    collate: Callable[[Sequence[TokenRow]], Batch]
    is_packed: bool

    def __call__(self, rows: Sequence[tuple[int, TokenRow]]) -> Batch:
        """Return the batch."""
        return self.collate([row if index != PADDING else self._silence(row) for index, row in rows])

    def _silence(self, row: TokenRow) -> TokenRow:
        row = row if self.is_packed else {name: values[:1] for name, values in row.items()}
        return {**row, "labels": np.full_like(row["labels"], IGNORED)}


@dataclass(frozen=True, kw_only=True)
class PromptRows:
    """Collates prompts: ``input_ids`` and ``attention_mask``, padded on the left, and ``index`` [batch].

    ``index`` is the place of each prompt in its source; -1 marks rows that only fill up the batch.

    Args:
        pad_id: Fills ``input_ids``.
        multiple_of: The length is rounded up to a multiple of this.
    """

    pad_id: int
    multiple_of: int = 1

    def __call__(self, rows: Sequence[tuple[int, Any]]) -> Batch:
        """Return the batch."""
        pad = PadRows(pad_id=self.pad_id, multiple_of=self.multiple_of, on_left=True)
        batch = pad([row for _, row in rows])
        del batch["labels"]
        return {**batch, "index": torch.tensor([index for index, _ in rows])}
