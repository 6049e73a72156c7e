"""``fsdp2_auto``: what it chooses when a run starts, and that training is the same."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launches import OURS, fork_ranks, write_run
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.distributed.tensor import DTensor
from training import EVEN, GLOBAL_BATCH, LENGTH, Recorder, Rows, build_task, build_trainer, save_model

from lit_fsdp import AutoFSDP2Strategy, FSDP2Strategy, Mesh
from lit_fsdp.planning.search.search import Problem
from lit_fsdp.sharding.mesh import get_fsdp_mesh
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.shard import Sharding
from ranks import run_ranks

MODEL = {**EVEN, "hidden_size": 128, "intermediate_size": 512}
COPIES = Mesh(replicate=-1, shard=1)  # the fastest where a copy fits on each


class Data(Rows):
    """Says how large its batches are."""

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def make_example_batch(self) -> dict[str, torch.Tensor]:
        ids = torch.zeros(self.batch_size, LENGTH, dtype=torch.int64)
        return {"input_ids": ids, "labels": ids}


def fit(folder: Path, strategy: FSDP2Strategy) -> list[float]:
    recorder = Recorder()
    trainer = build_trainer(strategy, callbacks=[recorder], max_steps=3)
    trainer.fit(build_task(folder), Data(EVEN["vocab_size"], GLOBAL_BATCH // dist.get_world_size()))
    return recorder.result.losses


def train_both_ways(folder: Path) -> None:
    roomy, tight = AutoFSDP2Strategy(), AutoFSDP2Strategy(device_memory="1025.7MiB")
    expected = fit(folder, FSDP2Strategy(print_plan=False))
    for strategy in (roomy, tight):
        assert fit(folder, strategy) == pytest.approx(expected, rel=1e-6)
    assert roomy.settings.activation_checkpointing.mode == "none"
    assert roomy.settings.mesh == COPIES
    assert tight.settings != roomy.settings
    settings: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(settings, tight.settings)
    assert settings == [tight.settings] * dist.get_world_size()


@pytest.mark.full
def test_training_is_the_same_with_settings_that_fit_the_memory(tmp_path: Path) -> None:
    run_ranks(train_both_ways, save_model(tmp_path / "model", **MODEL), world_size=2)


def fail(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"fsdp2_auto: nothing fits: the smallest has .* take more GPUs"):
        fit(folder, AutoFSDP2Strategy(device_memory="1KiB"))
    trainer = build_trainer(AutoFSDP2Strategy(), max_steps=1)
    with pytest.raises(
        ValueError, match=r"fsdp2_auto: data: .*has no method make_example_batch.* set trainer.strategy"
    ):
        trainer.fit(build_task(folder), Rows(EVEN["vocab_size"], GLOBAL_BATCH))


def test_what_it_cannot_choose_for_is_refused_before_anything_is_sharded(tmp_path: Path) -> None:
    run_ranks(fail, save_model(tmp_path / "model", **MODEL), world_size=1)


class PlainData(Rows):
    """Does not say how large its batches are."""

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def evaluate(folder: Path) -> None:
    data = Data(EVEN["vocab_size"], GLOBAL_BATCH)
    task, strategy = build_task(folder), AutoFSDP2Strategy()
    task.validation_step = lambda *_: None  # type: ignore[method-assign]
    trainer = build_trainer(strategy, limit_val_batches=1)
    trainer.validate(task, data)
    chosen = strategy.settings
    assert chosen.mesh == COPIES
    # Another module, of which nothing is known, and the first one again: each on the mesh that it is sharded over.
    other = build_task(folder)
    other.validation_step = lambda *_: None  # type: ignore[method-assign]
    sizes = []
    for module, rows in ((other, PlainData(EVEN["vocab_size"], GLOBAL_BATCH)), (task, data)):
        trainer.validate(module, rows)
        assert strategy.device_mesh is not None
        sizes.append((strategy.settings.mesh, get_fsdp_mesh(strategy.device_mesh).shape))
        weight = next(p for p in module.parameters() if isinstance(p, DTensor))
        assert weight.device_mesh.shape == sizes[-1][1]
    assert sizes == [(Mesh(), (2,)), (COPIES, (2, 1))]
    # The same module again, under a strategy that would choose for itself.
    again = AutoFSDP2Strategy(device_memory="1025.7MiB")
    build_trainer(again, max_steps=1).fit(task, data)
    assert again.settings == chosen


def test_a_module_that_is_sharded_already_stays_as_it_is(tmp_path: Path) -> None:
    run_ranks(evaluate, save_model(tmp_path / "model", **MODEL), world_size=2)


def choose_beside_others(patch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 share a card of which another process has half; rank 2 has one of its own, with less."""
    rank, gib = dist.get_rank(), 2**30
    free, reserved = [(7.0, 2.0), (7.5, 1.0), (4.0, 1.5)][rank]
    card = SimpleNamespace(name="NVIDIA GeForce RTX 4060 Ti", uuid=f"GPU-{rank // 2}")  # sold with 8 and with 16
    patch.setattr(torch.cuda, "mem_get_info", lambda _: (int(free * gib), 16 * gib))
    patch.setattr(torch.cuda, "memory_reserved", lambda _: int(reserved * gib))
    patch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    for device_memory, expected, note in (
        (None, 5.0, "free on the GPU of rank 0 for each of the 2 ranks on it, which has 16.00 GiB"),
        ("3GiB", 3.0, "device_memory"),
    ):
        strategy = AutoFSDP2Strategy(device_memory=device_memory)
        patch.setattr(AutoFSDP2Strategy, "root_device", torch.device("cuda", 0))
        patch.setattr(AutoFSDP2Strategy, "world_size", dist.get_world_size())
        patch.setattr(AutoFSDP2Strategy, "barrier", lambda _: None)
        patch.setattr(AutoFSDP2Strategy, "num_processes", 3)
        hardware, num_bytes = strategy.choose_hardware()
        assert (num_bytes / gib, strategy.memory_note) == (expected, note)
        assert hardware.gpu.memory_gib == 16  # of the card, not of what is free on it


def test_memory_is_what_is_free_and_what_this_process_holds_shared_by_the_ranks_of_a_card() -> None:
    with pytest.MonkeyPatch.context() as patch:
        run_ranks(choose_beside_others, patch, world_size=3)


def warn(folder: Path) -> None:
    with pytest.warns(UserWarning, match="nothing fits with headroom"):
        fit(folder, AutoFSDP2Strategy(device_memory="500MiB"))


def test_what_fits_without_headroom_only_is_tried_with_a_warning(tmp_path: Path) -> None:
    run_ranks(warn, save_model(tmp_path / "model", **MODEL), world_size=1)


def choose_on_unequal_hosts(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("lit_fsdp.planning.auto_strategy.count_host_bytes", lambda: (8 - 4 * dist.get_rank()) * 2**30)
    seen = []

    def note(problem: Problem) -> None:
        seen.append(problem.host_bytes)
        raise ValueError("noted")

    patch.setattr("lit_fsdp.planning.auto_strategy.search", note)
    with pytest.raises(ValueError, match="noted"):
        fit(folder, AutoFSDP2Strategy())
    assert seen == [4 * 2**30]


def test_all_ranks_choose_for_the_host_with_the_least_memory(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        run_ranks(choose_on_unequal_hosts, save_model(tmp_path / "model", **MODEL), patch)


def fit_after_one_that_held_gradients(folder: Path) -> None:
    strategy = AutoFSDP2Strategy()
    strategy.settings = Settings(sharding=Sharding(no_sync=True))  # as a fit before chose, which accumulated
    fit(folder, strategy)
    assert not strategy.settings.sharding.no_sync


def fit_again(folder: Path) -> None:
    # Of a module that is sharded, what was chosen for accumulated gradients stays.
    module, held = BoringModel(), FSDP2Strategy(sharding=Sharding(no_sync=True))
    build_trainer(held, max_steps=1, accumulate_grad_batches=2).fit(module)
    build_trainer(strategy := AutoFSDP2Strategy(), max_steps=1).fit(module)
    assert strategy.settings.sharding.no_sync


def test_what_an_earlier_fit_chose_is_not_refused_beside_another_accumulation(tmp_path: Path) -> None:
    run_ranks(fit_again, tmp_path, world_size=1)
    run_ranks(fit_after_one_that_held_gradients, save_model(tmp_path / "model", **MODEL), world_size=1)


def test_settings_that_cannot_work_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="device_memory: got '8 GPUs'"):
        AutoFSDP2Strategy(device_memory="8 GPUs")
    with pytest.raises(ValueError, match="link: got 'string'"):
        AutoFSDP2Strategy(link="string")


@pytest.mark.full
def test_it_has_a_name_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    write_run(tmp_path, trainer={"strategy": "fsdp2_auto", "enable_checkpointing": False})
    ended = fork_ranks("fit", "--config=run.yaml")
    assert [rank.code for rank in ended] == [0, 0], ended[0].err
    said = ended[0].err + ended[0].out
    assert "fsdp2_auto: mesh.replicate=-1, mesh.shard=1: " in said
    assert "of the time of the defaults" in said
