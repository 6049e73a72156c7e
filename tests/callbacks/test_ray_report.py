"""What a run reports to Ray is where the next start of it looks."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader
from training import build_trainer

from lit_fsdp import FSDP2Strategy
from lit_fsdp.callbacks.ray_report import RayReport, find_reported_checkpoint
from lit_fsdp.checkpoint.latest import SAVE_NUMBER
from ranks import run_ranks


class StandIn(ModuleType):
    """As much of ``ray.train`` as a worker needs to report."""

    def __init__(self, kept: Path) -> None:
        super().__init__("ray.train")
        self.kept = kept
        self.Checkpoint = SimpleNamespace(from_directory=lambda folder: folder)
        self.get_context = lambda: SimpleNamespace(get_world_rank=lambda: 0)

    def report(self, _: Any, folder: str | None) -> None:
        if folder is not None:
            copytree(folder, self.kept, dirs_exist_ok=True)

    def get_checkpoint(self) -> Any:
        @contextmanager
        def give() -> Iterator[str]:
            yield str(self.kept)

        return SimpleNamespace(as_directory=give)


def save(path: Path, number: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"state_dict": {}, SAVE_NUMBER: number}, path)
    return path


@pytest.mark.parametrize("name", ["step={}.ckpt", "step={}-val/loss=0.5.ckpt"])
def test_a_checkpoint_that_took_the_place_of_the_reported_one_is_found(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.train", StandIn(tmp_path / "kept"))
    folder = tmp_path / "runs" / "lr=1"
    save(tmp_path / "runs" / "lr=2" / "last.ckpt", 9)  # of another run
    options: dict[str, Any] = {"logger": False, "accelerator": "cpu", "devices": 1}
    trainer = Trainer(callbacks=[ModelCheckpoint(folder)], **options)
    callback, module = RayReport(), BoringModel()
    callback.on_train_start(trainer, module)
    reported = save(folder / name.format(6), 1)
    callback.on_fit_end(trainer, module)
    assert find_reported_checkpoint() == str(reported)
    newer = save(folder / name.format(8), 2)
    reported.unlink()
    assert find_reported_checkpoint() == str(newer)


def test_no_micro_batch_begins_with_a_broadcast_about_signals_that_a_worker_never_gets(tmp_path: Path) -> None:
    def body() -> None:
        sys.modules.update({"ray": ModuleType("ray"), "ray.train": StandIn(tmp_path / f"kept{dist.get_rank()}")})
        sys.modules["ray"].train = sys.modules["ray.train"]  # type: ignore[attr-defined]
        sources, broadcast = list[Any](), dist.broadcast
        dist.broadcast = lambda *args, **options: (
            sources.append(sys._getframe(1).f_code.co_name) or broadcast(*args, **options)
        )
        for callbacks, expected in (([], 3), ([RayReport()], 0)):
            sources.clear()
            trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=callbacks, max_steps=3)
            trainer.fit(BoringModel(), DataLoader(torch.randn(8, 32)))
            assert sources.count("_broadcast_sigterm_tensor") == expected, sources

    run_ranks(body)
