"""The progress bar: what it shows, where, and how often."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_time import FakeTime
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, IterableDataset

from lit_fsdp.callbacks import ProgressBar


class TinyTask(LightningModule):
    """Logs what a task logs."""

    def __init__(self, unit: str = "tokens", time: FakeTime | None = None) -> None:
        super().__init__()
        self.unit, self.time = unit, time or FakeTime()
        self.layer = torch.nn.Linear(4, 1)
        torch.nn.init.constant_(self.layer.weight, 0.1)  # a loss below 1, whatever was drawn before
        torch.nn.init.zeros_(self.layer.bias)
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


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """The clock of the progress bar."""
    fake = FakeTime()
    monkeypatch.setattr("lit_fsdp.callbacks.progress.time", fake)
    return fake


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


def test_without_a_terminal_there_is_a_line_every_minute_with_the_time_left(
    time: FakeTime, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bar = ProgressBar()
    fit(bar, tmp_path, task=TinyTask(time=time), max_steps=40)  # of 4 s each
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [["step", "16/40"], ["step", "31/40"]]
    assert all(" loss 0." in line and " tokens/s 250.0 mem " in line for line in (*lines, last))
    assert [line.rpartition(" GiB")[2] for line in lines] == [" eta 0:01:36", " eta 0:00:36"]
    assert (first[:10], last[:11]) == ("step 1/40 ", "step 40/40 ")
    assert "/s" not in first  # nothing to compare with yet
    assert "eta" not in first + last
    fit(bar, tmp_path, task=TinyTask(time=time), max_steps=1)
    assert "/s" not in capsys.readouterr().out  # nor in a second fit
    assert float(first.split()[-2]) > 0.01  # memory


def test_the_time_left_counts_validations(time: FakeTime, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = TinyTask(time=time)
    fit(ProgressBar(), tmp_path, task=task, limit_val_batches=1, val_check_interval=4)  # of 1000 s each
    lines = [line for line in capsys.readouterr().out.splitlines() if "eta" in line]
    assert [line.split()[1] for line in lines] == ["5/12", "9/12"]  # the first after each
    assert [line.split()[-1] for line in lines] == ["0:29:38", "0:12:42"]  # 1016 s / 4 * 7, 2032 s / 8 * 3


def test_the_last_line_of_a_run_that_is_stopped_is_of_its_last_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stopping(TinyTask):
        def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.trainer.should_stop = batch_idx == 6

    fit(ProgressBar(), tmp_path, task=Stopping(), max_steps=-1, max_epochs=-1)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["1", "7"]  # of no known number


def test_data_of_unknown_length_has_no_end_that_could_be_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.ones(3, 4))

    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", callbacks=[ProgressBar(line_every_s=0)], max_epochs=1, **quiet)  # type: ignore[arg-type]
    trainer.fit(TinyTask(), DataLoader(Stream()))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1", "2", "3"]
    assert not any("eta" in line for line in lines)


def test_the_rate_is_that_since_the_last_line_without_validations(
    time: FakeTime, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = TinyTask(time=time)
    fit(ProgressBar(line_every_s=8), tmp_path, task=task, limit_val_batches=1, val_check_interval=6)
    lines = [line for line in capsys.readouterr().out.splitlines() if "loss 0." in line and "val/loss" not in line]
    assert [line.split()[1] for line in lines] == ["1/12", "3/12", "5/12", "7/12", "9/12", "11/12", "12/12"]
    assert ["tokens/s 250.0 " in line for line in lines] == [False, *[True] * 6]  # 1000 in 4 s


def test_a_rate_is_known_where_validations_come_more_often_than_lines(
    time: FakeTime, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"limit_val_batches": 1, "val_check_interval": 4}
    fit(ProgressBar(line_every_s=2040), tmp_path, task=TinyTask(time=time), **options)
    lines = [line for line in capsys.readouterr().out.splitlines() if "mem" in line]
    assert [line.split()[1] for line in lines] == ["1/12", "11/12", "12/12"]
    assert "tokens/s 250.0 " in lines[1]


def test_with_accumulation_it_counts_steps_and_not_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(ProgressBar(line_every_s=0), tmp_path, accumulate_grad_batches=3, max_steps=4)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["1/4", "2/4", "3/4", "4/4"]


def test_samples_are_shown_where_there_are_no_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(ProgressBar(line_every_s=0), tmp_path, task=TinyTask(unit="samples"))
    out = capsys.readouterr().out
    assert "samples/s" in out
    assert "tokens/s" not in out


def test_the_validation_loss_gets_a_line_and_the_sanity_check_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(ProgressBar(), tmp_path, limit_val_batches=2, val_check_interval=6)
    validations = [line for line in capsys.readouterr().out.splitlines() if "val/loss" in line]
    assert [line.split()[1] for line in validations] == ["6", "12"]


def test_the_metric_that_a_module_names_stands_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Counting(TinyTask):
        headline_metric = "top1_pct"

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log_dict({"val/top1_pct": 62.5, "val/loss": 0.5, "val/other": 1.0})

    fit(ProgressBar(), tmp_path, task=Counting(), limit_val_batches=1, val_check_interval=12)
    assert "step 12 val/loss 0.500 val/top1_pct 62.500\n" in capsys.readouterr().out


def test_in_a_terminal_it_is_a_bar_with_the_same_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    fit(ProgressBar(refresh_rate=4), tmp_path, limit_val_batches=2)
    out = capsys.readouterr().out
    assert "\r" in out
    assert "Epoch 0" in out
    assert all(f"{name}=" in out for name in ("loss", "tokens/s", "mem", "eta"))
    assert "step 4/12" not in out


def test_metrics_are_read_at_a_refresh_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    get_metrics = ProgressBar.get_metrics
    monkeypatch.setattr(ProgressBar, "get_metrics", lambda *args: reads.append(1) or get_metrics(*args))
    fit(ProgressBar(), tmp_path)
    assert len(reads) == 2  # after the first step and the last


def test_a_refresh_rate_of_zero_shows_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(ProgressBar(refresh_rate=0), tmp_path, limit_val_batches=1)
    assert capsys.readouterr().out == ""
