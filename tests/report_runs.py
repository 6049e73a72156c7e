"""Runs that end in a report, and what a test reads in it."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from training import EVEN, Rows, build_task, build_trainer, save_model

from lit_fsdp import FSDP2Strategy
from lit_fsdp.callbacks import RunReport
from lit_fsdp.reporting.sections import Curve, Plot, Section, Table
from ranks import run_ranks

RUN_NAME = "<script>alert(1)<"
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


class TinyTask(LightningModule):
    """Logs a loss that is the number of the step, and fails where told to."""

    def __init__(self, fail_at: int | None = None, error: BaseException | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.fail_at, self.error = fail_at, error or RuntimeError("the loss went <away>")

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.fail_at:
            raise self.error
        self.log("train/loss", float(self.global_step + 1))
        self.log("both", float(self.global_step), on_step=True, on_epoch=True)
        return self.layer(batch).square().mean()

    def on_train_epoch_end(self) -> None:
        self.log("late", float(self.current_epoch))

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val/loss", 100.0 - self.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Weather(Callback):
    """A user's callback with a section that has everything."""

    def make_section(self) -> Section:
        curves = [Curve(label=f"gate {i} of the <east> wing, $a$", x=[1, 2, 3], y=[i, 2.0, 3.0]) for i in range(3)]
        plot = Plot(title="Rain & <wind>", x_label="hour", y_label="mm", curves=curves, spans=[("night", 1, 2)])
        row = ["<b>a long name of a place | with a bar</b>", *(f"{i * 1234567:,}" for i in range(8))]
        table = Table(title="Hours", columns=["place", *(f"column {i}" for i in range(8))], rows=[row] * 3)
        numbers = {"rain_mm": torch.tensor([1.0, float("nan")]), "file": Path("/mnt/anna/secret/rain.csv")}
        notes = ["Read from /mnt/anna/secret/rain.csv, see https://example.org/a/b."]
        return Section(
            title="Weather & more", name="weather", numbers=numbers, tables=[table], plots=[plot], notes=notes
        )


class Broken(Callback):
    """A user's callback that cannot say what it has to say."""

    def make_section(self) -> Section:
        raise KeyError("no <such> gauge")


class Page(HTMLParser):
    """The document as tests look at it: whether it is well-formed, what it refers to, what is in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        self.text += data if self.open[-1:] != ["style"] else ""

    def _note(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name.removeprefix("xlink:") in ("href", "src", "srcset", "action", "data", "poster", "background"):
                self.references.append(value or "")


def fit_rank(model: Path, out: Path) -> None:
    """Train on this rank, with sections of every kind."""
    trainer = build_trainer(
        FSDP2Strategy(print_plan=False),
        callbacks=[Weather(), Broken(), RunReport()],
        logger=CSVLogger(out, name=RUN_NAME),
        log_every_n_steps=2,
    )
    trainer.fit(build_task(model), Rows(EVEN["vocab_size"], 4))


def fit_two_ranks(folder: Path) -> Path:
    """Return the folder of a run on two ranks, all in ``folder``."""
    run_ranks(fit_rank, save_model(folder / "model", **EVEN), folder)
    return folder / RUN_NAME / "version_0"


def fit_tiny(folder: Path, task: LightningModule | None = None, ckpt_path: Any = None, **settings: Any) -> Trainer:
    """Train a tiny task in this process; settings are those of the Trainer."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    options = {"max_steps": 10, "log_every_n_steps": 5, "logger": CSVLogger(folder, name="tiny"), **quiet, **settings}
    callbacks = options.pop("callbacks", [])
    reports = [] if any(isinstance(callback, RunReport) for callback in callbacks) else [RunReport()]
    trainer = Trainer(accelerator="cpu", default_root_dir=folder, callbacks=[*callbacks, *reports], **options)
    data = DataLoader(torch.ones(8, 4), batch_size=2)
    trainer.fit(task or TinyTask(), data, data, ckpt_path=ckpt_path)
    return trainer


def read_numbers(folder: Path) -> dict[str, Any]:
    """Return ``report.json``, which must be JSON to the letter."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads((folder / "report.json").read_text(), parse_constant=refuse)
