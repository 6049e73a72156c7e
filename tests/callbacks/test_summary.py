"""The table at the end of a run."""

import re
from pathlib import Path

import pytest
import torch
from fake_time import FakeTime
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lit_fsdp.callbacks import RunSummary


class TinyTask(LightningModule):
    """Sees 100 tokens a step, slowly at first."""

    def __init__(self, time: FakeTime | None = None) -> None:
        super().__init__()
        self.time = time or FakeTime()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.time.sleep(32 if self.global_step < 2 else 4)
        self.log("train/tokens_seen", 100.0 * (self.global_step + 1))
        loss = self.layer(batch).square().mean()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.time.sleep(64)
        self.log("val/loss", self.layer(batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder: Path, capsys: pytest.CaptureFixture[str], task: LightningModule, **settings: object) -> dict[str, str]:
    """Return the rows of the table."""
    trainer = Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        enable_model_summary=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
        **{"max_steps": 12, "logger": False, "callbacks": [RunSummary()], **settings},  # type: ignore[arg-type]
    )
    data = DataLoader(torch.ones(40, 4), batch_size=2)
    trainer.fit(task, data, data)
    rows = re.findall(r"^│ (.*?) +│ (.*?) *│$", capsys.readouterr().out, flags=re.MULTILINE)
    return dict(rows)


def test_it_tells_what_the_run_took_and_where_its_results_lie(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = ModelCheckpoint(dirpath=tmp_path / "kept", save_last="link")
    callbacks = [RunSummary(), checkpoint]
    rows = fit(tmp_path, capsys, TinyTask(), callbacks=callbacks, limit_val_batches=1, val_check_interval=6)
    assert rows["steps"] == "12 (now at 12)"
    assert rows["tokens seen"] == "1,200"
    assert rows["ranks"] == "1 on cpu"
    assert rows["peak memory"].endswith(" GiB")
    assert float(rows["train/loss"]) >= 0
    assert float(rows["val/loss"]) >= 0
    assert rows["last checkpoint"] == "kept/last.ckpt"
    assert (tmp_path / rows["best checkpoint"]).exists()


def test_the_throughput_leaves_out_the_slow_first_steps_and_the_validation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    time = FakeTime()
    monkeypatch.setattr("lit_fsdp.callbacks.summary.time", time)
    options = {"limit_val_batches": 1, "val_check_interval": 2, "enable_checkpointing": False}
    rows = fit(tmp_path, capsys, TinyTask(time), callbacks=[RunSummary(num_warmup_steps=2)], **options)
    assert rows["tokens/s"] == "25.0 (25.0 per rank)"  # 100 in 4 s
    assert rows["wall time"] == "0:08:08"  # 2 x 32 s, 10 x 4 s, and 6 validations


def test_a_task_that_logs_nothing_gets_the_rest_of_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class SilentTask(TinyTask):
        def log(self, *args: object, **kwargs: object) -> None:  # type: ignore[override]
            pass

    rows = fit(tmp_path, capsys, SilentTask(), limit_val_batches=0, enable_checkpointing=False, max_steps=2)
    assert set(rows) == {"steps", "wall time", "ranks", "peak memory"}


def test_a_loss_that_is_not_finite_at_the_end_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Lost(TinyTask):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("train/loss", loss * float("inf"))
            return loss

    with pytest.warns(UserWarning, match=r"ended with a train/loss of inf, .* go on from an earlier one"):
        rows = fit(tmp_path, capsys, Lost(), max_steps=1, enable_checkpointing=False)
    assert rows["train/loss"] == "inf"


def test_a_run_that_only_tries_one_step_has_a_table_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = fit(tmp_path, capsys, TinyTask(), fast_dev_run=True)
    assert rows["steps"] == "1 (now at 1)"


@pytest.mark.parametrize("verbose", [True, False])
def test_an_evaluation_ends_in_its_metrics_with_six_digits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verbose: bool
) -> None:
    class Thirds(TinyTask):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log_dict({"val/loss": 10 / 3, "val/steps": 1e6})

        def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("test/loss", 2 / 3)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", default_root_dir=tmp_path, callbacks=[RunSummary()], **quiet)  # type: ignore[arg-type]
    data = DataLoader(torch.ones(4, 4))
    trainer.validate(Thirds(), data, verbose=verbose)
    trainer.test(Thirds(), data, verbose=verbose)
    out = capsys.readouterr().out
    rows = re.findall(r"^│ (.*?) +│ (.*?) *│$", out, flags=re.MULTILINE)
    assert rows == [("val/loss", "3.33333"), ("val/steps", "1e+06"), ("test/loss", "0.666667")] * verbose
    assert verbose or out == ""
