"""Trains tiny image classifiers under the Trainer on forked ranks, and in a plain torch loop to compare with."""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader
from training import GLOBAL_BATCH, NUM_STEPS, OPTIMIZER, Recorder, Result, build_trainer, gather_weights, train_stock
from transformers import AutoConfig, AutoModelForImageClassification

from lit_fsdp import FSDP2Strategy
from lit_fsdp.sharding.buffers import sync_buffers
from lit_fsdp.tasks import ImageClassification, ImageData, LRSchedule, Pixels
from lit_fsdp.tasks.image_classification.metrics import list_predictions
from lit_fsdp.tasks.loading import build_train_loader
from ranks import run_ranks

NUM_CLASSES, SIZE = 5, 16
# 33 and 35 rows leave the last of 2 ranks fewer than the first.
VIT = {
    "model_type": "vit",
    "image_size": SIZE,
    "patch_size": 4,
    "hidden_size": 33,
    "intermediate_size": 35,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
}
CONVNEXT = {"model_type": "convnext", "patch_size": 2, "num_stages": 2, "hidden_sizes": [9, 15], "depths": [2, 2]}
DINOV2 = {**VIT, "model_type": "dinov2", "num_hidden_layers": 2, "mlp_ratio": 1}
SIGLIP = {"model_type": "siglip", "vision_config": {k: v for k, v in VIT.items() if k != "model_type"}}
SWIN = {
    "model_type": "swin",
    "image_size": SIZE,
    "patch_size": 2,
    "embed_dim": 9,
    "depths": [2, 2],
    "num_heads": [3, 3],
    "window_size": 4,
    "drop_path_rate": 0.0,
}
RESNET = {"model_type": "resnet", "embedding_size": 7, "hidden_sizes": [9, 15], "depths": [1, 2], "layer_type": "basic"}
MODELS = {"vit": VIT, "convnext": CONVNEXT, "dinov2": DINOV2, "siglip": SIGLIP, "swin": SWIN, "resnet": RESNET}


def make_images(num_images: int = NUM_STEPS * GLOBAL_BATCH) -> list[dict[str, Any]]:
    """Return rows of which some have no class, so that a mean of means would be wrong."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(num_images):
        label = int(torch.randint(NUM_CLASSES, (), generator=generator))
        pixels = torch.randn(3, SIZE, SIZE, generator=generator) + label
        rows.append({"pixel_values": pixels, "labels": torch.tensor(-100 if i % 7 in (0, 1, 3) else label)})
    return rows


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack rows."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


class ImageRows(pl.LightningDataModule):
    """The rows of ``make_images`` in global order."""

    def __init__(self, batch_size: int, share: Any = None) -> None:
        super().__init__()
        self.batch_size, self.share = batch_size, share

    def train_dataloader(self) -> DataLoader[Any]:
        """Return this rank's share."""
        options: dict[str, Any] = {"collate": collate, "shuffle": False, "trainer": self.trainer, "share": self.share}
        return build_train_loader(make_images(), batch_size=self.batch_size, **options)


def save_classifier(folder: Path, config: dict[str, Any], num_classes: int = NUM_CLASSES) -> Path:
    """Write a random model that every run starts from."""
    torch.manual_seed(1)
    settings = AutoConfig.for_model(**config, num_labels=num_classes)
    model = AutoModelForImageClassification.from_config(settings)
    with torch.no_grad():  # layer scales of 1e-6 would hide all gradients behind them
        for name, parameter in model.named_parameters():
            if "layer_scale" in name:
                parameter.fill_(0.5)
    model.save_pretrained(folder)
    return folder


class WithLogits(ImageClassification):
    """Predicts the logits of all classes too."""

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, list[Any]]:
        """Return what is written, and ``logits``."""
        logits = self.compute_logits(batch["pixel_values"])
        return {**list_predictions(logits, batch, self.class_names), "logits": logits.tolist()}


def train_plainly(folder: Path, *, num_parts: int = 1, watch: Callable[[nn.Module], None] | None = None) -> Result:
    """Train on one device without Lightning, FSDP or our task.

    Args:
        folder: With the model.
        num_parts: How many parts of a batch are computed one by one: BatchNorm normalizes each by itself, as ranks do.
        watch: Called with the model before the first step and after each.
    """
    model = AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float32).train()
    rows, seen = make_images(), watch or (lambda _: None)

    def compute_loss(step: int) -> Tensor:
        seen(model)
        batch = collate(rows[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH])
        return torch.tensor(_add_gradients(model, batch, num_parts), dtype=torch.float64)

    result = train_stock(model, compute_loss)
    seen(model)
    state = model.state_dict()
    result.weights = {name: value.detach() for name, value in state.items() if value.is_floating_point()}
    return result


def _add_gradients(model: nn.Module, batch: dict[str, Tensor], num_parts: int) -> float:
    """Return the mean loss; every part begins with the running statistics of before, and their mean stays."""
    statistics = [buffer for name, buffer in model.named_buffers() if "running" in name]
    before, found, loss_sum = [buffer.clone() for buffer in statistics], [], 0.0
    num_targets = (batch["labels"] != -100).sum()
    for pixels, labels in zip(*(batch[name].chunk(num_parts) for name in ("pixel_values", "labels")), strict=True):
        for buffer, value in zip(statistics, before, strict=True):
            buffer.copy_(value)
        logits = model(pixel_values=pixels).logits
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum") / num_targets
        loss.backward()
        loss_sum += float(loss.detach())
        found.append([buffer.clone() for buffer in statistics])
    for buffer, *values in zip(statistics, *found, strict=True):
        buffer.copy_(torch.stack(values).mean(0))
    return loss_sum


def fit(
    folder: Path, out: Path, strategy: dict[str, Any], options: dict[str, Any], task_options: dict[str, Any]
) -> None:
    """Train on this rank; rank 0 writes the result."""
    accumulate, share = options.get("accumulate_grad_batches", 1), options.pop("share", None)
    recorder = Recorder()
    trainer = build_trainer(FSDP2Strategy(print_plan=False, **strategy), callbacks=[recorder], **options)
    settings = {"num_classes": NUM_CLASSES, "head": "keep", "lr_scheduler": LRSchedule(type="constant"), **task_options}
    task = ImageClassification(pretrained=str(folder), optimizer=OPTIMIZER, **settings)
    trainer.fit(task, ImageRows(GLOBAL_BATCH // dist.get_world_size() // accumulate, share))
    sync_buffers(task.model)  # as before an evaluation or a checkpoint
    recorder.result.weights = gather_weights(task)  # type: ignore[arg-type]
    if trainer.is_global_zero:
        torch.save(vars(recorder.result), out)


def train_sharded(
    folder: Path,
    tmp_path: Path,
    *,
    world_size: int,
    strategy: dict[str, Any],
    task: dict[str, Any] | None = None,
    **options: Any,
) -> Result:
    """Train under ``FSDP2Strategy(**strategy)`` and ``Trainer(**options)`` on forked ranks."""
    out = tmp_path / "result.pt"
    run_ranks(fit, folder, out, strategy, options, task or {}, world_size=world_size)
    return Result(**torch.load(out))


def write_folder(folder: Path, counts: dict[str, int], *, size: tuple[int, int] = (20, 24)) -> Path:
    """Write ``folder/<class>/<number>.png``: squares of a grey of their class, with some noise."""
    generator = np.random.default_rng(0)
    for number, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            grey = 40 + 70 * number + generator.integers(0, 20, (size[1], size[0], 3))
            Image.fromarray(grey.astype(np.uint8)).save(folder / name / f"{i:03d}.png")
    return folder


def make_data(folder: Path, **options: Any) -> ImageData:
    """Return 25 images to train on and 9 to test on, of three classes."""
    if not (folder / "train").exists():
        write_folder(folder / "train", {"cat": 9, "dog": 8, "eel": 8})
        write_folder(folder / "test", {"cat": 4, "dog": 2, "eel": 3})
    train, test = str(folder / "train"), str(folder / "test")
    settings: dict[str, Any] = {
        "train": train,
        "validation": test,
        "test": test,
        "predict": test,
        "processor": Pixels(size=SIZE),
    }
    return ImageData(**{**settings, "batch_size": 2, "num_workers": 0, **options})


def list_files(folder: Path) -> list[tuple[str, str]]:
    """Return images below a folder, and their classes."""
    return [(str(p.relative_to(folder)), p.parent.name) for p in sorted(folder.rglob("*.png"))]


def write_shards(folder: Path, out: Path, suffix: str = "cls") -> str:
    """Write the images of a folder into two tar files in the layout of WebDataset; return their pattern."""
    files = list_files(folder)
    for shard in range(2):
        with tarfile.open(out / f"part-{shard:03d}.tar", "w") as tar:
            for i, (name, label) in enumerate(files[shard * 4 : shard * 4 + 4]):
                text = label.encode() if suffix == "cls" else json.dumps({"label": label}).encode()
                for ending, content in (("png", (folder / name).read_bytes()), (suffix, text)):
                    info = tarfile.TarInfo(f"a/{shard}{i}.{ending}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return str(out / "part-{000..001}.tar")
