"""From an image to what the model sees: evaluation by the model's own processor, training with changes on top."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from PIL import Image
from torch import Tensor

from lit_fsdp.errors import get_first_line
from lit_fsdp.tasks.image_classification.augmentation import Augmentation, change_colors, crop_and_flip, erase
from lit_fsdp.tasks.loading import mix_seeds
from lit_fsdp.tasks.pretrained import quiet_transformers
from lit_fsdp.weights.base_weights import PROCESSOR, fetch_pretrained, get_pretrained_folder

PROCESSOR_FILE = "preprocessor_config.json"


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """How images become numbers where no model says it.

    Args:
        size: Height and width that the model takes.
        mean: Of each color, taken away from values between 0 and 1.
        std: Of each color, by which they are divided then.
        crop_fraction: Below 1, the shorter side is resized to ``size`` divided by this and the middle is cut out, so
            that proportions stay; 1 resizes the whole image to a square.
    """

    size: int = 224
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    crop_fraction: float = 1.0

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # YAML gives lists

    def check(self) -> None:
        """Refuse values that no image could be made with."""
        rules = {
            "size": (self.size >= 1, "1 or more"),
            "std": (min(self.std) > 0, "three numbers above 0"),
            "crop_fraction": (0 < self.crop_fraction <= 1, "above 0, up to 1"),
        }
        for name, (is_right, expected) in rules.items():
            if not is_right:
                raise ValueError(f"processor.{name}: got {getattr(self, name)!r}: expected {expected}")

    def build(self) -> Any:
        """Return an image processor of Transformers that does so, and needs no torchvision."""
        from transformers import BitImageProcessorPil, ViTImageProcessorPil

        size = {"height": self.size, "width": self.size}
        options: dict[str, Any] = {
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
            "do_resize": True,
            "resample": int(Image.Resampling.BICUBIC),
        }
        if self.crop_fraction == 1:
            return ViTImageProcessorPil(size=size, **options)
        shortest = {"shortest_edge": round(self.size / self.crop_fraction)}
        return BitImageProcessorPil(size=shortest, do_center_crop=True, crop_size=size, **options)


class Preprocessing:
    """Makes tensors of images.

    Args:
        processor: Of Transformers.
        augmentation: How training images are changed; ``None`` prepares them as for evaluation.
    """

    def __init__(self, processor: Any, augmentation: Augmentation | None) -> None:
        self.processor = processor
        self.augmentation = augmentation
        height, width = self.for_evaluation(Image.new("RGB", (64, 48))).shape[-2:]
        self.size = (height, width)
        is_scaled, is_normal = (getattr(processor, n, None) for n in ("do_rescale", "do_normalize"))
        factor = (processor.rescale_factor if is_scaled else 1.0) or 1.0
        mean, std = (processor.image_mean, processor.image_std) if is_normal else ((0.0,) * 3, (1.0,) * 3)
        self._scale = torch.tensor([factor / s for s in std])[:, None, None]  # [3, 1, 1]
        self._shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)])[:, None, None]
        resample = getattr(processor, "resample", None)
        self._resample = int(Image.Resampling.BICUBIC if resample is None else resample)
        self._check()

    def _check(self) -> None:
        """Refuse a processor whose images training would see otherwise than evaluation."""
        name = type(self.processor).__name__
        other = tuple(self.for_evaluation(Image.new("RGB", (48, 64))).shape[-2:])
        if other != self.size:
            raise ValueError(
                f"processor: {name} makes images of {self.size} and {other} of a wide and a tall one: expected one "
                "size; set processor: {size: ...}"
            )
        color = (20, 100, 220)  # which no resizing and no crop changes
        seen = self.for_evaluation(Image.new("RGB", (64, 48), color)).mean((1, 2))
        trained = (torch.tensor(color)[:, None, None] * self._scale + self._shift).flatten()
        if self.augmentation is not None and not torch.allclose(seen, trained, atol=0.02):
            raise ValueError(
                f"processor: {name} does more to colors than to scale and normalize them once (evaluation would see "
                f"{seen.tolist()}, training {trained.tolist()}): set processor: {{size: ...}}, or augmentation: null"
            )

    def for_evaluation(self, image: Image.Image) -> Tensor:
        """Return ``float32`` [3, height, width] as the processor makes it."""
        return self.processor(images=image, return_tensors="pt")["pixel_values"][0]

    def for_training(self, image: Image.Image, seed: Sequence[int]) -> Tensor:
        """Return the same of an image that was changed at random; what is drawn depends on the seed alone."""
        if self.augmentation is None:
            return self.for_evaluation(image)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(mix_seeds(*seed))
            image = crop_and_flip(image, self.augmentation, self.size, self._resample)
            pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)  # [3, height, width]
            pixels = change_colors(pixels, self.augmentation)
            return erase(pixels * self._scale + self._shift, self.augmentation)

    def describe(self) -> str:
        """Return the text of ``preprocessor_config.json``."""
        return str(self.processor.to_json_string())


def compare_colors(preprocessing: Preprocessing, pretrained: str, folder: Path) -> None:
    """Warn where the folder of a pretrained model says that it was trained on colors normalized otherwise."""
    path = folder / PROCESSOR_FILE
    if not path.is_file():
        return
    stored, own = json.loads(path.read_text()), preprocessing.processor
    for name in ("image_mean", "image_std"):
        was, now = stored.get(name), getattr(own, name, None)
        if stored.get("do_normalize", True) and was and now and not np.allclose(was, now, atol=1e-3):
            rank_zero_warn(
                f"data.processor: {name} is {list(now)}, and {pretrained} was trained with {was}; set data.processor "
                "to the name of the model, or to these"
            )


def load_processor(setting: str | Pixels) -> Any:
    """Return a processor of Transformers that needs no torchvision: of a model by name or folder, or of values."""
    if isinstance(setting, Pixels):
        return setting.build()
    from transformers import AutoImageProcessor

    fetch_pretrained(setting, "processor", PROCESSOR)
    try:
        with quiet_transformers():  # it advises torchvision, which would resize a little differently
            return AutoImageProcessor.from_pretrained(
                get_pretrained_folder(setting, PROCESSOR), backend="pil", trust_remote_code=False
            )
    except (OSError, ValueError, ImportError) as error:
        reason = get_first_line(error)
        raise ValueError(f"processor: got {setting!r}: {reason}") from error
