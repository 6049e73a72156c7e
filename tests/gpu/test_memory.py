"""What is counted on a GPU is what its allocator has, and what is said when it has none left."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from training import EVEN, GLOBAL_BATCH, Rows, build_task, build_trainer, save_model

from lit_fsdp import ActivationCheckpointing, FSDP2Strategy
from lit_fsdp.callbacks import MemoryLogger, OOMReport
from ranks import run_ranks

pytestmark = pytest.mark.gpu

# Large enough that rounding to the allocator's pieces, 512 bytes each, does not show.
SIZES = {**EVEN, "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 2048}


def measure(folder: Path, root: Path, recompute: Any) -> None:
    # Before CUDA starts: cuBLAS takes up to tens of MiB from the allocator, as much as a step of these models.
    os.environ.update(CUBLAS_WORKSPACE_CONFIG=":16:8", CUBLASLT_WORKSPACE_SIZE="128")
    memory = MemoryLogger(snapshot_steps=[3])
    trainer = build_trainer(
        FSDP2Strategy(print_plan=False, activation_checkpointing=ActivationCheckpointing(mode=recompute)),
        callbacks=[memory],
        accelerator="gpu",
        precision="bf16-mixed",
        default_root_dir=root,
        max_steps=6,
        log_every_n_steps=1,
    )
    trainer.fit(build_task(folder), Rows(SIZES["vocab_size"], GLOBAL_BATCH))
    section = memory.make_section()
    assert section is not None
    curve = section.plots[0].curves[0]
    assert curve.label == "peak allocated, GiB"
    allocated = curve.y[3] * 2**30  # of a step without trace or snapshot
    assert section.numbers["step"]["peak_bytes"] == pytest.approx(allocated, rel=0.05)
    assert abs(section.numbers["predicted"]["difference_pct"]) < 5  # the closed form, over the allocator
    assert list((root / "memory").glob("snapshot_step_3_rank_0.pickle"))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_traced_peak_is_that_of_the_allocator_within_5_percent(tmp_path: Path, recompute: str) -> None:
    folder = save_model(tmp_path / "model", **SIZES)
    run_ranks(measure, folder, tmp_path, recompute, world_size=1, backend="cpu:gloo,cuda:nccl")


def run_out(folder: Path, root: Path) -> None:
    trainer = build_trainer(
        FSDP2Strategy(print_plan=False),
        callbacks=[OOMReport(snapshot=True)],
        accelerator="gpu",
        default_root_dir=root,
    )
    task = build_task(folder)
    task.on_before_backward = lambda _: torch.empty(2**50, device="cuda")  # type: ignore[method-assign, assignment]
    with pytest.raises(torch.OutOfMemoryError):
        trainer.fit(task, Rows(SIZES["vocab_size"], GLOBAL_BATCH))
    report = (root / "out_of_memory.md").read_text()
    assert "in backward, step 1" in report
    assert "the allocator held another" in report
    assert "| trainer.strategy.activation_checkpointing.mode: full |" in report
    assert (root / "out_of_memory_rank_0.pickle").exists()


def test_a_gpu_without_memory_left_is_reported(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", **SIZES)
    run_ranks(run_out, folder, tmp_path, world_size=1, backend="cpu:gloo,cuda:nccl")
