"""Evaluation and prediction on any number of ranks: every image counts once, what cannot be decoded nowhere."""

import csv
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
import torch
import torch.distributed as dist
from image_training import VIT, make_data, save_classifier
from torch import nn
from training import build_trainer
from transformers import AutoModelForImageClassification

from lit_fsdp import FSDP2Strategy
from lit_fsdp.callbacks.predictions import WritePredictions
from lit_fsdp.tasks import ImageClassification, LRSchedule
from lit_fsdp.tasks.image_classification.skipped import SkippedImages
from ranks import run_ranks


def evaluate(folder: Path, model: Path, out: Path) -> None:
    trainer = build_trainer(FSDP2Strategy(print_plan=False))
    task = ImageClassification(pretrained=str(model), head="keep")
    data = make_data(folder)
    metrics = trainer.test(task, datamodule=data, verbose=False)[0]
    records = trainer.predict(task, datamodule=data)
    assert task.evaluation["test"].num_images == 9
    assert records is not None
    filler = [[i for i in part["index"] if i >= 0] for part in records]
    assert (filler[-1] == []) == (dist.get_rank() == 2)  # a batch of filler alone
    torch.save((metrics, records, task.evaluation["test"].confusion), out / f"{dist.get_rank()}.pt")


@pytest.mark.full
def test_every_image_counts_once_at_any_number_of_ranks(tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "model", VIT, 3)
    data = make_data(tmp_path, eval_batch_size=9)
    data.setup("test")
    batch = next(iter(data.test_dataloader()))
    stock = AutoModelForImageClassification.from_pretrained(model)
    with torch.no_grad():
        logits = stock(batch["pixel_values"]).logits
    labels = batch["labels"]
    expected = {
        "test/loss": float(nn.functional.cross_entropy(logits, labels)),
        "test/top1_pct": 100 * float((logits.argmax(1) == labels).double().mean()),
        "test/top5_pct": 100.0,
    }
    for world_size in (1, 3):  # batches of 2: on 3 ranks, the last one of the second has one image, of the third none
        run_ranks(evaluate, tmp_path, model, tmp_path, world_size=world_size)
        found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(world_size)]
        for metrics, _, confusion in found:
            assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-4)
            assert [sum(row) for row in confusion] == [4, 2, 3]
        records = {}
        for _, parts, _ in found:
            for part in parts:
                for i, name, p in zip(part["index"], part["prediction"], part["probability"], strict=True):
                    assert i == -1 or i not in records
                    records[i] = (name, p)
        chances, predicted = logits.softmax(1).max(1)
        records.pop(-1, None)
        assert sorted(records) == list(range(9))
        assert [records[i][0] for i in range(9)] == [["cat", "dog", "eel"][c] for c in predicted]
        assert [records[i][1] for i in range(9)] == pytest.approx(chances.tolist(), abs=1e-5)


def test_a_model_is_not_evaluated_on_the_classes_of_other_data(tmp_path: Path) -> None:
    task, data = ImageClassification(config=VIT), make_data(tmp_path)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", enable_model_summary=False, **quiet)  # type: ignore[arg-type]
    trainer.test(task, datamodule=data, verbose=False)
    trainer.test(task, datamodule=make_data(tmp_path), verbose=False)
    for path in (tmp_path / "test/cat").iterdir():
        path.unlink()
    (tmp_path / "test/cat").rmdir()
    with pytest.raises(ValueError, match=r"the model was trained for 3 classes \(cat, dog, eel\), .*has 2 \(dog, eel"):
        trainer.test(task, datamodule=make_data(tmp_path, train=None), verbose=False)


def skip(folder: Path, seen: Path) -> None:
    trainer = build_trainer(FSDP2Strategy(print_plan=False), max_steps=-1, max_epochs=2, num_sanity_val_steps=0)
    task = ImageClassification(config=VIT, lr_scheduler=LRSchedule(type="constant"))
    data = make_data(folder, bad_images="skip", shuffle=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        trainer.fit(task, datamodule=data)
    texts = [str(warning.message) for warning in caught]
    named = [Path(text.split(": ")[1]).name for text in texts if text.startswith("skipped: ")]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if "skipped" in name}
    trainer.predict(task, datamodule=data)
    told = sum(text == "train: images that could not be decoded, and count nowhere: 2" for text in texts)
    torch.save((metrics, task.skipped_images, named, told), seen / f"{dist.get_rank()}.pt")


@pytest.mark.full
def test_images_that_are_skipped_are_named_once_and_counted_over_all_ranks(tmp_path: Path) -> None:
    make_data(tmp_path)
    for name in ("train/cat/000.png", "train/dog/001.png", "test/eel/000.png"):
        (tmp_path / name).unlink()
        (tmp_path / name).with_stem(f"bad_{Path(name).parts[1]}").write_text("no image")
    run_ranks(skip, tmp_path, tmp_path, world_size=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for metrics, totals, _, _ in ranks:
        assert metrics == {"train/skipped_images": 2, "val/skipped_images": 1}
        assert totals == {"train": 2, "val": 1, "predict": 1}
    named = sorted(name for _, _, names, _ in ranks for name in names)
    assert named == ["bad_cat.png", "bad_dog.png", "bad_eel.png"]
    assert [told for *_, told in ranks] == [1, 0]


def test_an_image_that_is_skipped_is_named_in_its_first_epoch_alone() -> None:
    skipped = SkippedImages()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for problems in (["a.png: cut"], ["a.png: cut", "b.png: cut"]):
            skipped.add("train", {"problems": problems, "labels": [0, -100, -100]})
    assert [str(warning.message) for warning in caught] == ["skipped: a.png: cut", "skipped: b.png: cut"]


def test_predictions_are_written_as_tables(tmp_path: Path) -> None:
    data = make_data(tmp_path, bad_images="skip")
    (tmp_path / "test" / "cat" / "001.png").write_text("no image")
    writers = [WritePredictions(str(tmp_path / f"out{suffix}")) for suffix in (".csv", ".parquet")]
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, callbacks=[*writers], enable_checkpointing=False, **options)
    with pytest.warns(UserWarning, match=r"skipped: .*cat/001\.png"):
        parts = trainer.predict(ImageClassification(config=VIT), datamodule=data)
    assert parts is not None
    expected = [dict(zip(part, row, strict=True)) for part in parts for row in zip(*part.values(), strict=True)]
    expected = [row for row in expected if row["index"] >= 0]
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == expected
    assert [row["prediction"] is None for row in expected] == [False, True, *[False] * 7]
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [{name: "" if v is None else str(v) for name, v in row.items()} for row in expected]


def train_on_nothing(folder: Path) -> None:
    trainer = build_trainer(FSDP2Strategy(print_plan=False), max_steps=-1, max_epochs=1, limit_val_batches=0)
    data = make_data(folder, bad_images="skip")
    with pytest.raises(ValueError, match=r"train: none of 24 images could be decoded; see the warnings"):
        trainer.fit(ImageClassification(config=VIT, lr_scheduler=LRSchedule(type="constant")), datamodule=data)
    with pytest.raises(ValueError, match=r"test: none of 9 images could be decoded"):
        trainer.test(ImageClassification(config=VIT), datamodule=data, verbose=False)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:skipped")
def test_an_epoch_without_one_image_that_could_be_decoded_ends_the_run(tmp_path: Path) -> None:
    make_data(tmp_path)
    for path in tmp_path.rglob("*.png"):
        path.write_text("no image")
    run_ranks(train_on_nothing, tmp_path, world_size=2)
