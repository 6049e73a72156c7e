"""How training images are changed: crops and flips, policies of colour and shape, erasing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

Policy = Literal["none", "randaugment", "trivialaugment", "autoaugment"]
_CROP_TRIES = 10


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """How training images are changed; evaluation never changes them.

    What is drawn for an image depends on the seed, the epoch and its number in the data alone, so a run is the same
    at any number of ranks and workers, and after a resume. ``policy`` and ``color_jitter`` come from torchvision where
    it is installed, else from kornia: ``pip install -e ".[vision]"``.

    Args:
        crop_scale: Cut out a random part of this share of the area, and resize it to the model's size. ``[1, 1]``
            resizes the whole image.
        crop_ratio: Width by height of that part, from and to.
        flip: Probability of a horizontal flip.
        policy: Random operations of colour and shape, as in the papers of these names.
        policy_num_ops: For ``randaugment``: how many operations.
        policy_magnitude: For ``randaugment``: how strong, from 0 to 30; from kornia 1 to 29.
        color_jitter: How far brightness, contrast and saturation change, 0.4 for up to 40 %.
        erasing: Probability that a random rectangle is overwritten with noise.
    """

    crop_scale: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    policy: Policy = "none"
    policy_num_ops: int | None = None
    policy_magnitude: int | None = None
    color_jitter: float = 0.0
    erasing: float = 0.0

    def __post_init__(self) -> None:
        for name in ("crop_scale", "crop_ratio"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # YAML gives lists

    def check(self) -> None:
        """Refuse values that mean nothing, or would be ignored."""
        (low, high), (narrow, wide) = self.crop_scale, self.crop_ratio
        rules = {
            "crop_scale": (0 < low <= high <= 1, "two shares above 0 and up to 1, the smaller first"),
            "crop_ratio": (0 < narrow <= wide, "two ratios above 0, the smaller first"),
            "flip": (0 <= self.flip <= 1, "a probability from 0 to 1"),
            "erasing": (0 <= self.erasing <= 1, "a probability from 0 to 1"),
            "color_jitter": (0 <= self.color_jitter <= 1, "0 to 1"),
            "policy_num_ops": (self.policy_num_ops is None or self.policy_num_ops >= 1, "1 or more"),
            "policy_magnitude": (self.policy_magnitude is None or 0 <= self.policy_magnitude <= 30, "0 to 30"),
        }
        for name, (is_right, expected) in rules.items():
            if not is_right:
                raise ValueError(f"augmentation.{name}: got {getattr(self, name)!r}: expected {expected}")
        for name in ("policy_num_ops", "policy_magnitude"):
            if getattr(self, name) is not None and self.policy != "randaugment":
                raise ValueError(f"augmentation.{name}: not used by policy {self.policy!r}; set policy to randaugment")
        if self.needs_library and choose_library() == "kornia" and self.policy_magnitude in (0, 30):
            raise ValueError(
                f"augmentation.policy_magnitude: got {self.policy_magnitude}: kornia takes 1 to 29: set "
                f"{min(max(self.policy_magnitude, 1), 29)}, or install torchvision"
            )

    @property
    def needs_library(self) -> bool:
        """Whether another package does part of it."""
        return self.policy != "none" or self.color_jitter > 0


def choose_library() -> Literal["torchvision", "kornia"]:
    """Return which package changes colours and shapes."""
    from importlib.util import find_spec

    for name in ("torchvision", "kornia"):
        if find_spec(name) is not None:
            return name
    raise ValueError(
        "augmentation: policy and color_jitter need torchvision or kornia: "
        'pip install -e ".[vision]"; or leave them out'
    )


def crop_and_flip(image: Image.Image, settings: Augmentation, size: tuple[int, int], resample: int) -> Image.Image:
    """Return a part of an RGB image at random, resized, maybe flipped. Draws from torch's generator."""
    box = _draw_box(image.size, settings)
    image = image.resize((size[1], size[0]), resample=Image.Resampling(resample), box=box)
    if settings.flip and float(torch.rand(())) < settings.flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return image


def _draw_box(size: tuple[int, int], settings: Augmentation) -> tuple[float, float, float, float]:
    """Return left, upper, right and lower of a part; the largest of a fitting ratio if no try fits, as torchvision."""
    width, height = size
    if settings.crop_scale == (1.0, 1.0):
        return 0, 0, width, height
    low, high = (math.log(ratio) for ratio in settings.crop_ratio)
    for _ in range(_CROP_TRIES):
        u = torch.rand(4).tolist()
        area = width * height * (settings.crop_scale[0] + u[0] * (settings.crop_scale[1] - settings.crop_scale[0]))
        ratio = math.exp(low + u[1] * (high - low))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, upper = int(u[2] * (width - w + 1)), int(u[3] * (height - h + 1))
            return left, upper, left + w, upper + h
    ratio = min(max(width / height, settings.crop_ratio[0]), settings.crop_ratio[1])
    w, h = min(width, round(height * ratio)), min(height, round(width / ratio))
    left, upper = (width - w) // 2, (height - h) // 2
    return left, upper, left + w, upper + h


def change_colors(pixels: Tensor, settings: Augmentation) -> Tensor:
    """Return ``uint8`` [3, height, width] after policy and jitter. Draws from torch's generator."""
    for change in _build_changes(settings) if settings.needs_library else ():
        pixels = change(pixels)
    return pixels


def erase(pixels: Tensor, settings: Augmentation) -> Tensor:
    """Return normalized pixels [3, height, width], maybe with a rectangle of noise. Draws from torch's generator."""
    if not settings.erasing or float(torch.rand(())) >= settings.erasing:
        return pixels
    # Values of the paper (arXiv 1708.04896), as in torchvision and timm.
    height, width = pixels.shape[-2:]
    for _ in range(_CROP_TRIES):
        u = torch.rand(4).tolist()
        area, ratio = height * width * (0.02 + u[0] * (1 / 3 - 0.02)), math.exp((2 * u[1] - 1) * math.log(1 / 0.3))
        h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < h < height and 0 < w < width:
            top, left = int(u[2] * (height - h + 1)), int(u[3] * (width - w + 1))
            pixels = pixels.clone()
            pixels[:, top : top + h, left : left + w] = torch.randn(pixels.shape[0], h, w)
            break
    return pixels


@lru_cache(maxsize=8)
def _build_changes(settings: Augmentation) -> tuple[Callable[[Tensor], Tensor], ...]:
    """Return functions from ``uint8`` to ``uint8`` [3, height, width]."""
    jitter, num_ops = settings.color_jitter, settings.policy_num_ops or 2
    magnitude = 9 if settings.policy_magnitude is None else settings.policy_magnitude
    policies: dict[str, Callable[[], Any]]
    if choose_library() == "torchvision":
        from torchvision.transforms import v2  # type: ignore[import-not-found,unused-ignore]

        jitter_class: Any = v2.ColorJitter
        policies = {
            "randaugment": lambda: v2.RandAugment(num_ops, magnitude),
            "trivialaugment": v2.TrivialAugmentWide,
            "autoaugment": v2.AutoAugment,
        }
    else:
        from kornia import augmentation  # type: ignore[import-not-found,unused-ignore]
        from kornia.augmentation import auto  # type: ignore[import-not-found,unused-ignore]

        jitter_class = augmentation.ColorJitter
        policies = {
            "randaugment": lambda: auto.RandAugment(num_ops, magnitude),
            "trivialaugment": auto.TrivialAugment,
            "autoaugment": lambda: auto.AutoAugment("imagenet"),
        }
    changes = [policies[settings.policy]()] if settings.policy != "none" else []
    changes += [jitter_class(jitter, jitter, jitter)] if jitter else []
    return tuple(changes) if choose_library() == "torchvision" else tuple(map(_run_on_floats, changes))


def _run_on_floats(change: Any) -> Callable[[Tensor], Tensor]:
    def run(pixels: Tensor) -> Tensor:
        changed = change(pixels[None].float() / 255)[0]
        return (changed * 255).round().clamp(0, 255).to(torch.uint8)

    return run
