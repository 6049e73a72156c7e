"""The progress bar: what it shows, where, and how often."""

import sys
from pathlib import Path

import pytest
import torch
from fake_time import FakeTime
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from lit_fsdp.callbacks import ProgressBar


class TinyTask(LightningModule):
    """Logs what a task logs."""

    def __init__(self, unit: str = "tokens", time: FakeTime | None = None) -> None:
        super().__init__()
        self.unit, self.time = unit, time or FakeTime()
        self.layer = torch.nn.Linear(4, 1)
        self.seen = 0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen += 1000
        self.time.sleep(4)
        loss = self.layer(batch).square().mean()
        self.log_dict({"train/loss": loss, f"train/{self.unit}_seen": float(self.seen)})
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.time.sleep(1000)
        self.log("val/loss", self.layer(batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(bar: ProgressBar, folder: Path, *, task: TinyTask | None = None, **settings: object) -> None:
    data = DataLoader(torch.ones(40, 4), batch_size=2)
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[bar],
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_model_summary=False,
        logger=False,
        num_sanity_val_steps=1,
        **{"max_steps": 12, "limit_val_batches": 0, **settings},  # type: ignore[arg-type]
    )
    trainer.fit(task or TinyTask(), data, data)


def test_without_a_terminal_every_refresh_is_one_plain_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(ProgressBar(refresh_rate=5), tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["step", "5/12"], ["step", "10/12"], ["step", "12/12"]]
    assert all("\r" not in line and " loss 0." in line and line.endswith(" GiB") for line in lines)
    assert "tokens/s" not in lines[0]  # nothing to compare with yet
    assert "tokens/s" in lines[1]
    assert float(lines[0].split()[-2]) > 0.01  # memory


def test_the_rate_is_that_since_the_last_line_without_validations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    time = FakeTime()
    monkeypatch.setattr("lit_fsdp.callbacks.progress.time", time)
    task = TinyTask(time=time)
    fit(ProgressBar(refresh_rate=2), tmp_path, task=task, limit_val_batches=1, val_check_interval=6)
    lines = [line for line in capsys.readouterr().out.splitlines() if "loss 0." in line and "val/loss" not in line]
    assert [line.split()[1] for line in lines] == ["2/12", "4/12", "6/12", "8/12", "10/12", "12/12"]
    assert ["tokens/s 250.0 " in line for line in lines] == [False, True, True, True, True, True]  # 1000 in 4 s


def test_with_accumulation_it_counts_steps_and_not_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(ProgressBar(refresh_rate=2), tmp_path, accumulate_grad_batches=3, max_steps=4)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["2/4", "4/4"]


def test_samples_are_shown_where_there_are_no_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(ProgressBar(refresh_rate=2), tmp_path, task=TinyTask(unit="samples"))
    out = capsys.readouterr().out
    assert "samples/s" in out
    assert "tokens/s" not in out


def test_the_validation_loss_gets_a_line_and_the_sanity_check_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(ProgressBar(refresh_rate=100), tmp_path, limit_val_batches=2, val_check_interval=6)
    validations = [line for line in capsys.readouterr().out.splitlines() if "val/loss" in line]
    assert [line.split()[1] for line in validations] == ["6", "12"]


def test_in_a_terminal_it_is_a_bar_with_the_same_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    fit(ProgressBar(refresh_rate=4), tmp_path, limit_val_batches=2)
    out = capsys.readouterr().out
    assert "\r" in out
    assert "Epoch 0" in out
    assert all(f"{name}=" in out for name in ("loss", "tokens/s", "mem"))
    assert "step 4/12" not in out


def test_metrics_are_read_at_a_refresh_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    get_metrics = ProgressBar.get_metrics
    monkeypatch.setattr(ProgressBar, "get_metrics", lambda *args: reads.append(1) or get_metrics(*args))
    fit(ProgressBar(refresh_rate=4), tmp_path)
    assert len(reads) == 3


def test_a_refresh_rate_of_zero_shows_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(ProgressBar(refresh_rate=0), tmp_path, limit_val_batches=1)
    assert capsys.readouterr().out == ""
