"""What the data of tasks shares: a source for each split, held-out rows, and the loaders of this rank."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from lit_fsdp.parsing.mappings import TakesMappings
from lit_fsdp.tasks.loading import ResumableLoader, Rows, build_eval_loader, build_train_loader
from lit_fsdp.tasks.shares import Share, check_share, count_largest

Split = Literal["train", "validation", "test", "predict"]

SPLITS_OF_STAGE: dict[str | None, tuple[Split, ...]] = {
    "fit": ("train", "validation"),
    "validate": ("validation",),
    "test": ("test",),
    "predict": ("predict",),
    None: ("train", "validation", "test", "predict"),
}
# Of a data set, where the user names none.
DEFAULT_SPLITS: dict[Split, str] = {"train": "train", "validation": "validation", "test": "test", "predict": "test"}
_HELD_OUT_SEED = 0  # not the seed setting: runs with other seeds are compared on the same rows


class TaskData(TakesMappings, LightningDataModule):
    """A source for each split, and a loader of it for this rank.

    A subclass says in ``build_eval_loader`` and ``train_dataloader`` how rows become batches. Its settings of these
    names say what they mean.

    Args:
        sources: Of each split, what the user names, and the split of that.
    """

    source_kinds = "a file, a folder or a data set"  # in errors
    has_changing_lengths = False  # whether batches are padded to lengths of their own: compiled code should know
    is_endless = False  # whether training rows come pass after pass, so that only a number of steps ends a run

    def __init__(
        self,
        *,
        sources: dict[Split, tuple[Any, str | None]],
        validation_fraction: float,
        batch_size: int,
        eval_batch_size: int | None,
        num_workers: int,
        shuffle: bool,
        seed: int,
        global_batch_size: int | None = None,
        share: Share = None,
    ) -> None:
        super().__init__()
        check_least(1, batch_size=batch_size, eval_batch_size=eval_batch_size, global_batch_size=global_batch_size)
        check_least(0, num_workers=num_workers, seed=seed)
        for split, (source, name) in sources.items():
            refuse_empty(split, source, self.source_kinds)
            if source is None and name is not None:
                raise ValueError(f"{split}_split: not used, as {split} names no data set; leave it out")
        if not 0 <= validation_fraction < 1:
            raise ValueError(f"validation_fraction: got {validation_fraction}: expected 0 to below 1, such as 0.05")
        if validation_fraction and sources["validation"][0] is not None:
            raise ValueError("validation_fraction: not used, as validation names a source; leave one of them out")
        self.sources, self.validation_fraction = sources, validation_fraction
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size or batch_size
        self.num_workers, self.shuffle, self.seed = num_workers, shuffle, seed
        check_share(share)
        self.global_batch_size, self.share = global_batch_size, share

    @abstractmethod
    def build_eval_loader(self, split: Split) -> DataLoader[Any]:
        """Return this rank's batches of a split that is not trained on."""

    def val_dataloader(self) -> Any:
        """Return this rank's validation batches, or none if nothing is set to validate on."""
        if self.holds_out or self.sources["validation"][0] is not None:
            return self.build_eval_loader("validation")
        if self.trainer is not None and self.trainer.state.fn == TrainerFn.VALIDATING:
            raise self.describe_missing("validation")
        # Lightning 2.6 warns of "zero length" also where an empty list says: nothing to validate on.
        warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")
        return []

    def test_dataloader(self) -> DataLoader[Any]:
        """Return this rank's test batches."""
        return self.build_eval_loader("test")

    def predict_dataloader(self) -> DataLoader[Any]:
        """Return this rank's rows to predict, with ``index`` to put predictions in the order of the source."""
        return self.build_eval_loader("predict")

    @property
    def holds_out(self) -> bool:
        """Whether validation is a share of the training rows."""
        return self.sources["validation"][0] is None and self.validation_fraction > 0

    def get_source_split(self, split: Split) -> Split:
        """Return the split whose source has the rows of another one, which may be held out of it."""
        return "train" if split == "validation" and self.holds_out else split

    @property
    def largest_batch_size(self) -> int:
        """Rows of the largest micro-batch that a rank gets in training."""
        return count_largest(self.share, self.batch_size)

    def choose_rows(self, split: Split, num_rows: int) -> NDArray[np.int64]:
        """Return which rows of its source a split has, in order."""
        if not self.holds_out or split not in ("train", "validation"):
            return np.arange(num_rows)
        num_held_out = max(1, round(num_rows * self.validation_fraction))
        if num_held_out >= num_rows:
            raise ValueError(
                f"validation_fraction: {self.validation_fraction} of {num_rows} rows leaves none to train on; lower "
                "it, or set validation"
            )
        order = np.random.default_rng(_HELD_OUT_SEED).permutation(num_rows)
        return np.sort(order[:num_held_out] if split == "validation" else order[num_held_out:])

    def describe_missing(self, split: Split) -> ValueError:
        """Return the error of a split that is needed and has no source."""
        also = ", or set validation_fraction" if split == "validation" else ""
        return ValueError(f"{split}: not set; name {self.source_kinds}{also}")

    def load_train(
        self,
        rows: Rows,
        collate: Callable[[Any], Any],
        what: str,
        fingerprint: str = "",
        lengths: NDArray[np.int64] | None = None,
    ) -> ResumableLoader:
        """Return a loader of training rows with the settings of this data; see :func:`build_train_loader`."""
        return build_train_loader(
            rows,
            batch_size=self.batch_size,
            collate=collate,
            shuffle=self.shuffle,
            seed=self.seed,
            num_workers=self.num_workers,
            trainer=self.trainer,
            what=what,
            fingerprint=fingerprint,
            whole_steps=self.global_batch_size is not None,
            share=self.share,
            lengths=lengths,
        )

    def load_eval(self, rows: Rows, collate: Callable[[Any], Any]) -> DataLoader[Any]:
        """Return a loader of other rows with the settings of this data; see :func:`build_eval_loader`."""
        return build_eval_loader(
            rows,
            batch_size=self.eval_batch_size,
            collate=collate,
            num_workers=self.num_workers,
            trainer=self.trainer,
        )


def refuse_endless(trainer: Trainer, data: object) -> None:
    """Refuse a run of endless data that only its epochs could end: the first one would have no end.

    Raises:
        ValueError: With what to set.
    """
    if getattr(data, "is_endless", False) and count_stream_batches(trainer) is None:
        raise ValueError(
            f"max_steps: got {trainer.max_steps}: {type(data).__name__} streams train without an end, so no epoch "
            "ends: set trainer.max_steps, or limit_train_batches to a number of batches"
        )


def count_stream_batches(trainer: Trainer) -> int | None:
    """Return the micro-batches of one rank in a whole run on endless data; ``None`` if nothing ends the run."""
    limit = trainer.limit_train_batches
    ends = [trainer.max_steps * trainer.accumulate_grad_batches] if trainer.max_steps != -1 else []
    return min([*ends, *([limit] if isinstance(limit, int) else [])], default=None)


def refuse_empty(split: Split, source: object, kinds: str) -> None:
    """Refuse a source without a name, which as a path would be the current folder.

    Args:
        split: That it is of.
        source: A text, a list of sources, or a mapping with a ``path``.
        kinds: What is expected.

    Raises:
        ValueError: It is empty, or one of a list is.
    """
    if isinstance(source, str) and not source.strip():
        raise ValueError(f"{split}: got {source!r}: expected {kinds}; see whether a variable of the shell is not set")
    if isinstance(source, Mapping):
        refuse_empty(split, source.get("path"), kinds)
    elif isinstance(source, list):
        for one in source:
            refuse_empty(split, one, kinds)


def check_least(least: int, **settings: int | None) -> None:
    """Refuse settings that are too small."""
    for name, value in settings.items():
        if value is not None and value < least:
            raise ValueError(f"{name}: got {value}: expected {least} or more")
