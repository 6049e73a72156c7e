"""A rank whose GPU memory is capped runs out of it for real, and the step is redone in parts."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from memory_faults import Fault, Faults
from torch import Tensor, nn
from torch.utils.data import DataLoader
from training import EVEN, Recorder, Rows, build_task, build_trainer, gather_weights, save_model

from benchmarks.one_card import share_card
from lit_fsdp import FSDP2Strategy, Wrap
from lit_fsdp.strategy.batch_split import BatchPart, split_rows
from ranks import count_gpus, run_ranks

pytestmark = pytest.mark.gpu

WIDTH, LAYERS, ROWS, STEPS = 512, 16, 16384, 3  # 16 times 32 MiB of activations of each kind


class Wide(LightningModule):
    """Activations take far more than weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
        self.losses: list[float] = []
        self.peak_bytes = 0

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        hidden = batch
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden.square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.peak_bytes = torch.cuda.max_memory_allocated()

    def split_batch(self, batch: Tensor, num_parts: int) -> list[BatchPart]:
        return split_rows(batch, num_parts)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit_wide(options: dict[str, Any]) -> tuple[Wide, list[str]]:
    torch.manual_seed(0)
    module = Wide()
    torch.manual_seed(1 + dist.get_rank())
    data = DataLoader(torch.randn(STEPS * ROWS, WIDTH), batch_size=ROWS)  # type: ignore[arg-type]
    strategy = FSDP2Strategy(oom_retries=8, wrap=Wrap(policy="module_classes", module_classes=("Sequential",)))
    build_trainer(strategy, accelerator="gpu", max_steps=STEPS, gradient_clip_val=None, **options).fit(module, data)
    return module, strategy.redone_steps


def train_capped() -> None:
    options = share_card()
    truth, redone = fit_wide(options)
    assert redone == []
    torch.cuda.empty_cache()
    if dist.get_rank() == 1:  # alone
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(0.7 * truth.peak_bytes / total)
    found, redone = fit_wide(options)
    assert len(redone) >= 2
    assert redone[0].startswith("rank 1 ran out of memory in ")
    assert found.losses == pytest.approx(truth.losses, rel=1e-5)


def test_a_rank_with_less_memory_is_no_end() -> None:
    run_ranks(train_capped, is_on_gpus=True)


def train_with_faults(folder: Path) -> None:
    def fit(faults: list[Fault]) -> tuple[list[float], dict[str, Tensor]]:
        recorder, task = Recorder(), build_task(folder)
        callbacks = [recorder, Faults(faults)]
        trainer = build_trainer(FSDP2Strategy(oom_retries=9), callbacks=callbacks, accelerator="gpu", max_steps=STEPS)
        trainer.fit(task, Rows(EVEN["vocab_size"], 4))
        return recorder.result.losses, gather_weights(task)

    losses, weights = fit([])
    for phase in ("start", "forward", "unshard", "copy out", "backward", "gather again", "reduce", "end"):
        for rank in (0, 1):
            found, found_weights = fit([Fault(rank=rank, phase=phase, unit=2, times=2)])
            assert found == pytest.approx(losses, abs=1e-5), (phase, rank)
            for name, weight in weights.items():
                assert (found_weights[name] - weight).abs().max() < 1e-5, (phase, rank, name)


@pytest.mark.skipif(count_gpus() < 2, reason="needs two GPUs")
def test_a_rank_that_fails_alone_leaves_no_rank_waiting_in_nccl(tmp_path: Path) -> None:
    run_ranks(train_with_faults, save_model(tmp_path, **EVEN), backend="cpu:gloo,cuda:nccl")
