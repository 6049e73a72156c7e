"""The report of a run, in its three files."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from report_runs import RUN_NAME, Page, TinyTask, fit_tiny, fit_two_ranks, read_numbers

from lit_fsdp.callbacks import (
    CommunicationLogger,
    MemoryLogger,
    Preemption,
    RunReport,
    RunSummary,
    StabilityMonitor,
    ThroughputLogger,
)
from lit_fsdp.reporting.report_files import Report, add_section, write_report
from lit_fsdp.reporting.sections import Section

DOCS = Path(__file__).parent.parent.parent / "docs" / "report.md"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on two ranks, with a section of a user and a broken one."""
    folder = tmp_path_factory.mktemp("two")
    before = Path.cwd()
    os.chdir(folder)
    try:
        return fit_two_ranks(folder)
    finally:
        os.chdir(before)


def test_the_numbers_are_those_of_the_run(two_ranks: Path) -> None:
    numbers = read_numbers(two_ranks)
    run = numbers["run"]
    assert (run["status"], run["num_steps"], run["num_steps_planned"], run["num_ranks"]) == ("finished", 8, 8, 2)
    assert run["folder"] == f"{RUN_NAME}/version_0"
    rows = [line.split(",") for line in (two_ranks / "metrics.csv").read_text().splitlines()]
    column = rows[0].index("train/loss")
    logged = [float(row[column]) for row in rows[1:]]  # at the same steps, by Lightning
    assert numbers["curves"]["train/loss"]["steps"] == [2, 4, 6, 8]
    assert numbers["curves"]["train/loss"]["values"] == pytest.approx(logged)
    assert numbers["curves"]["train/loss"]["lowest"]["value"] == pytest.approx(min(logged))
    assert numbers["units"]["shard"] == 2
    keys = {*numbers["units"], *numbers["units"]["units"][0]}
    assert keys <= set(re.findall(r"`(\w+)`", DOCS.read_text()))
    assert sum(unit["num_parameters"] for unit in numbers["units"]["units"]) == numbers["units"]["num_parameters"]
    assert numbers["environment"]["packages"]["torch"] == torch.__version__
    assert numbers["environment"]["devices"] == [{"name": "cpu", "memory_gib": None}] * 2
    assert numbers["config"]["trainer"]["max_steps"] == 8
    assert "null" not in json.dumps(numbers["config"])
    assert numbers["run"]["headline"] is None  # without a validation
    assert set(numbers) == {
        *("format", "run", "curves", "checkpoints", "units", "sections", "config", "environment"),
    }


def test_a_users_section_is_in_all_three_files_and_a_broken_one_says_why(two_ranks: Path) -> None:
    sections = read_numbers(two_ranks)["sections"]
    assert sections["weather"]["numbers"] == {"rain_mm": [1.0, None], "file": "…/rain.csv"}
    assert sections["broken"]["error"] == "KeyError: 'no <such> gauge'"
    text = Page((two_ranks / "report.html").read_text()).text
    markdown = (two_ranks / "report.md").read_text()
    for words in ("Weather & more", "Hours", "1,234,567", "KeyError: 'no <such> gauge'"):
        assert words in text
        assert words.replace("&", "&amp;").replace("<", "&lt;") in markdown
    pictures = re.findall(r"!\[.*?\]\((.*?)\)", markdown)
    assert len(pictures) == 5  # four curves and the user's plot
    for picture in pictures:
        assert (two_ranks / picture).read_bytes().startswith(b"\x89PNG")


def test_the_page_is_well_formed_and_refers_to_nothing_outside(two_ranks: Path) -> None:
    source = (two_ranks / "report.html").read_text()
    page = Page(source)
    assert page.references
    assert all(reference.startswith("#") for reference in page.references)
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert not re.search(r"url\((?!#)|@import|<link|<img", source)
    assert page.tags.count("svg") == 4 + 2  # the user's plot for a screen and for a phone
    assert "default-src 'none'" in source


def test_what_users_name_is_text_and_never_a_tag(two_ranks: Path) -> None:
    source = (two_ranks / "report.html").read_text()
    page = Page(source)
    assert "script" not in page.tags
    assert "b" not in page.tags
    assert RUN_NAME in page.text
    assert "<b>a long name of a place | with a bar</b>" in page.text
    assert "gate 0 of the <east> wing, $a$" in page.text
    markdown = (two_ranks / "report.md").read_text()
    assert "<script>" not in markdown
    assert "&lt;b>a long name of a place \\| with a bar&lt;/b>" in markdown


def test_no_file_tells_where_the_machine_keeps_things(two_ranks: Path) -> None:
    for name in ("report.html", "report.md", "report.json"):
        text = (two_ranks / name).read_text()
        assert "anna" not in text
        assert str(two_ranks.parent.parent) not in text
        assert os.uname().nodename not in re.findall(r"[\w.-]+", text) or len(os.uname().nodename) < 4
        assert "https://example.org/a/b" in text  # is no path


@pytest.mark.full
def test_an_error_in_training_is_raised_unchanged_and_the_report_says_so(tmp_path: Path) -> None:
    error = RuntimeError("no file /mnt/anna/data/x.bin, the loss went <away>")
    with pytest.raises(RuntimeError) as raised:
        fit_tiny(tmp_path, TinyTask(fail_at=7, error=error))
    assert raised.value is error
    folder = tmp_path / "tiny" / "version_0"
    run = read_numbers(folder)["run"]
    assert (run["status"], run["last_step"]) == ("failed", 7)
    assert run["message"].startswith("at step 7: RuntimeError: no file …/x.bin, the loss went <away> (training_step, ")
    assert read_numbers(folder)["curves"]["train/loss"]["values"] == [5.0]
    assert "the loss went <away>" in Page((folder / "report.html").read_text()).text
    assert not any("anna" in (folder / name).read_text() for name in ("report.html", "report.md", "report.json"))


@pytest.mark.full
@pytest.mark.parametrize("policy", ["warn", "skip"])
def test_a_run_that_came_to_its_end_without_a_finite_loss_diverged_unless_such_steps_are_left_out(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, policy: Literal["warn", "skip"]
) -> None:
    class Diverging(TinyTask):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx) + (float("nan") if self.global_step >= 4 else 0.0)
            self.log("train/loss", loss)
            return loss

    callbacks = [StabilityMonitor(policy), RunSummary()]
    fit_tiny(tmp_path, Diverging(), max_steps=6, log_every_n_steps=1, callbacks=callbacks)
    run = read_numbers(tmp_path / "tiny" / "version_0")["run"]
    assert any("ended with a train/loss of nan" in str(w.message) for w in recwarn) == (policy == "warn")
    if policy == "skip":
        assert run["status"] == "finished"
        assert run["message"] == "training came to its end at step 6, which was left out as bad."
        return
    lost = "but train/loss is nan (not finite for the first time at step 5)"
    assert (run["status"], run["message"]) == ("diverged", f"training came to its end at step 6, {lost}.")


def test_an_error_before_the_first_step_leaves_a_report_too(tmp_path: Path) -> None:
    class Unbuildable(TinyTask):
        def configure_model(self) -> None:
            raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError):
        fit_tiny(tmp_path, Unbuildable())
    run = read_numbers(tmp_path / "tiny" / "version_0")["run"]
    assert (run["status"], run["num_steps"]) == ("failed", 0)
    assert run["message"].startswith("before the first step: OutOfMemoryError: no room")


def test_a_run_that_is_refused_before_the_first_step_leaves_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refused(TinyTask):
        def setup(self, stage: str) -> None:
            raise ValueError("num_labels: got 3: the data has 8 classes")

    with pytest.raises(ValueError, match="num_labels"):
        fit_tiny(tmp_path, Refused())
    assert not list(tmp_path.rglob("report*"))
    assert "report" not in "".join(capsys.readouterr())
    RunReport().on_exception(Trainer(accelerator="cpu", logger=False), Refused(), ValueError("before any setup"))


def test_a_preempted_run_says_so_and_names_its_checkpoint(tmp_path: Path) -> None:
    class Preempted(TinyTask):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.global_step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SIGTERMException):
        fit_tiny(tmp_path, Preempted(), callbacks=[Preemption(), ModelCheckpoint()])
    numbers = read_numbers(tmp_path / "tiny" / "version_0")
    assert numbers["run"]["status"] == "preempted"
    assert numbers["run"]["last_step"] == 4
    assert [file["path"] for file in numbers["checkpoints"]] == ["checkpoints/preempted-step=4.ckpt"]


@pytest.mark.full
def test_only_checkpoints_of_this_run_are_listed(tmp_path: Path) -> None:
    folder = tmp_path / "tiny" / "version_0" / "kept"
    folder.mkdir(parents=True)
    (folder / "preempted-step=1.ckpt").write_text("of an earlier run")
    os.utime(folder / "preempted-step=1.ckpt", (0, 0))
    logger = CSVLogger(tmp_path, name="tiny", version=0)
    fit_tiny(tmp_path, callbacks=[ModelCheckpoint(dirpath=folder, filename="new")], max_steps=1, logger=logger)
    numbers = read_numbers(tmp_path / "tiny" / "version_0")
    assert [file["path"] for file in numbers["checkpoints"]] == ["kept/new.ckpt"]


def test_ctrl_c_is_an_interruption(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):  # Lightning's
            fit_tiny(tmp_path, TinyTask(fail_at=2, error=KeyboardInterrupt()))
    finally:
        signal.signal(signal.SIGINT, before)
    run = read_numbers(tmp_path / "tiny" / "version_0")["run"]
    assert (run["status"], run["message"]) == ("interrupted", "Ctrl-C ended the run at step 2.")


@pytest.mark.full
def test_a_run_that_stops_early_is_not_a_finished_one(tmp_path: Path) -> None:
    stopper = EarlyStopping("val/loss", mode="max", patience=1)
    fit_tiny(tmp_path, callbacks=[stopper], max_steps=100)
    run = read_numbers(tmp_path / "tiny" / "version_0")["run"]
    assert (run["status"], run["last_step"], run["num_steps_planned"]) == ("stopped", 8, 100)


@pytest.mark.full
def test_training_validation_and_epochs_are_read_once_each_where_they_are_logged(tmp_path: Path) -> None:
    fit_tiny(tmp_path, log_every_n_steps=3)  # 10 steps in epochs of 4
    curves = read_numbers(tmp_path / "tiny" / "version_0")["curves"]
    points = {name: list(zip(curve["steps"], curve["values"], strict=True)) for name, curve in curves.items()}
    assert points["train/loss"] == [(3, 3.0), (6, 6.0), (9, 9.0), (10, 10.0)]
    assert points["val/loss"] == [(4, 96.0), (8, 92.0)]
    assert points["both"] == [(3, 2.0), (6, 5.0), (9, 8.0), (10, 9.0)]
    assert points["both_epoch"] == [(4, 1.5), (8, 5.5), (10, 8.5)]
    assert set(points) == {"train/loss", "both", "both_epoch", "val/loss", "late"}
    assert points["late"] == [(4, 0.0), (8, 1.0), (10, 2.0)]


def test_micro_batches_are_no_steps(tmp_path: Path) -> None:
    fit_tiny(tmp_path, accumulate_grad_batches=2, log_every_n_steps=1, max_steps=3, limit_val_batches=0)
    assert read_numbers(tmp_path / "tiny" / "version_0")["curves"]["train/loss"]["steps"] == [1, 2, 3]


def test_a_section_that_comes_later_names_no_folder_of_this_machine_either(tmp_path: Path) -> None:
    write_report(Report(name="run", status="finished", message="", facts={}, parts=[], numbers={}), tmp_path)
    assert add_section(tmp_path, Section(title="More", name="more", numbers={"model": "/mnt/anna/runs/secret/run"}))
    assert read_numbers(tmp_path)["sections"]["more"]["numbers"] == {"model": "…/run"}


@pytest.mark.full
@pytest.mark.parametrize("place", ["four.ckpt", "memory://runs/four.ckpt"])
def test_a_run_that_goes_on_reports_its_own_part(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = fit_tiny(tmp_path, max_steps=4)
    trainer.save_checkpoint(place)
    fit_tiny(tmp_path, max_steps=10, log_every_n_steps=2, ckpt_path=place if ":" in place else tmp_path / place)
    numbers = read_numbers(tmp_path / "tiny" / "version_1")
    run = numbers["run"]
    assert (run["first_step"], run["last_step"], run["num_steps"]) == (4, 10, 6)
    assert run["resumed_from"] == place
    assert numbers["curves"]["train/loss"]["steps"] == [6, 8, 10]
    text = Page((tmp_path / "tiny" / "version_1" / "report.html").read_text()).text
    assert "6, from 4 to 10" in text


@pytest.mark.full
def test_a_run_that_had_nothing_left_to_do_took_no_step(tmp_path: Path) -> None:
    fit_tiny(tmp_path, max_steps=4).save_checkpoint(tmp_path / "four.ckpt")
    fit_tiny(tmp_path, max_steps=4, ckpt_path=tmp_path / "four.ckpt")
    run = read_numbers(tmp_path / "tiny" / "version_1")["run"]
    assert (run["status"], run["first_step"], run["last_step"], run["num_steps"]) == ("finished", 4, 4, 0)


@pytest.mark.full
def test_without_a_logger_the_report_has_a_folder_of_its_own(tmp_path: Path) -> None:
    fit_tiny(tmp_path, logger=False)
    assert read_numbers(tmp_path / "run_report")["curves"]["train/loss"]["steps"] == [5, 10]
    assert not (tmp_path / "report.md").exists()
    fit_tiny(tmp_path, logger=False, callbacks=[RunReport(fallback_dir=str(tmp_path / "runs" / "mine"))])
    assert read_numbers(tmp_path / "runs" / "mine")["run"]["name"] == "mine"


def test_a_run_that_only_tries_one_step_leaves_no_file(tmp_path: Path) -> None:
    fit_tiny(tmp_path, fast_dev_run=True)
    assert not list(tmp_path.rglob("report*"))


@pytest.mark.full
def test_the_same_callback_starts_anew_in_a_second_fit(tmp_path: Path) -> None:
    report = RunReport()
    fit_tiny(tmp_path, callbacks=[report], max_steps=5)
    trainer = fit_tiny(tmp_path, callbacks=[report], max_steps=10, logger=CSVLogger(tmp_path, name="again"))
    trainer.validate(TinyTask(), [torch.ones(2, 4)], verbose=False)  # is no fit
    assert read_numbers(tmp_path / "again" / "version_0")["curves"]["train/loss"]["steps"] == [5, 10]


def test_a_fit_that_fails_before_its_first_step_reports_nothing_of_the_one_before(tmp_path: Path) -> None:
    class Unstartable(TinyTask):
        def on_fit_start(self) -> None:
            raise RuntimeError("no")

    callbacks: list[Any] = [MemoryLogger(trace_step=None), ThroughputLogger(), CommunicationLogger()]
    fit_tiny(tmp_path, callbacks=callbacks)
    assert None not in [callback.make_section() for callback in callbacks]
    with pytest.raises(RuntimeError, match="no"):
        fit_tiny(tmp_path, Unstartable(), callbacks=callbacks)
    assert [callback.make_section() for callback in callbacks] == [None] * 3


def test_a_report_that_cannot_be_written_does_not_fail_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="the run has no report: "):
        fit_tiny(tmp_path, logger=False, callbacks=[RunReport(fallback_dir=str(tmp_path / "file"))])


@pytest.mark.full
def test_sections_of_one_name_and_what_is_no_section_do_not_get_lost(tmp_path: Path) -> None:
    class Says(Callback):
        def __init__(self, section: Any) -> None:
            self.section = section

        def make_section(self) -> Any:
            return self.section

    ours = [Section(title="Curves of mine", name="curves", numbers={"k": k}) for k in range(2)]
    odd = Section(title="Odd", name="odd", numbers={"x": object()})
    callbacks = [Says(section) for section in [*ours, odd, {"title": "a dict"}, None]]
    with pytest.warns(UserWarning, match="make_section returned a dict: expected a Section, or None"):
        fit_tiny(tmp_path, callbacks=callbacks)
    sections = read_numbers(tmp_path / "tiny" / "version_0")["sections"]
    assert [sections[name]["numbers"]["k"] for name in ("curves_2", "curves_3")] == [0, 1]
    assert [section["error"][:9] for section in sections.values() if "error" in section] == ["TypeError"] * 2


def test_values_that_are_no_numbers_are_told(tmp_path: Path) -> None:
    class Diverging(TinyTask):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.log("train/loss", float("nan") if self.global_step >= 4 else 1.0)
            return self.layer(batch).square().mean()

    fit_tiny(tmp_path, Diverging(), log_every_n_steps=1, max_steps=6)
    folder = tmp_path / "tiny" / "version_0"
    curve = read_numbers(folder)["curves"]["train/loss"]
    assert curve["values"] == [1.0] * 4 + [None] * 2
    assert curve["num_not_finite"] == 2
    assert "train/loss was not a finite number 2 times, first at step 5." in (folder / "report.md").read_text()


@pytest.mark.full
def test_the_example_in_the_documentation_runs(tmp_path: Path) -> None:
    source = re.search(r"```python\n# slow_steps.py\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert source is not None
    names: dict[str, Any] = {}
    exec(source[1], names)
    fit_tiny(tmp_path, callbacks=[names["SlowSteps"]()])
    folder = tmp_path / "tiny" / "version_0"
    assert read_numbers(folder)["sections"]["slow_steps"]["numbers"]["num_steps"] == 10
    assert "The slowest steps" in Page((folder / "report.html").read_text()).text


@pytest.mark.full
def test_the_documentation_lists_the_keys_there_are(tmp_path: Path) -> None:
    fit_tiny(tmp_path)
    text, numbers = DOCS.read_text(), read_numbers(tmp_path / "tiny" / "version_0")
    named = set(re.findall(r"`(\w+)`", text))
    assert {*numbers, *numbers["run"], *numbers["environment"], *numbers["curves"]["val/loss"]} <= named
