"""Mixup and cutmix: two images and their classes become one."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Mixup:
    """Train on mixtures of two images of a micro-batch, whose losses are weighed as they are mixed.

    Args:
        mixup_alpha: Parameter of the beta distribution for mixup, which adds images; 0 leaves it out. 0.8 is usual.
        cutmix_alpha: The same for cutmix, which pastes a rectangle of one into the other. 1 is usual.
        switch_prob: Where both are set: how often it is cutmix.
        prob: Of a micro-batch to be mixed at all.
    """

    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0
    switch_prob: float = 0.5
    prob: float = 1.0

    def check(self) -> None:
        """Refuse values that mean nothing, or would be ignored."""
        if min(self.mixup_alpha, self.cutmix_alpha) < 0 or not self.mixup_alpha + self.cutmix_alpha:
            raise ValueError(
                f"mixup: got mixup_alpha {self.mixup_alpha}, cutmix_alpha {self.cutmix_alpha}: "
                "expected 0 or more, and one of them above 0"
            )
        if self.switch_prob != 0.5 and not (self.mixup_alpha and self.cutmix_alpha):
            raise ValueError(
                "mixup.switch_prob: only used where mixup_alpha and cutmix_alpha are both set; leave it out"
            )
        for name in ("switch_prob", "prob"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"mixup.{name}: got {getattr(self, name)}: expected 0 to 1")


@dataclass(frozen=True, kw_only=True)
class Mixed:
    """A micro-batch of mixtures.

    Args:
        pixels: [batch, channels, height, width].
        partners: Which image each was mixed with [batch].
        share: Of its own class in the loss; the rest is its partner's.
    """

    pixels: Tensor
    partners: Tensor
    share: float


def mix(pixels: Tensor, is_valid: Tensor, settings: Mixup) -> Mixed:
    """Mix images [batch, channels, height, width]; those without a class stay alone.

    Draws from Python's generator, so nothing waits for a GPU.
    """
    num_images, _, height, width = pixels.shape
    own = torch.arange(num_images, device=pixels.device)
    if random.random() >= settings.prob:
        return Mixed(pixels=pixels, partners=own, share=1.0)
    is_cutmix = settings.cutmix_alpha > 0 and (not settings.mixup_alpha or random.random() < settings.switch_prob)
    alpha = settings.cutmix_alpha if is_cutmix else settings.mixup_alpha
    share = random.betavariate(alpha, alpha)
    partners = _move(torch.tensor(random.sample(range(num_images), num_images)), pixels.device)
    partners = torch.where(is_valid & is_valid[partners], partners, own)
    others = pixels[partners]
    if not is_cutmix:
        return Mixed(pixels=pixels * share + others * (1 - share), partners=partners, share=share)
    h, w = (round(length * math.sqrt(1 - share)) for length in (height, width))
    top, left = (random.randrange(length) - size // 2 for length, size in ((height, h), (width, w)))
    rows, columns = slice(max(top, 0), min(top + h, height)), slice(max(left, 0), min(left + w, width))
    mixed = pixels.clone()
    mixed[:, :, rows, columns] = others[:, :, rows, columns]
    area = max(rows.stop - rows.start, 0) * max(columns.stop - columns.start, 0)
    return Mixed(pixels=mixed, partners=partners, share=1 - area / (height * width))  # of what lies inside the image


def _move(values: Tensor, device: torch.device) -> Tensor:
    """Return values of the CPU on a device, without waiting for what a GPU still has to do."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
