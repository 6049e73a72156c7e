"""Labelled images: folders, manifests, tar shards, data sets of Hugging Face, scikit-learn's digits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fsdp.tasks.data import SPLITS_OF_STAGE, Split, TaskData
from lit_fsdp.tasks.image_classification.augmentation import Augmentation
from lit_fsdp.tasks.image_classification.images import BadImageError, Images
from lit_fsdp.tasks.image_classification.metrics import IGNORED
from lit_fsdp.tasks.image_classification.preprocessing import Pixels, Preprocessing, load_processor
from lit_fsdp.tasks.image_classification.sources import (
    DIGITS,
    NUM_ASKED,
    Fields,
    fetch_images,
    open_images,
    sort_labels,
)
from lit_fsdp.tasks.loading import PADDING, GlobalSampler, ResumableLoader, hash_rows
from lit_fsdp.tasks.shares import Share
from lit_fsdp.weights.base_weights import PROCESSOR, fetch_pretrained

Batch = dict[str, Any]
_NUM_SAMPLED = 256  # images whose contents a checkpoint knows


class ImageData(TaskData):
    """Images with one class each, for a classifier.

    A source is one of these:

    - a folder with one folder of images for each class, also at an address such as ``s3://bucket/train``
    - a ``.csv``, ``.jsonl`` or ``.parquet`` manifest with paths; Parquet also with the images themselves
    - tar shards in the layout of WebDataset: a file, a folder of them, or a pattern such as ``data-{000..012}.tar``,
      also behind a URL that fsspec reads
    - a folder written by ``datasets.save_to_disk``, or a data set on the Hub as ``org/name`` or ``org/name:config``
    - ``digits``: the 1,797 handwritten digits of scikit-learn, without a download

    Where no source is named at all, all are the digits, with a warning.

    Evaluation counts every image once at any number of ranks. What the model sees there is made by an image processor
    of Transformers, which is exported with the model.

    Args:
        train: Source to train on.
        validation: Source to validate on.
        test: Source to test on.
        predict: Source of images to classify; labels are not needed. A folder may hold the images themselves,
            and one image will do.
        validation_fraction: Without ``validation``, hold out this share of the training images, always the same.
        train_split: Which split of a data set to train on, such as ``train[:1%]``; ``train`` if not given.
        validation_split: The same for ``validation``; ``validation`` if not given.
        test_split: The same for ``test``; ``test`` if not given.
        predict_split: The same for ``predict``; ``test`` if not given.
        image_field: Column of manifests and data sets with the image, or its path relative to the manifest.
        label_field: Column with its class.
        classes: Names of the classes in the order of the model's outputs. By default those of the training data: as a
            data set has them, else numbers by value and names by alphabet.
        processor: How images become numbers: name or folder of the model whose processor to use, or ``Pixels``.
        augmentation: How training images are changed; ``null`` does not. By default crops and flips.
        bad_images: ``error`` stops at the first image that cannot be decoded; ``skip`` names it and counts it nowhere.
        batch_size: Images in a micro-batch of one rank.
        global_batch_size: Images in an optimizer step, of all ranks and accumulated micro-batches together. Each start
            sets ``trainer.accumulate_grad_batches`` by it, so a run keeps it on another number of ranks, and an epoch
            is a whole number of steps. ``null`` leaves both to you.
        share: For ranks that are not equally fast: the share of each in the rows of a step, such as ``[3, 1]``.
            ``auto`` measures in the first steps and then gives faster ranks more rows, which takes more memory there.
            Steps, losses and evaluation stay the same; ``batch_size`` becomes the mean over the ranks.
        eval_batch_size: The same for validation, test and prediction; ``batch_size`` if not given.
        num_workers: Processes per rank that read ahead; 0 reads in the main process.
        shuffle: Train in a new order each epoch, the same for any number of ranks.
        seed: Of that order, and of augmentation.
    """

    source_kinds = "a folder, a manifest, tar shards, a data set, or digits"

    def __init__(
        self,
        *,
        train: str | None = None,
        validation: str | None = None,
        test: str | None = None,
        predict: str | None = None,
        validation_fraction: float = 0.0,
        train_split: str | None = None,
        validation_split: str | None = None,
        test_split: str | None = None,
        predict_split: str | None = None,
        image_field: str = "image",
        label_field: str = "label",
        classes: list[str] | None = None,
        processor: str | Pixels = Pixels(),  # noqa: B008  frozen, and shown by --help
        augmentation: Augmentation | None = Augmentation(),  # noqa: B008  likewise
        bad_images: Literal["error", "skip"] = "error",
        batch_size: int = 32,
        global_batch_size: int | None = None,
        share: Share = None,
        eval_batch_size: int | None = None,
        num_workers: int = 2,
        shuffle: bool = True,
        seed: int = 0,
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
        if classes is not None and (len(set(classes)) != len(classes) or len(classes) < 2):
            raise ValueError(f"classes: got {classes}: expected names, each once, and two or more")
        if isinstance(processor, Pixels):
            processor.check()
        if augmentation is not None:
            augmentation.check()
        self._take_default()
        self.fields = Fields(image=image_field, label=label_field)
        self.given_classes = classes
        self.processor_setting = processor
        self.augmentation = augmentation
        self.skips_bad_images = bad_images == "skip"
        self._images: dict[Split, Images] = {}
        self._classes: list[str] | None = None

    def _take_default(self) -> None:
        """Take the digits for everything where nothing is named; else what is missing is asked for."""
        if any(given is not None for pair in self.sources.values() for given in pair):
            return
        for split in self.sources:
            if split != "validation" or not self.validation_fraction:
                self.sources[split] = (DIGITS, None)
        rank_zero_warn(
            "data: no source is named, so it is scikit-learn's 1,797 handwritten digits; set train to your own images"
        )

    # What a task asks

    @property
    def classes(self) -> list[str]:
        """Names of the classes; there are some once ``setup`` has run."""
        if self._classes is None:
            raise RuntimeError("the classes are found in setup(); call that first")
        return self._classes

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """How images become numbers. Loads the processor when it is first asked for."""
        return Preprocessing(load_processor(self.processor_setting), self.augmentation)

    def count_classes(self) -> int | None:
        """Return how many classes there will be, if that is known without reading data."""
        if self.given_classes is not None:
            return len(self.given_classes)
        return 10 if self.sources["train"][0] == DIGITS else None

    def make_example_batch(self) -> Batch:
        """Return a micro-batch of the size that training has, without reading data."""
        height, width = self.preprocessing.size
        num_images = self.largest_batch_size
        pixels = torch.zeros(num_images, 3, height, width)
        return {"pixel_values": pixels, "labels": torch.zeros(num_images, dtype=torch.int64)}

    # Life cycle

    def prepare_data(self) -> None:
        """Download data sets and the processor of the Hub, on one process per node."""
        stage = self.trainer.state.fn if self.trainer is not None else None
        for split in dict.fromkeys(("train", *SPLITS_OF_STAGE[stage])):  # training has the classes
            source, name = self.sources[split]
            if source is not None:
                try:
                    fetch_images(source, split=name, split_of=split)
                except ValueError as error:
                    raise ValueError(f"{split}: {error}") from error
        if isinstance(self.processor_setting, str):
            fetch_pretrained(self.processor_setting, "processor", PROCESSOR)

    def setup(self, stage: str | None = None) -> None:
        """Find the images that a stage needs, and the classes; none is decoded."""
        if stage == "fit" and self.sources["train"][0] is None:
            raise self.describe_missing("train")
        for split in SPLITS_OF_STAGE[stage]:
            self._open(self.get_source_split(split))
        if self._classes is None:
            self._classes = self.given_classes or self._get_classes()
        if stage == "fit" and len(self._classes) < 2:
            raise ValueError(
                f"train: {self.sources['train'][0]}: all images are of the class {self._classes[0]!r}: expected two "
                "classes or more"
            )
        for split, images in self._images.items():
            self._check_labels(split, images)

    def train_dataloader(self) -> ResumableLoader:
        """Return this rank's training batches; the loader's place is part of every checkpoint."""
        images = self._build_rows("train")
        rows = _TrainRows(images, self.preprocessing, self.seed)
        loader = self.load_train(rows, collate, f"train ({len(rows)} images)", images.compute_fingerprint())
        rows.sampler = loader.sampler  # type: ignore[assignment]
        return loader

    def build_eval_loader(self, split: Split) -> DataLoader[Any]:
        """Return this rank's batches of a split."""
        return self.load_eval(_EvalRows(self._build_rows(split), self.preprocessing), collate_numbered)

    # How it is done

    def _open(self, split: Split) -> Images | None:
        source, name = self.sources[split]
        if source is not None and split not in self._images:
            try:
                self._images[split] = open_images(
                    source, split=name, split_of=split, fields=self.fields, needs_files=not self.skips_bad_images
                )
            except ValueError as error:
                raise ValueError(f"{split}: {error}") from error
            if split != "predict" and self._images[split].labels is None:
                raise ValueError(
                    f"{split}: {source}: images without classes; expected a folder for each class, or a column "
                    f"{self.fields.label!r}"
                )
        return self._images.get(split)

    def _get_classes(self) -> list[str]:
        # Also for a test alone: its own images might lack a class.
        images = self._open("train") or next(iter(self._images.values()), None)
        if images is None or images.labels is None:
            raise ValueError("classes: not known: no source has labels; set classes, or train to what was trained on")
        return images.class_names or sort_labels(images.labels)

    def _check_labels(self, split: Split, images: Images) -> None:
        known = set(self.classes)
        if split == "predict" or images.labels is None:
            return
        strange = next((i for i, label in enumerate(images.labels) if label not in known), None)
        if strange is not None:
            raise ValueError(
                f"{split}: {images.locate(strange)}: class {images.labels[strange]!r} is not one of "
                f"{', '.join(self.classes[:10])}{' ...' if len(self.classes) > 10 else ''}"
            )

    def _build_rows(self, split: Split) -> _Rows:
        images = self._open(self.get_source_split(split))
        if images is None:
            raise self.describe_missing(split)
        chosen = self.choose_rows(split, len(images))
        numbers = {name: i for i, name in enumerate(self.classes)}
        labels = np.full(len(chosen), IGNORED)
        if split != "predict":
            assert images.labels is not None
            labels = np.array([numbers[images.labels[int(i)]] for i in chosen])
        return _Rows(images=images, chosen=chosen, labels=labels, skips_bad=self.skips_bad_images)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Some images of a source, with the numbers of their classes."""

    images: Images
    chosen: np.ndarray
    labels: np.ndarray
    skips_bad: bool

    def compute_fingerprint(self) -> str:
        """Return a digest of names, classes, sizes of files, and the contents of some; folders may move.

        Times of files change when they are copied, so they are left out. An image that another of the very same size
        has replaced is seen only in the sample: to read all would take as long as an epoch.
        """
        chosen = [int(i) for i in self.chosen]
        names = (self.images.locate(i).rpartition("/")[2] for i in chosen)
        sizes = self._measure(chosen)
        places = np.linspace(0, len(chosen) - 1, min(len(chosen), _NUM_SAMPLED)).astype(int)  # spread over all of them
        sample = [chosen[place] for place in places]
        return hash_rows([self.labels.tobytes(), *names, *sizes, *map(self._fetch, sample)])

    def _measure(self, numbers: Sequence[int]) -> list[int]:
        """Return the sizes of images, asked for many at a time: each may be a round trip on a network disk."""
        if (measure := self.images.measure) is None:
            return []
        sizes = [0] * len(numbers)

        def ask(first: int) -> None:
            sizes[first::NUM_ASKED] = [measure(number) for number in numbers[first::NUM_ASKED]]

        with ThreadPoolExecutor(NUM_ASKED) as threads:
            list(threads.map(ask, range(NUM_ASKED)))
        return sizes

    def _fetch(self, number: int) -> bytes:
        try:
            return self.images.fetch(number) if self.images.fetch is not None else b""
        except (OSError, ValueError):  # neither a file nor bytes: whoever reads it says so, or skips it
            return b""

    def read(self, index: int) -> tuple[Image.Image | None, str]:
        """Return an image, or what is wrong with it."""
        try:
            return self.images.read(int(self.chosen[index])), ""
        except BadImageError as error:
            if not self.skips_bad:
                raise ValueError(f"{error}; remove it, or set bad_images to skip") from error
            return None, str(error)

    def make(self, index: int, make: Callable[[Image.Image], Tensor], size: tuple[int, int]) -> dict[str, Any]:
        image, problem = self.read(index)
        if image is None:
            return {"pixel_values": torch.zeros(3, *size), "label": IGNORED, "problem": problem}
        return {"pixel_values": make(image), "label": int(self.labels[index]), "problem": ""}


class _TrainRows:
    """Rows changed at random, by seed, epoch and number."""

    def __init__(self, rows: _Rows, preprocessing: Preprocessing, seed: int) -> None:
        self.rows, self.preprocessing, self.seed = rows, preprocessing, seed
        self.sampler: GlobalSampler | None = None  # knows the epoch; workers are forked when it begins

    def __len__(self) -> int:
        return len(self.rows.chosen)

    def __getitem__(self, index: int) -> dict[str, Any]:
        seed = (self.seed, self.sampler.epoch if self.sampler is not None else 0, index)
        process = self.preprocessing
        return self.rows.make(index, lambda image: process.for_training(image, seed), process.size)


class _EvalRows:
    def __init__(self, rows: _Rows, preprocessing: Preprocessing) -> None:
        self.rows, self.preprocessing = rows, preprocessing

    def __len__(self) -> int:
        return len(self.rows.chosen)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows.make(index, self.preprocessing.for_evaluation, self.preprocessing.size)
        return row | {"file": self.rows.images.locate(int(self.rows.chosen[index]))}


def collate(rows: Sequence[dict[str, Any]]) -> Batch:
    """Return ``pixel_values`` [batch, 3, height, width], ``labels`` [batch], and ``problems`` of bad images."""
    return {
        "pixel_values": torch.stack([row["pixel_values"] for row in rows]),
        "labels": torch.tensor([row["label"] for row in rows]),
        "problems": [row["problem"] for row in rows if row["problem"]],
    }


def collate_numbered(rows: Sequence[tuple[int, dict[str, Any]]]) -> Batch:
    """Return the same with ``index``, ``files`` and ``is_bad``; what only fills up the last batch has no label."""
    batch = collate([row if i != PADDING else row | {"label": IGNORED, "problem": ""} for i, row in rows])
    is_bad = torch.tensor([bool(row["problem"]) for _, row in rows])
    return batch | {"index": [i for i, _ in rows], "files": [row["file"] for _, row in rows], "is_bad": is_bad}
