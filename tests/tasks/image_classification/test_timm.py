"""Models of timm, where it is installed with a torchvision that fits the installed torch."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from image_training import write_folder
from PIL import Image
from training import build_trainer
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification

from lit_fsdp import FSDP2Strategy
from lit_fsdp.export.model import export_model
from lit_fsdp.tasks import ImageClassification, ImageData, Pixels
from lit_fsdp.tasks.image_classification.model import build_classifier
from ranks import run_ranks

HAS_TIMM = find_spec("timm") is not None


def fit(folder: Path) -> None:
    trainer = build_trainer(FSDP2Strategy(print_plan=False), max_steps=2)
    task = ImageClassification(config={"model_type": "timm_wrapper", "architecture": "vit_tiny_patch16_224"})
    sources: dict[str, Any] = {"train": str(folder / "train"), "predict": str(folder / "train")}
    data = ImageData(**sources, processor=Pixels(size=224), batch_size=4, num_workers=0)
    trainer.fit(task, datamodule=data)
    assert task.model is not None
    predictions = trainer.predict(task, datamodule=data)
    trainer.save_checkpoint(folder / "last.ckpt")
    if dist.get_rank() == 0:
        assert predictions is not None
        torch.save(predictions[0], folder / "predictions.pt")


@pytest.mark.skipif(not HAS_TIMM, reason="timm is not installed")
def test_a_model_of_timm_is_trained_on_two_ranks_and_exported(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", {"cat": 8, "dog": 8})
    run_ranks(fit, tmp_path)
    export_model(tmp_path / "last.ckpt", tmp_path / "model")
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "model")
    processor = AutoImageProcessor.from_pretrained(tmp_path / "model", backend="pil")
    found = torch.load(tmp_path / "predictions.pt")
    images = [Image.open(file) for file in found["file"]]
    with torch.no_grad():
        chances = model(**processor(images, return_tensors="pt")).logits.softmax(1).max(1).values
    assert chances.tolist() == pytest.approx(found["probability"], abs=1e-6)


@pytest.mark.skipif(HAS_TIMM, reason="timm is installed")
def test_without_timm_it_is_said_what_to_install() -> None:
    with pytest.raises(ValueError, match=r'models of timm need timm and torchvision: pip install -e "\.\[timm\]"'):
        build_classifier(AutoConfig.for_model("timm_wrapper", architecture="resnet18"), None)
