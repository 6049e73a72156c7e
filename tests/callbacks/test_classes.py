"""What is written of the classes is what the module has found."""

import csv
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from PIL import Image

from lit_fsdp.callbacks import ClassReport
from lit_fsdp.callbacks.plots import render_svg

NAMES = ["cat", "dog", "$eel$"]


class Found(pl.LightningModule):
    """Has evaluated already."""

    def __init__(self, confusion: list[list[int]] | None) -> None:
        super().__init__()
        values = {"top1_pct": 62.5, "class_accuracy_pct": 60.0}
        accuracy = [0.75, 0.5, math.nan]
        found = SimpleNamespace(num_images=8, values=values, class_accuracy=accuracy, confusion=confusion)
        self.evaluation, self.class_names = {"test": found}, NAMES


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
    pixels = np.asarray(Image.open(tmp_path / "confusion_test.png").convert("RGB")).astype(int)
    blue = (pixels[..., 2] - pixels[..., 0]).max(0)
    assert (blue > 60).sum() > 100


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


def test_without_a_matrix_there_is_a_table_only(tmp_path: Path) -> None:
    section = end_test(tmp_path, Found(None)).make_section()
    assert [path.name for path in tmp_path.iterdir()] == ["classes_test.csv"]
    assert section is not None
    assert section.plots == []
