"""Tasks that users write in their own folder: found by class path, sharded as they ask, trained as on one device."""

import csv
from pathlib import Path

import pytest
import yaml
from launches import fork_ranks, write_run

MYTASK = """
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from lit_fsdp import Unit
from lit_fsdp.tasks import CausalLM


def list_units(module):
    return [name for name, m in module.named_modules() if isinstance(m, FSDPModule)]


class ShoutingLM(CausalLM):
    def on_train_start(self):
        print("LET US TRAIN", *list_units(self))


class OneUnitLM(ShoutingLM):
    def configure_units(self, model):
        return [Unit(names=("model.model.layers.1",), kind="block"), Unit(names=("",), kind="root")]


class Stack(LightningModule):
    def __init__(self, batch_size: int = 4, manual: bool = False):
        super().__init__()
        self.batch_size = batch_size
        self.automatic_optimization = not manual
        self.net = nn.Sequential(nn.Linear(6, 15), nn.Tanh(), nn.Linear(15, 15), nn.Tanh(), nn.Linear(15, 1))

    def forward(self, x):
        return self.net(x)

    def on_train_start(self):
        print("units:", *(name or "(root)" for name in list_units(self)))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("train/loss", loss, sync_dist=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)

    def train_dataloader(self):
        x = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
        rows = list(zip(x, x.sum(1, keepdim=True).sin()))
        world = {"num_replicas": self.trainer.world_size, "rank": self.trainer.global_rank}
        sampler = DistributedSampler(rows, shuffle=False, **world)
        return DataLoader(rows, batch_size=self.batch_size, sampler=sampler)


class Numbers(Stack):
    def training_step(self, batch, batch_idx):
        print("seen:", *batch.tolist())
        return self(batch[:, None].expand(-1, 6).float()).square().mean()

    def train_dataloader(self):
        return DataLoader(torch.arange(16), batch_size=2)


class OwnShards(Stack):
    def configure_model(self):
        if not list_units(self):
            for layer in (self.net[0], self.net[2]):
                fully_shard(layer, mesh=self.device_mesh)
            fully_shard(self.net, mesh=self.device_mesh)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with tasks of the user and runs for them."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    (tmp_path / "mytask.py").write_text(MYTASK)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = {"accelerator": "cpu", "max_steps": 4, "log_every_n_steps": 1, **quiet}
    (tmp_path / "stack.yaml").write_text(yaml.safe_dump({"trainer": trainer, "model": "mytask.Stack"}))
    return tmp_path


def read_losses(name: str) -> list[float]:
    (version,) = Path("runs", name).iterdir()
    with (version / "metrics.csv").open() as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


def train(name: str, *options: str, ranks: int = 2) -> tuple[list[float], str]:
    """Return the losses of a run, and what its first rank printed."""
    ended = fork_ranks("fit", f"--run_name={name}", *options, ranks=ranks)
    assert all(rank.code == 0 for rank in ended), ended
    return read_losses(name), ended[0].out


@pytest.mark.full
def test_a_task_in_the_current_folder_is_found_by_its_class_path() -> None:
    options = ("--config=run.yaml", "--model.class_path=mytask.ShoutingLM", "--trainer.max_steps=2")
    losses, out = train("loud", *options, ranks=1)
    assert out.count("LET US TRAIN") == 1
    assert len(losses) == 2


@pytest.mark.full
def test_the_units_of_a_task_win_over_those_of_the_strategy() -> None:
    model = "--model.class_path=mytask."
    expected, out = train("default", "--config=run.yaml", f"{model}ShoutingLM")
    assert "LET US TRAIN  model.model.embed_tokens model.model.layers.0 model.model.layers.1" in out
    losses, out = train("own", "--config=run.yaml", f"{model}OneUnitLM")
    assert "LET US TRAIN  model.model.layers.1\n" in out
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("manual", [False, True])
def test_a_plain_module_trains_on_two_ranks_as_on_one_device(manual: bool) -> None:
    options = ("--config=stack.yaml", f"--model.manual={manual}")
    expected, _ = train("one", *options, "--trainer.strategy=auto", "--model.batch_size=8", ranks=1)
    losses, out = train("two", *options, "--trainer.strategy=fsdp2")
    assert "units: net\n" in out if manual else "units: (root)\n" in out
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.full
def test_a_module_that_the_user_sharded_stays_so_and_trains() -> None:
    expected, _ = train("one", "--config=stack.yaml", "--trainer.strategy=auto", "--model.batch_size=8", ranks=1)
    losses, out = train("own", "--config=stack.yaml", "--model=mytask.OwnShards", "--trainer.strategy=fsdp2")
    assert "units: net net.0 net.2\n" in out
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.full
def test_a_plain_loader_is_split_over_the_ranks() -> None:
    ended = fork_ranks("fit", "--config=stack.yaml", "--model=mytask.Numbers", "--run_name=numbers")
    assert [rank.code for rank in ended] == [0, 0], ended
    lines = [line for rank in ended for line in rank.out.splitlines() if line.startswith("seen:")]
    assert sorted(int(number) for line in lines for number in line.split()[1:]) == list(range(16))
