"""Steps of an optimizer beside forward and backward: the same bits as one step after the other."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from adapter_training import LORA
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from training import EVEN, TIED, UNEVEN, Recorder, Rows, build_task, build_trainer, gather_weights, save_model

from lit_fsdp import ActivationCheckpointing, CPUOffload, FSDP2Strategy, Sharding
from lit_fsdp.callbacks import EMA, StabilityMonitor
from lit_fsdp.tasks import LRSchedule, Optimizer
from ranks import run_ranks

RECOMPUTED = {"activation_checkpointing": ActivationCheckpointing(mode="full")}
WARMUP = {"lr_scheduler": LRSchedule(type="cosine", warmup_steps=3)}
# Model, ranks, settings of the strategy, the Trainer, the task.
RUNS: dict[str, tuple[dict[str, Any], int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "full, 1 rank": (EVEN, 1, {}, {}, WARMUP),
    "full, 2 ranks, never clipped": (UNEVEN, 2, RECOMPUTED, {"gradient_clip_val": None}, {"loss_chunks": 3}),
    "tied, 2 ranks, always clipped": (TIED, 2, {}, {"gradient_clip_val": 1e-3}, WARMUP),
    "full, 2 ranks, clipped by value": (
        EVEN, 2, {}, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}, {}
    ),
    "full, 2 ranks, accumulated": (EVEN, 2, {}, {"accumulate_grad_batches": 4}, WARMUP),
    "full, 1 rank, accumulated": (TIED, 1, RECOMPUTED, {"accumulate_grad_batches": 2}, {}),
    "full, 2 ranks, accumulated without communication": (
        UNEVEN, 2, {"sharding": Sharding(no_sync=True)}, {"accumulate_grad_batches": 2}, {}
    ),
    "lora, 2 ranks": (EVEN, 2, {}, {}, {"lora": LORA}),
    "lora, 1 rank, accumulated": (EVEN, 1, RECOMPUTED, {"accumulate_grad_batches": 2}, {"lora": LORA} | WARMUP),
    "bf16, 2 ranks, 8-bit": (
        {**EVEN, "hidden_size": 256}, 2, {}, {"precision": "bf16-true"},
        {"optimizer": Optimizer(name="adamw_8bit", learning_rate=1e-3, weight_decay=0.1)},
    ),
    "bf16-mixed, gathered throughout": (
        EVEN, 2, {"sharding": Sharding(reshard_after_forward=False)}, {"precision": "bf16-mixed"}, {}
    ),
}


def train(
    folder: Path, out: Path, overlaps: bool, strategy: dict[str, Any], trainer: dict[str, Any], task: dict[str, Any]
) -> None:
    options = dict(trainer)
    callbacks, source = options.pop("callbacks", []), options.pop("ckpt_path", None)
    recorder = Recorder()
    offload = CPUOffload(overlap_optimizer=overlaps)
    runner = build_trainer(
        FSDP2Strategy(cpu_offload=offload, **strategy), callbacks=[recorder, *callbacks], max_steps=6, **options
    )
    module = build_task(folder, **task)
    batch_size = 8 // dist.get_world_size() // options.get("accumulate_grad_batches", 1)
    followed = []
    module.on_train_start = lambda: followed.append(runner.strategy.overlapped_steps)  # type: ignore[method-assign]
    vocab_size = {"hidden_size": 32, **EVEN}["vocab_size"] if "67" not in str(folder) else 67
    runner.fit(module, Rows(vocab_size, batch_size), ckpt_path=source)
    assert (followed[0] is not None and followed[0].is_deferred) is overlaps
    state = get_optimizer_state_dict(module, runner.optimizers[0])
    states = {
        f"{name}.{key}": value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, values in state["state"].items()
        for key, value in values.items()
    }
    result = {"losses": recorder.result.losses, "norms": recorder.result.grad_norms}
    if runner.is_global_zero:
        pass
    weights = gather_weights(module)
    if runner.is_global_zero:
        torch.save(result | {"weights": weights, "states": states}, out)


def compare(tmp_path: Path, sizes: dict[str, Any], world_size: int, *settings: Any) -> None:
    folder = save_model(tmp_path / f"model{sizes['vocab_size']}", **sizes)
    results = []
    for overlaps in (False, True):
        run_ranks(train, folder, tmp_path / "result", overlaps, *settings, world_size=world_size)
        results.append(torch.load(tmp_path / "result"))
    plain, overlapped = results
    assert len(plain["losses"]) == 6
    assert overlapped["losses"] == plain["losses"]
    assert overlapped["norms"] == plain["norms"]
    for kind in ("weights", "states"):
        assert overlapped[kind].keys() == plain[kind].keys()
        assert [n for n, t in plain[kind].items() if not torch.equal(t, overlapped[kind][n])] == []


@pytest.mark.parametrize("name", list(RUNS))
def test_bits_are_those_of_steps_one_after_the_other(name: str, tmp_path: Path) -> None:
    compare(tmp_path, RUNS[name][0], RUNS[name][1], *RUNS[name][2:])
