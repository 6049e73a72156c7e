"""Times and verdicts of a GPU, which are read a step after they were made."""

from pathlib import Path
from typing import Any

import pytest
from training import EVEN, GLOBAL_BATCH, Rows, build_task, build_trainer, save_model

from lit_fsdp import FSDP2Strategy
from lit_fsdp.callbacks import Profile, StabilityMonitor, ThroughputLogger
from ranks import run_ranks

pytestmark = pytest.mark.gpu


def fit(folder: Path, root: Path, policy: Any) -> None:
    speed, monitor = ThroughputLogger(num_warmup_steps=2), StabilityMonitor(policy=policy)
    trainer = build_trainer(
        FSDP2Strategy(print_plan=False),
        callbacks=[speed, monitor, Profile(start_step=4, num_steps=1)],
        accelerator="gpu",
        precision="bf16-mixed",
        default_root_dir=root,
    )
    task = build_task(folder)
    trainer.fit(task, Rows(64, GLOBAL_BATCH))
    section = speed.make_section()
    assert section is not None
    numbers = section.numbers
    parts = sum(numbers[f"{part}_s"] for part in ("data", "forward", "backward", "optimizer", "other"))
    assert parts == pytest.approx(numbers["step_s"], rel=0.3)  # medians of each
    assert numbers["first_step_flops_of_rank_0"]["model"] > 0
    assert ("mfu_pct" in numbers) == any(note.startswith("MFU is of") for note in section.notes)
    assert ("predicted" in numbers) == ("mfu_pct" in numbers)
    assert monitor.state_dict()["counts"] == {}
    assert len(monitor.state_dict()["loss"]) == trainer.global_step
    assert (root / "profile" / "rank0.json.gz").exists()


@pytest.mark.parametrize("policy", ["warn", "skip"])
def test_speed_stability_and_a_trace_of_a_gpu(tmp_path: Path, policy: str) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    run_ranks(fit, folder, tmp_path, policy, world_size=1, backend="cpu:gloo,cuda:nccl")
