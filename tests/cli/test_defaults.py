"""Which callbacks the command line adds."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from launches import fork_ranks, write_run
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
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
from lit_fsdp.cli.defaults import choose_callbacks, remove_unused_run

MEASURING = [StabilityMonitor, MemoryLogger, CommunicationLogger, ThroughputLogger, OOMReport]
MONITORS = [ClassReport, *MEASURING, SpokenReport, RunReport]


def choose(
    *given: Callback, command: str = "fit", run_summary: bool = True, monitoring: bool = True, **trainer: Any
) -> list[type[Callback]]:
    settings = {"fast_dev_run": False, "enable_progress_bar": None, "enable_checkpointing": None, **trainer}
    chosen = choose_callbacks(
        given,
        settings,
        command=command,
        run_root=Path("runs/x"),
        progress_bar=ProgressBar(),
        run_summary=run_summary,
        monitoring=monitoring,
    )
    return [type(callback) for callback in chosen]


def test_a_fit_is_saved_preempted_reported_and_summed_up_the_summary_last() -> None:
    assert choose() == [ProgressBar, Preemption, ModelCheckpoint, *MONITORS, RunSummary]


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
        ({"enable_checkpointing": False}, {ModelCheckpoint}),
        ({"fast_dev_run": True}, {Preemption, ModelCheckpoint}),
        ({"command": "validate"}, {Preemption, *MONITORS} - {ClassReport}),
    ],
)
def test_each_setting_leaves_out_what_it_is_about(settings: dict[str, Any], missing: set[type[Callback]]) -> None:
    assert set(choose(**settings)) == set(choose()) - missing


def test_only_predict_writes_predictions() -> None:
    assert WritePredictions in choose(command="predict")
    assert WritePredictions not in choose()


@pytest.mark.full
def test_a_run_of_the_command_line_ends_in_a_report_with_its_merged_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path, trainer={"max_steps": 2, "val_check_interval": 1}, data={"validation_fraction": 0.2})
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
    # Validation came first, as Lightning's check that it runs.
    assert {"stability", "memory", "comm", "speed"} <= set(numbers["sections"])
    assert not any("error" in section for section in numbers["sections"].values())
    page = Page((folder / "report.html").read_text())
    assert "script" not in page.tags
    assert f"run_name: {name}" in page.text
    assert numbers["curves"]["val/loss"]["steps"] == [1, 2]
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


def test_the_folder_of_a_run_that_never_began_goes_and_what_others_put_there_stays(tmp_path: Path) -> None:
    version = tmp_path / "runs/run/version_3"
    (version / "checkpoints").mkdir(parents=True)
    (version / "hparams.yaml").touch()
    (version / "events.out.tfevents.1").touch()
    remove_unused_run(version, [version, tmp_path])
    assert version.exists()
    note = version / "note.txt"
    note.touch()
    remove_unused_run(version, [tmp_path])
    assert sorted(path.name for path in version.iterdir()) == [
        *("checkpoints", "events.out.tfevents.1", "hparams.yaml", "note.txt")
    ]
    note.unlink()
    remove_unused_run(version, [tmp_path])
    assert list(tmp_path.iterdir()) == []
