"""The learning rate of adapters, where none is set."""

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from training import EVEN, Rows, build_trainer, save_model

from lit_fsdp import FSDP2Strategy, LoRA, Optimizer
from lit_fsdp.tasks import CausalLM, LRSchedule
from ranks import run_ranks

ADAPTERS = LoRA(r=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "model", **EVEN)


class Save(pl.Callback):
    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "run.ckpt")


class Said(logging.Handler):
    """What Lightning was told to say of the learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("lightning.pytorch").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "learning_rate: not set" in record.getMessage():
            self.lines.append(record.getMessage())


def train(model: Path, folder: Path, steps: int, *, lora: LoRA | None, rate: float | None, load: bool = False) -> float:
    """Train on one rank, and return the rate of the last step."""
    task = CausalLM(
        pretrained=str(model),
        lora=lora,
        optimizer=Optimizer(learning_rate=rate),
        lr_scheduler=LRSchedule(type="constant"),
    )
    strategy = FSDP2Strategy(print_plan=False)
    trainer = build_trainer(strategy, max_steps=steps, callbacks=[Save()], default_root_dir=folder)
    trainer.fit(task, Rows(EVEN["vocab_size"], 2), ckpt_path=folder / "run.ckpt" if load else None)
    return float(trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.full
@pytest.mark.parametrize(
    ("lora", "rate", "expected"),
    [(ADAPTERS, None, 1e-3), (None, None, 1e-4), (ADAPTERS, 1e-4, 1e-4), (None, 3e-3, 3e-3)],
)
def test_adapters_alone_take_ten_times_the_default_and_say_so(
    lora: LoRA | None, rate: float | None, expected: float, model: Path, tmp_path: Path
) -> None:
    line = "optimizer.learning_rate: not set: 0.001, ten times that of whole models, as adapters are trained"

    def check() -> None:
        said = Said()
        assert train(model, tmp_path, 1, lora=lora, rate=rate) == expected
        assert said.lines == ([line] if lora is not None and rate is None else [])

    run_ranks(check, world_size=1)


@pytest.mark.full
def test_a_resumed_run_without_a_rate_keeps_the_one_it_began_with(model: Path, tmp_path: Path) -> None:
    """As of a run that began when the default was 1e-4 for adapters too."""

    def check() -> None:
        said = Said()
        train(model, tmp_path, 1, lora=ADAPTERS, rate=1e-4)
        assert train(model, tmp_path, 2, lora=ADAPTERS, rate=None, load=True) == 1e-4
        assert train(model, tmp_path, 3, lora=ADAPTERS, rate=5e-4, load=True) == 5e-4
        assert said.lines == ["optimizer.learning_rate: not set: 0.0001, as in the checkpoint"]

    run_ranks(check, world_size=1)


@pytest.mark.full
def test_a_task_with_an_optimizer_of_its_own_is_not_told_of_a_default(model: Path, tmp_path: Path) -> None:
    class Own(CausalLM):
        def configure_optimizers(self) -> torch.optim.Optimizer:  # type: ignore[override]
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01)

    def check() -> None:
        said = Said()
        trainer = build_trainer(FSDP2Strategy(), max_steps=1, default_root_dir=tmp_path)
        trainer.fit(Own(pretrained=str(model), lora=ADAPTERS), Rows(EVEN["vocab_size"], 2))
        assert trainer.global_step == 1
        assert not said.lines

    run_ranks(check, world_size=1)
