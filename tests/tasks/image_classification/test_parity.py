"""Sharded training of classifiers equals training on one device: losses, gradient norms, weights after 8 steps."""

from pathlib import Path
from typing import Any

import pytest
from image_training import MODELS, save_classifier, train_plainly, train_sharded
from training import Result, list_differences

from lit_fsdp import Mesh, Recompute, Sharding

# Rounding: sums run in another order on N ranks.
TOLERANCE = {"vit": 1e-6, "convnext": 1e-6}
RUNS: dict[str, dict[str, Any]] = {
    "vit 2 ranks": {"model": "vit"},
    "vit 2 ranks, recomputed": {"model": "vit", "strategy": {"recompute": Recompute(mode="full")}},
    "vit 4 ranks, 2 x 2, accumulated": {"model": "vit", "strategy": {"mesh": Mesh(replicate=2)}, "accumulate": 2},
    "convnext 2 ranks": {"model": "convnext"},
    "convnext 2 ranks, recomputed, accumulated": {
        "model": "convnext",
        "strategy": {"recompute": Recompute(mode="full"), "sharding": Sharding(hold_gradients=True)},
        "accumulate": 2,
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Result]]:
    made = {}
    for name, config in MODELS.items():
        folder = save_classifier(tmp_path_factory.mktemp("models") / name, config)
        made[name] = (folder, train_plainly(folder))
    return made


@pytest.mark.parametrize("name", RUNS)
def test_sharded_training_equals_one_device(name: str, models: dict[str, tuple[Path, Result]], tmp_path: Path) -> None:
    run = RUNS[name]
    folder, truth = models[run["model"]]
    num_ranks = 4 if "4 ranks" in name else 2
    result = train_sharded(
        folder,
        tmp_path,
        world_size=num_ranks,
        strategy=run.get("strategy", {}),
        accumulate_grad_batches=run.get("accumulate", 1),
    )
    differences = list_differences(result, truth)
    assert max(differences.values()) <= TOLERANCE[run["model"]], differences
    assert len(result.losses) == len(truth.losses)
    assert abs(truth.losses[0] - truth.losses[-1]) > 0.05  # it did train
