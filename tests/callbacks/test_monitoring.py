"""What is on by default, all at once, in runs that are not the usual ones."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launches import ROOT, write_run
from lightning.pytorch import Callback
from training import EVEN, Rows, build_task, build_trainer, save_model

from lit_fsdp import FSDP2Strategy
from lit_fsdp.callbacks import (
    CommunicationLogger,
    MemoryLogger,
    OOMReport,
    RunReport,
    StabilityMonitor,
    ThroughputLogger,
)
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
