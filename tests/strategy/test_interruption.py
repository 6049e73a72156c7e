"""Runs that are interrupted again and again end like a run that never was."""

import csv
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from launches import Ended, fork_ranks, run_processes, torchrun, write_run
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lit_fsdp.checkpoint.manifest import check_files, is_complete

pytestmark = pytest.mark.slow

NUM_STEPS = 200
TASK = """
import os, signal, time
from pathlib import Path
from lit_fsdp.tasks import CausalLM

class Watched(CausalLM):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 0:
            Path("step").write_text(str(self.trainer.global_step))
        time.sleep(0.01)
        # However late the test is, no run gets past the steps in which it is to be interrupted.
        while Path("limit").exists() and self.trainer.global_step >= int(Path("limit").read_text() or 0):
            time.sleep(0.01)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        time.sleep(0.01)
        return super().validation_step(batch, batch_idx)
"""
RUN = ("fit", "--config=run.yaml", "--ckpt_path=last")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "watched.py").write_text(TASK)
    return tmp_path


def configure(folder: Path, *, every: int, is_async: bool, max_steps: int = NUM_STEPS) -> None:
    saves = {"every_n_train_steps": every, "save_top_k": 2, "monitor": "step", "mode": "max", "save_last": "link"}
    checkpoint = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": saves}
    strategy = {"class_path": "lit_fsdp.FSDP2Strategy", "init_args": {"async_save": is_async}}
    trainer = {"max_steps": max_steps, "max_epochs": -1, "val_check_interval": 3, "limit_val_batches": 2}
    trainer |= {"callbacks": [checkpoint], "strategy": strategy, "num_sanity_val_steps": 1}
    write_run(folder, trainer=trainer, data={"validation": "train.jsonl"})


def fit(name: str, *options: str, meanwhile: Callable[[list[int]], None] | None = None) -> list[Ended]:
    args = (*RUN, "--model.class_path=watched.Watched", f"--run_name={name}", *options)
    return fork_ranks(*args, timeout_s=600, meanwhile=meanwhile)


def read_losses(name: str) -> dict[int, float]:
    """The loss by step, over all versions of a run; a step that two of them did must be the same."""
    losses: dict[int, float] = {}
    for path in sorted(Path("runs", name).glob("version_*/metrics.csv")):
        with path.open() as file:
            rows = {int(row["step"]): float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]}
        assert {step: losses[step] for step in rows.keys() & losses} == {s: rows[s] for s in rows.keys() & losses}
        losses |= rows
    return losses


def read_step() -> int:
    return int(Path("step").read_text() or -1) if Path("step").exists() else -1


def wait_for(is_true: Callable[[], bool], pids: list[int], timeout_s: float = 600) -> None:
    """Wait for something that happens before one of these processes ends."""
    deadline = time.monotonic() + timeout_s
    while not is_true() and time.monotonic() < deadline:
        if any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in pids):
            return
        time.sleep(0.001)


def list_checkpoints(name: str) -> Iterator[Path]:
    yield from (path for path in Path("runs", name).glob("version_*/checkpoints/*.ckpt") if not path.is_symlink())


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_twenty_signals_at_random_moments_leave_no_trace_in_the_losses(folder: Path, is_async: bool) -> None:
    configure(folder, every=7, is_async=is_async)
    assert [rank.code for rank in fit("whole")] == [0, 0]
    truth = read_losses("whole")
    assert len(truth) == NUM_STEPS
    Path("step").unlink()
    dice, limit = random.Random(int(is_async)), Path("limit")
    for k in range(20):
        goal = read_step() + dice.randint(1, 6)
        limit.write_text(str(goal + 3))

        def interrupt(pids: list[int], goal: int = goal) -> None:
            wait_for(lambda: read_step() >= goal, pids)
            time.sleep(dice.uniform(0, 0.05))
            number = dice.choice([signal.SIGTERM, signal.SIGUSR1])
            for pid in dice.choice([pids[:1], pids[1:], pids]) * dice.randint(1, 2):
                os.kill(pid, number)
            limit.write_text(str(NUM_STEPS))

        ranks = fit("broken", meanwhile=interrupt)
        assert [rank.code for rank in ranks] == [0, 0], (k, ranks[0].err + ranks[1].err)
        preempted = [path for path in list_checkpoints("broken") if path.name.startswith("preempted-")]
        assert len(preempted) == k + 1, ranks[0].err
        assert all(is_complete(path) for path in list_checkpoints("broken"))
    assert [rank.code for rank in fit("broken")] == [0, 0]
    assert read_losses("broken") == truth


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_run_killed_in_the_middle_of_a_save_goes_on_from_one_that_is_whole(folder: Path, is_async: bool) -> None:
    configure(folder, every=1, is_async=is_async, max_steps=10_000)
    dice = random.Random(2 + int(is_async))

    def list_incomplete() -> set[Path]:
        return set(Path("runs").glob("**/.*.incomplete"))

    def kill(pids: list[int], before: set[Path], wants_save: bool) -> None:
        start, saves = read_step(), dice.randint(1, 4)
        wait_for(lambda: read_step() > start + saves, pids)
        while True:
            wait_for(lambda: bool(list_incomplete() - before), pids)
            time.sleep(dice.uniform(0, 0.06))
            for pid in dice.choice([pids, pids[::-1]]):
                os.kill(pid, signal.SIGSTOP)
            if list_incomplete() - before or not wants_save:
                break
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    num_cut_short = 0
    for k in range(20):
        before = list_incomplete()
        ranks = fit("killed", meanwhile=partial(kill, before=before, wants_save=k % 2 == 0))
        assert [rank.code for rank in ranks] == [-9, -9], ranks[0].err + ranks[1].err
        num_cut_short += bool(list_incomplete() - before)
        for path in filter(is_complete, list_checkpoints("killed")):
            check_files(path, "full")
        newest = max(filter(is_complete, list_checkpoints("killed")), key=lambda path: path.stat().st_mtime)
        dcp_to_torch_save(newest, "plain.pt")
    assert num_cut_short >= 10
    done = read_step()
    ranks = fit("killed", f"--trainer.max_steps={done + 3}")
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].err + ranks[1].err
    assert read_step() == done + 2


@pytest.mark.parametrize("launcher", ["lightning", "torchrun"])
def test_a_signal_to_one_process_of_a_real_launch_ends_all_well(folder: Path, launcher: str) -> None:
    configure(folder, every=50, is_async=False)
    # The first rank is the launcher itself; it starts the other one from the same command.
    rank = {"lightning": "0", "torchrun": "1"}[launcher]
    (folder / "watched.py").write_text(TASK.replace("time.sleep(0.01)", SENDS.format(rank=rank), 1))
    args = (*RUN, "--model.class_path=watched.Watched", "--run_name=real")
    if launcher == "torchrun":
        ended = torchrun(*args)
    else:
        (ended,) = run_processes(["-m", "lit_fsdp", *args, "--trainer.devices=2"])
    assert ended.code == 0, ended.err
    assert [path.name for path in list_checkpoints("real")] == ["preempted-step=5.ckpt"]
    assert "preempted at step 5" in ended.err


SENDS = """
        if self.trainer.global_step == 3 and self.trainer.global_rank == {rank}:
            os.kill(os.getpid(), signal.SIGTERM)
"""
