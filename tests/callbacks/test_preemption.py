"""A signal to any rank: all save at the same step, and the run goes on from there as if nothing had happened."""

import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader
from training import EVEN, NUM_STEPS, Environment, Rows, build_task, build_trainer, collate, make_rows, save_model
from waiting import wait_until

from lit_fsdp import FSDP2Strategy
from lit_fsdp.callbacks import Preemption
from lit_fsdp.checkpoint.manifest import is_complete
from lit_fsdp.strategy.signals import SignalListener
from ranks import run_ranks

TERM, USR1, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), **EVEN)


class Send(pl.Callback):
    """Sends signals to this rank itself, once, in the hook of this name at this step."""

    def __init__(self, hook: str, step: int, ranks: tuple[int, ...], signals: tuple[int, ...]) -> None:
        self.step, self.ranks, self.signals = step, ranks, list(signals)
        setattr(self, hook, self._send)

    def _send(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step == self.step and dist.get_rank() in self.ranks and not trainer.sanity_checking:
            while self.signals:
                os.kill(os.getpid(), self.signals.pop(0))


class Losses(pl.Callback):
    """The loss of this rank by step."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.losses[trainer.global_step] = float(outputs["loss"])


class ValidatedRows(Rows):
    """Validates every two steps, on as many batches."""

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(make_rows(self.vocab_size, 16), batch_size=4, collate_fn=collate)  # type: ignore[arg-type]


class SlurmRanks(SLURMEnvironment):
    """A job of SLURM whose ranks exist already."""

    creates_processes_externally = True
    world_size, set_world_size = Environment.world_size, Environment.set_world_size
    global_rank, set_global_rank = Environment.global_rank, Environment.set_global_rank
    local_rank, node_rank = Environment.local_rank, LightningEnvironment.node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        return


def train(
    model: Path,
    folder: Path,
    *callbacks: pl.Callback,
    ckpt_path: Path | None = None,
    rows: type[Rows] = Rows,
    strategy: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[pl.Trainer, dict[int, float]]:
    """Train on this rank; return the trainer and the losses by step, up to the end or the preemption."""
    recorder = Losses()
    batch_size = 8 // dist.get_world_size() // options.get("accumulate_grad_batches", 1)
    preemption = Preemption(("SIGTERM", "SIGUSR1", "SIGINT"), dirpath=str(folder))
    trainer = build_trainer(
        FSDP2Strategy(print_plan=False, **(strategy or {})),
        callbacks=[recorder, preemption, *callbacks],
        **{"limit_val_batches": 0, **options},
    )
    try:
        trainer.fit(build_task(model), rows(EVEN["vocab_size"], batch_size), ckpt_path=ckpt_path, weights_only=False)
    except SIGTERMException as stop:
        assert stop.code == 0
        assert trainer.should_stop
    return trainer, recorder.losses


def find_saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.ckpt"))


def same_on_all_ranks(value: Any) -> bool:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(v == value for v in values)


# when, on which ranks, which signals, and after which step the run is saved
CASES: dict[str, tuple[str, int, tuple[int, ...], tuple[int, ...], int]] = {
    "one rank": ("on_train_batch_start", 2, (1,), (TERM,), 4),
    "the first rank": ("on_before_optimizer_step", 2, (0,), (USR1,), 4),
    "all ranks": ("on_before_optimizer_step", 3, (0, 1), (TERM,), 5),
    "twice": ("on_train_batch_start", 2, (1,), (TERM, USR1), 4),
    "Ctrl-C": ("on_train_batch_start", 2, (0, 1), (INT,), 4),
    "after the step": ("on_train_batch_end", 3, (0,), (TERM,), 5),
}


@pytest.mark.full(after=1)
@pytest.mark.parametrize(("name", "is_async"), [*((name, False) for name in CASES), ("all ranks", True)])
def test_all_ranks_save_at_the_same_step_and_the_run_goes_on_bit_for_bit(
    model: Path, tmp_path: Path, name: str, is_async: bool
) -> None:
    hook, step, ranks, signals, expected = CASES[name]

    def body() -> None:
        strategy = {"async_save": is_async}
        _, truth = train(model, tmp_path, strategy=strategy)
        assert find_saved(tmp_path) == []
        trainer, losses = train(model, tmp_path, Send(hook, step, ranks, signals), strategy=strategy)
        assert same_on_all_ranks(trainer.global_step)
        assert trainer.global_step == expected
        saved = tmp_path / f"preempted-step={expected}.ckpt"
        assert is_complete(saved)
        _, rest = train(model, tmp_path, ckpt_path=saved, strategy=strategy)
        assert (max(losses), min(rest)) == (expected, expected + 1)
        assert losses | rest == truth
        assert len(truth) == NUM_STEPS

    run_ranks(body)


@pytest.mark.full
def test_a_second_interrupt_ends_the_run_at_once(model: Path, tmp_path: Path) -> None:
    def body() -> None:
        with pytest.raises((KeyboardInterrupt, SystemExit)) as ended:
            train(model, tmp_path, Send("on_train_batch_start", 2, (0, 1), (INT, INT)))
        assert not isinstance(ended.value, SIGTERMException)

    run_ranks(body)
    assert find_saved(tmp_path) == []


@pytest.mark.full
def test_a_second_signal_while_saving_changes_nothing(model: Path, tmp_path: Path) -> None:
    def body() -> None:
        send = (Send("on_train_batch_start", 2, (1,), (TERM,)), Send("on_save_checkpoint", 4, (0, 1), (TERM, USR1)))
        train(model, tmp_path, *send, Send("on_exception", 4, (0, 1), (TERM,)))
        for number in (TERM, USR1):
            os.kill(os.getpid(), number)  # while the process ends

    run_ranks(body)
    assert find_saved(tmp_path) == ["preempted-step=4.ckpt"]
    assert is_complete(tmp_path / "preempted-step=4.ckpt")


@pytest.mark.full
def test_a_signal_during_validation_saves_within_two_batches_and_is_resumed(model: Path, tmp_path: Path) -> None:
    options = {"limit_val_batches": 1.0, "val_check_interval": 2, "num_sanity_val_steps": 1, "rows": ValidatedRows}

    def body() -> None:
        _, truth = train(model, tmp_path, **options)
        batches: list[int] = []

        class Count(pl.Callback):
            def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
                batches.append(trainer.global_step)

        trainer, _ = train(model, tmp_path, Count(), Send("on_validation_batch_start", 4, (1,), (TERM,)), **options)
        assert trainer.global_step == 4
        assert batches.count(4) == 2
        saved = tmp_path / "preempted-step=4.ckpt"
        assert is_complete(saved)
        _, rest = train(model, tmp_path, ckpt_path=saved, **options)
        assert rest == {step: loss for step, loss in truth.items() if step > 4}

    run_ranks(body)


@pytest.mark.full
@pytest.mark.parametrize("hook", ["setup", "on_fit_start", "on_sanity_check_start"])
def test_a_signal_before_the_first_step_ends_the_run_there(model: Path, tmp_path: Path, hook: str) -> None:
    options = {"limit_val_batches": 1, "num_sanity_val_steps": 1, "rows": ValidatedRows}

    class Early(Send):
        def _send(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
            if dist.get_rank() == 1:
                os.kill(os.getpid(), TERM)

    def body() -> None:
        trainer, losses = train(model, tmp_path, Early(hook, 0, (1,), (TERM,)), **options)
        assert (trainer.global_step, losses) == (0, {})

    run_ranks(body)
    assert find_saved(tmp_path) == []


@pytest.mark.full
def test_checkpoints_that_are_due_at_the_same_step_are_not_saved_twice(model: Path, tmp_path: Path) -> None:
    def body() -> None:
        every = ModelCheckpoint(dirpath=tmp_path / "every", every_n_train_steps=1, save_top_k=-1)
        train(model, tmp_path, Send("on_train_batch_start", 2, (1,), (TERM,)), every, enable_checkpointing=True)

    run_ranks(body)
    assert find_saved(tmp_path) == ["preempted-step=4.ckpt"]
    assert len(find_saved(tmp_path / "every")) == 3


@pytest.mark.full
def test_micro_batches_and_steps_make_no_other_collective_than_the_notes(model: Path, tmp_path: Path) -> None:
    counts = {"all_gather_single": 0, "broadcast": 0}

    def count(name: str) -> Callable[..., Any]:
        call = getattr(dist, name)

        def counted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            is_note = name == "all_gather_single" and kwargs.get("async_op") and tensor.dtype == torch.float64
            counts[name] += is_note or name == "broadcast"
            return call(tensor, *args, **kwargs)

        return counted

    def body() -> None:
        for name in counts:
            setattr(dist, name, count(name))
        train(model, tmp_path, accumulate_grad_batches=2)
        assert counts == {"all_gather_single": NUM_STEPS + 1, "broadcast": 0}

    run_ranks(body)


def test_a_run_that_was_not_signalled_gives_the_handlers_back(model: Path, tmp_path: Path) -> None:
    def body() -> None:
        before = [signal.getsignal(number) for number in (TERM, USR1)]
        trainer, _ = train(model, tmp_path)
        assert [signal.getsignal(number) for number in (TERM, USR1)] == before
        assert "register_signal_handlers" not in vars(trainer._signal_connector)

    run_ranks(body, world_size=1)


def answers(child: socket.socket) -> bool:
    child.send(b"?")
    return child.recv(1) == b"!"


def list_pending(pid: int) -> set[signal.Signals]:
    """Return the signals that a process has been sent and has not taken."""
    found = re.search(r"^ShdPnd:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return {number for number in signal.Signals if int(found[1], 16) >> (number - 1) & 1}


def test_forked_data_workers_survive_a_signal_to_all_processes_but_not_their_parent() -> None:
    def body() -> None:
        received: list[int] = []
        listener = SignalListener(received.append)
        assert listener.start([TERM, USR1])
        for is_from_parent in (False, True):
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                ours.close()
                while theirs.recv(1):
                    theirs.send(b"!")
                os._exit(3)
            theirs.close()
            assert answers(ours)
            if is_from_parent:
                os.kill(pid, TERM)
            else:
                subprocess.run(["/bin/kill", "-TERM", str(pid)], check=True)
                subprocess.run(["/bin/kill", "-USR1", str(pid)], check=True)
                wait_until(lambda pid=pid: not list_pending(pid))
                assert answers(ours)
                assert os.waitpid(pid, os.WNOHANG) == (0, 0)
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            assert os.waitstatus_to_exitcode(status) == (0 if is_from_parent else -9)
        assert received == []
        listener.stop()

    run_ranks(body, world_size=1)


@pytest.mark.full
def test_under_slurm_the_job_is_requeued_after_the_save(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "bin" / "scontrol"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "$@" $(ls {tmp_path}/saved) >> {tmp_path}/called\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")

    def body(number: int) -> None:
        send = Send("on_train_batch_start", 2, (1,), (number,))
        train(model, tmp_path / "saved", send, plugins=[SlurmRanks(requeue_signal=signal.SIGUSR2)])

    run_ranks(body, TERM)
    assert not (tmp_path / "called").exists()
    run_ranks(body, signal.SIGUSR2)
    assert (tmp_path / "called").read_text() == "requeue 17 preempted-step=4.ckpt\n"


def test_a_place_that_cannot_be_written_to_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    preemption = Preemption(dirpath=str(tmp_path / "file" / "saved"))
    with pytest.raises(ValueError, match=r"Preemption.dirpath: got .*/file/saved': .*/file is no folder"):
        preemption.setup(pl.Trainer(accelerator="cpu", logger=False), pl.LightningModule(), "fit")


def test_what_cannot_be_caught_is_refused() -> None:
    with pytest.raises(ValueError, match="SIGKILL cannot be caught"):
        Preemption(signals=["SIGTERM", "SIGKILL"])
    with pytest.raises(ValueError, match="expected names such as SIGTERM"):
        Preemption(signals=["TERM"])
    with pytest.raises(ValueError, match="at least one"):
        Preemption(signals=[])
