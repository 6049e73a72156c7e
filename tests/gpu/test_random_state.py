"""Random numbers of a GPU go on after a resume, and checkpoints go from the CPU to GPUs and back."""

from pathlib import Path

import pytest
import torch
from training import EVEN, GLOBAL_BATCH, Rows, build_task, build_trainer, save_model

from lit_fsdp import FSDP2Strategy
from lit_fsdp.sharding.random_state import collect_random_state, restore_random_state
from ranks import run_ranks

pytestmark = pytest.mark.gpu
BACKENDS = {"cpu": "gloo", "gpu": "cpu:gloo,cuda:nccl"}


def draw_again() -> None:
    torch.cuda.set_device(0)
    torch.rand(5, device="cuda")
    state = collect_random_state()
    first = torch.rand(5, device="cuda")
    restore_random_state(state)
    assert torch.equal(torch.rand(5, device="cuda"), first)


def test_a_gpu_draws_again_what_it_drew_after_the_state_was_collected() -> None:
    run_ranks(draw_again, world_size=1, backend=BACKENDS["gpu"])


def fit_until(step: int, folder: Path, accelerator: str, path: Path | None, saved: Path) -> None:
    trainer = build_trainer(FSDP2Strategy(print_plan=False), accelerator=accelerator, max_steps=step)
    trainer.fit(build_task(folder), Rows(EVEN["vocab_size"], GLOBAL_BATCH), ckpt_path=path)
    assert trainer.global_step == step
    assert torch.cuda.is_initialized() == (accelerator == "gpu")
    trainer.save_checkpoint(saved)


@pytest.mark.parametrize(("first", "second"), [("cpu", "gpu"), ("gpu", "cpu")])
def test_a_checkpoint_goes_on_elsewhere(first: str, second: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    halfway, end = tmp_path / "halfway", tmp_path / "end"
    run_ranks(fit_until, 2, folder, first, None, halfway, world_size=1, backend=BACKENDS[first])
    run_ranks(fit_until, 3, folder, second, halfway, end, world_size=1, backend=BACKENDS[second])
    assert end.is_dir()
