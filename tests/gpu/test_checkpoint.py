"""Saving beside training on GPUs: any mix of checkpoints, in pinned memory, without a context on another GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from training import EVEN, GLOBAL_BATCH, Rows, build_task, build_trainer, gather_weights, save_model

from lit_fsdp import CPUOffload, FSDP2Strategy
from lit_fsdp.checkpoint.manifest import check_files
from lit_fsdp.checkpoint.reader import open_checkpoint
from lit_fsdp.checkpoint.staging import Stager, iterate_tensors
from ranks import count_gpus, run_ranks

pytestmark = pytest.mark.gpu

BACKEND = "cpu:gloo,cuda:nccl"


def save_two_kinds(folder: Path, root: Path, offload: bool, accelerator: str = "gpu") -> None:
    kinds = {"weights": {"every_n_train_steps": 1, "save_weights_only": True}, "full": {"every_n_train_steps": 2}}
    strategy = FSDP2Strategy(print_plan=False, async_save=True, cpu_offload=CPUOffload() if offload else None)
    trainer = build_trainer(
        strategy,
        callbacks=[ModelCheckpoint(root / name, save_top_k=-1, **kind) for name, kind in kinds.items()],  # type: ignore[arg-type]
        accelerator=accelerator,
        max_steps=4,
        enable_checkpointing=True,
    )
    task = build_task(folder)
    trainer.fit(task, Rows(EVEN["vocab_size"], GLOBAL_BATCH // dist.get_world_size()))
    truth = gather_weights(task)
    for name, num_saved in (("weights", 4), ("full", 2)):
        saved = sorted((root / name).glob("*.ckpt"))
        assert len(saved) == num_saved
        for path in saved:
            check_files(path, "full")
        stored = open_checkpoint(saved[-1])
        weights = stored.read({key: stored.describe(key) for key in stored.tensors})
        if trainer.is_global_zero:
            assert weights.keys() == truth.keys()
            assert all(torch.equal(weights[key], truth[key]) for key in truth)
    strategy.barrier()


@pytest.mark.parametrize("offload", [False, True])
def test_weights_alone_and_full_checkpoints_are_saved_beside_each_other(tmp_path: Path, offload: bool) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    run_ranks(save_two_kinds, folder, tmp_path, offload, world_size=1, backend=BACKEND)


def stage_from_gpu() -> None:
    torch.cuda.set_device(0)
    stager = Stager()
    state: dict[str, Any] = {f"weight_{i}": torch.randn(1000, 33, device="cuda") for i in range(3)}
    for names in (["weight_0"], list(state), ["weight_2"]):
        truth = {name: state[name].cpu() for name in names}
        staged = stager.stage({name: state[name] for name in names})
        assert all(tensor.is_pinned() for tensor in iterate_tensors(staged))
        assert all(torch.equal(staged[name], truth[name]) for name in names)
        for name in names:
            state[name].add_(1)
        torch.cuda.synchronize()
        assert all(torch.equal(staged[name], truth[name]) for name in names)
    stager.release()
    assert not any(tensor.is_pinned() for tensor in iterate_tensors(staged))
    state["weight_0"].cpu()  # no error is left behind


def test_staged_tensors_are_copies_in_pinned_memory_until_it_is_released() -> None:
    run_ranks(stage_from_gpu, world_size=1, backend=BACKEND)


def save_on_two_gpus(folder: Path, root: Path, offload: bool) -> None:
    save_two_kinds(folder, root, offload)
    own = dist.get_rank()
    others = [i for i in range(torch.cuda.device_count()) if i != own and torch._C._cuda_hasPrimaryContext(i)]
    assert others == []


@pytest.mark.skipif(count_gpus() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("offload", [False, True])
def test_a_rank_has_a_context_on_its_own_gpu_alone(tmp_path: Path, offload: bool) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    run_ranks(save_on_two_gpus, folder, tmp_path, offload, world_size=2, backend=BACKEND)
