"""How good a classifier is: every image counts once, on whichever rank it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassStatScores
from typing_extensions import override

IGNORED = -100  # label of what is no image of the data: it counts in no loss and no metric
MAX_CONFUSION_CLASSES = 1024  # 8 MiB on each rank
_NUM_BINS = 15


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is known after all images.

    Args:
        num_images: How many there were.
        values: By name, in percent.
        class_accuracy: Share of each class that was found, NaN for a class without images [classes].
        confusion: How many images of a class (row) were taken for which (column); ``None`` for more than 1,024 classes.
    """

    num_images: int
    values: dict[str, float]
    class_accuracy: list[float]
    confusion: list[list[int]] | None


class CalibrationError(Metric):
    """Expected calibration error over bins of confidence, as ``MulticlassCalibrationError`` of torchmetrics.

    That keeps the confidence of every image on every rank; this keeps sums for each bin.
    """

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        for name in ("confidence", "correct", "count"):
            self.add_state(name, torch.zeros(_NUM_BINS, dtype=torch.float64), dist_reduce_fx="sum")
        self.confidence: Tensor
        self.correct: Tensor
        self.count: Tensor

    @override
    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add images, from ``logits`` [batch, classes] and ``labels`` [batch]."""
        is_valid = labels != IGNORED
        confidence, predicted = logits[is_valid].softmax(1).double().max(1)
        bins = (confidence * _NUM_BINS).long().clamp(max=_NUM_BINS - 1)
        self.confidence.index_add_(0, bins, confidence)
        self.correct.index_add_(0, bins, (predicted == labels[is_valid]).double())
        self.count.index_add_(0, bins, torch.ones_like(confidence))

    @override
    def compute(self) -> Tensor:
        return (self.confidence - self.correct).abs().sum() / self.count.sum().clamp(min=1)


class Metrics(nn.Module):
    """All metrics of one evaluation. States are summed over ranks when they are computed.

    Args:
        num_classes: How many classes the model has.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        options: dict[str, Any] = {"num_classes": num_classes, "ignore_index": IGNORED, "validate_args": False}
        metrics: dict[str, Metric | MetricCollection] = {
            "scores": MulticlassStatScores(average=None, **options),
            "top5": MulticlassAccuracy(average="micro", top_k=min(5, num_classes), **options),
            "calibration": CalibrationError(),
        }
        if num_classes <= MAX_CONFUSION_CLASSES:
            metrics["confusion"] = MulticlassConfusionMatrix(**options)
        self.metrics = MetricCollection(metrics, compute_groups=False)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch, ``logits`` [batch, classes]; images whose label is ``IGNORED`` count nowhere."""
        self.metrics.update(logits.float(), labels)

    @property
    def has_batches(self) -> bool:
        """Whether there were any since the last time; the same on all ranks, as each has as many."""
        return self.metrics["scores"].update_called

    def reset(self) -> None:
        """Start anew."""
        self.metrics.reset()

    def compute(self) -> Evaluation:
        """Return the result over all ranks, and start anew. All ranks must call it."""
        found = self.metrics.compute()
        self.reset()
        num_right, count = found["scores"][:, 0], found["scores"][:, -1]  # [classes]; between them are other sums
        by_class = num_right / count  # NaN where there are none
        shares = {
            "top1_pct": num_right.sum() / count.sum().clamp(min=1),
            "top5_pct": found["top5"],
            "class_accuracy_pct": by_class.nanmean(),
            "calibration_error_pct": found["calibration"],
        }
        return Evaluation(
            num_images=int(count.sum()),
            values={name: 100 * float(value) for name, value in shares.items()},
            class_accuracy=by_class.tolist(),
            confusion=found["confusion"].tolist() if "confusion" in found else None,
        )


def list_predictions(logits: Tensor, batch: Mapping[str, Any], class_names: Sequence[str]) -> dict[str, list[Any]]:
    """Return ``index`` of each image in its source, ``file``, ``prediction`` and ``probability``.

    The last two are ``None`` for an image that could not be decoded.
    """
    probability, predicted = logits.float().softmax(1).max(1)
    is_bad = batch["is_bad"].tolist()
    names = [None if bad else class_names[c] for c, bad in zip(predicted.tolist(), is_bad, strict=True)]
    chances = [None if bad else p for p, bad in zip(probability.tolist(), is_bad, strict=True)]
    return {"index": batch["index"], "file": batch["files"], "prediction": names, "probability": chances}
