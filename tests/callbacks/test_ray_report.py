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
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from lit_fsdp.callbacks.ray_report import RayReport, find_reported_checkpoint
from lit_fsdp.checkpoint.latest import SAVE_NUMBER


class StandIn(ModuleType):
    """As much of ``ray.train`` as a worker needs to report."""

    def __init__(self, kept: Path) -> None:
        super().__init__("ray.train")
        self.kept = kept
        self.Checkpoint = SimpleNamespace(from_directory=lambda folder: folder)

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
