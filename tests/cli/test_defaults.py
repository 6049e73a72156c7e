"""Which callbacks the command line adds."""

import csv
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from input_rows import FIT, TRAINER, Row, check_row, compare_contents, list_contents, run_rows
from launches import Ended, Start, fork_commands, fork_ranks, write_run
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from report_runs import Page, read_numbers

from lit_fsdp.callbacks import (
    ClassReport,
    CommunicationLogger,
    MemoryLogger,
    OOMReport,
    Preemption,
    ProgressBar,
    RunReport,
    RunSummary,
    SpokenReport,
    StabilityMonitor,
    ThroughputLogger,
    WritePredictions,
)
from lit_fsdp.cli.defaults import (
    LastStep,
    LogInterval,
    Verbosity,
    choose_callbacks,
    choose_loggers,
    claim_folder,
    list_found,
    remove_unused_run,
)
from lit_fsdp.tasks import TextData

MEASURING = [StabilityMonitor, MemoryLogger, CommunicationLogger, ThroughputLogger, OOMReport]
MONITORS = [ClassReport, *MEASURING, SpokenReport, RunReport]


def choose(
    *given: Callback,
    command: str = "fit",
    run_summary: bool = True,
    monitoring: bool = True,
    verbosity: Verbosity = "brief",
    **trainer: Any,
) -> list[type[Callback]]:
    unset = dict.fromkeys(("enable_progress_bar", "enable_checkpointing", "log_every_n_steps"))
    settings = {"fast_dev_run": False, **unset, **trainer}
    chosen = choose_callbacks(
        given,
        settings,
        command=command,
        run_root=Path("runs/x"),
        progress_bar=ProgressBar(),
        run_summary=run_summary,
        monitoring=monitoring,
        verbosity=verbosity,
    )
    return [type(callback) for callback in chosen]


def test_a_fit_is_saved_preempted_reported_and_summed_up_the_summary_last() -> None:
    assert choose() == [ProgressBar, Preemption, ModelCheckpoint, LastStep, LogInterval, *MONITORS, RunSummary]


class OwnReport(RunReport):
    """A user's variant."""


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (RunReport(), RunReport),
        (OwnReport(), RunReport),
        (MemoryLogger(trace_step=5), MemoryLogger),
        (RunSummary(), RunSummary),
        (Preemption(), Preemption),
        (ProgressBar(), ProgressBar),
        (ModelCheckpoint(), ModelCheckpoint),
    ],
)
def test_a_callback_that_is_given_replaces_that_of_its_class(given: Callback, kind: type[Callback]) -> None:
    assert choose(given) == [default for default in choose() if default is not kind]


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        ({"monitoring": False}, {*MONITORS}),
        ({"run_summary": False}, {RunSummary}),
        ({"enable_progress_bar": False}, {ProgressBar}),
        ({"enable_checkpointing": False}, {ModelCheckpoint, LastStep}),
        ({"fast_dev_run": True}, {Preemption, ModelCheckpoint, LastStep}),
        ({"log_every_n_steps": 10}, {LogInterval}),
        ({"command": "validate"}, {Preemption, LastStep, LogInterval, *MONITORS} - {ClassReport}),
    ],
)
def test_each_setting_leaves_out_what_it_is_about(settings: dict[str, Any], missing: set[type[Callback]]) -> None:
    assert set(choose(**settings)) == set(choose()) - missing


@pytest.mark.parametrize(
    ("num_steps", "interval"),
    [
        (1, 1),
        (3, 1),
        (99, 1),
        (100, 2),
        (300, 5),
        (999, 10),
        (1000, 20),
        (2500, 50),
        (10**6, 50),
        (math.inf, 50),
        (-1, 50),
    ],
)
def test_a_run_logs_each_step_or_fifty_of_them_at_least(num_steps: float, interval: int) -> None:
    trainer: Any = SimpleNamespace(estimated_stepping_batches=num_steps, log_every_n_steps=1, max_epochs=-1)
    LogInterval().on_train_start(trainer, LightningModule())
    assert trainer.log_every_n_steps == interval


def test_what_saves_on_exceptions_only_replaces_no_save() -> None:
    assert ModelCheckpoint in choose(OnExceptionCheckpoint("failed"))


def test_only_predict_writes_predictions() -> None:
    assert WritePredictions in choose(command="predict")
    assert WritePredictions not in choose()


def _list_nulls(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _list_nulls(part, f"{path}.{key}".lstrip("."))
    elif value is None:
        yield path


@pytest.mark.full
def test_a_run_of_the_command_line_ends_in_a_report_with_its_merged_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"max_steps": 3, "val_check_interval": 1, "log_every_n_steps": None, "check_val_every_n_epoch": None}
    write_run(tmp_path, trainer=settings, data={"validation_fraction": 0.2})
    name = "<script>x"
    ended = fork_ranks("fit", "--config", "run.yaml", f"--run_name={name}", "--monitoring=true")
    assert [rank.code for rank in ended] == [0, 0], ended[0].err
    folder = tmp_path / "runs" / name / "version_0"
    assert f"report: runs/{name}/version_0/report.html" in ended[0].err
    assert "report: " not in ended[1].err
    numbers = read_numbers(folder)
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert numbers["config"] == saved
    assert saved["run_name"] == name
    # Settings that are not in use are left out, where that is what leaving them out means.
    assert list(_list_nulls(saved)) == ["trainer.check_val_every_n_epoch"]
    # The terminal: what is trained, the summary, and where all else is.
    first, title, *_ = ended[0].out.splitlines()
    where = f"2 ranks on cpu, from step 0 to 3, logs in runs/{name}/version_0"
    assert first == f"training: 39,072 of 39,072 parameters, {where}"
    assert title.startswith("Run summary")
    picked, report = ended[0].err.splitlines()
    assert picked.startswith("attention: auto: varlen: ")
    assert report == f"report: runs/{name}/version_0/report.html"
    perplexity = numbers["curves"]["val/perplexity"]
    assert numbers["run"]["headline"] == {
        "name": "val/perplexity",
        "mode": "min",
        "last": perplexity["last"],
        "best": perplexity["lowest"],
    }
    with (folder / "metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file) if row["train/loss"]] == ["0", "1", "2"]
    # Validation came first, as Lightning's check that it runs.
    assert {"stability", "memory", "comm", "speed"} <= set(numbers["sections"])
    assert not any("error" in section for section in numbers["sections"].values())
    page = Page((folder / "report.html").read_text())
    assert "script" not in page.tags
    assert f"run_name: {name}" in page.text
    assert numbers["curves"]["val/loss"]["steps"] == [1, 2, 3]
    best = [file["path"] for file in numbers["checkpoints"] if file["is_last"]]
    assert best == ["checkpoints/last.ckpt"]


@pytest.mark.full
def test_monitoring_false_and_a_run_without_logger_leave_no_report_and_one_beside_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path, trainer={"max_steps": 1, "logger": False, "enable_checkpointing": False})
    (ended,) = fork_ranks("fit", "--config", "run.yaml", "--monitoring=false", ranks=1)
    assert ended.code == 0, ended.err
    assert not list(tmp_path.rglob("report*"))
    (ended,) = fork_ranks("fit", "--config", "run.yaml", "--monitoring=true", ranks=1)
    assert ended.code == 0, ended.err
    numbers = read_numbers(tmp_path / "runs" / "run")
    assert numbers["config"]["trainer"]["logger"] is False
    assert numbers["run"]["name"] == "run"


def begin(logger: CSVLogger | TensorBoardLogger) -> Path:
    logger.log_hyperparams({"lr": 1.0})
    logger.log_metrics({"loss": 1.0})
    logger.save()
    logger.finalize("failed")
    return Path(logger.log_dir)


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
@pytest.mark.parametrize("version", [None, "", "mine"])
def test_of_a_run_that_never_began_only_goes_what_its_own_loggers_wrote(
    kind: type[CSVLogger | TensorBoardLogger], version: str | None, tmp_path: Path
) -> None:
    def build() -> CSVLogger | TensorBoardLogger:
        return kind(tmp_path, name="runs/run", version=version)

    found = list_found(logger := build())
    folder = begin(logger)
    (folder / "checkpoints").mkdir()
    remove_unused_run(folder, found)
    assert list(tmp_path.iterdir()) == []

    folder.mkdir(parents=True)
    (folder / "events.out.tfevents.1.host.0.0").write_text("of an earlier run")
    (folder / "hparams.yaml").write_text("lr: 2.0")
    before = list_contents(tmp_path)
    found = list_found(logger := build())
    folder = begin(logger)
    (folder / "hparams.yaml").write_text("lr: 2.0")
    remove_unused_run(folder, found)
    assert list_contents(tmp_path) == before

    found = list_found(logger := build())
    folder = begin(logger)
    (folder / "events.out.tfevents.1.host.00.0").write_text("of another run, which began since")
    before = list_contents(tmp_path)
    remove_unused_run(folder, found)
    assert list_contents(tmp_path) == before


def test_runs_of_one_name_that_start_at_once_have_folders_of_their_own(tmp_path: Path) -> None:
    settings, root = {"logger": None, "fast_dev_run": False}, tmp_path / "runs" / "run"
    started = [choose_loggers(settings, root) for _ in range(3)]  # before one of them has made its folder
    found = [list_found(loggers[0]) for loggers in started]
    for loggers in started:
        claim_folder(loggers)
    folders = [[Path(logger.log_dir) for logger in loggers] for loggers in started]
    assert folders == [[root / f"version_{i}"] * 2 for i in range(3)]
    for (folder, _), before in zip(folders, found, strict=True):  # refused, all of them
        remove_unused_run(folder, before)
    assert list(tmp_path.iterdir()) == []
    root.parent.symlink_to(tmp_path / "not mounted")
    claim_folder(choose_loggers(settings, root))  # comes back: what is wrong is said later


class MeetingData(TextData):
    """Waits until another run has come as far: to the last moment before loggers make their folder."""

    def check_stage(self, stage: Any) -> None:
        super().check_stage(stage)
        Path(f"{os.getpid()}.here").touch()
        while len([*Path.cwd().glob("*.here")]) < 2:
            time.sleep(0.01)


@pytest.mark.full
def test_two_runs_that_start_at_once_do_not_write_into_one_folder(tmp_path: Path) -> None:
    write_run(tmp_path, trainer={"enable_checkpointing": False})
    rates = [1e-3, 2e-3]
    options = [f"--data.class_path={__name__}.MeetingData", "--model.optimizer.learning_rate"]
    ended = fork_commands([Start(args=["fit", "--config=run.yaml", *options, str(r)], folder=tmp_path) for r in rates])
    assert [one.code for one in ended] == [0, 0], ended[0].err
    written = [yaml.safe_load(path.read_text()) for path in tmp_path.glob("runs/run/version_*/config.yaml")]
    assert sorted(one["model"]["init_args"]["optimizer"]["learning_rate"] for one in written) == rates


def test_a_refused_run_leaves_the_results_of_earlier_ones_where_its_own_logger_writes(tmp_path: Path) -> None:
    logger = {"class_path": "TensorBoardLogger", "init_args": {"save_dir": ".", "name": "tb", "version": ""}}
    write_run(tmp_path, trainer={**TRAINER, "logger": logger}, data={"train": "trian.jsonl"})
    row = Row(name="misspelt", args=FIT, files={"tb/events.out.tfevents.1.host.1.0": "results"}, words=["trian"])
    assert run_rows([("own", row)], {"own": tmp_path}, tmp_path.parent / f"{tmp_path.name}_rows") == [""]


def test_a_row_fails_on_files_that_are_gone_or_changed(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").write_text("1")
    before = list_contents(tmp_path)
    (tmp_path / "a").unlink()
    (tmp_path / "b").write_text("2")
    row, ended = Row(name="x", args=FIT), Ended(code=2, out="", err="error: x", took_s=1.0)
    assert check_row(row, ended, compare_contents(before, list_contents(tmp_path))) == (
        "gone a, changed b: ['error: x']"
    )


OWN = """
from enum import Enum
from lightning.pytorch import Callback

class Mode(str, Enum):
    FIRST = "first"

class Own(Callback):
    def __init__(self, mode: Mode = Mode.FIRST):
        assert mode is Mode.FIRST
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        # With an enum as a default where jsonargparse wants text, and one where it wants an enum.
        ["--monitoring=false", "--trainer.callbacks=[{class_path: Timer, init_args: {duration: '00:12:00:00'}}]"],
        ["--monitoring=false", "--trainer.callbacks=[{class_path: own.Own}]"],
        ["--trainer.barebones=true", "--trainer.log_every_n_steps=null", "--trainer.enable_progress_bar=null"],
    ],
    ids=["timer", "own", "barebones"],
)
def test_what_callbacks_and_lightning_have_by_default_is_no_obstacle(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own.py").write_text(OWN)
    write_run(tmp_path)
    (ended,) = fork_ranks("fit", "--config", "run.yaml", *options, ranks=1)
    assert ended.code == 0, ended
