"""A run can move between Lightning's own strategies and ours, through one checkpoint file."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from differences import find_largest
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from models import Stack
from torch.distributed.fsdp import fully_shard
from training import EVEN, TIED, Recorder, Result, Rows, build_task, build_trainer, fit_and_write, save_model
from transformers import AutoModelForCausalLM

from lit_fsdp import FSDP2Strategy
from lit_fsdp.checkpoint.single_file import (
    gather_model_state,
    gather_optimizer_state,
    load_single_file,
    save_single_file,
)
from lit_fsdp.checkpoint.writer import CheckpointWriter
from ranks import run_ranks

Make = Callable[[], Any]


def single() -> SingleDeviceStrategy:
    return SingleDeviceStrategy("cpu")


def fsdp2(checkpoint_format: Any = "single_file") -> FSDP2Strategy:
    return FSDP2Strategy(print_plan=False, checkpoint_format=checkpoint_format)


def train(make: Make, folder: Path, out: Path, max_steps: int, save: Path | None, load: Path | None) -> None:
    trainer = build_trainer(make(), callbacks=[Recorder()], max_steps=max_steps)
    fit_and_write(trainer, build_task(folder), Rows(64, 8 // trainer.world_size), out, save=save, load=load)


@pytest.mark.full(after=1)
@pytest.mark.parametrize(
    ("first", "first_ranks", "second", "second_ranks", "config"),
    [
        pytest.param(DDPStrategy, 2, fsdp2, 2, EVEN, marks=pytest.mark.slow),
        (single, 1, fsdp2, 4, TIED),
        pytest.param(fsdp2, 2, single, 1, TIED, marks=pytest.mark.slow),
        (fsdp2, 2, DDPStrategy, 2, EVEN),
        (fsdp2, 2, lambda: fsdp2("sharded"), 4, EVEN),
    ],
    ids=["ddp to fsdp2", "single to fsdp2 tied", "fsdp2 to single tied", "fsdp2 to ddp", "file to folder"],
)
def test_a_run_goes_on_under_the_other_strategy(
    first: Make, first_ranks: int, second: Make, second_ranks: int, config: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", **config)
    path = tmp_path / "run.ckpt"
    run_ranks(train, first, folder, tmp_path / "whole", 8, None, None, world_size=first_ranks)
    run_ranks(train, first, folder, tmp_path / "half", 4, path, None, world_size=first_ranks)
    assert path.is_file()
    run_ranks(train, second, folder, tmp_path / "moved", 8, None, path, world_size=second_ranks)
    whole, moved = (Result(**torch.load(tmp_path / name)) for name in ("whole", "moved"))
    differences = [abs(a - b) for a, b in zip(whole.losses[4:], moved.losses[4:], strict=True)]
    assert find_largest(differences) <= 1e-6
    assert find_largest(float((whole.weights[n] - w).abs().max()) for n, w in moved.weights.items()) <= 1e-6


def load_refused(path: Path, folder: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_trainer(fsdp2()).fit(build_task(folder), Rows(64, 4), ckpt_path=path)


class NotPlain:
    """What a safe load refuses."""


@pytest.mark.full
def test_files_that_cannot_be_read_safely_or_do_not_fit_are_refused_on_every_rank(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    path = tmp_path / "some.ckpt"
    weights = {f"model.{n}": p for n, p in AutoModelForCausalLM.from_pretrained(folder).state_dict().items()}
    for content, message in (
        ({"state_dict": {}, "extra": NotPlain()}, r"some.ckpt cannot be read safely: it names \S+\.NotPlain;"),
        ({"weights": 1}, "no checkpoint of Lightning: it has no state_dict"),
        ({"state_dict": {}}, "some.ckpt lacks model.lm_head.weight"),
        ({"state_dict": {**weights, "model.more": torch.ones(1)}}, "some.ckpt holds model.more: it was saved"),
        (
            {"state_dict": {**weights, "model.model.norm.weight": torch.ones(3)}},
            r"norm.weight has shape \(3,\), the model's \(32,\)",
        ),
    ):
        torch.save(content, path)
        run_ranks(load_refused, path, folder, message)
    path.write_bytes(b"not a checkpoint")
    run_ranks(load_refused, path, folder, "is no checkpoint: expected a folder of ours")


def test_a_changed_byte_in_one_file_is_found_on_demand(tmp_path: Path) -> None:
    path = tmp_path / "some.ckpt"
    model = torch.nn.Linear(40, 50)
    save_single_file(path, {"state_dict": model.state_dict(), "epoch": 3})
    assert load_single_file(path, model, [], strict=True, verify="full") == {"epoch": 3}
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert load_single_file(path, model, [], strict=True) == {"epoch": 3}
    with pytest.raises(ValueError, match=r"some\.ckpt is damaged: the checksum of .*/data/\d differs"):
        load_single_file(path, model, [], strict=True, verify="full")


def load_what_was_never_stepped(path: Path) -> None:
    make: Any = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)  # noqa: E731
    whole = Stack()
    whole.last.requires_grad_(requires_grad=False)
    optimizer = make(whole)
    whole(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    names = [name for name, _ in whole.named_parameters()]
    stored = {"state_dict": whole.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    if torch.distributed.get_rank() == 0:
        torch.save(stored, path)
    torch.distributed.barrier()
    sharded = fully_shard(Stack())
    own = make(sharded)
    load_single_file(path, sharded, [own], strict=True)
    steps = {name: float(own.state.get(p, {}).get("step", 0.0)) for name, p in sharded.named_parameters()}
    assert steps == {name: 0.0 if name.startswith("last.") else 1.0 for name in names}


def test_parameters_that_were_never_stepped_begin_without_a_step(tmp_path: Path) -> None:
    run_ranks(load_what_was_never_stepped, tmp_path / "run.ckpt")


def load_with_others_frozen(path: Path, saved: str | None, loaded: str | None, message: str) -> None:
    def make(frozen: str | None) -> tuple[Any, Any]:
        model = fully_shard(Stack())
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen is None or not name.startswith(frozen))
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, torch.optim.AdamW(trained, lr=1e-3)

    model, optimizer = make(saved)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    state = {"state_dict": gather_model_state(model), "optimizer_states": [gather_optimizer_state(model, optimizer)]}
    save_single_file(path, state)
    model, optimizer = make(loaded)
    with pytest.raises(ValueError, match=message):
        load_single_file(path, model, [optimizer], strict=True)


@pytest.mark.parametrize(("saved", "loaded", "counts"), [(None, "last.", (20, 18)), ("last.", None, (18, 20))])
def test_other_parameters_that_train_are_refused(
    saved: str | None, loaded: str | None, counts: tuple[int, int], tmp_path: Path
) -> None:
    message = rf"state of a group of {counts[0]} parameters, the run has {counts[1]} there: resume it with the same"
    run_ranks(load_with_others_frozen, tmp_path / "run.ckpt", saved, loaded, message)


def resume_with_8_bit_states_of_torchao(folder: Path) -> None:
    low_bit = importlib.import_module("torchao.optim")
    inputs = torch.randn(2, 8, 128, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))

    def make() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = fully_shard(torch.nn.Linear(128, 128))
        return model, low_bit.AdamW8bit(model.parameters(), lr=1e-2)

    def step(model: Any, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return next(model.parameters()).full_tensor()

    model, optimizer = make()
    step(model, optimizer, inputs[0])
    state = {"state_dict": gather_model_state(model), "optimizer_states": [gather_optimizer_state(model, optimizer)]}
    save_single_file(folder / "run.ckpt", state)
    expected = step(model, optimizer, inputs[1])
    model, optimizer = make()
    load_single_file(folder / "run.ckpt", model, [optimizer], strict=True)
    assert torch.equal(step(model, optimizer, inputs[1]), expected)
    state = optimizer.state[next(model.parameters())]["exp_avg"].to_local()
    assert type(state).__name__ == "OptimState8bit"


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_8_bit_states_of_torchao_are_resumed_to_the_bit(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    run_ranks(resume_with_8_bit_states_of_torchao, tmp_path, world_size=ranks)


def test_one_file_is_not_written_beside_training() -> None:
    with pytest.raises(ValueError, match="leave one of them out"):
        CheckpointWriter(checkpoint_format="single_file", is_async=True, report=print)
