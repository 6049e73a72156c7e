"""What is counted on a GPU is what its allocator has, and what is said when it has none left."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Block
from torch import nn
from training import EVEN, GLOBAL_BATCH, LENGTH, Rows, build_task, build_trainer, save_model

from lit_fsdp import ActivationCheckpointing, AutoFSDP2Strategy, FSDP2Strategy
from lit_fsdp.callbacks import MemoryLogger, OOMReport
from lit_fsdp.planning.closed_form.engine import estimate_step
from lit_fsdp.planning.estimate import describe_model
from lit_fsdp.planning.step_parts import MicroBatch, Ranks
from lit_fsdp.sharding.activation_checkpointing import apply_activation_checkpointing
from lit_fsdp.sharding.cpu_offload import CPUOffload
from ranks import run_ranks

pytestmark = pytest.mark.gpu

DEPTH, WIDTH = 12, 512

# Large enough that rounding to the allocator's pieces, 512 bytes each, does not show.
SIZES = {**EVEN, "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 2048}


def measure(folder: Path, root: Path, recompute: Any, cpu_offload: CPUOffload | None) -> None:
    # Before CUDA starts: cuBLAS takes up to tens of MiB from the allocator, as much as a step of these models.
    os.environ.update(CUBLAS_WORKSPACE_CONFIG=":16:8", CUBLASLT_WORKSPACE_SIZE="128")
    memory = MemoryLogger(snapshot_steps=[3])
    trainer = build_trainer(
        FSDP2Strategy(
            print_plan=False, activation_checkpointing=ActivationCheckpointing(mode=recompute), cpu_offload=cpu_offload
        ),
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


@pytest.mark.parametrize(("recompute", "cpu_offload"), [("none", None), ("full", None), ("full", CPUOffload())])
def test_the_traced_peak_is_that_of_the_allocator_within_5_percent(
    tmp_path: Path, recompute: str, cpu_offload: CPUOffload | None
) -> None:
    folder = save_model(tmp_path / "model", **SIZES)
    run_ranks(measure, folder, tmp_path, recompute, cpu_offload, world_size=1, backend="cpu:gloo,cuda:nccl")


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


def compare_offloaded_inputs() -> None:
    held, gradients = [], []
    x = torch.randn(2048, WIDTH, device="cuda")
    for is_offloaded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*[Block(WIDTH) for _ in range(DEPTH)]).cuda()
        settings = ActivationCheckpointing(mode="full", offload=is_offloaded)
        apply_activation_checkpointing(model, settings, [str(i) for i in range(DEPTH)])
        for _ in range(3):  # also in memory that was used before
            model.zero_grad()
            before = torch.cuda.memory_allocated()
            loss = model(x).square().mean()
            held.append(torch.cuda.memory_allocated() - before)
            loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    # The first input is the test's; the last block keeps its own.
    assert held[2] - held[5] == (DEPTH - 2) * x.nbytes
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_offloaded_inputs_leave_the_gpu_and_come_back() -> None:
    run_ranks(compare_offloaded_inputs, world_size=1, is_on_gpus=True)


def offload(folder: Path) -> None:
    strategy = FSDP2Strategy(print_plan=False, cpu_offload=CPUOffload())
    task, trainer = build_task(folder), build_trainer(strategy, accelerator="gpu", max_steps=3)
    trainer.fit(task, Rows(10_000, GLOBAL_BATCH))
    shape, ranks = MicroBatch(rows=GLOBAL_BATCH, length=LENGTH), Ranks(num_nodes=1, per_node=1)
    host = estimate_step(describe_model(task, strategy), strategy.settings, shape, ranks=ranks).host_by_kind
    exact = sum(parameter.nbytes for parameter in task.parameters())
    assert host["parameters"] > 1.2 * exact  # so that the rounding shows
    pinned = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    assert pinned == pytest.approx(host["parameters"] + host["gradients"], rel=0.03)  # batches are pinned too


def test_pinned_memory_of_offload_is_what_is_planned(tmp_path: Path) -> None:
    sizes = {**SIZES, "vocab_size": 10_000, "intermediate_size": 2560}  # no power of two
    run_ranks(offload, save_model(tmp_path / "model", **sizes), world_size=1, backend="cpu:gloo,cuda:nccl")


def find_free(root: Path) -> None:
    device, num_bytes = torch.device("cuda", 0), 2**30
    strategy = AutoFSDP2Strategy()
    trainer = build_trainer(strategy, accelerator="gpu", default_root_dir=root)
    assert trainer.strategy.root_device == device
    torch.zeros(1, device=device)
    _, before = strategy.choose_hardware()
    held = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    _, mine = strategy.choose_hardware()
    assert mine == pytest.approx(before, abs=num_bytes / 8)  # what this process holds is its own to use
    free, total = torch.cuda.mem_get_info(device)
    assert free + held.numel() <= mine < total
    assert "free on the GPU of rank 0" in strategy.memory_note


def test_auto_takes_what_is_free_and_what_this_process_holds(tmp_path: Path) -> None:
    run_ranks(find_free, tmp_path, world_size=1, backend="cpu:gloo,cuda:nccl")
