"""Sharded training of classifiers equals training on one device: losses, gradient norms, weights after 8 steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from image_training import MODELS, save_classifier, train_plainly, train_sharded
from training import Result, list_differences

from lit_fsdp import ActivationCheckpointing, Mesh, Sharding

TOLERANCE = 1e-6  # rounding: sums run in another order on N ranks
ACCUMULATED: dict[str, Any] = {
    "strategy": {"activation_checkpointing": ActivationCheckpointing(mode="full"), "sharding": Sharding(no_sync=True)},
    "accumulate": 2,
}
RUNS: dict[str, dict[str, Any]] = {
    "vit 2 ranks": {"model": "vit"},
    "vit 2 ranks, recomputed": {
        "model": "vit",
        "strategy": {"activation_checkpointing": ActivationCheckpointing(mode="full")},
    },
    "vit 2 ranks, unequal shares": {"model": "vit", "share": [3, 1]},
    "vit 4 ranks, 2 x 2, accumulated": {"model": "vit", "strategy": {"mesh": Mesh(replicate=2)}, "accumulate": 2},
    "convnext 2 ranks, recomputed, accumulated": {"model": "convnext", **ACCUMULATED},
}
SLOW: dict[str, dict[str, Any]] = {
    "convnext 2 ranks": {"model": "convnext"},
    "dinov2 2 ranks": {"model": "dinov2"},
    "dinov2 2 ranks, recomputed, accumulated": {"model": "dinov2", **ACCUMULATED},
    "siglip 2 ranks": {"model": "siglip"},
    "siglip 2 ranks, recomputed, accumulated": {"model": "siglip", **ACCUMULATED},
    "swin 2 ranks": {"model": "swin"},
    "swin 2 ranks, recomputed, accumulated": {"model": "swin", **ACCUMULATED},
    "swin 4 ranks, 2 x 2": {"model": "swin", "strategy": {"mesh": Mesh(replicate=2)}},
}

Truths = Callable[..., tuple[Path, Result]]


@pytest.fixture(scope="module")
def train_once(tmp_path_factory: pytest.TempPathFactory) -> Truths:
    """Return what gives a saved model, and what one device makes of it."""
    made: dict[tuple[str, int], tuple[Path, Result]] = {}

    def train(name: str, num_parts: int = 1) -> tuple[Path, Result]:
        if (name, num_parts) not in made:
            folder = save_classifier(tmp_path_factory.mktemp("models") / name, MODELS[name])
            made[name, num_parts] = (folder, train_plainly(folder, num_parts=num_parts))
        return made[name, num_parts]

    return train


@pytest.mark.full(after=1)
@pytest.mark.parametrize("name", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_sharded_training_equals_one_device(name: str, train_once: Truths, tmp_path: Path) -> None:
    run = {**RUNS, **SLOW}[name]
    folder, truth = train_once(run["model"])
    result = train_sharded(
        folder,
        tmp_path,
        world_size=4 if "4 ranks" in name else 2,
        strategy=run.get("strategy", {}),
        accumulate_grad_batches=run.get("accumulate", 1),
        share=run.get("share"),
    )
    differences = list_differences(result, truth)
    assert max(differences.values()) <= TOLERANCE, differences
    assert len(result.losses) == len(truth.losses)
    assert abs(truth.losses[0] - truth.losses[-1]) > 0.05  # it did train


@pytest.mark.full
def test_with_batch_norm_ranks_equal_one_device_that_normalizes_their_parts_of_a_batch(
    train_once: Truths, tmp_path: Path
) -> None:
    folder, truth = train_once("resnet", num_parts=2)
    result = train_sharded(folder, tmp_path, world_size=2, strategy={})
    differences = list_differences(result, truth)  # also of running statistics, as means over ranks
    assert max(differences.values()) <= TOLERANCE, differences
    assert any("running_mean" in name for name in truth.weights)
    _, whole = train_once("resnet")  # and not one that normalizes whole batches
    assert max(list_differences(result, whole).values()) > 0.01
