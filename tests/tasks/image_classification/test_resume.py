"""An interrupted run of a classifier goes on as if it had not been interrupted."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from image_training import NUM_CLASSES, VIT, ImageRows, make_data, save_classifier
from training import OPTIMIZER, build_trainer

from lit_fsdp import FSDP2Strategy
from lit_fsdp.tasks import Augmentation, ImageClassification, LRSchedule, Mixup, Optimizer
from ranks import RankError, run_ranks

NUM_STEPS = 11  # of 6 an epoch


class Follow(pl.Callback):
    """Keeps the loss of every step; saves in the middle of the first and of the second epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.losses.append(float(module.step_loss))
        if trainer.global_step in (4, 8) and trainer.ckpt_path is None:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def train(folder: Path, task_options: dict[str, Any], path: str | None, num_workers: int) -> None:
    follow = Follow(folder)
    options: dict[str, Any] = {"max_steps": NUM_STEPS, "limit_val_batches": 0}
    trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[follow], **options)
    settings: dict[str, Any] = {"config": VIT, "optimizer": OPTIMIZER, "lr_scheduler": LRSchedule(type="constant")}
    task = ImageClassification(**{**settings, **task_options})
    augmentation = Augmentation(crop_scale=(0.3, 1.0), erasing=0.5)
    batch_size = 4 // dist.get_world_size()
    data = make_data(folder, augmentation=augmentation, batch_size=batch_size, num_workers=num_workers)
    trainer.fit(task, datamodule=data, ckpt_path=path)
    if trainer.is_global_zero:
        torch.save(follow.losses, folder / "losses.pt")


def train_and_read(folder: Path, *args: Any, world_size: int) -> list[float]:
    run_ranks(train, folder, *args, world_size=world_size)
    return list(torch.load(folder / "losses.pt"))


@pytest.mark.full
def test_a_run_on_mixtures_of_changed_images_goes_on_exactly_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    make_data(tmp_path)
    torch.manual_seed(0)
    options = {"config": {**VIT, "hidden_dropout_prob": 0.1}, "mixup": Mixup(mixup_alpha=0.8, cutmix_alpha=1.0)}
    whole = train_and_read(tmp_path, options, None, 0, world_size=2)
    assert len(set(whole)) == NUM_STEPS
    for step, num_workers in ((4, 0), (8, 1)):
        rest = train_and_read(tmp_path, options, str(tmp_path / f"{step}.ckpt"), num_workers, world_size=2)
        assert rest == whole[step:]


@pytest.mark.full
def test_on_another_number_of_ranks_it_goes_on_with_the_same_images(tmp_path: Path) -> None:
    make_data(tmp_path)
    torch.manual_seed(0)
    whole = train_and_read(tmp_path, {}, None, 0, world_size=2)
    rest = train_and_read(tmp_path, {}, str(tmp_path / "4.ckpt"), 0, world_size=1)
    assert rest == pytest.approx(whole[4:], abs=1e-6)


def resume(model: Path, out: Path, options: dict[str, Any], path: str | None) -> None:
    trainer = build_trainer(FSDP2Strategy(print_plan=False), max_steps=2 if path is None else 4)
    settings: dict[str, Any] = {"pretrained": str(model), "num_classes": NUM_CLASSES, "head": "keep", **options}
    trainer.fit(ImageClassification(**settings), ImageRows(2), ckpt_path=path)
    if path is None:
        trainer.save_checkpoint(out)


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            {},
            {"layer_decay": 0.5},
            r"holds 2 groups .* the run has 10: resume it with the optimizer\.name and layer_decay",
        ),
        ({}, {"optimizer": Optimizer(name="muon")}, r"holds 2 groups .* the run has 3: resume it with the optimizer"),
        ({"layer_decay": 0.5}, {}, r"holds 10 groups .* the run has 2"),
    ],
)
def test_a_resume_with_other_groups_of_parameters_is_refused(
    before: dict[str, Any], after: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model, path = save_classifier(tmp_path / "model", VIT), tmp_path / "last.ckpt"
    run_ranks(resume, model, path, before, None, world_size=1)
    with pytest.raises(RankError, match=rf"ValueError: .*{message}"):
        run_ranks(resume, model, path, after, str(path), world_size=1)
