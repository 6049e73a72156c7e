"""What users of Lightning write works under ``FSDP2Strategy`` as under DDP, or is refused."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import DataLoader
from training import build_trainer

from lit_fsdp import FSDP2Strategy
from ranks import RankError, run_ranks

NUM_ROWS = 32


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows that know their number."""

    def __init__(self) -> None:
        self.x = torch.randn(NUM_ROWS, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"number": torch.tensor(index), "x": self.x[index], "y": self.x[index].sum().sin()[None]}


class Plain(pl.LightningModule):
    """What a user writes who has not heard of sharding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 15), nn.Tanh(), nn.Linear(15, 1))

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch["x"]), batch["y"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Rows(), batch_size=NUM_ROWS // dist.get_world_size() // 4)


class BuiltEarly(Plain):
    """Builds its optimizer before sharding, in groups."""

    def __init__(self, build: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        first, last = self.net[0].parameters(), self.net[2].parameters()
        self.optimizer = build([{"params": first, "lr": 2e-2}, {"params": last}], lr=1e-2)

    def configure_optimizers(self) -> Any:
        return self.optimizer


def gather(module: nn.Module) -> dict[str, Tensor]:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Tensor] = get_model_state_dict(module, options=options)
    return {name.removeprefix("module."): value for name, value in state.items()}


def train(build: Callable[[], pl.LightningModule], out: Path, is_sharded: bool, **options: Any) -> None:
    """Train on this rank; rank 0 writes the weights. Checkpoints ``save`` and ``resume`` are options."""
    pl.seed_everything(0, verbose=False)
    module = build()
    saved, resume, own = options.pop("save", None), options.pop("resume", None), options.pop("strategy", {})
    strategy: Any = FSDP2Strategy(print_plan=False, **own) if is_sharded else DDPStrategy(process_group_backend="gloo")
    settings = {"gradient_clip_val": None, "use_distributed_sampler": True, "max_steps": -1, "max_epochs": 2, **options}
    trainer = build_trainer(strategy, **settings)
    trainer.fit(module, ckpt_path=resume)
    if saved is not None:
        trainer.save_checkpoint(saved)
    weights = gather(module)
    if dist.get_rank() == 0:
        torch.save(weights, out)


def compare(build: Callable[[], pl.LightningModule], folder: Path, *, world_size: int = 2, **options: Any) -> None:
    """Compare the weights after training with those of DDP."""
    for name in ("sharded", "ddp"):
        run_ranks(partial(train, **options), build, folder / name, name == "sharded", world_size=world_size)
    assert_same(folder / "sharded", folder / "ddp", 2e-5)


def assert_same(path: Path, other: Path, tolerance: float) -> None:
    weights, expected = torch.load(path), torch.load(other)
    assert weights.keys() == expected.keys()
    assert max(float((weights[name] - value).abs().max()) for name, value in expected.items()) <= tolerance


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "build",
    [
        partial(torch.optim.AdamW, eps=1e-4),
        pytest.param(partial(torch.optim.Adagrad, initial_accumulator_value=0.1), marks=pytest.mark.full),
    ],
    ids=["adamw", "adagrad"],  # that one has state from the beginning
)
def test_an_optimizer_built_in_init_trains_the_sharded_parameters(
    build: Callable[..., torch.optim.Optimizer], world_size: int, tmp_path: Path
) -> None:
    module = partial(BuiltEarly, build)
    compare(module, tmp_path, world_size=world_size)
    run_ranks(partial(train, max_epochs=1, save=tmp_path / "c"), module, tmp_path / "half", True, world_size=world_size)
    run_ranks(partial(train, resume=tmp_path / "c"), module, tmp_path / "resumed", True, world_size=world_size)
    assert_same(tmp_path / "resumed", tmp_path / "sharded", 0.0)


class Replaced(BuiltEarly):
    """Replaces the parameters that its optimizer holds."""

    def configure_model(self) -> None:
        self.net[2] = nn.Linear(15, 1)


def test_an_optimizer_of_parameters_that_the_module_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"optimizer 0 \(SGD\) holds a parameter of shape \(1, 15\) that the module"):
        run_ranks(train, partial(Replaced, torch.optim.SGD), tmp_path / "out", True, world_size=1)


class WithoutOptimizer(Plain):
    """Measures, and trains nothing."""

    def configure_optimizers(self) -> None:
        return None


@pytest.mark.parametrize("checkpoint_format", ["sharded", "single_file"])
def test_a_module_without_an_optimizer_is_saved_and_resumed(checkpoint_format: str, tmp_path: Path) -> None:
    settings = {"checkpoint_format": checkpoint_format}
    saving = partial(train, strategy=settings, max_epochs=1, save=tmp_path / "c")
    run_ranks(saving, WithoutOptimizer, tmp_path / "half", True)
    run_ranks(partial(train, strategy=settings, resume=tmp_path / "c"), WithoutOptimizer, tmp_path / "resumed", True)
    assert_same(tmp_path / "half", tmp_path / "resumed", 0.0)
