"""The parity of tests/sharding/test_parity.py on CUDA: one rank for each GPU, up to four."""

from pathlib import Path
from typing import Any

import pytest
from differences import find_largest
from training import EVEN, TIED, list_differences, save_model, train_plainly, train_sharded

from lit_fsdp import ActivationCheckpointing, CPUOffload, Mesh, MixedPrecision, Sharding
from ranks import count_gpus

pytestmark = pytest.mark.gpu

# Matrix products on a GPU sum in another order than the CPU run they are compared with; TF32 stays off.
TOLERANCE = 1e-5


def count_ranks() -> int:
    """One, two or four: what divides the global batch."""
    return max(n for n in (1, 2, 4) if n <= count_gpus())


@pytest.mark.parametrize(
    ("config", "strategy", "options"),
    [
        (EVEN, {}, {}),
        (TIED, {"sharding": Sharding(reshard_after_forward=False)}, {}),
        (EVEN, {"cpu_offload": CPUOffload(), "activation_checkpointing": ActivationCheckpointing(mode="full")}, {}),
        (EVEN, {"cpu_offload": CPUOffload(pin_memory=False)}, {"accumulate_grad_batches": 2}),
        (EVEN, {"sharding": Sharding(no_sync=True)}, {"accumulate_grad_batches": 2}),
        (EVEN, {"activation_checkpointing": ActivationCheckpointing(mode="full", offload=True)}, {}),
    ],
    ids=["full", "grad_op tied", "offload recompute", "offload unpinned accumulate", "no_sync", "inputs offloaded"],
)
def test_training_on_gpus_equals_one_cpu(
    config: dict[str, Any], strategy: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", **config)
    truth = train_plainly(folder)
    result = train_sharded(folder, tmp_path, world_size=count_ranks(), strategy=strategy, accelerator="gpu", **options)
    differences = list_differences(result, truth)
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
def test_low_precision_follows_the_float32_curve(precision: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    truth = train_plainly(folder)
    result = train_sharded(
        folder, tmp_path, world_size=count_ranks(), strategy={}, accelerator="gpu", precision=precision
    )
    differences = [abs(a - b) for a, b in zip(result.losses, truth.losses, strict=True)]
    assert 1e-6 < find_largest(differences) <= 0.03


def test_float16_gradients_in_host_memory_are_unscaled_there(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    truth = train_plainly(folder)
    strategy = {"cpu_offload": CPUOffload(), "mixed_precision": MixedPrecision(reduce_dtype="float32")}
    result = train_sharded(
        folder, tmp_path, world_size=count_ranks(), strategy=strategy, accelerator="gpu", precision="16-mixed"
    )
    differences = [abs(a - b) for a, b in zip(result.losses, truth.losses, strict=True)]
    assert find_largest(differences) <= 0.03


@pytest.mark.skipif(count_gpus() < 4, reason="2 x 2 takes 4 GPUs")
def test_hybrid_sharding_on_four_gpus_equals_one_cpu(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    truth = train_plainly(folder)
    result = train_sharded(folder, tmp_path, world_size=4, strategy={"mesh": Mesh(replicate=2)}, accelerator="gpu")
    differences = list_differences(result, truth)
    assert max(differences.values()) <= TOLERANCE, differences
