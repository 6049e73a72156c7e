"""Text for causal language models: documents, prompts with completions, chats."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from lit_fsdp.cache import build_once, get_cache_dir, hash_files, make_key, read_digests
from lit_fsdp.tasks.causal_lm.batches import (
    Batch,
    DocumentRows,
    EvalRows,
    PackedRows,
    PadRows,
    PromptRows,
    stack_rows,
)
from lit_fsdp.tasks.causal_lm.rows import Format, LossOn, RowError, RowFormat, list_texts, parse_row
from lit_fsdp.tasks.causal_lm.sources import Part, Source, TxtDocuments, check_source, list_parts, read_parts
from lit_fsdp.tasks.causal_lm.tokenizer import (
    TrainTokenizer,
    get_pad_id,
    identify_tokenizer,
    load_tokenizer,
    read_chat_template,
    train_tokenizer,
)
from lit_fsdp.tasks.causal_lm.tokens import ENDS, LEARN, TOKENS, TokenStore, write_tokens
from lit_fsdp.tasks.data import DEFAULT_SPLITS, SPLITS_OF_STAGE, Split, TaskData, check_least
from lit_fsdp.tasks.loading import ResumableLoader
from lit_fsdp.tasks.row_files import Row

_EXAMPLE_DOCUMENTS = 4  # in a packed row of an example
CACHE_VERSION = 2  # raise it when the same settings give other tokens than before


class TextData(TaskData):
    """Text from files, data sets or the Hugging Face Hub, as tokens for a causal language model.

    A source is a ``.txt``, ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file, a folder or pattern of such
    files, a folder written by ``datasets.save_to_disk``, a data set on the Hub as ``org/name`` or
    ``org/name:config``, a list of these, or ``pydoc``: the language reference inside Python itself, 0.5 MB of
    English without a download.

    Rows are plain text (``text``), prompts with completions (``prompt``, ``completion``) or chats
    (``messages``, each with ``role`` and ``content``). They are tokenized once, in the first process that
    comes, and kept on disk until a source, the tokenizer or a setting that matters changes.

    Args:
        train: Source to train on.
        validation: Source to validate on.
        test: Source to test on.
        predict: Source of prompts to continue: rows with ``prompt``, plain text or ``messages``.
        validation_fraction: Without ``validation``, hold out this share of the training documents, always the
            same.
        train_split: Which split of a data set to train on, such as ``train[:1%]``; ``train`` if not given.
        validation_split: The same for ``validation``; ``validation`` if not given.
        test_split: The same for ``test``; ``test`` if not given.
        predict_split: The same for ``predict``; ``test`` if not given.
        format: ``text``, ``prompt_completion`` or ``chat``; ``auto`` decides row by row, by the fields that
            are there.
        text_field: Field that holds plain text.
        txt_documents: What is one document in a ``.txt`` file: the ``file``, each ``line``, or each
            ``paragraph`` between blank lines.
        loss_on: Which tokens are learned: ``all``, or those of the ``completion`` or the assistant's messages. ``auto``
            learns completions of chats and prompts, and all of plain text.
        bad_rows: ``error`` stops at the first bad row; ``skip`` leaves bad rows out and warns with their
            number.
        tokenizer: Model name on the Hub or folder to load it from, or ``TrainTokenizer`` to train one on
            ``train``.
        chat_template: Jinja text, or a ``.jinja`` file, to render chats by instead of the tokenizer's own template. It
            is exported with the tokenizer.
        seq_length: Tokens in a packed row, 2 or more; longest row otherwise.
        packing: Join documents into rows of exactly ``seq_length``, so that no compute goes into padding.
            Attention stays inside each document, but one that crosses the end of a row is split there. If
            false, each document is a row, cut at ``seq_length`` and padded to the longest of its batch.
        pad_to_multiple_of: Without packing, round the length of a batch up to a multiple of this.
        batch_size: Rows in a micro-batch of one rank.
        global_batch_size: Rows in an optimizer step, of all ranks and accumulated micro-batches together. Each start
            sets ``trainer.accumulate_grad_batches`` by it, so a run keeps it on another number of ranks, and an epoch
            is a whole number of steps. ``null`` leaves both to you.
        eval_batch_size: The same for validation, test and prediction; ``batch_size`` if not given.
        num_workers: Processes per rank that read ahead; 0 reads in the main process.
        shuffle: Train in a new order each epoch, the same for any number of ranks.
        seed: Of that order.
        cache_dir: Where tokens are kept; else ``LIT_FSDP_CACHE`` or ``~/.cache/lit_fsdp``.
    """

    source_kinds = "a file, a folder, a data set, or pydoc"

    def __init__(
        self,
        *,
        train: Source | None = None,
        validation: Source | None = None,
        test: Source | None = None,
        predict: Source | None = None,
        validation_fraction: float = 0.0,
        train_split: str | None = None,
        validation_split: str | None = None,
        test_split: str | None = None,
        predict_split: str | None = None,
        format: Format = "auto",  # noqa: A002
        text_field: str = "text",
        txt_documents: TxtDocuments = "file",
        loss_on: LossOn = "auto",
        bad_rows: Literal["error", "skip"] = "error",
        tokenizer: str | TrainTokenizer,
        chat_template: str | None = None,
        seq_length: int = 1024,
        packing: bool = True,
        pad_to_multiple_of: int = 1,
        batch_size: int = 1,
        global_batch_size: int | None = None,
        eval_batch_size: int | None = None,
        num_workers: int = 2,
        shuffle: bool = True,
        seed: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__(
            sources={
                "train": (train, train_split),
                "validation": (validation, validation_split),
                "test": (test, test_split),
                "predict": (predict, predict_split),
            },
            validation_fraction=validation_fraction,
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            shuffle=shuffle,
            seed=seed,
        )
        check_least(2, seq_length=seq_length)  # of a row of one token nothing is predicted
        check_least(1, pad_to_multiple_of=pad_to_multiple_of)
        if pad_to_multiple_of != 1 and packing and predict is None:
            raise ValueError(
                f"pad_to_multiple_of: got {pad_to_multiple_of}: packed rows have no padding; leave it out, or set "
                "packing to false"
            )
        self.row_format = RowFormat(format=format, text_field=text_field, loss_on=loss_on)
        self.txt_documents: TxtDocuments = txt_documents
        self.skips_bad_rows = bad_rows == "skip"
        self.tokenizer_setting = tokenizer
        self.chat_template = None if chat_template is None else read_chat_template(chat_template)
        self.seq_length = seq_length
        self.packing = packing
        self.pad_to_multiple_of = pad_to_multiple_of
        self.cache_dir = get_cache_dir(cache_dir)
        self._tokenizer: Any = None
        self._tokenizer_id = ""
        self._stores: dict[Split, TokenStore] = {}

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; there is one once ``setup`` has run."""
        if self._tokenizer is None:
            raise RuntimeError("the tokenizer is loaded or trained in setup(); call that first")
        return self._tokenizer

    def check_stage(self, stage: str) -> None:
        """Refuse what is not set or not there for a command of Trainer, before the processes of a run are started."""
        needed = {"fit": "train", "validate": "validation"}.get(stage, stage)
        if type(self).setup is not TextData.setup:  # it may get its rows from elsewhere
            return
        is_made_later = type(self).prepare_data is not LightningDataModule.prepare_data
        for split in SPLITS_OF_STAGE.get(stage, ()):  # plans need no data
            source = self.sources[split][0]
            if source is None and split == needed and not (split == "validation" and self.holds_out):
                raise self.describe_missing(split)
            if source is not None and not is_made_later:
                try:
                    check_source(source)
                except ValueError as error:
                    raise ValueError(f"{split}: {error}") from error

    def setup(self, stage: str | None = None) -> None:
        """Load or train the tokenizer and make the tokens that a stage needs, unless the cache has them."""
        splits = SPLITS_OF_STAGE[stage]
        if stage == "fit" and self.sources["train"][0] is None:
            raise self.describe_missing("train")
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
            if self.chat_template is not None:
                self._tokenizer.chat_template = self.chat_template
            self._tokenizer_id = identify_tokenizer(self._tokenizer)
        for split in splits:
            needed = self.get_source_split(split)
            if needed not in self._stores and self.sources[needed][0] is not None:
                self._stores[needed] = self._get_tokens(needed)
        # Its threads were used, so that each fork of a loader's worker would warn, and could hang if it
        # tokenized.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def train_dataloader(self) -> ResumableLoader:
        """Return this rank's training batches; the loader's place is part of every checkpoint."""
        rows = self._get_rows("train")
        store = self._stores["train"]
        kind = f"rows of {self.seq_length} tokens" if self.packing else "rows"
        what = f"train ({len(store)} documents, {int(store.ends[-1])} tokens, as {kind})"
        digests = read_digests(store.folder)
        fingerprint = make_key(tokens=[digests[name] for name in (TOKENS, LEARN, ENDS)])
        return self.load_train(rows, self._collate, what, fingerprint)

    def make_example_batch(self) -> Batch:
        """Return a micro-batch of the largest size that training can have, without reading data.

        Packed rows hold several documents; rows of a padded batch are as long as they may be, the first one shorter.
        """
        shape = (self.batch_size, self.seq_length)
        if self.packing:
            positions = torch.arange(self.seq_length) % -(-self.seq_length // _EXAMPLE_DOCUMENTS)
            ids = torch.zeros(shape, dtype=torch.int64)
            return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions.expand(shape).clone()}
        lengths = [max(1, self.seq_length // 2)] * (self.batch_size > 1)
        lengths += [self.seq_length] * (self.batch_size - len(lengths))
        rows = [dict.fromkeys(("input_ids", "labels"), np.zeros(length, dtype=np.int64)) for length in lengths]
        return PadRows(pad_id=0, multiple_of=self.pad_to_multiple_of)(rows)

    def build_eval_loader(self, split: Split) -> DataLoader[Any]:
        """Return this rank's batches of a split; prompts are padded on the left."""
        collate: Callable[[Any], Any] = EvalRows(collate=self._collate, is_packed=self.packing)
        if split == "predict":
            collate = PromptRows(pad_id=get_pad_id(self.tokenizer), multiple_of=self.pad_to_multiple_of)
        return self.load_eval(self._get_rows(split), collate)

    @property
    def _collate(self) -> Callable[[Any], Any]:
        if self.packing:
            return stack_rows
        return PadRows(pad_id=get_pad_id(self.tokenizer), multiple_of=self.pad_to_multiple_of)

    def _get_rows(self, split: Split) -> PackedRows | DocumentRows:
        store = self._stores.get(self.get_source_split(split))
        if store is None:
            raise self.describe_missing(split)
        documents = self.choose_rows(split, len(store))
        if self.packing and split != "predict":
            pad_id = get_pad_id(self.tokenizer)
            return PackedRows(store, documents, seq_length=self.seq_length, pad_id=pad_id)
        rows = DocumentRows(store, documents, seq_length=self.seq_length, keep_end=split == "predict")
        if cuts := rows.describe_cuts():
            rank_zero_warn(f"{split}: {cuts}")
        return rows

    def _get_parts(self, split: Split) -> list[Part]:
        source, name = self.sources[split]
        if source is None:
            raise self.describe_missing(split)
        try:
            parts = list_parts(source, split=name or DEFAULT_SPLITS[split], txt_documents=self.txt_documents)
        except ValueError as error:
            raise ValueError(f"{split}: {error}") from error
        if name is not None and not any(part.has_splits for part in parts):
            raise ValueError(f"{split}_split: got {name!r}: {source} has no splits; leave it out")
        return parts

    def _load_tokenizer(self) -> Any:
        setting = self.tokenizer_setting
        if isinstance(setting, str):
            return load_tokenizer(setting)
        parts = self._get_parts("train")
        key = self._make_key(parts, vocab_size=setting.vocab_size)

        def build(folder: Path) -> None:
            texts = self._read_texts(read_parts(parts, "reading train for a tokenizer"))
            train_tokenizer(texts, setting).save_pretrained(str(folder))

        return load_tokenizer(str(build_once(self.cache_dir / "tokenizers" / key, build)))

    def _get_tokens(self, split: Split) -> TokenStore:
        parts = self._get_parts(split)
        row_format = replace(self.row_format, is_prompt=split == "predict")
        key = self._make_key(parts, tokenizer=self._tokenizer_id, row_format=vars(row_format))

        def build(folder: Path) -> None:
            rows, skips = read_parts(parts, f"tokenizing {split}"), self.skips_bad_rows
            try:
                write_tokens(folder, rows, tokenizer=self.tokenizer, row_format=row_format, skip_bad_rows=skips)
            except ValueError as error:
                raise ValueError(f"{split}: {error}") from error

        store = TokenStore(build_once(self.cache_dir / "tokens" / key, build))
        if num_bad := store.summary["num_bad"]:
            named = "\n  ".join(store.summary["bad"])
            rank_zero_warn(f"{split}: {num_bad} bad rows are skipped, {len(store)} are good. The first:\n  {named}")
        return store

    def _make_key(self, parts: list[Part], **facts: Any) -> str:
        return make_key(
            cache_version=CACHE_VERSION,
            versions=[version(name) for name in ("tokenizers", "transformers")],
            sources=[part.identify() for part in parts],
            contents=hash_files(self.cache_dir, [path for part in parts for path in part.list_files()]),
            format=vars(self.row_format),
            skips_bad_rows=self.skips_bad_rows,
            **facts,
        )

    def _read_texts(self, rows: Iterable[Row]) -> Iterator[str]:
        for row in rows:
            try:
                yield from list_texts(parse_row(row, self.row_format))
            except RowError as error:
                if not self.skips_bad_rows:
                    raise ValueError(f"train: {row.where}: {error}") from error
