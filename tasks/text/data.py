"""Text for causal language models: documents, prompts with completions, chats."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from typing_extensions import override

from lit_fsdp.cache import build_once, get_cache_dir, hash_files, make_key
from lit_fsdp.reporting.sections import Section
from lit_fsdp.tasks.data import SPLITS_OF_STAGE, Split, TaskData, check_least, refuse_endless
from lit_fsdp.tasks.length_groups import choose_group_size
from lit_fsdp.tasks.loading import GlobalSampler, ResumableLoader, hash_rows
from lit_fsdp.tasks.row_files import Row
from lit_fsdp.tasks.shares import Share
from lit_fsdp.tasks.text.batches import (
    Batch,
    DocumentRows,
    Documents,
    EvalRows,
    PackedRows,
    PadRows,
    PromptRows,
    add_document_lengths,
    stack_rows,
)
from lit_fsdp.tasks.text.messages import RowError
from lit_fsdp.tasks.text.mixture import (
    DataSource,
    JoinedTokens,
    SourceCount,
    Sources,
    check_sources,
    count_sources,
    list_group_parts,
    list_groups,
    mix_documents,
)
from lit_fsdp.tasks.text.preview import Preview, make_preview
from lit_fsdp.tasks.text.rows import Columns, Format, LossOn, RowFormat, list_texts, parse_row
from lit_fsdp.tasks.text.sources import Part, TxtDocuments, read_parts
from lit_fsdp.tasks.text.streaming import (
    HeldDocuments,
    RowMaker,
    StreamLoader,
    StreamSource,
    TextStream,
    check_streaming,
)
from lit_fsdp.tasks.text.tokenizer import (
    TrainTokenizer,
    get_pad_id,
    identify_tokenizer,
    load_tokenizer,
    read_chat_template,
    train_tokenizer,
)
from lit_fsdp.tasks.text.tokens import TokenStore, describe_unread, write_tokens

_NUM_REPORTED = 3  # rows
_BUFFER_SIZE = 10_000  # rows
_EXAMPLE_DOCUMENTS = 4  # in a packed row of an example
CACHE_VERSION = 5  # raise it when the same settings give other tokens than before


class TextData(TaskData):
    """Text from files, data sets or the Hugging Face Hub, as tokens for a causal language model.

    A source is a ``.txt``, ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file, or a folder or pattern of such
    files, also at an address such as ``s3://bucket/rows``. Or it is a folder written by ``datasets.save_to_disk``, a
    data set on the Hub as ``org/name`` or ``org/name:config``, or a list of these. ``pydoc`` is the language reference
    inside Python itself, 0.5 MB of English without a download.

    Rows are plain text (``text``), prompts with completions (``prompt``, ``completion``), instructions
    (``instruction``, ``input``, ``output``) or chats (``messages`` with ``role`` and ``content``, or ``conversations``
    with ``from`` and ``value``). ``columns`` names other fields. They are tokenized once, in the first process that
    comes, and kept on disk until a source, the tokenizer or a setting that matters changes; or with ``streaming`` while
    the model trains.

    Args:
        train: Source to train on. Or a list of several, each with a ``path`` and, to set its share of the rows, a
            ``weight``: ``[{path: a.jsonl, weight: 0.7}, {path: b.jsonl, weight: 0.3}]``. Each may have ``split``,
            ``format`` and ``columns`` of its own. An epoch has as many rows as all sources together.
        validation: Source to validate on.
        test: Source to test on.
        predict: Source of prompts to continue: rows with ``prompt``, ``instruction``, plain text or ``messages``.
        validation_fraction: Without ``validation``, hold out this share of the training documents, always the
            same.
        train_split: Which split of a data set to train on, such as ``train[:1%]``; ``train`` if not given.
        validation_split: The same for ``validation``; ``validation`` if not given.
        test_split: The same for ``test``; ``test`` if not given.
        predict_split: The same for ``predict``; ``test`` if not given.
        format: ``text``, ``prompt_completion`` or ``chat``; ``auto`` decides row by row, by the fields that
            are there. ``chat`` puts prompts and completions into the chat template, too, and texts of ``predict``.
        columns: The fields of your rows, where they have names of their own.
        txt_documents: What is one document in a ``.txt`` file: the ``file``, each ``line``, or each
            ``paragraph`` between blank lines. So also of a topic of ``pydoc``.
        loss_on: Which tokens are learned: ``all``, or those of the ``completion`` or the assistant's messages. ``auto``
            learns completions of chats and prompts, and all of plain text.
        bad_rows: ``error`` stops at the first bad row; ``skip`` leaves bad rows out and warns with their
            number.
        tokenizer: Model name on the Hub or folder to load it from, or ``TrainTokenizer`` to train one on
            ``train``.
        chat_template: Jinja text, or a ``.jinja`` file, to render chats by instead of the tokenizer's own template. It
            is exported with the tokenizer.
        seq_length: Tokens in a packed row, 2 or more; longest row otherwise.
        group_by_length: Without packing, put rows of like lengths into a batch, in a new order each epoch, to compute
            less padding. Each optimizer step then has rows of like lengths.
        packing: Join documents into rows of exactly ``seq_length``, so that no compute goes into padding.
            Attention stays inside each document, but one that crosses the end of a row is split there. If
            false, each document is a row, cut at ``seq_length`` and padded to the longest of its batch.
        pad_to_multiple_of: Without packing, round the length of a batch up to a multiple of this.
        batch_size: Rows in a micro-batch of one rank.
        global_batch_size: Rows in an optimizer step, of all ranks and accumulated micro-batches together. Each start
            sets ``trainer.accumulate_grad_batches`` by it, so a run keeps it on another number of ranks, and an epoch
            is a whole number of steps. ``null`` leaves both to you.
        share: For ranks that are not equally fast: the share of each in the rows of a step, such as ``[3, 1]``.
            ``auto`` measures in the first steps and then gives faster ranks more rows, which takes more memory there.
            Steps, losses and evaluation stay the same; ``batch_size`` becomes the mean over the ranks.
        eval_batch_size: The same for validation, test and prediction; ``batch_size`` if not given.
        num_workers: Processes per rank that read ahead; 0 reads in the main process.
        shuffle: Train in a new order each epoch, the same for any number of ranks.
        seed: Of that order.
        streaming: Read and tokenize ``train`` while the model trains, for data too big to tokenize first. Nothing of it
            is kept on disk. It has no known length and starts again at its end, so set ``trainer.max_steps``.
        shuffle_buffer_size: Rows that are held in memory, and shuffled among themselves, where ``train`` streams;
            files come in a new order each time, too.
        cache_dir: Where tokens are kept; else ``LIT_FSDP_CACHE`` or ``~/.cache/lit_fsdp``.
    """

    source_kinds = "a file, a folder, a data set, or pydoc"

    def __init__(
        self,
        *,
        train: Sources | None = None,
        validation: Sources | None = None,
        test: Sources | None = None,
        predict: Sources | None = None,
        validation_fraction: float = 0.0,
        train_split: str | None = None,
        validation_split: str | None = None,
        test_split: str | None = None,
        predict_split: str | None = None,
        format: Format = "auto",  # noqa: A002
        columns: Columns | None = None,
        txt_documents: TxtDocuments = "file",
        loss_on: LossOn = "auto",
        bad_rows: Literal["error", "skip"] = "error",
        tokenizer: str | TrainTokenizer,
        chat_template: str | None = None,
        seq_length: int = 1024,
        packing: bool = True,
        pad_to_multiple_of: int = 1,
        group_by_length: bool = False,
        batch_size: int = 1,
        global_batch_size: int | None = None,
        share: Share = None,
        eval_batch_size: int | None = None,
        num_workers: int = 2,
        shuffle: bool = True,
        seed: int = 0,
        streaming: bool = False,
        shuffle_buffer_size: int = _BUFFER_SIZE,
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
            share=share,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            shuffle=shuffle,
            seed=seed,
        )
        for split, (sources, _) in self.sources.items():
            if sources is not None:
                list_groups(split, sources)  # refuses what cannot be
        check_least(2, seq_length=seq_length)  # of a row of one token nothing is predicted
        check_least(1, pad_to_multiple_of=pad_to_multiple_of, shuffle_buffer_size=shuffle_buffer_size)
        if streaming:
            check_streaming(
                validation_fraction=validation_fraction,
                trains_tokenizer=not isinstance(tokenizer, str),
                share=share,
                group_by_length=group_by_length,
            )
            self.is_endless = True
        elif shuffle_buffer_size != _BUFFER_SIZE:
            raise ValueError(
                f"shuffle_buffer_size: got {shuffle_buffer_size}: only a stream is shuffled in parts: leave it out, or "
                "set streaming to true"
            )
        if pad_to_multiple_of != 1 and packing and predict is None:
            raise ValueError(
                f"pad_to_multiple_of: got {pad_to_multiple_of}: packed rows have no padding; leave it out, or set "
                "packing to false"
            )
        if group_by_length and (packing or not shuffle):
            reason = "packed rows have one length; leave it out, or set packing to false"
            raise ValueError(
                f"group_by_length: {reason if packing else 'with shuffle: false, rows keep their order; leave one out'}"
            )
        self.row_format = RowFormat(format=format, columns=columns or Columns(), loss_on=loss_on)
        self.txt_documents: TxtDocuments = txt_documents
        self.skips_bad_rows = bad_rows == "skip"
        self.tokenizer_setting = tokenizer
        self.chat_template = None if chat_template is None else read_chat_template(chat_template)
        self.seq_length = seq_length
        self.packing = packing
        self.has_changing_lengths = not packing
        self.pad_to_multiple_of, self.group_by_length = pad_to_multiple_of, group_by_length
        self.streaming, self.shuffle_buffer_size = streaming, shuffle_buffer_size
        self.cache_dir = get_cache_dir(cache_dir)
        self._stream: TextStream | None = None
        self._tokenizer: Any = None
        self._tokenizer_id = ""
        self._stores: dict[Split, TokenStore | JoinedTokens] = {}

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; there is one once ``setup`` has run."""
        if self._tokenizer is None:
            raise RuntimeError("the tokenizer is loaded or trained in setup(); call that first")
        return self._tokenizer

    @property
    def repeats_rows(self) -> bool:
        """Whether a row of ``train`` may come more than once in an epoch."""
        train = self.sources["train"][0]
        return self.is_endless or (train is not None and list_groups("train", train)[0][1].weight is not None)

    def check_stage(self, stage: str) -> None:
        """Refuse what is not set or not there for a command of Trainer, before the processes of a run are started."""
        if type(self).setup is TextData.setup:  # else it may get its rows from elsewhere
            check_sources(self, stage)

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
            if self.sources[needed][0] is None or needed in self._stores:
                continue
            if needed == "train" and self.streaming:
                self._stream = self._open_stream()
            else:
                self._stores[needed] = self._get_tokens(needed)
        # Its threads were used, so that each fork of a loader's worker would warn, and could hang if it
        # tokenized.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def train_dataloader(self) -> ResumableLoader | StreamLoader:
        """Return this rank's training batches; the loader's place is part of every checkpoint."""
        if self._stream is not None:
            if self.trainer is not None:
                refuse_endless(self.trainer, self)
            return self._load_stream(self._stream)
        rows = self._get_rows("train")
        store = self._stores["train"]
        kind = f"rows of {self.seq_length} tokens" if self.packing else "rows"
        what = f"train ({len(store)} documents, {store.num_tokens} tokens, as {kind})"
        # Of several sources, the documents of an epoch are drawn.
        drawn = {"documents": hash_rows([rows.documents.tobytes()])} if isinstance(store, JoinedTokens) else {}
        fingerprint = make_key(tokens=store.list_digests(), **drawn)
        lengths = rows.lengths if isinstance(rows, DocumentRows) and self.group_by_length else None
        return self.load_train(rows, self._collate, what, fingerprint, lengths)

    def make_preview(self, split: Split, num_shown: int) -> Preview:
        """Return what a split holds, and its first rows as text; ``setup`` makes the tokens before."""
        source_split, is_train = self.get_source_split(split), split == "train"
        sources: list[SourceCount] = []
        store: TokenStore | JoinedTokens | HeldDocuments
        if is_train and self._stream is not None:
            store = self._stream.take(skips_bad_rows=self.skips_bad_rows)
            rows = self._make_rows(split, store, np.arange(len(store.lengths)))
        else:
            rows = self._get_rows(split, warns=False)  # it says so itself
            store = self._stores[source_split]
        if isinstance(store, JoinedTokens):
            groups = [group for _, group in self._list_groups(source_split)]
            longest = None if isinstance(rows, PackedRows) else self.seq_length
            sources = count_sources(store, groups, self.choose_rows(split, len(store)), rows.documents, longest)
        return make_preview(
            rows,
            store,
            tokenizer=self.tokenizer,
            num_shown=num_shown,
            batch_size=self.batch_size if is_train else self.eval_batch_size,
            pad_to_multiple_of=self.pad_to_multiple_of,
            draw_order=self._draw_order if is_train and self.shuffle and self._stream is None else None,
            is_grouped=is_train and self.group_by_length,
            sources=sources,
            is_begin=isinstance(store, HeldDocuments),
        )

    def _draw_order(self, lengths: NDArray[np.int64], is_grouped: bool) -> NDArray[np.int64]:
        """Return the order of the first epoch, as for any number of ranks."""
        size = choose_group_size(len(lengths), self.global_batch_size)
        sampler = GlobalSampler(
            len(lengths),
            batch_size=1,
            shuffle=True,
            seed=self.seed,
            drop_last=False,
            lengths=lengths if is_grouped else None,
            group_size=size,
        )
        return sampler.draw_order(0).numpy()

    @override
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return a packed batch with the lengths of its documents, for a module whose attention goes by them."""
        has_use = self.trainer is not None and hasattr(self.trainer.lightning_module, "pack_inputs")
        return add_document_lengths(batch) if has_use else batch

    def make_section(self) -> Section | None:
        """Return the training data as a part of the report; ``None`` before ``setup``."""
        if "train" not in self._stores and self._stream is None:
            return None
        loader = None if self.trainer is None else self.trainer.train_dataloader
        sampler = loader.sampler if isinstance(loader, ResumableLoader) else None
        num_left_over = sampler.dataset_size - sampler.total_size if isinstance(sampler, GlobalSampler) else None
        return replace(self.make_preview("train", _NUM_REPORTED), num_left_over=num_left_over).make_section()

    def make_example_batch(self) -> Batch:
        """Return a micro-batch of the largest size that training can have, without reading data.

        Packed rows hold several documents; rows of a padded batch are as long as they may be, the first one shorter.
        """
        num_rows = self.largest_batch_size
        shape = (num_rows, self.seq_length)
        if self.packing:
            positions = torch.arange(self.seq_length) % -(-self.seq_length // _EXAMPLE_DOCUMENTS)
            ids = torch.zeros(shape, dtype=torch.int64)
            return {"input_ids": ids, "labels": ids.clone(), "position_ids": positions.expand(shape).clone()}
        lengths = [max(1, self.seq_length // 2)] * (num_rows > 1)
        lengths += [self.seq_length] * (num_rows - len(lengths))
        rows = [dict.fromkeys(("input_ids", "labels"), np.zeros(length, dtype=np.int64)) for length in lengths]
        return PadRows(pad_id=0, multiple_of=self.pad_to_multiple_of)(rows)

    def build_eval_loader(self, split: Split) -> DataLoader[Any]:
        """Return this rank's batches of a split; prompts are padded on the left."""
        rows = self._get_rows(split)
        collate: Callable[[Any], Any] = EvalRows(collate=self._collate, is_packed=self.packing)
        if split == "predict":
            shape: dict[str, int] = {"pad_id": get_pad_id(self.tokenizer), "multiple_of": self.pad_to_multiple_of}
            collate = PromptRows(places=self._stores[split].places, **shape)
        return self.load_eval(rows, collate)

    @property
    def _collate(self) -> Callable[[Any], Any]:
        if self.packing:
            return stack_rows
        return PadRows(pad_id=get_pad_id(self.tokenizer), multiple_of=self.pad_to_multiple_of)

    def _get_rows(self, split: Split, *, warns: bool = True) -> PackedRows | DocumentRows:
        store = self._stores.get(self.get_source_split(split))
        if store is None:
            raise self.describe_missing(split)
        documents = self.choose_rows(split, len(store))
        groups = [group for _, group in self._list_groups(self.get_source_split(split))]
        if split == "train" and isinstance(store, JoinedTokens) and groups[0].weight is not None:
            documents = mix_documents(store, documents, groups, seed=self.seed if self.shuffle else None)
        rows = self._make_rows(split, store, documents)
        if warns and isinstance(rows, DocumentRows) and (cuts := rows.describe_cuts()):
            rank_zero_warn(f"{split}: {cuts}")
        return rows

    def _make_rows(self, split: Split, store: Documents, documents: NDArray[np.int64]) -> PackedRows | DocumentRows:
        if self.packing and split != "predict":
            pad_id = get_pad_id(self.tokenizer)
            return PackedRows(store, documents, seq_length=self.seq_length, pad_id=pad_id)
        return DocumentRows(store, documents, seq_length=self.seq_length, keep_end=split == "predict")

    def _open_stream(self) -> TextStream:
        groups = [group for _, group in self._list_groups("train")]
        sources = [
            StreamSource(parts=[(part, self._read_as(group)) for part in parts], weight=group.weight or 1.0)
            for group, parts in zip(groups, self._list_parts("train"), strict=True)
        ]
        if groups[0].weight is None:  # each row once in a pass
            sources = [StreamSource(parts=[part for source in sources for part in source.parts])]
        return TextStream(
            sources,
            tokenizer=self.tokenizer,
            shuffle=self.shuffle,
            buffer_size=self.shuffle_buffer_size,
            seed=self.seed,
        )

    def _load_stream(self, stream: TextStream) -> StreamLoader:
        shape: dict[str, Any] = {"packing": self.packing, "seq_length": self.seq_length}
        return StreamLoader(
            stream,
            make_rows=lambda: RowMaker(pad_id=get_pad_id(self.tokenizer), **shape),
            collate=self._collate,
            batch_size=self.batch_size,
            share=self.share,
            skips_bad_rows=self.skips_bad_rows,
            fingerprint=stream.make_key(tokenizer=self._tokenizer_id, skips_bad_rows=self.skips_bad_rows, **shape),
            trainer=self.trainer,
            num_workers=self.num_workers,
        )

    def _list_groups(self, split: Split) -> list[tuple[str, DataSource]]:
        if (sources := self.sources[split][0]) is None:
            raise self.describe_missing(split)
        return list_groups(split, sources)

    def _list_parts(self, split: Split) -> list[list[Part]]:
        name = self.sources[split][1]
        return list_group_parts(
            self._list_groups(split),
            split=split,
            split_name=name,
            txt_documents=self.txt_documents,
            is_streamed=self.streaming and split == "train",
        )

    def _read_as(self, group: DataSource, *, is_prompt: bool = False) -> RowFormat:
        """Return how the rows of a source are read."""
        own = self.row_format
        return replace(
            own, format=group.format or own.format, columns=group.columns or own.columns, is_prompt=is_prompt
        )

    def _load_tokenizer(self) -> Any:
        setting = self.tokenizer_setting
        if isinstance(setting, str):
            return load_tokenizer(setting)
        parts = self._list_parts("train")
        groups = [(place, self._read_as(group)) for place, group in self._list_groups("train")]
        formats = [row_format for _, row_format in groups]
        facts: dict[str, Any] = {"mask_token": True} if setting.mask_token else {}
        facts |= {"formats": [asdict(one) for one in formats]} if set(formats) != {self.row_format} else {}
        key = self._make_key([part for own in parts for part in own], vocab_size=setting.vocab_size, **facts)

        def build(folder: Path) -> None:
            what = "reading train for a tokenizer"
            texts = (
                text
                for own, (place, row_format) in zip(parts, groups, strict=True)
                for text in self._read_texts(read_parts(own, what), place, row_format)
            )
            train_tokenizer(texts, setting).save_pretrained(str(folder))

        return load_tokenizer(str(build_once(self.cache_dir / "tokenizers" / key, build)))

    def _get_tokens(self, split: Split) -> TokenStore | JoinedTokens:
        groups = self._list_groups(split)
        stores = [
            self._get_own_tokens(split, place, parts, self._read_as(group, is_prompt=split == "predict"))
            for (place, group), parts in zip(groups, self._list_parts(split), strict=True)
        ]
        return stores[0] if len(stores) == 1 else JoinedTokens(stores)

    def _get_own_tokens(self, split: Split, place: str, parts: list[Part], row_format: RowFormat) -> TokenStore:
        """Return the tokens of one source, made now unless the cache has them."""
        facts = {"has_places": True} if row_format.is_prompt and self.skips_bad_rows else {}
        key = self._make_key(parts, tokenizer=self._tokenizer_id, row_format=asdict(row_format), **facts)

        def build(folder: Path) -> None:
            rows, skips = read_parts(parts, f"tokenizing {place}"), self.skips_bad_rows
            try:
                write_tokens(
                    folder,
                    rows,
                    tokenizer=self.tokenizer,
                    row_format=row_format,
                    skip_bad_rows=skips,
                    has_all_columns=split == "train",
                )
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error

        store = TokenStore(build_once(self.cache_dir / "tokens" / key, build))
        if num_bad := store.summary["num_bad"]:
            named = "\n  ".join(store.summary["bad"])
            rank_zero_warn(f"{place}: {num_bad} bad rows are skipped, {len(store)} are good. The first:\n  {named}")
        for line in describe_unread(store.summary["num_unread"]):
            rank_zero_warn(f"{place}: {line}")
        return store

    def _make_key(self, parts: list[Part], **facts: Any) -> str:
        return make_key(
            cache_version=CACHE_VERSION,
            versions=[version(name) for name in ("tokenizers", "transformers")],
            sources=[part.identify() for part in parts],
            contents=hash_files(self.cache_dir, [path for part in parts for path in part.list_files()]),
            format=asdict(self.row_format),
            skips_bad_rows=self.skips_bad_rows,
            **facts,
        )

    def _read_texts(self, rows: Iterable[Row], place: str, row_format: RowFormat) -> Iterator[str]:
        for row in row_format.expand(rows):
            try:
                yield from list_texts(parse_row(row, row_format))
            except RowError as error:
                if not self.skips_bad_rows:
                    raise ValueError(f"{place}: {row.where}: {error}") from error
