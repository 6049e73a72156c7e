"""Ranks that differ in ``tensor`` alone see the same rows, draw the same numbers, and count once."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from training import build_trainer

from lit_fsdp import FSDP2Strategy, Mesh
from ranks import RankError, run_ranks


class Noted(pl.LightningModule):
    """Notes the rows it sees and the numbers that a step draws."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.seen: list[float] = []
        self.drawn: list[float] = []

    def configure_model(self) -> None:
        if not isinstance(self.net, FSDPModule):  # itself, as mesh.tensor has no plan for it
            assert self.device_mesh is not None
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += batch.flatten().tolist()
        self.drawn.append(float(torch.rand(())))
        self.log("train/count", torch.tensor(float(len(batch))), sync_dist=True, reduce_fx="sum")
        return self.net(batch).sum()

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Data(pl.LightningDataModule):
    """Sixteen rows, which Lightning shares out."""

    batch_size, global_batch_size = 2, 8

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.arange(16.0).view(16, 1), batch_size=self.batch_size, shuffle=True)  # type: ignore[arg-type]


def fit_shared(out: Path, mesh: Mesh, source: Path | None, max_steps: int) -> None:
    """Train, and note by rank what was seen, drawn and counted."""
    pl.seed_everything(3)
    module = Noted()
    strategy = FSDP2Strategy(mesh=mesh, print_plan=False)
    save = ModelCheckpoint(out / "checkpoints", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = build_trainer(
        strategy, callbacks=[save], max_steps=max_steps, use_distributed_sampler=True, enable_checkpointing=True
    )
    trainer.fit(module, datamodule=Data(), ckpt_path=None if source is None else str(source))
    count, accumulated = float(trainer.callback_metrics["train/count"]), trainer.accumulate_grad_batches
    torch.save((module.seen, module.drawn, count, accumulated), out / f"{dist.get_rank()}.pt")


class OwnSampler(pl.LightningDataModule):
    """Sixteen rows, shared out by the number of all ranks."""

    def train_dataloader(self) -> DataLoader[Any]:
        rows: Any = torch.arange(16.0).view(16, 1)
        return DataLoader(rows, batch_size=2, sampler=DistributedSampler(rows))

    test_dataloader = train_dataloader


def run_own_sampler(command: str) -> None:
    trainer = build_trainer(FSDP2Strategy(mesh=Mesh(tensor=2), print_plan=False), max_steps=1)
    getattr(trainer, command)(Noted(), datamodule=OwnSampler())


@pytest.mark.parametrize("command", ["fit", "test"])
def test_rows_that_ranks_of_one_layer_do_not_share_are_refused(command: str) -> None:
    with pytest.raises(RankError, match=r"mesh.tensor: got 2: ranks 0 to 1 share rows, and their data gave them diff"):
        run_ranks(run_own_sampler, command, world_size=4)


def run_shared(out: Path, mesh: Mesh, source: Path | None = None, max_steps: int = 2) -> list[Any]:
    """Return by rank what was seen, drawn, counted and accumulated."""
    out.mkdir()
    run_ranks(fit_shared, out, mesh, source, max_steps, world_size=4)
    return [torch.load(out / f"{rank}.pt") for rank in range(4)]


def test_ranks_of_one_layer_share_rows_and_random_numbers(tmp_path: Path) -> None:
    found = run_shared(tmp_path / "whole", Mesh(tensor=2))
    (seen, drawn, counts, accumulated) = zip(*found, strict=True)
    assert (seen[0], drawn[0]) == (seen[1], drawn[1])
    assert (seen[2], drawn[2]) == (seen[3], drawn[3])
    assert drawn[0] != drawn[2]
    assert sorted(seen[0] + seen[2]) == list(range(16))  # none lost, none seen by both groups
    assert counts == (4, 4, 4, 4)  # two groups of two rows
    assert accumulated == (2, 2, 2, 2)  # 8 rows a step
    # Two streams were saved, one for each group; a resumed run draws on.
    saved = tmp_path / "whole" / "checkpoints" / "step=1.ckpt"
    resumed = run_shared(tmp_path / "resumed", Mesh(tensor=2), saved)
    assert [part[1] for part in resumed] == [numbers[2:] for numbers in drawn]
    # Four groups of one rank: no stream of two ranks may go on in them.
    other = run_shared(tmp_path / "other", Mesh(), saved)
    assert len({tuple(part[1]) for part in other}) == 4


class Rising(Noted):
    """Logs what is better in each step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("score", float(self.global_step))
        return super().training_step(batch, batch_idx)


def save_best(out: Path) -> None:
    (out / "best").mkdir(parents=True, exist_ok=True)
    (out / "best" / "step=1.ckpt").touch()  # of another run
    strategy = FSDP2Strategy(mesh=Mesh(tensor=2))
    save = ModelCheckpoint(out / "best", "{step}", monitor="score", mode="max", every_n_train_steps=1)
    trainer = build_trainer(strategy, callbacks=[save], max_steps=3, enable_checkpointing=True)
    trainer.fit(Rising(), datamodule=Data())
    assert (Path(save.best_model_path).name, float(save.best_model_score)) == ("step=3.ckpt", 2.0)  # type: ignore[arg-type]
    assert (out / "best" / "step=1.ckpt").is_file()  # step 1 of this run went to another name
    is_first = dist.get_rank() == 0
    assert strategy.reduce_boolean_decision(is_first, all=False)
    assert not strategy.reduce_boolean_decision(is_first, all=True)
    assert strategy.reduce_boolean_decision(True, all=True)


def test_ranks_of_one_layer_save_the_best_checkpoint_and_overwrite_none(tmp_path: Path) -> None:
    run_ranks(save_best, tmp_path)


def reduce_large_numbers() -> None:
    strategy = FSDP2Strategy(mesh=Mesh(tensor=2))
    build_trainer(strategy, max_steps=1).fit(Noted(), datamodule=Data())
    odd = 2**24 + 1  # float32 has none
    assert strategy.reduce(torch.tensor(odd), reduce_op="sum") == odd  # of one group of ranks
    assert strategy.reduce(torch.tensor(odd), reduce_op="mean") == odd


def test_whole_numbers_are_not_rounded_when_ranks_reduce_them() -> None:
    run_ranks(reduce_large_numbers)
