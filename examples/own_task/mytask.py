"""A task and data of your own, without a change to lit_fsdp: a model learns to sort rows of numbers."""

from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaModel

from lit_fsdp.tasks import Task


class Sorter(Task):
    """Predict a row of numbers in order. Each argument of ``__init__`` is a key below ``model.init_args``."""

    def __init__(self, width: int = 64, num_layers: int = 4, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # optimizer and lr_scheduler, which are keys too
        self.sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": num_layers}

    def configure_model(self) -> None:
        """Build the model without memory. Each rank then gets memory and weights for its own shards only."""
        if hasattr(self, "model"):  # fit calls this again before validation
            return
        with torch.device("meta"):
            self.model = LlamaModel(LlamaConfig(vocab_size=100, num_attention_heads=4, **self.sizes))
            self.head = nn.Linear(self.sizes["hidden_size"], 100)
        self.finish_model()

    def sum_losses(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of [batch, length] numbers, and how many there are."""
        both = torch.cat([rows, rows.sort(dim=1).values], dim=1)  # first as given, then in order
        logits = self.head(self.model(both).last_hidden_state)[:, rows.shape[1] - 1 : -1]  # [batch, length, 100]
        targets = both[:, rows.shape[1] :]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return loss, loss.new_tensor(targets.numel())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.weigh_loss(*self.sum_losses(batch))  # the step divides by the targets of all ranks

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.update_eval_loss("val", *self.sum_losses(batch))


class SorterData(LightningDataModule):
    """Rows of random numbers. Lightning gives each rank its part of any map-style data set."""

    def __init__(self, num_rows: int = 4000, length: int = 16, batch_size: int = 32) -> None:
        super().__init__()
        rows = torch.randint(100, (num_rows, length), generator=torch.Generator().manual_seed(0))
        self.held_out, self.rows = rows[: num_rows // 10], rows[num_rows // 10 :]
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.rows, batch_size=self.batch_size, shuffle=True)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.held_out, batch_size=self.batch_size)  # type: ignore[arg-type]
