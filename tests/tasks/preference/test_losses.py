"""The losses, rewards and gradients are TRL's, on the same batch."""

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from preference_cases import BETA, CASES, DESIRABLE, METRICS, build_model, describe_gradients, make_batch

from lit_fsdp.tasks import PreferenceTuning

TESTS = Path(__file__).parents[2]
GOLDEN: dict[str, Any] = json.loads((TESTS / "preference_golden.json").read_text())
# A Python with TRL, which needs versions of its own: pip install torch==2.13.0 trl
TRL_PYTHON = os.environ.get("TRL_PYTHON", sys.executable)


def build_task(folder: Path, name: str, **options: Any) -> PreferenceTuning:
    """Return the task of a case with its models, as training has them, but for sharding."""
    if not (folder / "config.json").is_file():
        build_model(0.0).save_pretrained(folder)
    has_reference = CASES[name]["loss_type"] not in ("orpo", "simpo")
    options = {"reference": "model" if has_reference else "auto", **options}
    task = PreferenceTuning(pretrained=str(folder), beta=BETA, **CASES[name], **options)
    task.model = build_model(0.0)
    task.reference = build_model(0.5).requires_grad_(False) if has_reference else None
    return task


def compute(task: PreferenceTuning, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return what our task says of a batch."""
    batch = {**batch, "desirable": DESIRABLE} if task.loss.is_unpaired else batch
    loss_sum, number = task.compute_loss(batch)
    assert number == 4
    (loss_sum / number).backward()
    assert task.model is not None
    metrics = {name: float(value) for name, value in task._take_metrics(is_training=task.training).items()}
    return {"loss": float(loss_sum.detach() / number), "metrics": metrics, "gradients": describe_gradients(task.model)}


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """All to 1e-6: of losses and metrics, or of 1; of gradients, of their norm over all parameters."""
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6, abs=1e-6)
    for key, value in expected["metrics"].items():
        assert found["metrics"][key] == pytest.approx(value, rel=1e-6, abs=1e-6), key
    assert found["gradients"].keys() == expected["gradients"].keys()
    norm = math.hypot(*(norm for norm, _ in expected["gradients"].values()))
    for key, values in expected["gradients"].items():
        assert found["gradients"][key] == pytest.approx(values, rel=0, abs=1e-6 * norm), key


@pytest.mark.parametrize("name", CASES)
def test_losses_rewards_and_gradients_are_those_of_trl(name: str, tmp_path: Path) -> None:
    check(compute(build_task(tmp_path, name), make_batch()), GOLDEN[name])


@pytest.mark.slow
@pytest.mark.skipif(
    sys.executable == TRL_PYTHON and find_spec("trl") is None,
    reason="needs TRL: set TRL_PYTHON to a Python that has it",
)
def test_trl_says_so_today() -> None:
    done = subprocess.run(
        [TRL_PYTHON, str(TESTS / "preference_cases.py")],
        capture_output=True,
        text=True,
        check=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    found = json.loads(done.stdout)
    assert found.keys() == GOLDEN.keys()
    for name, expected in found.items():
        assert set(expected["metrics"]) <= set(METRICS)
        check(GOLDEN[name], expected)
