"""What is written of the classes is what the module has found."""

import csv
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from lightning.pytorch.trainer.states import TrainerFn
from PIL import Image

from lit_fsdp.callbacks import ClassReport
from lit_fsdp.reporting.plots import render_svg

NAMES = ["cat", "dog", "$eel$"]


class Found(pl.LightningModule):
    """Has evaluated already."""

    def __init__(self, confusion: list[list[int]] | None, names: list[str] = NAMES) -> None:
        super().__init__()
        values = {"top1_pct": 62.5, "class_accuracy_pct": 60.0}
        accuracy = [0.75, 0.5, math.nan, *[1.0] * (len(names) - 3)]
        found = SimpleNamespace(num_images=8, values=values, class_accuracy=accuracy, confusion=confusion)
        self.evaluation, self.class_names = {"test": found, "val": found}, names


CONFUSION = [[3, 1, 0], [0, 2, 2], [0, 0, 0]]


def end_test(folder: Path, module: pl.LightningModule, **options: Any) -> ClassReport:
    callback = ClassReport()
    trainer = pl.Trainer(logger=False, default_root_dir=folder, accelerator="cpu", devices=1, **options)
    callback.on_test_end(trainer, module)
    return callback


def test_table_picture_and_section_say_which_class_was_taken_for_which(tmp_path: Path) -> None:
    callback = end_test(tmp_path, Found(CONFUSION))
    with (tmp_path / "classes_test.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[1:] == [["cat", "75.00", "3", "1", "0"], ["dog", "50.00", "0", "2", "2"], ["$eel$", "", "0", "0", "0"]]
    section = callback.make_section()
    assert section is not None
    assert [list(row) for row in section.tables[0].rows] == [["dog", "50.0"], ["cat", "75.0"]]
    assert [list(row) for row in section.tables[1].rows] == [["dog taken for $eel$", "2"], ["cat taken for dog", "1"]]
    assert section.numbers["num_images"] == 8
    picture = render_svg(section.plots[0])
    assert picture.startswith("<svg")
    assert all(f">{text}<" in picture for text in ("3", "2", "dog", "$eel$"))


def test_a_cell_is_as_dark_as_its_share_of_the_row(tmp_path: Path) -> None:
    end_test(tmp_path, Found([[1000, 0, 0], [0, 1, 1], [0, 0, 1]]))
    red = np.asarray(Image.open(tmp_path / "confusion_test.png").convert("RGB")).astype(int)[..., 0]
    whole, half = ((abs(red - value) < 9).sum() for value in (8, 107))  # of cells that have all of a row, or a half
    assert 0.6 < half / whole < 1.6  # two of each


@pytest.mark.parametrize(
    ("module", "options"),
    [(pl.LightningModule(), {}), (Found(CONFUSION), {"fast_dev_run": True})],
    ids=["no classifier", "a trial"],
)
def test_nothing_is_left_where_there_is_nothing_to_say(
    module: pl.LightningModule, options: dict[str, Any], tmp_path: Path
) -> None:
    callback = end_test(tmp_path, module, **options)
    assert list(tmp_path.iterdir()) == []
    assert callback.make_section() is None


def test_the_report_of_a_fit_has_no_classes_of_an_evaluation_before_it(tmp_path: Path) -> None:
    callback = end_test(tmp_path, Found(CONFUSION))
    assert callback.make_section() is not None
    for stage, has_section in (("validate", True), ("fit", False)):
        callback.setup(pl.Trainer(logger=False, accelerator="cpu", devices=1), Found(CONFUSION), stage)
        assert (callback.make_section() is not None) == has_section


def test_without_a_matrix_there_is_a_table_only(tmp_path: Path) -> None:
    section = end_test(tmp_path, Found(None)).make_section()
    assert [path.name for path in tmp_path.iterdir()] == ["classes_test.csv"]
    assert section is not None
    assert section.plots == []


def test_the_section_says_how_many_images_could_not_be_decoded(tmp_path: Path) -> None:
    module = Found(CONFUSION)
    module.skipped_images = {"test": 0, "train": 2}  # type: ignore[assignment]
    section = end_test(tmp_path, module).make_section()
    assert section is not None
    assert section.notes[1:] == ["2 images of the last epoch of train could not be decoded, and count nowhere."]
    assert section.numbers["skipped_images_train"] == 2


def test_while_training_goes_on_nothing_is_drawn(tmp_path: Path) -> None:
    callback, module = ClassReport(), Found(CONFUSION)
    trainer = pl.Trainer(logger=False, default_root_dir=tmp_path, accelerator="cpu", devices=1)
    trainer.state.fn = TrainerFn.FITTING
    callback.on_validation_end(trainer, module)
    assert [path.name for path in tmp_path.iterdir()] == ["classes_val.csv"]
    callback.on_fit_end(trainer, module)
    assert (tmp_path / "confusion_val.png").stat().st_size > 1000
    (tmp_path / "confusion_val.png").unlink()
    callback.on_exception(trainer, module, KeyboardInterrupt())  # it was drawn already
    assert not (tmp_path / "confusion_val.png").exists()
    trainer.state.fn = TrainerFn.VALIDATING
    callback.on_validation_end(trainer, module)
    assert (tmp_path / "confusion_val.png").exists()


@pytest.mark.full
def test_of_a_thousand_classes_those_mistaken_most_are_drawn_at_once(tmp_path: Path) -> None:
    counts = np.diag(np.full(1000, 40))
    counts[np.arange(1000), (np.arange(1000) + 1) % 1000] = 1
    counts[700, 3] = counts[3, 900] = 9
    names = [f"n{i:04d}" for i in range(1000)]
    module = Found(counts.tolist(), names)
    end_test(tmp_path, Found(CONFUSION))  # fonts are looked for once
    begin = time.process_time()
    callback = end_test(tmp_path, module)
    section = callback.make_section()
    assert section is not None
    svg = render_svg(section.plots[0])
    assert time.process_time() - begin < 3  # was 20
    assert all(f">{name}<" in svg for name in ("n0003", "n0700", "n0900", "all others"))
    matrix = section.plots[0].matrix
    assert matrix is not None
    reduced, labels = np.asarray(matrix.values), list(matrix.labels)
    assert len(labels) == 30
    assert reduced.sum() == counts.sum()
    row = labels.index("n0700")
    assert (reduced[row, row], reduced[row, labels.index("n0003")], reduced[row, -1]) == (40, 9, 1)
    assert section.plots[0].title == "Confusion matrix of test: 29 of 1,000 classes, those taken for each other most"
