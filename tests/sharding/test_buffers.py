"""Buffers that ranks fill by themselves are evaluated and saved as one."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from training import build_trainer

from lit_fsdp import FSDP2Strategy
from lit_fsdp.sharding.buffers import has_statistics_of_ranks, sync_buffers
from ranks import run_ranks


class Counting(pl.LightningModule):
    """A user's own module: BatchNorm, a buffer that each rank fills otherwise, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        self.register_buffer("seen", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("own", torch.zeros(1), persistent=False)
        self.at_validation: list[dict[str, Tensor]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen += 1 + self.global_rank
        self.own.fill_(self.global_rank)
        return self.net(batch[0]).square().mean()

    def on_validation_epoch_start(self) -> None:
        self.at_validation.append({name: buffer.clone() for name, buffer in self.named_buffers()})

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def make_loader() -> DataLoader[Any]:
    rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    return DataLoader(TensorDataset(rows), batch_size=4)


def train(folder: Path, checkpoint_format: Any, weights_only: bool) -> None:
    saver = ModelCheckpoint(folder / "saved", filename="last", save_weights_only=weights_only)
    strategy = FSDP2Strategy(print_plan=False, checkpoint_format=checkpoint_format)
    options = {"enable_checkpointing": True, "max_epochs": 2, "max_steps": -1}
    trainer = build_trainer(strategy, callbacks=[saver], **options)
    module = Counting()
    trainer.fit(module, make_loader(), make_loader())
    of_fit = trainer.callback_metrics["val_loss"]
    state = {key: value.clone() for key, value in module.optimizers().state_dict()["state"][0].items()}  # type: ignore[union-attr]
    (again,) = trainer.validate(module, make_loader(), ckpt_path=saver.best_model_path, verbose=False)
    assert all(torch.equal(state[key], value) for key, value in module.optimizers().state_dict()["state"][0].items())  # type: ignore[union-attr]
    torch.save((module.at_validation, float(of_fit), again["val_loss"]), folder / f"{dist.get_rank()}.pt")


@pytest.mark.full
@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("checkpoint_format", ["sharded", "single_file"])
def test_what_is_saved_is_what_was_validated(tmp_path: Path, checkpoint_format: str, weights_only: bool) -> None:
    run_ranks(train, tmp_path, checkpoint_format, weights_only)
    (first, fit_loss, loss), (second, *_) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert loss == pytest.approx(fit_loss, rel=1e-6)
    assert len(first) == 4  # the check before training, two epochs, the checkpoint
    for mine, other in zip(first, second, strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in mine if name != "own")
    assert first[-1]["seen"] == 8  # of the first rank, as under DDP
    assert second[-1]["own"] == 1


class NamedInput(nn.BatchNorm1d):
    """Has a signature of its own, and computes in the dtype of its weight."""

    def forward(self, values: Tensor, scale: float = 1.0) -> Tensor:  # type: ignore[override]
        return super().forward(values) * self.weight * scale


def train_in_16_bits() -> None:
    losses: list[float] = []
    for precision in ("32-true", "bf16-mixed", "bf16-true"):
        torch.manual_seed(0)
        trainer = build_trainer(FSDP2Strategy(print_plan=False), max_steps=3, precision=precision)
        module = Counting()
        module.net[1] = NamedInput(module.net[1].num_features)
        trainer.fit(module, make_loader())
        (found,) = trainer.validate(module, make_loader(), verbose=False)
        losses.append(found["val_loss"])
        assert module.net[1].running_var.dtype == torch.float32
        assert module.net[1].weight.dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
        assert "weight" in dict(module.net[1].named_parameters())
    assert losses == pytest.approx([losses[0]] * 3, rel=0.05)


@pytest.mark.full
@pytest.mark.parametrize("world_size", [1, 2])
def test_batch_norm_trains_in_16_bits_with_statistics_in_float32(world_size: int) -> None:
    run_ranks(train_in_16_bits, world_size=world_size)


def send_others() -> None:
    rank = dist.get_rank()
    module, norm = nn.Module(), nn.BatchNorm1d(2)
    whole = torch.full((4, 6), float(rank))
    buffers = {
        "strided": whole[:, ::2],
        "transposed": torch.full((3, 5), float(rank)).t(),
        "expanded": torch.full((1,), float(rank)).expand(7),
        "short": torch.full((3,), rank, dtype=torch.int16),
        "complex": torch.full((3,), rank * 1j),
        "empty": torch.empty(0),
        "scalar": torch.tensor(bool(rank)),
    }
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)
    norm.register_buffer("own", torch.tensor(rank))
    module.add_module("norm", norm)
    sync_buffers(module)
    assert all(not buffer.any() for name, buffer in module.named_buffers(recurse=False) if name != "empty")
    assert [buffer.shape for buffer in module.buffers(recurse=False)] == [buffer.shape for buffer in buffers.values()]
    assert torch.equal(whole[:, 1::2], torch.full((4, 3), float(rank)))  # what lies between
    assert norm.own == 0


def test_buffers_of_all_strides_and_dtypes_are_sent() -> None:
    run_ranks(send_others)


def test_only_statistics_of_each_ranks_own_batch_are_warned_of() -> None:
    assert has_statistics_of_ranks(nn.Sequential(nn.BatchNorm1d(2)))
    assert not has_statistics_of_ranks(nn.Sequential(nn.SyncBatchNorm(2), nn.BatchNorm1d(2, track_running_stats=False)))
