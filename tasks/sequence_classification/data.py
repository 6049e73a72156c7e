"""Texts with labels, and pairs of a better and a worse answer, for sequence classification."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fsdp.cache import build_once, get_cache_dir, hash_files, make_key, read_digests
from lit_fsdp.errors import join_names
from lit_fsdp.reporting.sections import Section
from lit_fsdp.tasks.data import SPLITS_OF_STAGE, Split, TaskData, check_least
from lit_fsdp.tasks.length_groups import compute_efficiency
from lit_fsdp.tasks.loading import PADDING, ResumableLoader
from lit_fsdp.tasks.row_files import show_controls
from lit_fsdp.tasks.sequence_classification.labels import (
    MULTI,
    REGRESSION,
    REWARD,
    SINGLE,
    Labels,
    ProblemType,
    Targets,
    count_targets,
    describe_target,
    make_targets,
    stack_targets,
)
from lit_fsdp.tasks.sequence_classification.rows import (
    OF_PAIRS,
    LabeledColumns,
    LabeledEncoder,
    LabeledFormat,
    PydocParagraphs,
    find_class_names,
    list_labeled_texts,
    name_labels,
    write_labeled,
)
from lit_fsdp.tasks.shares import Share
from lit_fsdp.tasks.text.batches import Batch, PadRows, find_places, keep_exact
from lit_fsdp.tasks.text.messages import RowError
from lit_fsdp.tasks.text.mixture import DataSource, check_sources, list_group_parts
from lit_fsdp.tasks.text.preview import Piece, Preview
from lit_fsdp.tasks.text.sources import Part, Source, read_parts
from lit_fsdp.tasks.text.tokenizer import (
    TrainTokenizer,
    get_pad_id,
    identify_tokenizer,
    load_tokenizer,
    read_chat_template,
    train_tokenizer,
)
from lit_fsdp.tasks.text.tokens import TokenStore

CACHE_VERSION = 3  # raise it when the same settings give other tokens or labels than before
_PYDOC = "pydoc"
_NUM_REPORTED = 3  # rows


class LabeledTextData(TaskData):
    """Texts with labels from files, data sets or the Hugging Face Hub, for ``SequenceClassification``.

    A source is one of those of ``TextData``. Its rows hold ``text``, or ``messages``, and ``label``: the name or the
    number of a class, a list of these, or a number to predict. Rows of a reward model hold ``chosen`` and ``rejected``,
    and ``prompt`` if these do not begin with it, in the layouts of pairs that ``PreferenceData`` reads. ``pydoc`` is 8
    topics of Python's own language reference: its paragraphs are to be told apart.

    Args:
        train: Source to train on.
        validation: Source to validate on.
        test: Source to test on.
        predict: Source of texts to classify; they need no label.
        validation_fraction: Without ``validation``, hold out this share of the training rows, always the same.
        train_split: Which split of a data set to train on, such as ``train[:1%]``; ``train`` if not given.
        validation_split: The same for ``validation``; ``validation`` if not given.
        test_split: The same for ``test``; ``test`` if not given.
        predict_split: The same for ``predict``; ``test`` if not given.
        problem_type: What labels are: ``single_label_classification``, ``multi_label_classification``, ``regression``,
            or ``reward`` for pairs. If not given, lists are several labels; where all labels are numbers, and some
            have a point, such as 1.0, they are values to predict; all else names a class.
        classes: Names of the classes, in the order of the model's outputs. If not given, those of ``train``: as a data
            set or Parquet has them for its numbers (``ClassLabel``), else sorted, or 0 to the largest where labels are
            whole numbers.
        columns: The fields of your rows, where they have names of their own.
        label: The field that holds the label.
        bad_rows: ``error`` stops at the first bad row; ``skip`` leaves bad rows out and warns with their number.
        tokenizer: Model name on the Hub or folder to load it from, or ``TrainTokenizer`` to train one on ``train``.
        chat_template: Jinja text, or a ``.jinja`` file, to render chats by instead of the tokenizer's own template.
        seq_length: Tokens of the longest row. Longer texts are cut as the tokenizer cuts, longer pairs left out.
        pad_to_multiple_of: Round the length of a batch up to a multiple of this.
        batch_size: Rows in a micro-batch of one rank; a pair is one.
        global_batch_size: Rows in an optimizer step, of all ranks and accumulated micro-batches together. Each start
            sets ``trainer.accumulate_grad_batches`` by it. ``null`` leaves both to you.
        share: For ranks that are not equally fast: the share of each in the rows of a step, such as ``[3, 1]``.
            ``auto`` measures in the first steps.
        eval_batch_size: The same for validation, test and prediction; ``batch_size`` if not given.
        num_workers: Processes per rank that read ahead; 0 reads in the main process.
        shuffle: Train in a new order each epoch, the same for any number of ranks.
        seed: Of that order.
        cache_dir: Where tokens are kept; else ``LIT_FSDP_CACHE`` or ``~/.cache/lit_fsdp``.
    """

    source_kinds = "a file, a folder, a data set, or pydoc"
    has_changing_lengths = True

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
        problem_type: ProblemType | None = None,
        classes: list[str] | None = None,
        columns: LabeledColumns | None = None,
        label: str = "label",
        bad_rows: Literal["error", "skip"] = "error",
        tokenizer: str | TrainTokenizer,
        chat_template: str | None = None,
        seq_length: int = 512,
        pad_to_multiple_of: int = 1,
        batch_size: int = 8,
        global_batch_size: int | None = None,
        share: Share = None,
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
            share=share,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            shuffle=shuffle,
            seed=seed,
        )
        check_least(2, seq_length=seq_length)
        check_least(1, pad_to_multiple_of=pad_to_multiple_of)
        if classes is not None and problem_type in (REGRESSION, REWARD):
            raise ValueError(f"classes: got {len(classes)} of them with problem_type {problem_type!r}; leave them out")
        if classes is not None and (len(set(classes)) < len(classes) or len(classes) < 2):
            raise ValueError(f"classes: got {classes}: expected two or more, each once")
        columns = columns or LabeledColumns()
        named = [name for name, theirs in asdict(columns).items() if theirs is not None and name in OF_PAIRS]
        if named and problem_type != REWARD:
            raise ValueError(f"columns.{named[0]}: only pairs have one; set problem_type: reward, or leave it out")
        self.given_problem, self.given_classes = problem_type, classes
        self.labeled = LabeledFormat(columns=columns, label=label, is_pair=problem_type == REWARD)
        self.skips_bad_rows = bad_rows == "skip"
        self.tokenizer_setting = tokenizer
        self.chat_template = None if chat_template is None else read_chat_template(chat_template)
        self.seq_length, self.pad_to_multiple_of = seq_length, pad_to_multiple_of
        self.cache_dir = get_cache_dir(cache_dir)
        self._tokenizer: Any = None
        self._tokenizer_id = ""
        self._stores: dict[Split, TokenStore] = {}
        self._problem, self._classes = problem_type, classes

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; there is one once ``setup`` has run."""
        if self._tokenizer is None:
            raise RuntimeError("the tokenizer is loaded or trained in setup(); call that first")
        return self._tokenizer

    @property
    def problem_type(self) -> ProblemType | None:
        """What labels are of; it is known from the settings, or once ``setup`` has run."""
        return self._problem

    @property
    def classes(self) -> list[str] | None:
        """Names of the classes, in the order of the model's outputs; known as ``problem_type`` is, none of numbers."""
        return self._classes

    def check_stage(self, stage: str) -> None:
        """Refuse what is not set or not there for a command of Trainer, before the processes of a run are started."""
        if type(self).setup is LabeledTextData.setup:  # else it may get its rows from elsewhere
            check_sources(self, stage)

    def setup(self, stage: str | None = None) -> None:
        """Load or train the tokenizer and make tokens and labels, unless the cache has them.

        Classes are those of ``train``, in every stage in which that is set.
        """
        if stage == "fit" and self.sources["train"][0] is None:
            raise self.describe_missing("train")
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
            if self.chat_template is not None:
                self._tokenizer.chat_template = self.chat_template
            self._tokenizer_id = identify_tokenizer(self._tokenizer)
        needed = dict.fromkeys(self.get_source_split(split) for split in SPLITS_OF_STAGE[stage])
        if self._problem is None or (self._classes is None and self._problem in (SINGLE, MULTI)):
            needed = dict.fromkeys(("train", *needed))  # the first that is set says what there is to tell apart
        for split in needed:
            if split not in self._stores and self.sources[split][0] is not None:
                self._stores[split] = self._get_tokens(split)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # as TextData does

    def train_dataloader(self) -> ResumableLoader:
        """Return this rank's training batches; the loader's place is part of every checkpoint."""
        rows, store = self._get_rows("train"), self._stores["train"]
        digests = read_digests(store.folder)
        fingerprint = make_key(files=sorted(digests.items()), classes=self._classes, problem=self._problem)
        what = f"train ({len(rows)} rows)"
        return self.load_train(rows, self._collate("train"), what, fingerprint)

    def build_eval_loader(self, split: Split) -> DataLoader[Any]:
        """Return this rank's batches of a split, which is not trained on."""
        return self.load_eval(self._get_rows(split), self._collate(split))

    def make_preview(self, split: Split, num_shown: int) -> Preview:
        """Return what a split holds, and its first rows with their labels; ``setup`` makes the tokens before."""
        rows, is_train = self._get_rows(split), split == "train"
        store, problem, classes = rows.store, self._problem, self._classes or ()
        documents = 2 * rows.chosen[:, None] + np.arange(2) if rows.is_pair else rows.chosen[:, None]
        order = np.random.default_rng(self.seed).permutation(len(rows)) if is_train and self.shuffle else slice(None)
        size = self.batch_size if is_train else self.eval_batch_size
        targets = [] if rows.is_pair else [rows[row][1] for row in range(len(rows))]
        lines = [] if rows.is_pair or problem is None else [count_targets(targets, problem, classes)]
        if num_cut := store.summary["num_cut"]:
            lines.append(f"{num_cut:,} texts are longer than seq_length {self.seq_length} and are cut there")
        shown: list[list[Piece]] = []
        for row in range(min(num_shown, len(rows))):
            texts, target = rows[row]
            names = ["chosen", "rejected"]
            if not rows.is_pair and problem is not None:
                names = [describe_target(target, problem, classes)]
            shown.append([piece for name, ids in zip(names, texts, strict=True) for piece in self._show(name, ids)])
        return Preview(
            rows=shown,
            num_rows=len(rows),
            is_packed=False,
            lengths=store.lengths[documents.reshape(-1)],
            seq_length=self.seq_length,
            num_learned=None,
            efficiency=compute_efficiency(
                store.lengths[documents[order].reshape(-1)], size * documents.shape[1], self.pad_to_multiple_of
            ),
            num_bad=store.summary["num_bad"],
            bad=store.summary["bad"],
            labels=lines,
        )

    def make_section(self) -> Section | None:
        """Return the training data as a part of the report; ``None`` before ``setup``."""
        return self.make_preview("train", _NUM_REPORTED).make_section() if "train" in self._stores else None

    def _show(self, name: str, ids: NDArray[np.int64]) -> list[Piece]:
        """Return a text as pieces, with its label before it."""
        text = show_controls(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        title = Piece(text=f"[{name}] ", ids=(), is_learned=True, begins_document=True)
        return [title, Piece(text=text, ids=ids.tolist(), is_learned=False, begins_document=False)]

    def make_example_batch(self) -> Batch:
        """Return a micro-batch of the largest size that training can have, without reading data."""
        problem = self._problem or SINGLE
        num_rows = self.largest_batch_size * (2 if problem == REWARD else 1)
        shape = (num_rows, self.seq_length)
        batch = {
            "input_ids": torch.zeros(shape, dtype=torch.int64),
            "attention_mask": torch.ones(shape, dtype=torch.int64),
            "labels": torch.zeros(self.largest_batch_size, dtype=torch.int64 if problem == SINGLE else torch.float32),
        }
        batch["attention_mask"][0, self.seq_length // 2 :] = int(num_rows == 1)  # rows are padded to the longest
        if problem == REGRESSION:
            batch["labels"] = keep_exact(batch["labels"])
        if problem == MULTI:
            batch["labels"] = batch["labels"][:, None].repeat(1, len(self._classes or "12"))
        return batch

    def _collate(self, split: Split) -> LabeledRows:
        pad = PadRows(pad_id=get_pad_id(self.tokenizer), multiple_of=self.pad_to_multiple_of)
        places = self._stores[split].places if split == "predict" else None
        return LabeledRows(pad=pad, problem=self._problem, is_indexed=split != "train", places=places)

    def _get_rows(self, split: Split) -> LabeledDocuments:
        name = self.get_source_split(split)
        store = self._stores.get(name)
        if store is None:
            raise self.describe_missing(split)
        is_pair = self.labeled.is_pair and split != "predict"
        chosen = self.choose_rows(split, len(store) // (2 if is_pair else 1))
        targets = None
        if split != "predict" and not is_pair:
            assert self._problem is not None
            try:
                targets = make_targets(Labels(store.folder), self._problem, self._classes or ())
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        return LabeledDocuments(store=store, chosen=chosen, targets=targets, is_pair=is_pair)

    def _get_parts(self, split: Split) -> list[Part]:
        source, name = self.sources[split]
        if source is None:
            raise self.describe_missing(split)
        if source == _PYDOC and name is None:
            return [PydocParagraphs()]
        groups = [(split, DataSource(path=source))]
        return list_group_parts(groups, split=split, split_name=name, txt_documents="line")[0]

    def _load_tokenizer(self) -> Any:
        setting = self.tokenizer_setting
        if isinstance(setting, str):
            return load_tokenizer(setting)
        parts = self._get_parts("train")

        def build(folder: Path) -> None:
            rows = read_parts(parts, "reading train for a tokenizer")
            texts = list_labeled_texts(rows, self.labeled, skip_bad_rows=self.skips_bad_rows)
            try:
                train_tokenizer(texts, setting).save_pretrained(str(folder))
            except RowError as error:
                raise ValueError(f"train: {error}") from error

        key = self._make_key(parts, **asdict(setting))
        return load_tokenizer(str(build_once(self.cache_dir / "tokenizers" / key, build)))

    def _get_tokens(self, split: Split) -> TokenStore:
        parts, labeled = self._get_parts(split), self.labeled
        if split == "predict":
            labeled = LabeledFormat(columns=labeled.columns, label=labeled.label, is_labeled=False)
        encoder = LabeledEncoder(self.tokenizer, self.seq_length)
        facts = {"tokenizer": self._tokenizer_id, "seq_length": self.seq_length, "is_labeled": labeled.is_labeled}
        facts |= {"has_places": True} if self.skips_bad_rows and not labeled.is_labeled else {}
        names: list[str] | None = None
        if labeled.is_labeled and not labeled.is_pair and self.given_problem != REGRESSION:
            names = find_class_names(parts, labeled.label)
        if self.given_classes is not None and not set(names or ()) <= set(self.given_classes):
            names = None  # numbers are then places in classes, which has new names for them
        facts |= {} if names is None else {"names": names}

        def build(folder: Path) -> None:
            rows = read_parts(parts, f"tokenizing {split}")
            if names is not None:
                rows = name_labels(rows, labeled.label, names)
            try:
                write_labeled(folder, rows, encoder=encoder, labeled=labeled, skip_bad_rows=self.skips_bad_rows)
            except ValueError as error:
                raise ValueError(f"{split}: {error}") from error

        store = TokenStore(build_once(self.cache_dir / "labeled" / self._make_key(parts, **facts), build))
        self._tell(split, store)
        if labeled.is_labeled and not labeled.is_pair:
            try:
                self._set_problem(split, Labels(store.folder), names)
            except ValueError as error:
                raise ValueError(f"{split}: {error}") from error
        return store

    def _set_problem(self, split: Split, labels: Labels, names: list[str] | None) -> None:
        """Set what is learned of labels and the names of classes, unless they are known; a data set may have names."""
        if split == "train" and labels.are_full:
            raise ValueError(
                f"every row lists all of the labels {join_names([str(value) for value in labels.values])}: expected "
                "the classes that apply, not 0 or 1 for each class"
            )
        is_known = self._problem is not None
        has_classes = self.given_classes is not None or names is not None
        self._problem = labels.find_problem(self._problem, has_classes=has_classes)
        if self._problem != REGRESSION:
            self._classes = self._classes or names or labels.list_classes()
            return
        if self.given_classes is not None:
            raise ValueError(
                f"classes: got {len(self.given_classes)} of them, and a label is a number with a fraction, "
                "which names none; leave classes out, or write labels as they are in classes"
            )
        if not is_known:
            rank_zero_info(
                f"{split}: labels such as {labels.decimal} are numbers to predict (regression); to have classes, set "
                f"data.problem_type: {SINGLE}"
            )

    def _tell(self, split: Split, store: TokenStore) -> None:
        counts = store.summary
        if counts["num_bad"]:
            named = "\n  ".join(counts["bad"])
            rank_zero_warn(f"{split}: {counts['num_bad']} bad rows are skipped. The first:\n  {named}")
        if counts["num_cut"]:
            what = f"{counts['num_cut']} of {len(store)} rows are longer than seq_length {self.seq_length}"
            rank_zero_warn(f"{split}: {what} and are cut")
        if counts["num_long"]:
            rank_zero_warn(
                f"{split}: {counts['num_long']} pairs are longer than seq_length {self.seq_length} and are left out, "
                f"{len(store) // 2} are kept"
            )

    def _make_key(self, parts: list[Part], **facts: Any) -> str:
        return make_key(
            cache_version=CACHE_VERSION,
            versions=[version(name) for name in ("tokenizers", "transformers")],
            sources=[part.identify() for part in parts],
            contents=hash_files(self.cache_dir, [path for part in parts for path in part.list_files()]),
            labeled=asdict(self.labeled),
            skips_bad_rows=self.skips_bad_rows,
            **facts,
        )


@dataclass(frozen=True, kw_only=True)
class LabeledDocuments:
    """Rows of a split: the tokens of a text, or of the two of a pair, and the target if there is one.

    Args:
        store: The tokens of all texts of the source.
        chosen: Which rows of the source, in order.
        targets: Of all rows of the source.
        is_pair: Whether two texts are a row.
    """

    store: TokenStore
    chosen: NDArray[np.int64]
    targets: Targets | None
    is_pair: bool

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, row: int) -> tuple[list[NDArray[np.int64]], Any]:
        """Return ids [length] of each text, and the target."""
        number = int(self.chosen[row])
        documents = (2 * number, 2 * number + 1) if self.is_pair else (number,)
        ids = [self.store[document][0].astype(np.int64) for document in documents]
        return ids, np.float32(1) if self.targets is None else self.targets[number]


@dataclass(frozen=True, kw_only=True)
class LabeledRows:
    """Collates rows to ``input_ids``, ``attention_mask`` [texts, length] and ``labels``; a pair is two texts in turn.

    ``labels`` are [batch], or [batch, classes] of 0 and 1 for several labels. Of rows that only fill up a batch they
    are -100, or NaN where they are numbers; for pairs, others have 1. Numbers to predict are those of ``keep_exact``.

    Args:
        pad: Pads the texts.
        problem: What labels are of.
        is_indexed: Whether rows come with their index.
        places: Of all rows in their source, to have ``index``, the place of each, instead of ``labels``.
    """

    pad: Callable[[Sequence[Any]], Batch]
    problem: ProblemType | None
    is_indexed: bool
    places: NDArray[np.int64] | None = None

    def __call__(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        """Return the batch."""
        indexed = rows if self.is_indexed else list(enumerate(rows))
        batch = self.pad([{"input_ids": ids, "labels": ids} for _, (texts, _) in indexed for ids in texts])
        del batch["labels"]
        if self.places is not None:
            return {**batch, "index": find_places([index for index, _ in indexed], self.places)}
        assert self.problem is not None
        is_filler = [index == PADDING for index, _ in indexed]
        labels = stack_targets([target for _, (_, target) in indexed], is_filler, self.problem)
        return {**batch, "labels": keep_exact(labels) if self.problem == REGRESSION else labels}
