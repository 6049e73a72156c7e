"""What is on by default, all at once, in runs that are not the usual ones."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from launches import ROOT, write_run
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from models import to_full
from torch import Tensor, nn
from training import EVEN, Rows, build_task, build_trainer, save_model
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp import FSDP2Strategy
from lit_fsdp.callbacks import (
    CommunicationLogger,
    MemoryLogger,
    OOMReport,
    Preemption,
    RunReport,
    StabilityMonitor,
    ThroughputLogger,
)
from lit_fsdp.cli.scaling import read_report
from lit_fsdp.profiling.clock import Clock
from ranks import run_ranks

MODEL = dict(EVEN)


def build_monitors() -> list[Callback]:
    return [StabilityMonitor(), MemoryLogger(), CommunicationLogger(), ThroughputLogger(), OOMReport(), RunReport()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), **MODEL)


def fit_without_logging(folder: Path, root: Path) -> None:
    monitors = build_monitors()
    options: dict[str, Any] = {"max_steps": 6, "log_every_n_steps": 0, "default_root_dir": root}
    trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=monitors, **options)
    trainer.fit(build_task(folder), Rows(MODEL["vocab_size"], 4))
    for monitor in monitors[:4]:
        section = monitor.make_section()  # type: ignore[attr-defined]
        assert section is not None
        assert section.numbers, section.title


@pytest.mark.full
def test_a_trainer_that_logs_nothing_is_measured_all_the_same(folder: Path, tmp_path: Path) -> None:
    run_ranks(fit_without_logging, folder, tmp_path, world_size=2)


def fit_until_preempted(folder: Path, root: Path) -> None:
    class Preempt(Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 4 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    monitors = [*build_monitors(), Preemption(dirpath=str(root))]
    options: dict[str, Any] = {"max_steps": 20, "log_every_n_steps": 3, "default_root_dir": root}
    trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[Preempt(), *monitors], **options)
    with pytest.raises(SIGTERMException):
        trainer.fit(build_task(folder), Rows(MODEL["vocab_size"], 4))
    assert trainer.global_step == 6


@pytest.mark.full
def test_a_preempted_run_has_the_sections_that_all_ranks_make_together(folder: Path, tmp_path: Path) -> None:
    run_ranks(fit_until_preempted, folder, tmp_path, world_size=2)
    (path,) = tmp_path.rglob("report.json")
    report = json.loads(path.read_text())
    assert report["run"]["status"] == "preempted"
    assert report["sections"]["memory"]["numbers"]["peak_rss_gib"]
    assert report["sections"]["speed"]["numbers"]["ranks"] == 2
    assert report["sections"]["comm"]["numbers"]["collectives"]
    assert read_report(path).unit == "tokens"


def fit_with_one_gpu_behind(folder: Path, root: Path) -> None:
    if dist.get_rank() == 1:
        Clock.is_past = lambda *_: False  # type: ignore[method-assign, assignment]
    monitors = build_monitors()
    options: dict[str, Any] = {"max_steps": 6, "log_every_n_steps": 2, "default_root_dir": root}
    trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=monitors, **options)
    task = build_task(folder)
    task.log_dict = lambda *_, **__: None  # type: ignore[method-assign, assignment]  # no counts of tokens to wait for
    trainer.fit(task, Rows(MODEL["vocab_size"], 4))
    total = torch.ones(1)
    dist.all_reduce(total)  # all ranks are here, with nothing left over between them
    assert float(total) == 2


@pytest.mark.full
def test_a_rank_that_is_behind_makes_the_same_exchanges(folder: Path, tmp_path: Path) -> None:
    run_ranks(fit_with_one_gpu_behind, folder, tmp_path, world_size=2)


class Validated(Rows):
    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def trace_around_a_validation(folder: Path, root: Path) -> None:
    peaks = []
    for every in (None, 3):  # in the middle of step 2
        memory = MemoryLogger()
        options: dict[str, Any] = {"max_steps": 3, "accumulate_grad_batches": 2, "default_root_dir": root / str(every)}
        options |= {"limit_val_batches": 2 if every else 0, "num_sanity_val_steps": 0, "val_check_interval": every}
        trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[memory], **options)
        trainer.fit(build_task(folder), Validated(MODEL["vocab_size"], 2))
        section = memory.make_section()
        assert section is not None
        peaks.append((section.numbers["step"]["peak_bytes"], len(section.plots[1].curves[0].x)))
    (without, length), (around, around_length) = peaks
    assert around == pytest.approx(without, rel=1e-3)  # metrics of the validation are a few bytes
    assert abs(around_length - length) < 0.01 * length


@pytest.mark.full
def test_a_validation_inside_the_traced_step_is_not_traced(folder: Path, tmp_path: Path) -> None:
    run_ranks(trace_around_a_validation, folder, tmp_path, world_size=1)


def fit_too_short(folder: Path, root: Path) -> None:
    memory = MemoryLogger(trace_step=9)
    trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[memory], max_steps=2, default_root_dir=root)
    trainer.fit(build_task(folder), Rows(MODEL["vocab_size"], 8))
    section = memory.make_section()
    assert section is not None
    assert section.notes == ["No step was followed: the run had no step 9."]


def test_a_run_without_the_step_to_trace_says_so(folder: Path, tmp_path: Path) -> None:
    run_ranks(fit_too_short, folder, tmp_path, world_size=1)


def check_monitors(monitors: list[Callback]) -> MemoryLogger:
    """Return the callback for memory, once all have something to say and no rank is ahead of another."""
    for monitor in monitors[:4]:
        assert monitor.make_section() is not None, type(monitor)  # type: ignore[attr-defined]
    total = torch.ones(1)
    dist.all_reduce(total)
    assert float(total) == dist.get_world_size()
    memory = monitors[1]
    assert isinstance(memory, MemoryLogger)
    return memory


def save_mixture(folder: Path) -> Path:
    torch.manual_seed(1)
    sizes = {**MODEL, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    config = AutoConfig.for_model("qwen3_moe", **sizes, num_key_value_heads=2, decoder_sparse_step=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def fit_mixture(folder: Path, root: Path) -> None:
    monitors = build_monitors()
    trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=monitors, max_steps=4, default_root_dir=root)
    trainer.fit(build_task(folder), Rows(MODEL["vocab_size"], 4))
    section = check_monitors(monitors).make_section()
    assert section is not None
    assert section.numbers["step"]["step"] == 2
    # On rank 0 only, from modules that are sharded: nothing in it may be sent.
    assert ("predicted" in section.numbers) == (dist.get_rank() == 0), section.notes


@pytest.mark.full
def test_experts_are_estimated_by_one_rank_without_the_others(tmp_path: Path) -> None:
    run_ranks(fit_mixture, save_mixture(tmp_path / "model"), tmp_path, world_size=2)


class Branching(pl.LightningModule):
    """Runs other operators on each rank, and other ones in each step."""

    def __init__(self, *, skips_a_layer: bool) -> None:
        super().__init__()
        self.skips_a_layer = skips_a_layer  # on rank 1, which only some strategies allow
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("count", torch.zeros(1))  # which DDP sends to all ranks before each forward

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.layers[0](batch)
        for _ in range((3 * dist.get_rank() + batch_idx) % 4):
            x = x.sin() + x
        if not self.skips_a_layer or dist.get_rank() == 0:
            x = self.layers[1](x)
        self.count += 1
        return self.layers[2](x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.randn(32, 8, generator=torch.Generator().manual_seed(0)), batch_size=2)


def fit_branches(name: str, root: Path) -> None:
    strategies: dict[str, Any] = {
        "fsdp2": FSDP2Strategy(print_plan=False),
        "ddp": DDPStrategy(),
        "ddp_find_unused": DDPStrategy(find_unused_parameters=True),
        "auto": "auto",
    }
    monitors = build_monitors()
    options: dict[str, Any] = {"max_steps": 4, "accumulate_grad_batches": 2, "default_root_dir": root}
    trainer = build_trainer(strategies[name], callbacks=monitors, **options)
    trainer.fit(Branching(skips_a_layer=name == "ddp_find_unused"))
    section = check_monitors(monitors).make_section()
    assert section is not None
    assert section.numbers["step"]["step"] == 2, section.notes


@pytest.mark.full
@pytest.mark.parametrize(("name", "world_size"), [("fsdp2", 2), ("ddp", 2), ("ddp_find_unused", 2), ("auto", 1)])
def test_ranks_that_run_other_operators_are_measured_under_any_strategy(
    tmp_path: Path, name: str, world_size: int
) -> None:
    run_ranks(fit_branches, name, tmp_path, world_size=world_size)


def fail_to_look(*_: Any) -> int:
    raise KeyError("of a monitor")


def fit_with_broken_monitors(folder: Path, root: Path, patch: pytest.MonkeyPatch) -> None:
    if dist.get_rank() == 1:
        patch.setattr("lit_fsdp.profiling.memory_trace.count_hidden_bytes", fail_to_look)
    task, monitors = build_task(folder), build_monitors()

    def gather(*_: Any) -> None:  # on rank 0 only: there was nobody to gather with
        to_full(next(task.parameters()))

    patch.setattr(task, "measure_batch", gather, raising=True)
    trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=monitors, max_steps=4, default_root_dir=root)
    trainer.fit(task, Rows(MODEL["vocab_size"], 4))
    section = check_monitors(monitors).make_section()
    assert section is not None
    assert trainer.global_step == 4
    assert "step" not in section.numbers  # on both ranks
    missing = "Step 2 is not shown: ranks [1] could not follow it."
    stopped = "MemoryLogger stopped on rank 1: the step could not be followed: KeyError: 'of a monitor'."
    sent = "Nothing was predicted: reading the module would send to other ranks"
    assert (missing if dist.get_rank() == 0 else stopped) in section.notes
    assert any(note.startswith(sent) for note in section.notes) == (dist.get_rank() == 0)


def test_an_error_in_monitoring_is_said_and_training_goes_on(folder: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        run_ranks(fit_with_broken_monitors, folder, tmp_path, patch, world_size=2)


TASK = """
from lit_fsdp.tasks import CausalLM

class Failing(CausalLM):
    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        if self.global_step == 2:
            raise ValueError("on every rank")
"""


@pytest.mark.full
def test_a_run_that_fails_on_all_ranks_it_started_leaves_its_report(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(TASK)
    write_run(tmp_path)
    command = [sys.executable, "-m", "lit_fsdp", "fit", "--config=run.yaml", "--model=failing.Failing"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*command, "--cpu_processes=2", "--monitoring=true"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert "ValueError: on every rank" in ended.stderr
    assert "failed" in (tmp_path / "runs" / "run" / "version_0" / "report.html").read_text()
