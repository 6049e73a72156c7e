"""The moving average of a sharded classifier is that of one device, and is what is exported."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from differences import find_largest
from image_training import NUM_CLASSES, VIT, ImageRows, collate, make_images, save_classifier, train_plainly
from torch import Tensor, nn
from training import GLOBAL_BATCH, NUM_STEPS, OPTIMIZER, build_trainer, gather_weights
from transformers import AutoModelForImageClassification

from lit_fsdp import FSDP2Strategy
from lit_fsdp.callbacks import EMA
from lit_fsdp.export.model import export_model
from lit_fsdp.tasks import ImageClassification, LRSchedule
from ranks import run_ranks

DECAY = 0.3  # the warm-up reaches it in the fourth step


class Averages:
    """Averages the weights of a model on one device, in float64."""

    def __init__(self, *, warmup: bool) -> None:
        self.warmup = warmup
        self.num_updates = -1  # the first weights are where the average begins
        self.values: dict[str, Tensor] = {}

    def add(self, model: nn.Module) -> None:
        """Take the weights after another step."""
        weights = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
        t = self.num_updates
        decay = min(DECAY, (1 + t) / (10 + t)) if self.warmup else DECAY
        old = self.values or weights
        self.values = {name: decay * old[name] + (1 - decay) * weight for name, weight in weights.items()}
        self.num_updates += 1


class Validated(ImageRows):
    """Validates on all that it trains on, after the last step."""

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def find_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return find_largest(float((a[name] - b[name]).detach().abs().max()) for name in a)


def train(folder: Path, out: Path, warmup: bool) -> None:
    ema, options = EMA(decay=DECAY, warmup=warmup), {"num_sanity_val_steps": 0}
    trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[ema], **options)
    schedule = LRSchedule(type="constant")
    task = ImageClassification(
        pretrained=str(folder), num_classes=NUM_CLASSES, head="keep", optimizer=OPTIMIZER, lr_scheduler=schedule
    )
    trainer.fit(task, Validated(GLOBAL_BATCH // dist.get_world_size()))
    trainer.save_checkpoint(out / "last.ckpt")
    weights = gather_weights(task)  # type: ignore[arg-type]
    if trainer.is_global_zero:
        torch.save((weights, float(trainer.callback_metrics["val/loss"])), out / "result.pt")


@pytest.mark.full
@pytest.mark.parametrize("warmup", [True, False])
def test_a_sharded_average_is_that_of_one_device_and_stock_transformers_loads_it(warmup: bool, tmp_path: Path) -> None:
    folder = save_classifier(tmp_path / "model", VIT)
    truth = Averages(warmup=warmup)
    plain = train_plainly(folder, watch=truth.add)
    assert truth.num_updates == NUM_STEPS
    run_ranks(train, folder, tmp_path, warmup)
    weights, val_loss = torch.load(tmp_path / "result.pt")
    assert find_difference(weights, plain.weights) < 1e-6  # which training goes on with
    export_model(tmp_path / "last.ckpt", tmp_path / "exported")
    stock = AutoModelForImageClassification.from_pretrained(tmp_path / "exported")
    assert stock.config.num_labels == NUM_CLASSES
    assert find_difference(dict(stock.named_parameters()), truth.values) < 1e-6
    assert find_difference(plain.weights, truth.values) > 1e-4
    batch = collate(make_images())
    with torch.no_grad():
        logits = stock(batch["pixel_values"]).logits
    loss = nn.functional.cross_entropy(logits, batch["labels"])
    assert val_loss == pytest.approx(float(loss), abs=1e-6)  # the average is validated
