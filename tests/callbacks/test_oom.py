"""A rank that runs out of memory says what took it, and all ranks end."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import fork_ranks, write_run
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader
from training import build_trainer

from lit_fsdp import FSDP2Strategy
from lit_fsdp.callbacks import OOMReport
from lit_fsdp.profiling.device_memory import is_out_of_memory, start_recording, stop_recording
from ranks import run_ranks

TASK = """
import torch
from lit_fsdp.tasks import CausalLM

class Hungry(CausalLM):
    def __init__(self, *, place: str, hungry_rank: int, **kwargs):
        super().__init__(**kwargs)
        self.place, self.hungry_rank = place, hungry_rank

    def eat(self, place):
        if self.place == place and self.trainer.global_rank == self.hungry_rank and self.trainer.global_step == 2:
            try:
                torch.empty(2**50)
            except RuntimeError as error:
                raise RuntimeError(f"https://anna:hunter2@host: {error}") from error

    def training_step(self, batch, batch_idx):
        self.ballast = torch.ones(1000, 333)
        self.eat("forward")
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        self.eat("the optimizer step")

    def validation_step(self, batch, batch_idx):
        self.eat("validation")
        return super().validation_step(batch, batch_idx)
"""


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, rank: int) -> tuple[str, list]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hungry.py").write_text(TASK)
    callbacks = [{"class_path": "OOMReport"}]
    write_run(tmp_path, trainer={"callbacks": callbacks, "val_check_interval": 2}, data={"validation_fraction": 0.2})
    task = ["--model", "hungry.Hungry", f"--model.place={place}", f"--model.hungry_rank={rank}"]
    ended = fork_ranks("fit", "--config", "run.yaml", *task)
    assert all(e.code not in (0, None) for e in ended), ended
    (report,) = tmp_path.glob("runs/run/version_0/out_of_memory.md")
    return report.read_text(), ended


@pytest.mark.full(after=1)
@pytest.mark.parametrize("place", ["forward", "the optimizer step", "validation"])
def test_the_rank_that_fails_says_where_and_what_it_held(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, ended = run(tmp_path, monkeypatch, place, rank=1)
    assert report.startswith(f"# Out of memory on rank 1 of 2, in {place}, step 3\n")
    assert "you tried to allocate 4503599627370496 bytes" in report
    # 2 layers of 32 x 64, vocabulary of 320: this rank's half in fp32, with two moments of AdamW.
    for row in ("| parameters | 0.000 |", "| optimizer state | 0.000 |", "| activations and the rest |"):
        assert row in report
    assert "| - | [1000, 333] | float32 | 0.001 |" in report  # the ballast
    assert "| optimizer state of model.model.embed_tokens.weight | " in report
    assert "| trainer.strategy.activation_checkpointing.mode: full |" in report
    assert report.rstrip().endswith("```")
    assert "Traceback (most recent call last)" in report
    assert "@host" in report
    assert "hunter2" not in report + ended[1].out + ended[1].err
    assert report.split("## Traceback")[0] in ended[1].out
    assert "error: out of memory: " in ended[1].err
    assert "Traceback" not in ended[1].err


ONCE = """
from pathlib import Path
from lit_fsdp.tasks import CausalLM

class HungryOnce(CausalLM):
    def on_before_backward(self, loss):
        if self.trainer.global_rank == 1 and self.trainer.global_step == 1 and not Path("eaten").exists():
            Path("eaten").touch()  # what the module itself remembers of the step is undone
            raise RuntimeError("CUDA error: out of memory")
"""


@pytest.mark.full
def test_a_run_that_redoes_a_step_goes_on_with_all_callbacks_and_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "once.py").write_text(ONCE)
    strategy = {"class_path": "lit_fsdp.FSDP2Strategy", "init_args": {"oom_retries": 2}}
    write_run(tmp_path, trainer={"strategy": strategy, "max_steps": 4})
    losses = []
    for version in (0, 1):
        ended = fork_ranks("fit", "--config", "run.yaml", "--model", "once.HungryOnce", "--monitoring", "true")
        assert all(e.code in (0, None) for e in ended), ended
        report = json.loads((tmp_path / "runs" / "run" / f"version_{version}" / "report.json").read_text())
        losses.append(report["curves"])
        line = "rank 1 ran out of memory in backward of step 2: CUDA error: out of memory; redone as it was"
        assert report["run"]["redone_steps"] == ([] if version else [line])
    assert losses[0] == losses[1]
    assert not list(tmp_path.glob("**/out_of_memory.md"))


class Eater(LightningModule):
    """Has no memory left in the first batch of an evaluation."""

    error: Exception = torch.OutOfMemoryError("CUDA out of memory.")

    def eat(self, *_: Any) -> None:
        raise self.error

    validation_step = test_step = predict_step = eat  # type: ignore[assignment]


@pytest.mark.parametrize(("command", "phase"), [("validate", "validation"), ("test", "test"), ("predict", "predict")])
def test_an_evaluation_of_its_own_is_named(command: str, phase: str, tmp_path: Path) -> None:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "default_root_dir": tmp_path}
    trainer = Trainer(accelerator="cpu", callbacks=[OOMReport()], **quiet)
    with pytest.raises(torch.OutOfMemoryError):
        getattr(trainer, command)(Eater(), DataLoader(torch.ones(2, 4)))
    report = (tmp_path / "out_of_memory.md").read_text()
    assert report.startswith(f"# Out of memory on rank 0 of 1, in {phase}, step 1\n")


class Pairs(LightningDataModule):
    """Each pair is two rows of a batch."""

    batch_size, eval_batch_size = 4, 6
    max_frames_per_batch: int | None = None

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(8, 4), batch_size=2 * self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(torch.ones(12, 4), batch_size=2 * self.eval_batch_size)


class FullLinear(Eater):
    """Has no memory left in its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.ballast = torch.ones(2**23)
        self.eat()

    test_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fail_in_full(folder: Path, frames: int | None, command: str = "fit") -> str:
    """Return the report of a step whose batch has 8 rows of 4 pairs, or of a test with more."""
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = Trainer(
        accelerator="cpu", strategy=FSDP2Strategy(), callbacks=[OOMReport(fallback_dir=str(folder))], **quiet
    )
    data = Pairs()
    data.max_frames_per_batch = frames
    with pytest.raises(torch.OutOfMemoryError):
        getattr(trainer, command)(FullLinear(), datamodule=data)
    return (folder / "out_of_memory.md").read_text()


def read_advice(folder: Path) -> None:
    said = fail_in_full(folder, None)
    assert "| data.batch_size: 2 (now 4), with twice the trainer.accumulate_grad_batches |" in said
    assert "another result" not in next(line for line in said.splitlines() if "data.batch_size" in line)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FullLinear, "is_sum_of_rows", False, raising=False)  # such as a mean over a batch
        said = fail_in_full(folder, None)
    assert "another result" in next(line for line in said.splitlines() if "data.batch_size" in line)
    assert "| data.eval_batch_size: 3 (now 6) |" in fail_in_full(folder, None, "test")
    # Frames decide how many rows there are, whatever the setting.
    said = fail_in_full(folder, 100)
    assert "| setting | saves about" in said
    assert "data.batch_size" not in said


def test_the_batch_that_is_advised_is_that_of_the_setting(tmp_path: Path) -> None:
    run_ranks(read_advice, tmp_path, world_size=1)


def test_the_history_of_an_allocator_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *args, **kwargs: asked.append(kwargs))
    start_recording(monkeypatch)
    stop_recording(monkeypatch)
    assert asked[0]["max_entries"] <= 100_000  # of several KB each
    assert asked[1] == {"enabled": None}


def test_an_error_of_another_kind_leaves_no_report(tmp_path: Path) -> None:
    assert not is_out_of_memory(ValueError("we ran out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert not is_out_of_memory(None)
    module = Eater()
    module.error = ValueError("we ran out of memory")
    trainer = Trainer(accelerator="cpu", callbacks=[OOMReport()], logger=False, default_root_dir=tmp_path)
    with pytest.raises(ValueError, match="we ran out"):
        trainer.validate(module, DataLoader(torch.ones(2, 4)))
    assert list(tmp_path.iterdir()) == []


class OwnSteps(BoringModel):
    """Runs out of memory, maybe under manual optimization, and cannot split its batches."""

    def __init__(self, is_automatic: bool) -> None:
        super().__init__()
        self.automatic_optimization = is_automatic

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise MemoryError("no more")


class SplitSteps(OwnSteps):
    """Can."""

    def split_batch(self, batch: Any, num_parts: int) -> Any:
        raise AssertionError


def run_out(folder: Path, kind: type[OwnSteps], is_automatic: bool, is_advised: bool) -> None:
    trainer = build_trainer(FSDP2Strategy(), callbacks=[OOMReport(fallback_dir=str(folder))], gradient_clip_val=None)
    with pytest.raises(MemoryError):
        trainer.fit(kind(is_automatic))
    assert ("oom_retries" in (folder / "out_of_memory.md").read_text()) == is_advised


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "is_automatic", "is_advised"),
    [(SplitSteps, True, True), (SplitSteps, False, False), (OwnSteps, True, False)],
)
def test_steps_that_cannot_be_redone_are_not_said_to_be(
    tmp_path: Path, kind: type[OwnSteps], is_automatic: bool, is_advised: bool
) -> None:
    run_ranks(run_out, tmp_path, kind, is_automatic, is_advised, world_size=1)


def test_out_of_memory_is_seen_in_what_caused_an_error() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    try:
        try:
            try:
                torch.empty(2**50)
            except RuntimeError as error:
                raise RuntimeError(f"https://anna:hunter2@host: {error}") from error
        except RuntimeError as cause:
            raise ValueError("in a worker") from cause
    except ValueError as error:
        assert is_out_of_memory(error)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="num_tensors: got 0: expected 1 or more"):
        OOMReport(num_tensors=0)
