"""Metrics of a classifier count every image once, whichever rank it was on."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torchmetrics.functional.classification import multiclass_calibration_error

from lit_fsdp.tasks.image_classification.metrics import IGNORED, Metrics
from ranks import run_ranks

NUM_CLASSES = 7


def make(num_images: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(NUM_CLASSES - 1, (num_images,), generator=generator)  # one class has no image
    logits = torch.randn(num_images, NUM_CLASSES, generator=generator) * 2
    logits[torch.arange(num_images), labels] += 1.5
    return logits, labels


def evaluate(out: Path) -> None:
    """Batches of 4, of which rank 1 has 4 images and the rest is filler; rank 2 has filler only."""
    logits, labels = make(12)
    rank, metrics = dist.get_rank(), Metrics(NUM_CLASSES)
    own = [range(8), range(8, 12), range(0)][rank]
    for _ in range(2):  # the second time must not remember the first
        for begin in (0, 4):
            part = list(own)[begin : begin + 4]
            filler = 4 - len(part)
            metrics.update(
                torch.cat([logits[part], torch.full((filler, NUM_CLASSES), 9.0)]),
                torch.cat([labels[part], torch.full((filler,), IGNORED)]),
            )
        assert metrics.has_batches
        found = metrics.compute()
        assert not metrics.has_batches
    (out / f"{rank}.json").write_text(json.dumps(vars(found)))


def test_the_result_on_three_ranks_is_that_of_all_images_at_once(tmp_path: Path) -> None:
    run_ranks(evaluate, tmp_path, world_size=3)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    logits, labels = make(12)
    predicted = logits.argmax(1)
    by_class = [float((predicted[labels == c] == c).double().mean()) for c in range(NUM_CLASSES)]
    seen = [value for value in by_class if value == value]
    confusion = torch.zeros(NUM_CLASSES, NUM_CLASSES, dtype=torch.int64)
    confusion.index_put_((labels, predicted), torch.ones(12, dtype=torch.int64), accumulate=True)
    top5 = (logits.topk(5).indices == labels[:, None]).any(1).double().mean()
    error = multiclass_calibration_error(logits.softmax(1), labels, NUM_CLASSES, n_bins=15)
    for result in found:
        assert result["num_images"] == 12
        assert result["confusion"] == confusion.tolist()
        assert result["class_accuracy"] == pytest.approx(by_class, nan_ok=True)
        assert result["values"] == pytest.approx(
            {
                "top1_pct": 100 * float((predicted == labels).double().mean()),
                "top5_pct": 100 * float(top5),
                "class_accuracy_pct": 100 * sum(seen) / len(seen),
                "calibration_error_pct": 100 * float(error),
            },
            abs=1e-4,
        )
    assert 0 < found[0]["values"]["top1_pct"] < 100
