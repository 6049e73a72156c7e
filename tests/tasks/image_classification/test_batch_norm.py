"""Models with BatchNorm are evaluated and saved with the same statistics on all ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from image_training import make_data
from training import build_trainer

from lit_fsdp import FSDP2Strategy
from lit_fsdp.tasks import ImageClassification, LRSchedule
from ranks import run_ranks

RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}


def train_and_validate_again(folder: Path) -> None:
    torch.manual_seed(0)
    options = {"max_steps": 3, "num_sanity_val_steps": 0, "check_val_every_n_epoch": 2}
    trainer = build_trainer(FSDP2Strategy(print_plan=False), **options)
    task = ImageClassification(config=RESNET, lr_scheduler=LRSchedule(type="constant"))
    data = make_data(folder)
    trainer.fit(task, datamodule=data)
    name = "resnet.embedder.embedder.normalization.running_mean"
    own = task.model.get_buffer(name).clone()  # type: ignore[union-attr]
    trainer.save_checkpoint(folder / "last.ckpt")
    saved = task.model.get_buffer(name).clone()  # type: ignore[union-attr]
    before = trainer.validate(task, datamodule=data, verbose=False)
    again = build_trainer(FSDP2Strategy(print_plan=False))
    task = ImageClassification(config=RESNET)
    after = again.validate(task, datamodule=data, verbose=False, ckpt_path=str(folder / "last.ckpt"))
    assert task.model is not None
    torch.save((own, saved, task.model.get_buffer(name), before, after), folder / f"{dist.get_rank()}.pt")


@pytest.mark.full
def test_a_checkpoint_holds_the_mean_of_all_ranks_and_validates_as_the_run_did(tmp_path: Path) -> None:
    make_data(tmp_path)
    run_ranks(train_and_validate_again, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert not torch.equal(first[0], second[0])
    mean = (first[0] + second[0]) / 2
    for _, saved, loaded, before, after in (first, second):
        assert torch.allclose(saved, mean, atol=1e-7)
        assert torch.equal(saved, loaded)
        assert before == after != []


def validate_alone(folder: Path) -> None:
    trainer = build_trainer(FSDP2Strategy(print_plan=False), max_steps=-1, max_epochs=1, num_sanity_val_steps=0)
    task = ImageClassification(config=RESNET, lr_scheduler=LRSchedule(type="constant"))
    seen: list[torch.Tensor] = []
    start = task.on_validation_epoch_start

    def look() -> None:
        start()
        seen.extend(b.clone() for n, b in task.model.named_buffers() if "running" in n)  # type: ignore[union-attr]

    task.on_validation_epoch_start = look  # type: ignore[method-assign]
    trainer.fit(task, datamodule=make_data(folder))
    torch.save(seen, folder / f"{dist.get_rank()}.pt")


@pytest.mark.full
def test_a_validation_inside_of_training_sees_one_model_on_all_ranks(tmp_path: Path) -> None:
    make_data(tmp_path)
    run_ranks(validate_alone, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert len(first) >= 10
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
