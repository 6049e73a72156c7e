"""A log that cannot be written ends no run, and is not lost in silence."""

import warnings
from pathlib import Path

import pytest
from launches import fork_ranks, main, write_run
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from small_disk import small_disk

from lit_fsdp.reporting.lost_logs import check_log_folders, guard_loggers, list_lost_logs, outlive_lost_log

BREAK = """
import shutil
from pathlib import Path
from lightning.pytorch import Callback

class TakeFolder(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 2 and trainer.is_global_zero:
            shutil.rmtree("runs")
            Path("runs").touch()  # so that nobody makes it again
"""


def test_a_run_goes_on_without_its_folder_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = {"enable_checkpointing": False, "callbacks": [{"class_path": "take_folder.TakeFolder"}]}
    write_run(tmp_path, trainer=trainer)
    (tmp_path / "take_folder.py").write_text(BREAK)
    monkeypatch.syspath_prepend(tmp_path)
    first, second = fork_ranks("fit", "--config=run.yaml", "--monitoring=true", timeout_s=120)
    assert (first.code, second.code) == (0, 0)
    summary = first.out[first.out.index("NOT logged") :]
    for who in ("TensorBoardLogger", "MemoryLogger"):
        assert f"{who}: " in summary
    assert "now at 4" in first.out
    assert "Traceback" not in first.err + second.err


def test_a_full_disk_stops_no_logger_and_what_comes_later_is_written(tmp_path: Path) -> None:
    loggers = [TensorBoardLogger(tmp_path, version=0), CSVLogger(tmp_path, version=0, flush_logs_every_n_steps=1)]
    trainer = Trainer(logger=loggers, accelerator="cpu", enable_progress_bar=False)
    guard_loggers(Trainer(logger=loggers, accelerator="cpu", enable_progress_bar=False))
    guard_loggers(trainer)  # that one is told, and the earlier one no more
    for logger in loggers:
        logger.log_metrics({"loss": 1.0}, step=1)
        logger.save()
    with pytest.warns(UserWarning, match="cannot write to .*version_0: File too large: training goes on") as caught:
        with small_disk(10):
            for _ in range(3):
                for logger in loggers:
                    logger.log_metrics({"loss": 2.0}, step=2)
                    logger.save()
        for logger in loggers:
            logger.log_metrics({"loss": 3.0}, step=3)
            logger.finalize("success")
    assert len([w for w in caught if "training goes on" in str(w.message)]) == 1
    assert list_lost_logs(trainer) == ["TensorBoardLogger: File too large", "CSVLogger: File too large"]
    assert "3.0" in Path(loggers[1].log_dir, "metrics.csv").read_text()


def test_a_folder_is_asked_of_loggers_that_have_no_other(tmp_path: Path) -> None:
    class Remote(DummyLogger):
        save_dir = str(tmp_path / "file" / "x")

    (tmp_path / "file").touch()
    check_log_folders(Trainer(logger=Remote(), accelerator="cpu"))
    with pytest.raises(ValueError, match=r"^logger: CSVLogger cannot write to \S+: \S+file is no folder: choose"):
        check_log_folders(Trainer(logger=CSVLogger(Remote.save_dir), accelerator="cpu"))


def test_what_is_no_matter_of_files_ends_a_run_as_before(tmp_path: Path) -> None:
    trainer = Trainer(logger=False, accelerator="cpu")
    with pytest.raises(ValueError, match="a bad metric"), outlive_lost_log(trainer, "x", tmp_path):
        raise ValueError("a bad metric")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with outlive_lost_log(trainer, "x", tmp_path):
            raise ValueError("wrapped") from ConnectionError("refused")
    assert ["x cannot write" in str(w.message) for w in caught] == [True]


def test_a_folder_for_logs_that_cannot_be_is_refused_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    (tmp_path / "taken").touch()
    before = sorted(tmp_path.rglob("*"))
    for setting in ("trainer.default_root_dir=taken/here", "trainer.logger.init_args.save_dir=taken/here"):
        given = ["--trainer.logger=CSVLogger"] if "logger" in setting else []
        assert main(["fit", "--config=run.yaml", *given, f"--{setting}"]) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        name = "CSVLogger cannot write to taken/here: " if given else "got 'taken/here': "
        assert line.startswith(f"error: trainer.{'logger' if given else 'default_root_dir'}: {name}")
        assert "taken is no folder" in line
    assert sorted(tmp_path.rglob("*")) == before
