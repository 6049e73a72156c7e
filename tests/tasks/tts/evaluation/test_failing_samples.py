"""Speech of validation that fails: a warning and a line in the report, on all ranks, and training goes on."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from speech_training import build_data, build_task, build_trainer, make_rows
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from lit_fsdp.callbacks import SpokenReport
from lit_fsdp.strategy import shared_errors
from lit_fsdp.tasks import Sampling, SpeechEval
from lit_fsdp.tasks.tts.evaluation import speech_eval
from lit_fsdp.tasks.tts.preparation.prepared import write_shard
from ranks import RankError, run_ranks

SHORT = Sampling(do_sample=False, predictor_do_sample=False, max_frames=6)


class FailingBlock:
    """Fails inside a block, which is gathered then, at the third frame of each speech."""

    def __init__(self, task: Any, ranks: range) -> None:
        self.task, self.ranks, self.num_calls = task, ranks, 0

    def __call__(self, module: Any, inputs: Any) -> None:
        if self.task.training or module is not self.task.model.talker.model.layers[1].mlp:
            return
        self.num_calls = self.num_calls + 1 if inputs[0].shape[1] == 1 else 0  # a prompt has more positions
        if self.num_calls == 3 and dist.get_rank() in self.ranks:
            raise IndexError("index 64 is out of range")


class Gathered(pl.Callback):
    """Lists the parameters that are not sharded when a batch begins."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.names += [name for name, p in pl_module.named_parameters() if not isinstance(p, DTensor)]


def fail_at(place: str, task: Any, data: Any) -> None:
    if place == "block":
        torch.nn.modules.module.register_module_forward_pre_hook(FailingBlock(task, range(9)))
    elif place == "a block of rank 1":
        torch.nn.modules.module.register_module_forward_pre_hook(FailingBlock(task, range(1, 2)))
    elif place == "audio":

        def fail(*_: Any) -> None:
            raise OSError("no space left on device")

        speech_eval.write_audio = fail
    elif place == "the data of the last rank" and dist.get_rank() == dist.get_world_size() - 1:

        def refuse(_: Any) -> None:
            raise ValueError("language: got 'klingon'")

        data.encode_prompt = refuse


def fit(folder: Path, out: Path, place: str | None) -> None:
    pl.seed_everything(0, verbose=False)
    options = {"num_samples": 2, "speech_eval": SpeechEval(codec="formants"), "sampling": SHORT} if place else {}
    task, report, gathered = build_task(**options), SpokenReport(), Gathered()
    data = build_data(folder, validation=str(folder), batch_size=2)
    fail_at(place or "", task, data)
    trainer = build_trainer(
        callbacks=[report, gathered],
        val_check_interval=1,
        num_sanity_val_steps=0,
        logger=CSVLogger(out, name="", version=""),
    )
    trainer.fit(task, data)
    state = get_model_state_dict(task, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    section, logged = report.make_section(), {k: float(v) for k, v in trainer.callback_metrics.items()}
    numbers, notes = (section.numbers, section.notes) if section else ({}, [])
    found = {"step": trainer.global_step, "state": state, "gathered": gathered.names}
    found |= {"problems": dict(task.report.problems), "logged": logged, "numbers": numbers, "notes": notes}
    torch.save(found, out / f"{dist.get_rank()}.pt")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    write_shard(folder / "shard-00000.jsonl", make_rows(4))
    return folder


@pytest.fixture(scope="module")
def train_quietly(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Gives what is left of a run on so many ranks that generates no speech."""

    @cache
    def train(world_size: int) -> Any:
        folder = tmp_path_factory.mktemp("quiet")
        run_ranks(fit, prepared, folder, None, world_size=world_size)
        return torch.load(folder / "0.pt")

    return train


@pytest.mark.full
@pytest.mark.parametrize(
    ("place", "world_size", "problem"),
    [
        ("block", 2, "IndexError: index 64 is out of range"),
        ("block", 1, "IndexError: index 64 is out of range"),
        ("audio", 2, "RuntimeError: speech_eval failed on rank 0: OSError: no space left on device"),
        ("the data of the last rank", 2, "rank 1: ValueError: language: got 'klingon'"),
    ],
)
def test_training_goes_on_as_if_nobody_had_listened(
    prepared: Path, tmp_path: Path, train_quietly: Any, place: str, world_size: int, problem: str
) -> None:
    run_ranks(fit, prepared, tmp_path, place, world_size=world_size)
    quiet = train_quietly(world_size)
    for rank in range(world_size):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found["step"] == 3
        assert found["problems"] == {problem: 1}
        assert math.isnan(found["logged"]["val/speaker_similarity"])
        assert math.isnan(found["logged"]["val/duration_ratio"]) == (place != "audio")
        assert found["numbers"]["warnings"] == [problem]
        assert f"Warning: {problem} (first at step 1)." in found["notes"]
        assert found["gathered"] == quiet["gathered"]  # no unit is left as it was when it failed
        if rank == 0:  # it alone has the full state
            assert found["state"].keys() == quiet["state"].keys()
            assert all(torch.equal(found["state"][name], tensor) for name, tensor in quiet["state"].items())


@pytest.mark.full
def test_a_rank_that_fails_alone_ends_the_run_soon(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_errors, "_PATIENCE_S", 1.0)
    with pytest.raises(RankError) as raised:
        run_ranks(fit, prepared, tmp_path, "a block of rank 1", world_size=2, timeout_s=100)
    assert "IndexError: index 64 is out of range" in str(raised.value)
    assert "rank 1 waited 1 s for rank 0, which did not come to the same place" in str(raised.value)
