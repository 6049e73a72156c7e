"""Which classes a classifier finds, and which it takes for which."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lit_fsdp.reporting.lost_logs import outlive_lost_log
from lit_fsdp.reporting.metrics import find_run_folder, is_trial
from lit_fsdp.reporting.plots import write_png
from lit_fsdp.reporting.sections import Matrix, Plot, Section, Table

_MAX_ROWS = 20  # in tables of the report; files have all
_MAX_DRAWN = 200  # classes; of more, the picture has those that are mistaken most
_NUM_MISTAKEN = 29  # and all others together: 30 have room for their names


class ClassReport(Callback):
    """Write how well each class was found, and the confusion matrix, after every evaluation of a classifier.

    Leaves ``classes_val.csv`` or ``classes_test.csv`` and, of the last evaluation, ``confusion_val.png`` or
    ``confusion_test.png`` in the run's folder, and a section in the report of ``fit``. Above 200 classes, the picture
    has the 29 that are taken for each other most, and all others as one. Reads ``evaluation`` and ``class_names`` of
    the LightningModule, as ``ImageClassification`` has them; does nothing for others.

    Args:
        fallback_dir: Folder for the files if the run has none of its own, which it has with TensorBoardLogger or
            CSVLogger.
    """

    def __init__(self, fallback_dir: str | None = None) -> None:
        self.fallback_dir = fallback_dir
        self._last: tuple[str, Any, list[str]] | None = None
        self._skipped: Mapping[str, int] = {}  # kept by the module
        self._folder: Path | None = None  # for a picture that is still to be drawn

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # whose report has nothing of runs before
            self._last = self._folder = None

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._write(trainer, pl_module, "val")
            if trainer.state.fn != TrainerFn.FITTING:
                self._write_picture(trainer)

    @override
    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, pl_module, "test")
        self._write_picture(trainer)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write_picture(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._write_picture(trainer)

    def _write(self, trainer: Trainer, module: Any, stage: str) -> None:
        evaluation = getattr(module, "evaluation", {}).get(stage)
        if evaluation is None or is_trial(trainer):
            return
        folder = find_run_folder(trainer, self.fallback_dir)
        if not trainer.is_global_zero:
            return
        self._last = (stage, evaluation, list(module.class_names))
        self._skipped = getattr(module, "skipped_images", {})
        self._folder = folder
        with outlive_lost_log(trainer, type(self).__name__, folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_classes(folder / f"classes_{stage}.csv", evaluation, module.class_names)
        if stage == "test":
            rank_zero_info(f"classes: {folder / f'classes_{stage}.csv'}")

    def _write_picture(self, trainer: Trainer) -> None:
        """Draw the last evaluation, if it was not yet: while training goes on, the other ranks would wait for it."""
        if self._last is None or self._folder is None:
            return
        stage, evaluation, names = self._last
        if evaluation.confusion is not None:
            with outlive_lost_log(trainer, type(self).__name__, self._folder):
                write_png(_draw(evaluation.confusion, names, stage), self._folder / f"confusion_{stage}.png")
        self._folder = None

    def make_section(self) -> Section | None:
        """Return the last evaluation: the classes found worst, what they were taken for, and the matrix."""
        if self._last is None:
            return None
        stage, evaluation, names = self._last
        worst = sorted((a, name) for a, name in zip(evaluation.class_accuracy, names, strict=True) if not math.isnan(a))
        rows = [[name, f"{100 * accuracy:.1f}"] for accuracy, name in worst[:_MAX_ROWS]]
        tables = [Table(title="Classes, worst first", columns=["class", "accuracy in %"], rows=rows)]
        numbers = {"stage": stage, "num_images": evaluation.num_images, **evaluation.values}
        plots = []
        if evaluation.confusion is not None:
            tables.append(_list_mistakes(evaluation.confusion, names))
            plots.append(_draw(evaluation.confusion, names, stage))
        notes = [f"{evaluation.num_images:,} images of {stage}, each counted once."]
        for name, count in self._skipped.items():
            if count:
                notes.append(f"{count:,} images of the last epoch of {name} could not be decoded, and count nowhere.")
                numbers[f"skipped_images_{name}"] = count
        return Section(title="Classes", name="classes", numbers=numbers, tables=tables, plots=plots, notes=notes)


def write_classes(path: Path, evaluation: Any, names: list[str]) -> None:
    """Write a CSV file with a row for each class: its accuracy, and what it was taken for."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        has_matrix = evaluation.confusion is not None
        writer.writerow(["class", "accuracy_pct", *([f"taken for {name}" for name in names] if has_matrix else [])])
        for i, (name, accuracy) in enumerate(zip(names, evaluation.class_accuracy, strict=True)):
            shown = "" if math.isnan(accuracy) else f"{100 * accuracy:.2f}"
            writer.writerow([name, shown, *(evaluation.confusion[i] if has_matrix else [])])


def _list_mistakes(confusion: list[list[int]], names: list[str]) -> Table:
    found = [
        (count, names[i], names[j])
        for i, row in enumerate(confusion)
        for j, count in enumerate(row)
        if count and i != j
    ]
    found.sort(key=lambda mistake: -mistake[0])
    rows = [[f"{real} taken for {guess}", f"{count:,}"] for count, real, guess in found[:_MAX_ROWS]]
    return Table(title="Most frequent mistakes", columns=["what", "images"], rows=rows)


def _draw(confusion: list[list[int]], names: list[str], stage: str) -> Plot:
    title = f"Confusion matrix of {stage}"
    if len(names) > _MAX_DRAWN:
        title += f": {_NUM_MISTAKEN} of {len(names):,} classes, those taken for each other most"
        confusion, names = reduce_confusion(confusion, names)
    matrix = Matrix(values=confusion, labels=names)
    return Plot(title=title, x_label="taken for", y_label="class", curves=[], kind="matrix", matrix=matrix)


def reduce_confusion(confusion: list[list[int]], names: list[str]) -> tuple[list[list[int]], list[str]]:
    """Return matrix and names of the classes that are mistaken most, and of all others as one. Rows: real classes."""
    counts = np.asarray(confusion)
    mistakes = counts - np.diag(np.diag(counts))
    order = np.argsort(-mistakes, axis=None, kind="stable")
    pairs = np.stack(np.unravel_index(order[: len(names)], counts.shape), 1)
    chosen = sorted(list(dict.fromkeys(pairs.flatten().tolist()))[:_NUM_MISTAKEN])
    groups = np.full(len(names), len(chosen))
    groups[chosen] = range(len(chosen))
    member = np.eye(len(chosen) + 1, dtype=counts.dtype)[groups]  # [classes, groups]
    reduced = member.T @ counts @ member
    return reduced.tolist(), [*(names[i] for i in chosen), "all others"]
