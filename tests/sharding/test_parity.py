"""Sharded training equals training on one device: losses, gradient norms and weights after 8 steps.

The truth is a plain loop over the stock Transformers model, with its own loss and ``torch.optim.AdamW``.
"""

import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from training import EVEN, TIED, UNEVEN, Result, list_differences, save_model, train_plainly, train_sharded

from lit_fsdp import ActivationCheckpointing, CPUOffload, Mesh, Sharding

TOLERANCE = 1e-6

AXES: dict[str, dict[str, Any]] = {
    "model": {"even": EVEN, "uneven": UNEVEN, "tied": TIED},
    "sharding": {"full": True, "grad_op": False, "hybrid": True},
    "cpu_offload": {"device": None, "host": CPUOffload()},
    "activation_checkpointing": {"kept": ActivationCheckpointing(), "recomputed": ActivationCheckpointing(mode="full")},
    "accumulation": {"1": (1, False), "2 with comm": (2, False), "2 without comm": (2, True)},
    "ranks": {"2": 2, "4": 4},
}
# Every pair of values of two axes is in one of these runs; checked below.
RUNS = [
    ("even", "full", "device", "kept", "1", "2"),
    ("even", "grad_op", "host", "recomputed", "2 with comm", "4"),
    ("even", "hybrid", "device", "recomputed", "2 without comm", "4"),
    ("uneven", "full", "host", "recomputed", "2 without comm", "2"),
    ("uneven", "grad_op", "device", "kept", "1", "4"),
    ("uneven", "hybrid", "host", "kept", "2 with comm", "4"),
    ("tied", "full", "device", "recomputed", "2 with comm", "4"),
    ("tied", "grad_op", "host", "kept", "2 without comm", "2"),
    ("tied", "hybrid", "host", "recomputed", "1", "4"),
    ("even", "full", "host", "kept", "2 with comm", "2"),
    ("uneven", "grad_op", "device", "recomputed", "2 with comm", "2"),
]
IMPOSSIBLE = {("hybrid", "2")}  # 2 x 2 takes 4 ranks
# All that is run by default; the others with `pytest -m slow`. Every pair of values of the axes in the middle.
QUICK = [RUNS[i] for i in (0, 2, 3, 5, 7, 10)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Result]]:
    """The saved start and the result of plain training, of each model."""
    made = {}
    for name, config in AXES["model"].items():
        folder = save_model(tmp_path_factory.mktemp("models") / name, **config)
        made[name] = (folder, train_plainly(folder))
    return made


@pytest.mark.parametrize(
    ("runs", "names"),
    [(RUNS, tuple(AXES)), (QUICK, ("sharding", "cpu_offload", "activation_checkpointing"))],
    ids=["all", "quick"],
)
def test_the_runs_cover_every_pair_of_settings(runs: list[tuple[str, ...]], names: tuple[str, ...]) -> None:
    missing = []
    for first, second in combinations(names, 2):
        i, j = (list(AXES).index(name) for name in (first, second))
        for a in AXES[first]:
            for b in AXES[second]:
                is_covered = any(run[i] == a and run[j] == b for run in runs)
                if not is_covered and (a, b) not in IMPOSSIBLE:
                    missing.append((first, a, second, b))
    assert missing == []


def test_a_loss_a_norm_or_a_weight_that_is_no_number_is_a_difference_wherever_it_stands() -> None:
    truth = Result(losses=[2.0, 1.0], grad_norms=[3.0, 3.0], weights={"a": torch.ones(2), "b": torch.ones(2)})
    spoiled = {
        "loss": replace(truth, losses=[2.0, math.nan]),
        "grad_norm": replace(truth, grad_norms=[3.0, math.nan]),
        "weight": replace(truth, weights={"a": torch.ones(2), "b": torch.tensor([1.0, math.nan])}),
    }
    for kind, run in spoiled.items():
        assert list_differences(run, truth) == {"loss": 0.0, "grad_norm": 0.0, "weight": 0.0} | {kind: math.inf}


@pytest.mark.full(after=3)
@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=() if run in QUICK else pytest.mark.slow, id=" ".join(run)) for run in RUNS]
)
def test_sharded_training_equals_one_device(
    run: tuple[str, ...], models: dict[str, tuple[Path, Result]], tmp_path: Path
) -> None:
    model, sharding, offload, recompute, accumulation, ranks = run
    num_micro_batches, is_held = AXES["accumulation"][accumulation]
    folder, truth = models[model]
    result = train_sharded(
        folder,
        tmp_path,
        world_size=AXES["ranks"][ranks],
        strategy={
            "mesh": Mesh(replicate=2 if sharding == "hybrid" else 1),
            "sharding": Sharding(reshard_after_forward=AXES["sharding"][sharding], no_sync=is_held),
            "cpu_offload": AXES["cpu_offload"][offload],
            "activation_checkpointing": AXES["activation_checkpointing"][recompute],
        },
        accumulate_grad_batches=num_micro_batches,
    )
    assert len(result.losses) == 8
    assert result.losses[-1] != result.losses[0]
    differences = list_differences(result, truth)
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.full
@pytest.mark.parametrize(("model", "world_size", "is_held"), [("tied", 2, False), ("uneven", 1, True)])
def test_weights_that_stay_gathered_until_the_step_train_as_one_device(
    model: str, world_size: int, is_held: bool, models: dict[str, tuple[Path, Result]], tmp_path: Path
) -> None:
    folder, truth = models[model]
    kept = Sharding(reshard_after_forward=False, reshard_after_backward=False, no_sync=is_held)
    strategy = {"sharding": kept, "cpu_offload": CPUOffload() if world_size == 1 else None}
    result = train_sharded(folder, tmp_path, world_size=world_size, strategy=strategy, accumulate_grad_batches=2)
    differences = list_differences(result, truth)
    assert max(differences.values()) <= TOLERANCE, differences


def test_one_rank_equals_one_device(models: dict[str, tuple[Path, Result]], tmp_path: Path) -> None:
    folder, truth = models["even"]
    differences = list_differences(train_sharded(folder, tmp_path, world_size=1, strategy={}), truth)
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.full
def test_clipping_by_value_and_no_clipping_equal_one_device(
    models: dict[str, tuple[Path, Result]], tmp_path: Path
) -> None:
    folder, _ = models["even"]
    truth = train_plainly(folder, clip_norm=None)
    result = train_sharded(folder, tmp_path, world_size=2, strategy={}, gradient_clip_val=None)
    differences = list_differences(result, truth)
    assert max(differences.values()) <= TOLERANCE, differences
    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    truth = train_plainly(folder, clip_norm=None, clip_value=0.01)
    result = train_sharded(folder, tmp_path, world_size=2, strategy={}, **options)
    differences = list_differences(result, truth)
    assert max(differences.values()) <= TOLERANCE, differences
