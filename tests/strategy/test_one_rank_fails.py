"""An error on one rank ends all ranks within seconds, and says what it was."""

from pathlib import Path

import pytest
from launches import Ended, fork_ranks, run_processes, torchrun, write_run

PLACES = ("backward", "optimizer", "validation", "worker", "checkpoint")
TASK = """
import os, signal
import torch
import lit_fsdp.checkpoint.sharded
from lit_fsdp.tasks import CausalLM, TextData

def fail(*args, **kwargs):
    raise OSError("only this rank")

class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):
        return loss * 1
    backward = fail

class Broken(torch.utils.data.Dataset):
    def __init__(self, length):
        self.length = length
    def __len__(self):
        return self.length
    __getitem__ = fail

class LoneTask(CausalLM):
    def __init__(self, *, place: str, **kwargs):
        super().__init__(**kwargs)
        self.place = place

    def is_due(self, place):
        return self.place == place and self.trainer.global_rank == 1 and self.trainer.global_step == 2

    def on_fit_start(self):
        super().on_fit_start()
        if self.place == "checkpoint" and self.trainer.global_rank == 1:
            lit_fsdp.checkpoint.sharded.collect_random_state = lit_fsdp.checkpoint.sharded.describe_files = fail

    def backward(self, loss, *args, **kwargs):
        super().backward(Fail.apply(loss) if self.is_due("backward") else loss, *args, **kwargs)

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        if self.is_due("optimizer"):
            fail()
        if self.is_due("Ctrl-C"):
            os.kill(os.getpid(), signal.SIGINT)

    def validation_step(self, batch, batch_idx):
        if self.is_due("validation"):
            fail()
        return super().validation_step(batch, batch_idx)

class LoneData(TextData):
    def train_dataloader(self):
        loader = super().train_dataloader()
        if self.trainer.lightning_module.place == "worker" and self.trainer.global_rank == 1:
            return torch.utils.data.DataLoader(Broken(2 * len(loader)), num_workers=1)  # for two ranks
        return loader
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"every_n_train_steps": 1}}
    strategy = {"class_path": "lit_fsdp.FSDP2Strategy", "init_args": {"async_save": True}}
    trainer = {"max_steps": 50, "max_epochs": -1, "val_check_interval": 2, "callbacks": [saves], "strategy": strategy}
    write_run(tmp_path, trainer=trainer, data={"validation": "train.jsonl"})
    (tmp_path / "lone.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)


def options(place: str) -> tuple[str, ...]:
    task = ("--model.class_path=lone.LoneTask", f"--model.place={place}", "--data.class_path=lone.LoneData")
    return ("fit", "--config=run.yaml", *task)


def check(ended: Ended, place: str, *, is_collective: bool) -> None:
    assert ended.code == 1, ended.err
    assert "only this rank" in ended.err
    if not is_collective:  # else both ranks raise the same
        others = [line for line in ended.errors if "failed first, see the message there" in line]
        assert len(others) <= 1


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
def test_the_other_rank_does_not_wait_for_the_process_group_to_time_out(place: str) -> None:
    ranks = fork_ranks(*options(place))
    assert [rank.code for rank in ranks] == [1, 1], ranks[0].err + ranks[1].err
    if place == "checkpoint":  # both raise the same, which the first says for all
        assert "saving a checkpoint beside training failed: rank 1: only this rank" in ranks[0].err
    else:
        assert "only this rank" in ranks[1].err
        assert ranks[0].errors[0].startswith("error: another rank failed first, see the message there")


@pytest.mark.full
def test_a_rank_that_is_interrupted_alone_says_so() -> None:
    ranks = fork_ranks(*options("Ctrl-C"))
    assert [rank.code for rank in ranks] == [1, 1], ranks[0].err + ranks[1].err
    assert ranks[0].errors[0].startswith("error: another rank failed first, see the message there")
    (line,) = ranks[1].errors
    assert line.startswith("[rank 1] error: interrupted: --ckpt_path last goes on from runs/")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["lightning", "torchrun"])
@pytest.mark.parametrize("place", PLACES)
def test_real_launchers_end_all_processes_soon(place: str, launcher: str) -> None:
    # A rank that waited for the process group to time out, after half an hour, would be killed, and have no exit code.
    if launcher == "torchrun":
        ended = torchrun(*options(place))
    else:
        (ended,) = run_processes(["-m", "lit_fsdp", *options(place), "--trainer.devices=2"])
    check(ended, place, is_collective=place == "checkpoint")
