"""How good a sequence classifier is: every row counts once, on whichever rank it was."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchmetrics import MeanSquaredError, Metric, MetricCollection, PearsonCorrCoef
from torchmetrics.classification import (
    BinaryAccuracy,
    MulticlassAccuracy,
    MulticlassF1Score,
    MultilabelExactMatch,
    MultilabelF1Score,
)

from lit_fsdp.tasks.sequence_classification.labels import MULTI, REGRESSION, REWARD, SINGLE, ProblemType
from lit_fsdp.tasks.text.batches import IGNORED

# What says best how good a model is; of each, more is better.
HEADLINES: dict[ProblemType, str] = {
    SINGLE: "accuracy_pct",
    MULTI: "f1_pct",
    REGRESSION: "pearson",
    REWARD: "accuracy_pct",
}


def build_metrics(problem: ProblemType, num_labels: int) -> MetricCollection:
    """Return the metrics of a problem by name; values of ``_pct`` are shares, to be multiplied by 100."""
    classes: dict[str, Any] = {"num_classes": num_labels, "ignore_index": IGNORED, "validate_args": False}
    labels: dict[str, Any] = {"num_labels": num_labels, "validate_args": False}
    metrics: dict[str, Metric | MetricCollection]
    if problem == SINGLE:
        metrics = {
            "accuracy_pct": MulticlassAccuracy(average="micro", **classes),
            "f1_pct": MulticlassF1Score(average="macro", **classes),
        }
    elif problem == MULTI:
        metrics = {"exact_match_pct": MultilabelExactMatch(**labels), "f1_pct": MultilabelF1Score(**labels)}
    elif problem == REGRESSION:
        metrics = {"mse": MeanSquaredError(), "pearson": PearsonCorrCoef()}
    else:
        metrics = {"accuracy_pct": BinaryAccuracy(validate_args=False)}
    return MetricCollection(metrics, compute_groups=False)


def update_metrics(metrics: MetricCollection, problem: ProblemType, logits: Tensor, labels: Tensor) -> None:
    """Add a batch; rows that only fill it up count nowhere.

    Args:
        metrics: Of :func:`build_metrics`.
        problem: What labels are of.
        logits: [texts, outputs].
        labels: [batch], or [batch, classes].
    """
    logits = logits.double()
    if problem == SINGLE:
        metrics.update(logits, labels)
        return
    is_row = ~labels.isnan() if labels.dim() == 1 else ~labels.isnan().any(1)
    if not bool(is_row.any()):
        return
    if problem == REWARD:
        margins = logits[0::2, 0] - logits[1::2, 0]
        metrics.update((margins[is_row] > 0).double(), labels[is_row].long())
    elif problem == REGRESSION:
        metrics.update(logits[is_row, 0], labels[is_row].double())
    else:
        metrics.update(logits[is_row].sigmoid(), labels[is_row].long())
