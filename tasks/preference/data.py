"""Preferences: pairs of a chosen and a rejected completion of a prompt, or completions with a label."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from typing_extensions import override

from lit_fsdp.cache import COMPLETE, build_once, make_key, read_digests
from lit_fsdp.tasks.data import Split
from lit_fsdp.tasks.preference.batches import (
    DESIRABLE,
    REFERENCE,
    LabelledRows,
    PairRows,
    StackPairs,
    keeps_completion,
)
from lit_fsdp.tasks.preference.rows import CHOSEN, REJECTED, PreferenceColumns, PreferenceFormat
from lit_fsdp.tasks.preference.rows import DESIRABLE as DESIRABLE_MARK
from lit_fsdp.tasks.text.batches import Batch, DocumentRows, Ints, PadRows, keep_exact
from lit_fsdp.tasks.text.data import TextData
from lit_fsdp.tasks.text.preview import Piece, Preview, make_preview
from lit_fsdp.tasks.text.rows import Columns
from lit_fsdp.tasks.text.tokenizer import TrainTokenizer, get_pad_id
from lit_fsdp.tasks.text.tokens import ENDS, LEARN, TOKENS, TokenStore

_LOGPS = "logps.npy"


class PreferenceData(TextData):
    """Preferences from files, data sets or the Hugging Face Hub, as tokens.

    Rows are pairs (``prompt``, ``chosen``, ``rejected``) or completions with a label (``prompt``, ``completion``,
    ``label``), as text or as lists of messages. Without ``prompt``, a pair has as its prompt what both begin with, and
    of ``messages`` with a ``label`` the last one is the completion.
    ``columns`` names other fields; an ``input`` is part of an ``instruction`` that is the prompt. Sources, tokenizing
    and the cache are those of ``TextData``; each completion is read after its prompt as one document, of which only the
    completion counts. ``pydoc`` gives pairs made of Python's manual: how a piece of it goes on is better than the same
    words in reverse.

    A document longer than ``seq_length`` is cut at its end. A pair of which a completion is cut off whole is left out.

    Args:
        columns: The fields of your rows, where they have names of their own.
        format: ``chat`` puts prompts and completions that are text into the chat template, too.
        tokenizer: Model name on the Hub or folder to load it from, or ``TrainTokenizer`` to train one on ``train``.
        seq_length: Tokens of the longest prompt with a completion; longer ones are cut.
        batch_size: Pairs, or labelled completions, in a micro-batch of one rank. The model sees two rows for each.
    """

    def __init__(
        self,
        *,
        columns: PreferenceColumns | None = None,
        format: Literal["auto", "chat"] = "auto",  # noqa: A002
        tokenizer: str | TrainTokenizer,
        seq_length: int = 1024,
        batch_size: int = 1,
        **kwargs: Any,
    ) -> None:
        fixed = [name for name in ("packing", "txt_documents", "loss_on") if name in kwargs]
        if refused := [*(name for name in ("streaming", "group_by_length") if kwargs.get(name)), *fixed]:
            raise ValueError(f"{refused[0]}: preferences have no such setting; leave it out")
        for split in ("train", "validation", "test", "predict"):
            sources = kwargs.get(split)
            if isinstance(sources, list) and any(not isinstance(source, str) for source in sources):
                raise ValueError(
                    f"{split}: got a source with settings of its own: preferences take paths; name the path"
                )
        names = columns or PreferenceColumns()
        known = {ours: ours for ours in ("system", "tools") if getattr(names, ours) is not None}
        of_messages = Columns(role=names.role, content=names.content, **known)
        super().__init__(
            format=format,
            columns=of_messages,
            tokenizer=tokenizer,
            seq_length=seq_length,
            batch_size=batch_size,
            packing=False,
            loss_on="completion",
            txt_documents="file",
            **kwargs,
        )
        self.row_format = PreferenceFormat(format=format, columns=of_messages, loss_on="completion", names=names)
        # Set by the task: whether its loss takes single completions, and reads log-probabilities of a reference.
        self.is_unpaired = self.has_reference = False
        self._reference: dict[Split, NDArray[np.float32]] = {}

    @override
    def make_preview(self, split: Split, num_shown: int) -> Preview:
        """Return what a split holds, and its first pairs as text, or its first completions with their labels."""
        store = self._get_store(split)
        marks = store.summary["marks"]
        found = self._choose(split, is_unpaired=CHOSEN not in marks, warns=False)
        is_paired = CHOSEN in marks
        shown = found[:num_shown]
        documents = _interleave(found) if is_paired else found
        is_train = split == "train"
        size = self.batch_size if is_train else self.eval_batch_size
        # Rows of text are made below: of documents that begin with what they are.
        preview = make_preview(
            DocumentRows(store, documents, seq_length=self.seq_length),
            store,
            tokenizer=self.tokenizer,
            num_shown=len(shown) * (1 + is_paired),
            batch_size=size * (1 + is_paired),
            pad_to_multiple_of=self.pad_to_multiple_of,
            draw_order=self._draw_order if is_train and self.shuffle else None,
            is_grouped=False,
            sources=[],
        )
        rows = [
            [_make_title(marks[document]), replace(first, begins_document=False), *others]
            for document, (first, *others) in zip(documents, preview.rows, strict=False)
        ]
        if is_paired:
            rows = [[*chosen, *rejected] for chosen, rejected in zip(rows[::2], rows[1::2], strict=True)]
        return replace(preview, rows=rows, num_rows=len(found), other_efficiency=None)

    @override
    def make_example_batch(self) -> Batch:
        """Return a micro-batch of the largest size that training can have, without reading data."""
        num_rows = self.largest_batch_size
        lengths = [self.seq_length] * (2 * num_rows)
        lengths[0] = max(2, self.seq_length // 2)  # padded
        rows = [dict.fromkeys(("input_ids", "labels"), np.zeros(length, dtype=np.int64)) for length in lengths]
        batch = PadRows(pad_id=0, multiple_of=self.pad_to_multiple_of)(rows)
        if self.is_unpaired:
            batch[DESIRABLE] = torch.arange(num_rows) % 2 == 0
        if self.has_reference:
            batch[REFERENCE] = keep_exact(torch.zeros(2 * num_rows))
        return batch

    @override
    def build_eval_loader(self, split: Split) -> DataLoader[Any]:
        """Return this rank's batches of a split; prompts to continue are padded on the left."""
        if split == "predict":
            return super().build_eval_loader(split)
        return self.load_eval(self._get_rows(split), StackPairs(pad=self._pad, is_indexed=True))

    def build_reference_loader(self, split: Split) -> DataLoader[Any]:
        """Return this rank's batches of a split with the ``index`` of each row, [rows], to compute a reference of."""
        return self.load_eval(self._get_rows(split), StackPairs(pad=self._pad, is_indexed=True, keeps_index=True))

    def count_rows(self, split: Split) -> int:
        """Return how many pairs, or labelled completions, a split has."""
        return len(self._get_rows(split, warns=False))

    def locate_reference(self, split: Split, **model: Any) -> Path:
        """Return where the log-probabilities of a split by a reference are kept, by what they depend on.

        Args:
            split: Of the data.
            model: What tells the reference from others, as JSON.
        """
        store = self._get_store(split)
        digests = read_digests(store.folder)
        key = make_key(
            tokens=[digests[name] for name in (TOKENS, LEARN, ENDS)],
            rows=[split, self.validation_fraction, self.seq_length, self.is_unpaired, store.summary["marks"]],
            model=model,
        )
        return self.cache_dir / "reference" / key

    def drop_reference(self) -> None:
        """Forget the log-probabilities that rows were given: those of one task are not another's."""
        self._reference.clear()

    def has_kept(self, folder: Path) -> bool:
        """Whether a reference has been computed already."""
        return (folder / COMPLETE).exists()

    def keep_reference(self, split: Split, folder: Path, logps: NDArray[np.float32] | None) -> None:
        """Give rows their log-probabilities by a reference, and keep these on disk.

        Args:
            split: Of the data.
            folder: From ``locate_reference``.
            logps: [rows, 2] in the order of the split; ``None`` reads what is kept.
        """

        def build(made: Path) -> None:
            if logps is None:
                raise ValueError(f"{folder}: is damaged; delete this folder, and its numbers are computed again")
            np.save(made / _LOGPS, logps)

        self._reference[split] = np.load(build_once(folder, build) / _LOGPS)

    def holds_split(self, split: Split) -> bool:
        """Whether the tokens of a split have been made."""
        return self.get_source_split(split) in self._stores and (split != "validation" or self._validates)

    @property
    def _validates(self) -> bool:
        return self.holds_out or self.sources["validation"][0] is not None

    @property
    def _pad(self) -> PadRows:
        return PadRows(pad_id=get_pad_id(self.tokenizer), multiple_of=self.pad_to_multiple_of)

    @property
    @override
    def _collate(self) -> Callable[[Any], Any]:
        return StackPairs(pad=self._pad)

    @override
    def _get_rows(self, split: Split, *, warns: bool = True) -> Any:
        if split == "predict":
            return super()._get_rows(split, warns=warns)
        store = self._get_store(split)
        documents = self._choose(split, is_unpaired=self.is_unpaired, warns=warns)
        options: dict[str, Any] = {"seq_length": self.seq_length, "read_reference": partial(self._reference.get, split)}
        if not self.is_unpaired:
            return PairRows(store, documents, **options)
        is_desirable = _read_marks(store, CHOSEN + DESIRABLE_MARK)[documents]
        return LabelledRows(store, documents, is_desirable, **options)

    def _get_store(self, split: Split) -> TokenStore:
        store = self._stores.get(self.get_source_split(split))
        if store is None:
            raise self.describe_missing(split)
        assert isinstance(store, TokenStore)  # sources with settings of their own are refused
        return store

    def _choose(self, split: Split, *, is_unpaired: bool, warns: bool) -> Ints:
        """Return the documents of a split that have a completion left: of pairs the chosen ones."""
        store = self._get_store(split)
        marked = _read_marks(store, CHOSEN)
        if not is_unpaired and not marked.any():
            raise ValueError(
                f"{split}: rows have a label, and loss_type learns of pairs; set loss_type: kto, or give rows with "
                "chosen and rejected"
            )
        # Pairs are held out whole: else a prompt of the validation would be trained on with its other completion.
        is_of_pairs = 2 * int(marked.sum()) == len(store)
        documents = np.flatnonzero(marked) if is_of_pairs or not is_unpaired else np.arange(len(store))
        documents = documents[self.choose_rows(split, len(documents))]
        documents = _interleave(documents) if is_unpaired and is_of_pairs else documents
        kept = keeps_completion(store, documents, self.seq_length)
        if not is_unpaired:
            kept &= keeps_completion(store, documents + 1, self.seq_length)
        what = "completions" if is_unpaired else "pairs"
        if not kept.any():
            raise ValueError(f"{split}: seq_length: got {self.seq_length}: no completion of {len(kept)} {what} fits in")
        if is_unpaired and kept.sum() < 2:
            raise ValueError(
                f"{split}: loss_type kto compares with completions of other prompts: expected 2 rows or more"
            )
        if warns:
            if not is_unpaired and (left_out := len(store) - 2 * int(marked.sum())):
                rank_zero_warn(
                    f"{split}: {left_out} rows have a label, not chosen and rejected, and are left out; set "
                    "loss_type: kto to learn of them too"
                )
            self._warn_of_cuts(split, store, documents if is_unpaired else _interleave(documents), kept, what)
        return documents[kept]

    def _warn_of_cuts(
        self, split: Split, store: TokenStore, documents: Ints, kept: NDArray[np.bool_], what: str
    ) -> None:
        if cut := int((store.lengths[documents] > self.seq_length).sum()):
            lost = int((~kept).sum())
            left_out = f"; {lost} {what}, of which nothing would be left to learn, are left out" if lost else ""
            rank_zero_warn(
                f"{split}: {cut} of {len(documents)} documents are longer than seq_length {self.seq_length} and are "
                f"cut{left_out}"
            )


def _read_marks(store: TokenStore, wanted: str) -> NDArray[np.bool_]:
    """Return which documents have one of these marks."""
    marks = np.frombuffer(store.summary["marks"].encode(), dtype=np.uint8)
    return np.isin(marks, [ord(mark) for mark in wanted])


def _interleave(chosen: Ints) -> Ints:
    return np.stack([chosen, chosen + 1], axis=1).reshape(-1)


def _make_title(mark: str) -> Piece:
    names = {CHOSEN: "chosen", REJECTED: "rejected", DESIRABLE_MARK: "label: true"}
    return Piece(text=f"[{names.get(mark, 'label: false')}] ", ids=(), is_learned=False, begins_document=True)
