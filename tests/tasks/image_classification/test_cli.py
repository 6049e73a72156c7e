"""A classifier is trained, tested, exported and used by the command line."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from image_training import VIT, save_classifier, write_folder
from launches import ROOT, fork_ranks
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification

from lit_fsdp.cli.main import main

QUICKSTART = ROOT / "configs" / "vit_digits_quickstart.yaml"


def write_run(folder: Path, **model: Any) -> None:
    write_folder(folder / "train", {"cat": 12, "dog": 12, "eel": 12})
    write_folder(folder / "test", {"cat": 3, "dog": 4, "eel": 2})
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    data = {"train": "train", "validation": "test", "test": "test", "predict": "test", "processor": {"size": 16}}
    run = {
        "monitoring": True,
        "trainer": {"accelerator": "cpu", "max_epochs": 3, **quiet},
        "model": {
            "class_path": "image_training.WithLogits",
            "init_args": {"config": VIT, "optimizer": {"learning_rate": 3e-3}, **model},
        },
        "data": {"class_path": "ImageData", "init_args": {**data, "batch_size": 4, "num_workers": 0}},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))


def run_all(*commands: str) -> str:
    """Run commands on two ranks; return what rank 0 said."""
    said = ""
    for command in commands:
        ended = fork_ranks(*command.split(), ranks=2)
        assert [rank.code for rank in ended] == [0, 0], ended[0].err + ended[1].err
        said += ended[0].out + ended[0].err
    return said


@pytest.mark.full
def test_a_run_is_trained_tested_used_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    options = "--config run.yaml --ckpt_path last"
    said = run_all("fit --config run.yaml", f"test {options}", f"predict {options}")
    assert "the plan says" not in said  # as many gathers as were predicted
    runs = tmp_path / "runs" / "run"
    report = json.loads((runs / "version_0" / "report.json").read_text())
    numbers = report["sections"]["classes"]["numbers"]
    assert numbers["num_images"] == 9
    with (runs / "version_0" / "metrics.csv").open(newline="") as file:
        logged = [row["val/top1_pct"] for row in csv.DictReader(file) if row["val/top1_pct"]]
    assert numbers["top1_pct"] == pytest.approx(float(logged[-1]))
    (table,) = runs.glob("version_*/classes_test.csv")
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == ["cat", "dog", "eel"]
    assert [sum(int(row[f"taken for {name}"]) for name in ("cat", "dog", "eel")) for row in rows] == [3, 4, 2]
    assert Image.open(table.with_name("confusion_test.png")).size[0] > 400
    (file,) = tmp_path.rglob("predictions.jsonl")
    predictions = [json.loads(line) for line in file.read_text().splitlines()]
    assert [Path(row["file"]).name for row in predictions] == [
        p.name for p in sorted((tmp_path / "test").rglob("*.png"))
    ]
    assert all(1 / 3 <= row["probability"] <= 1 for row in predictions)
    assert main(["export", "--checkpoint", str(runs / "version_0"), "--out", "model"]) == 0
    capsys.readouterr()
    (tmp_path / "names.json").write_text('["cat", "dog", "eel"]')
    assert AutoConfig.from_pretrained("model").id2label == {0: "cat", 1: "dog", 2: "eel"}
    check_export(tmp_path, predictions)


def check_export(folder: Path, predictions: list[dict[str, Any]], model: Any = None, tolerance: float = 1e-5) -> None:
    """Classify the images again with stock Transformers, and compare the logits of all classes."""
    model = model or AutoModelForImageClassification.from_pretrained(folder / "model")
    processor = AutoImageProcessor.from_pretrained(folder / "model", backend="pil")
    images = [Image.open(folder / row["file"]) for row in predictions]
    with torch.no_grad():
        logits = model(**processor(images, return_tensors="pt")).logits
    names = json.loads((folder / "names.json").read_text())
    expected = torch.tensor([row["logits"] for row in predictions])
    assert torch.allclose(logits, expected, rtol=0, atol=tolerance)
    assert [names[int(c)] for c in expected.argmax(1)] == [row["prediction"] for row in predictions]
    chances = expected.softmax(1).max(1).values.tolist()
    assert chances == pytest.approx([row["probability"] for row in predictions], abs=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("quantization", [None, {"type": "nf4", "block_size": 32}], ids=["lora", "qlora"])
def test_adapters_over_a_model_of_other_classes_leave_as_adapters_and_merged(
    quantization: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    save_classifier(tmp_path / "base", {**VIT, **sizes}, 7)
    lora = {"r": 4, "alpha": 16}
    write_run(tmp_path, config=None, pretrained="base", lora=lora, quantization=quantization)
    run_all("fit --config run.yaml --monitoring false", "predict --config run.yaml --ckpt_path last")
    (file,) = tmp_path.rglob("predictions.jsonl")
    predictions = [json.loads(line) for line in file.read_text().splitlines()]
    export = ["export", "--checkpoint", "runs/run/version_0"]
    assert main([*export, "--out", "model"]) == 0
    names = json.loads((tmp_path / "model" / "classes.json").read_text())
    assert names == ["cat", "dog", "eel"]
    (tmp_path / "names.json").write_text(json.dumps(names))
    code = (tmp_path / "model" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    loaded: dict[str, Any] = {}
    exec(code, loaded)  # as the card says it
    if quantization is not None:
        assert isinstance(loaded["model"].base_model.model.classifier.modules_to_save.default, torch.nn.Linear)
        base = AutoModelForImageClassification.from_pretrained("base")
        dense = base.vit.layers[0].mlp.fc1.weight
        assert main([*export, "--out", "merged", "--merge", "true"]) == 0
        merged = AutoModelForImageClassification.from_pretrained("merged")
        assert merged.config.id2label == {0: "cat", 1: "dog", 2: "eel"}
        change = (merged.vit.layers[0].mlp.fc1.weight - dense).norm() / dense.norm()
        assert 0 < change < 0.5
        # The weights below the adapters are those of the base again, not rounded to 4 bits; logits spread by 0.6.
        check_export(tmp_path, predictions, merged, tolerance=0.06)
        return
    check_export(tmp_path, predictions, loaded["model"])
    assert main([*export, "--out", "merged", "--merge", "true"]) == 0
    merged = AutoModelForImageClassification.from_pretrained("merged")
    assert merged.config.id2label == {0: "cat", 1: "dog", 2: "eel"}
    check_export(tmp_path, predictions, merged)


@pytest.mark.full
@pytest.mark.parametrize("lora", [None, {"r": 4}], ids=["full", "merged"])
def test_a_model_trained_on_larger_images_than_its_own_is_exported_at_their_size(
    lora: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_classifier(tmp_path / "base", VIT, 7)
    write_run(tmp_path, config=None, pretrained="base", lora=lora)
    size = "--data.init_args.processor={size: 24}"
    short = ["--monitoring=false", "--trainer.max_steps=2", "--trainer.limit_val_batches=0"]
    for command in (["fit", *short], ["predict", "--ckpt_path=last"]):
        ended = fork_ranks(command[0], "--config=run.yaml", size, *command[1:])
        assert [rank.code for rank in ended] == [0, 0], ended[0].err
    (file,) = tmp_path.rglob("predictions.jsonl")
    predictions = [json.loads(line) for line in file.read_text().splitlines()]
    export = ["export", "--checkpoint", "runs/run/version_0"]
    if lora is not None:
        assert main([*export, "--out", "adapter"]) == 0
        assert "interpolate_pos_encoding=True" in (tmp_path / "adapter" / "README.md").read_text()
        assert "call it with `interpolate_pos_encoding=True`" in capsys.readouterr().out
    assert main([*export, "--out", "model", *(["--merge=true"] if lora is not None else [])]) == 0
    assert "were interpolated to the images it was trained on, 24 x 24" in capsys.readouterr().out
    assert AutoConfig.from_pretrained("model").image_size == 24
    (tmp_path / "names.json").write_text('["cat", "dog", "eel"]')
    check_export(tmp_path, predictions)


@pytest.mark.full
def test_a_checkpoint_of_other_classes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    run_all("fit --config run.yaml --monitoring false")
    ended = fork_ranks(
        *["test", "--config", "run.yaml", "--ckpt_path", "last", "--data.init_args.classes", "[eel,cat,dog]"]
    )
    assert [rank.code for rank in ended] == [2, 2], ended[0].err
    assert "classes: the checkpoint was trained for 3 classes (cat, dog, eel" in ended[0].err + ended[1].err


@pytest.mark.slow
def test_the_quickstart_reads_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    ended = fork_ranks("fit", f"--config={QUICKSTART}", "--trainer.accelerator=cpu", timeout_s=300)
    assert [rank.code for rank in ended] == [0, 0], ended[0].err
    (path,) = tmp_path.rglob("metrics.csv")
    with path.open(newline="") as file:
        found = [float(row["val/top1_pct"]) for row in csv.DictReader(file) if row["val/top1_pct"]]
    assert found[-1] >= 97


@pytest.mark.full
def test_the_quickstart_trains_and_counts_every_digit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    options = ["--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1"]
    ended = fork_ranks("fit", f"--config={QUICKSTART}", *options)
    assert [rank.code for rank in ended] == [0, 0], ended[0].err
    (path,) = tmp_path.rglob("report.json")
    report = json.loads(path.read_text())
    assert report["sections"]["classes"]["numbers"]["num_images"] == 360
