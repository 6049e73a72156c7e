"""The table at the end of a run."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_time import FakeTime
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from report_runs import Broken, Weather
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


class Improving(TinyTask):
    """Logs an accuracy that rises and falls."""

    headline_metric = "top1_pct"
    headline_mode = "max"

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val/top1_pct", {3: 10.0, 6: 60.0, 9: 55.0, 12: 50.0}[self.global_step])


def test_the_metric_that_the_module_names_comes_first_with_its_best_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"limit_val_batches": 1, "val_check_interval": 3, "enable_checkpointing": False}
    rows = fit(tmp_path, capsys, Improving(), **options)
    assert next(iter(rows.items())) == ("val/top1_pct", "50.0000 (best 60.0000 at step 6)")

    class Falling(Improving):
        headline_mode = "min"

    assert fit(tmp_path, capsys, Falling(), **options)["val/top1_pct"] == "50.0000 (best 10.0000 at step 3)"


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"headline_metric": "top1"}, "headline_metric: got 'top1': nothing logs it: did you mean top1_pct?"),
        ({"headline_mode": "high"}, "headline_mode: got 'high' in Wrong: expected min or max"),
    ],
)
def test_a_metric_that_cannot_be_shown_is_told(
    attributes: dict[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = type("Wrong", (Improving,), attributes)()
    how = pytest.warns(UserWarning, match=re.escape(message))
    if "headline_mode" in attributes:
        how = pytest.raises(ValueError, match=re.escape(message))  # type: ignore[assignment]
    with how:
        fit(tmp_path, capsys, wrong, max_steps=3, limit_val_batches=1, val_check_interval=3, enable_checkpointing=False)


@pytest.mark.parametrize("verbose", [False, True])
def test_tables_of_other_callbacks_are_printed_on_request_only(
    verbose: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callbacks = [Weather(), Broken(), RunSummary(verbose=verbose)]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 0}
    options = {"max_steps": 1, "callbacks": callbacks, "enable_checkpointing": False, "default_root_dir": tmp_path}
    trainer = Trainer(accelerator="cpu", **quiet, **options)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="Broken: make_section: ") if verbose else nullcontext():
        trainer.fit(TinyTask(), DataLoader(torch.ones(4, 4)))
    start, *rest = capsys.readouterr().out.splitlines()
    assert start == "training: 1 rank on cpu, from step 0 to 1"
    section = Weather().make_section()
    assert all((text in "\n".join(rest)) == verbose for text in (section.tables[0].columns[0], section.notes[0]))
    assert ("Run summary" in rest[0]) != verbose


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
    assert float(rows["val/loss"].split()[0]) >= 0
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


def test_a_second_fit_is_measured_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(TinyTask):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.time.sleep(4)
            return super().training_step(batch, batch_idx)

    time, summary = FakeTime(), RunSummary(num_warmup_steps=2)
    monkeypatch.setattr("lit_fsdp.callbacks.summary.time", time)
    options = {"limit_val_batches": 0, "enable_checkpointing": False, "callbacks": [summary]}
    speeds = [fit(tmp_path, capsys, task(time), **options)["tokens/s"] for task in (TinyTask, Slow)]
    assert speeds == ["25.0 (25.0 per rank)", "12.5 (12.5 per rank)"]


def test_a_task_that_logs_nothing_gets_the_rest_of_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class SilentTask(TinyTask):
        def log(self, *args: object, **kwargs: object) -> None:  # type: ignore[override]
            pass

    rows = fit(tmp_path, capsys, SilentTask(), limit_val_batches=0, enable_checkpointing=False, max_steps=2)
    assert set(rows) == {"steps", "wall time", "ranks", "peak memory"}


def test_a_run_that_had_nothing_left_to_do_took_no_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = Trainer(accelerator="cpu", max_steps=2, logger=False, default_root_dir=tmp_path, enable_checkpointing=False)
    first.fit(TinyTask(), DataLoader(torch.ones(4, 1, 4)))
    first.save_checkpoint(tmp_path / "two.ckpt")
    capsys.readouterr()
    trainer = Trainer(accelerator="cpu", max_steps=2, logger=False, default_root_dir=tmp_path, callbacks=[RunSummary()])
    trainer.fit(TinyTask(), DataLoader(torch.ones(4, 1, 4)), ckpt_path=str(tmp_path / "two.ckpt"))
    out = capsys.readouterr().out
    assert "nothing left to train: the run is at step 2 and trainer.max_steps is 2; raise it to go on\n" in out
    assert re.search(r"│ steps +│ 0 \(now at 2\)", out)
    one_epoch: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "default_root_dir": tmp_path}
    trainer = Trainer(**one_epoch, callbacks=[RunSummary()])
    trainer.fit(TinyTask(), DataLoader(torch.ones(4, 1, 4)))
    assert "nothing left" not in capsys.readouterr().out
    trainer.save_checkpoint(tmp_path / "epoch.ckpt")
    trainer = Trainer(**one_epoch, callbacks=[RunSummary()])
    trainer.fit(TinyTask(), DataLoader(torch.ones(4, 1, 4)), ckpt_path=str(tmp_path / "epoch.ckpt"))
    assert "is at step 4 and trainer.max_epochs is 1; raise it" in capsys.readouterr().out


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


def test_a_resume_within_an_epoch_says_what_is_trained_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    data, path = DataLoader(torch.ones(40, 4), batch_size=2), None
    for steps in (2, 3):
        saves = ModelCheckpoint(tmp_path, filename="run", every_n_train_steps=2)
        trainer = Trainer(max_steps=steps, callbacks=[RunSummary(), saves], **quiet)  # type: ignore[arg-type]
        trainer.fit(TinyTask(), data, ckpt_path=path)
        path = tmp_path / "run.ckpt"
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("training: ")]
    assert lines == [f"training: 1 rank on cpu, from step {first} to {last}" for first, last in ((0, 2), (2, 3))]
