"""A task on a class of Transformers, and data for it: it learns which numbers of a row are larger than the next."""

from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification

from lit_fsdp.tasks import ModelKind, TextTask
from lit_fsdp.tasks.loading import build_eval_loader, build_train_loader

LENGTH = 16


class Tagger(TextTask):
    """One label for each token. Model, weights, adapters, export, plan and resume are those of ``TextTask``."""

    kind = ModelKind(auto_class=AutoModelForTokenClassification, name="token classifier", expected="one such as bert")

    def compute_loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of all labels, and how many there are: the step divides by all."""
        labels = batch["labels"]  # [batch, length], -100 where there is none
        logits = self.run_model(input_ids=batch["input_ids"]).logits  # [batch, length, labels]
        loss_sum = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
        return loss_sum, (labels != -100).sum()


class TaggerData(LightningDataModule):
    """Rows of random numbers, with label 1 where the next one is smaller."""

    def __init__(self, num_rows: int = 2000, batch_size: int = 16) -> None:
        super().__init__()
        numbers = torch.randint(50, (num_rows, LENGTH), generator=torch.Generator().manual_seed(0))
        labels = (numbers > numbers.roll(-1, 1)).long()
        labels[:, -1] = -100  # nothing comes next
        rows = [{"input_ids": row, "labels": label} for row, label in zip(numbers, labels, strict=True)]
        self.held_out, self.rows, self.batch_size = rows[:200], rows[200:], batch_size

    def train_dataloader(self) -> Any:
        """Return a loader whose place is in every checkpoint, and that goes on there with any number of ranks."""
        return build_train_loader(self.rows, batch_size=self.batch_size, collate=stack, trainer=self.trainer)

    def val_dataloader(self) -> Any:
        """Return a loader that gives every row once; those that only fill up the last batch have the index -1."""
        return build_eval_loader(self.held_out, batch_size=self.batch_size, collate=stack_eval, trainer=self.trainer)

    def make_example_batch(self) -> dict[str, Tensor]:
        """Return a micro-batch of the largest size, for ``plan``."""
        return stack(self.rows[: self.batch_size])


def stack(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def stack_eval(rows: list[tuple[int, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Return a batch in which rows that only fill it up have no label."""
    batch = stack([row for _, row in rows])
    batch["labels"][torch.tensor([index for index, _ in rows]) < 0] = -100
    return batch
