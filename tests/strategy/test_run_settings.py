"""A run that goes on with other settings says which, a line for each; one that goes on as it was says nothing."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from training import build_trainer

from lit_fsdp import FSDP2Strategy, MixedPrecision
from ranks import run_ranks

SAMPLES = 8


class Plain(pl.LightningModule):
    """A module as anybody writes it, with a schedule."""

    def __init__(self, batch_size: int, optimizer: dict[str, Any]) -> None:
        super().__init__()
        self.net, self.batch_size, self.optimizer = nn.Linear(6, 2), batch_size, optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), **{"lr": 1e-2, **self.optimizer})
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.randn(64, 6), batch_size=self.batch_size)  # type: ignore[arg-type]


def fit(
    out: Path,
    *,
    seed: int = 0,
    samples: int = SAMPLES,
    optimizer: dict[str, Any] | None = None,
    strategy: dict[str, Any] | None = None,
    save: Path | None = None,
    load: Path | None = None,
    **options: Any,
) -> None:
    """Train on this rank; rank 0 writes what was said of a resume."""
    pl.seed_everything(seed, verbose=False)
    accumulate = options.get("accumulate_grad_batches", 1)
    module = Plain(samples // dist.get_world_size() // accumulate, optimizer or {})
    settings = {"precision": "32-true", "max_steps": -1, "max_epochs": 2, "gradient_clip_val": None, **options}
    trainer = build_trainer(FSDP2Strategy(print_plan=False, **(strategy or {})), **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    if dist.get_rank() == 0:
        said = [str(w.message) for w in caught]
        out.write_text(json.dumps([line for line in said if line.startswith("resume: ")]))
    os.environ.pop("PL_GLOBAL_SEED", None)


@pytest.mark.parametrize("checkpoint_format", ["sharded", "single_file"])
def test_each_setting_that_differs_is_said_in_a_line(checkpoint_format: str, tmp_path: Path) -> None:
    strategy: dict[str, Any] = {"checkpoint_format": checkpoint_format}
    path, out = tmp_path / "half.ckpt", tmp_path / "said"

    def run_both() -> None:
        fit(out, save=path, strategy=strategy, max_epochs=1, optimizer={"foreach": False})
        fit(out, load=path, strategy=strategy, optimizer={"foreach": True})  # not restored
        assert json.loads(out.read_text()) == ["resume: max_epochs was 1 in the checkpoint, is 2 now"]
        fit(
            out,
            load=path,
            strategy={**strategy, "mixed_precision": MixedPrecision(reduce_dtype="float32")},
            seed=1,
            samples=2 * SAMPLES,
            precision="bf16-mixed",
            accumulate_grad_batches=4,
            gradient_clip_val=0.5,
            optimizer={"lr": 2e-2},
        )

    run_ranks(run_both, world_size=1)
    changes = {
        "precision": ("32-true", "bf16-mixed"),
        "seed": (0, 1),
        "batch_size": (8, 4),
        "accumulate_grad_batches": (1, 4),
        "gradient_clip_val": (0, 0.5),
        "mixed_precision.reduce_dtype": ("None", "float32"),
        "max_epochs": (1, 2),
        "SGD.lr": (0.01, 0.02),
    }
    expected = [f"resume: {n} was {before} in the checkpoint, is {now} now" for n, (before, now) in changes.items()]
    expected[-1] += "; that of the checkpoint is used"
    assert json.loads(out.read_text()) == expected


def test_as_many_samples_in_a_step_of_other_ranks_are_the_same_run(tmp_path: Path) -> None:
    path, out = tmp_path / "half.ckpt", tmp_path / "said"
    run_ranks(lambda: fit(out, save=path, accumulate_grad_batches=2), world_size=2)
    run_ranks(lambda: fit(out, load=path), world_size=1)
    assert json.loads(out.read_text()) == []
