"""The plan of a classifier is what its run holds."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from image_training import write_folder
from plan_runs import check_held, enter_folder, fit, main, plan

VIT = {"model_type": "vit", "image_size": 32, "patch_size": 4, "hidden_size": 64, "intermediate_size": 128}
VIT |= {"num_hidden_layers": 3, "num_attention_heads": 4}


@pytest.mark.full
@pytest.mark.parametrize("mixup", [None, {"mixup_alpha": 0.8, "cutmix_alpha": 1.0}], ids=["plain", "mixed"])
def test_a_plan_is_what_a_run_on_two_ranks_holds(
    mixup: dict[str, float] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter_folder(tmp_path, monkeypatch)
    write_folder(tmp_path / "train", {"cat": 32, "dog": 32})
    quiet = {"enable_progress_bar": False, "enable_checkpointing": False, "log_every_n_steps": 1}
    model: dict[str, Any] = {"config": VIT, "mixup": mixup, "num_classes": 2}
    data = {"train": "train", "processor": {"size": 32}, "batch_size": 8, "num_workers": 0}
    run = {
        "trainer": {"accelerator": "cpu", "max_steps": 4, **quiet},
        "model": {"class_path": "ImageClassification", "init_args": model},
        "data": {"class_path": "ImageData", "init_args": data},
    }
    Path("run.yaml").write_text(yaml.safe_dump(run))
    _, report = fit("--config=run.yaml")
    real = report["memory"]["numbers"]["step"]
    found = plan("--config=run.yaml", "--devices=2", "--exact=true")
    assert found["closed_form_peak_bytes"] == pytest.approx(real["peak_bytes"], rel=0.02)
    check_held(found["memory"], real, rel=0.02)


def plan_size(model: dict[str, Any], size: int) -> int | None:
    """Plan a run whose images become of this size, by a trace; return the exit code."""
    run = {
        "trainer": {"accelerator": "cpu", "max_steps": 4},
        "model": {"class_path": "ImageClassification", "init_args": {"config": model, "num_classes": 2}},
        "data": {"class_path": "ImageData", "init_args": {"train": "train", "processor": {"size": size}}},
    }
    Path("run.yaml").write_text(yaml.safe_dump(run))
    return main(["plan", "--config=run.yaml", "--devices=2", "--exact=true", "--out=planned"])


@pytest.mark.full
def test_a_plan_interpolates_positions_as_a_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan_size({**VIT, "image_size": 64}, 32) == 0
    found = json.loads(Path("planned/plan.json").read_text())
    assert found["closed_form_peak_bytes"] == pytest.approx(found["memory"]["peak_bytes"], rel=0.03)


@pytest.mark.full
def test_images_of_a_size_that_a_model_does_not_take_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan_size({"model_type": "levit"}, 16) == 2
    err = capfd.readouterr().err
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "images become 16 x 16 pixels, and Levit" in line
