"""Mixup of images waits for no GPU."""

import random

import pytest
import torch

from lit_fsdp.tasks import Mixup
from lit_fsdp.tasks.image_classification.mixup import mix
from ranks import run_ranks

pytestmark = pytest.mark.gpu


def mix_without_waiting() -> None:
    pixels, is_valid = torch.zeros(4, 3, 8, 8, device="cuda"), torch.ones(4, dtype=torch.bool, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    random.seed(0)
    for settings in (Mixup(mixup_alpha=0.8), Mixup(cutmix_alpha=1.0)):
        mixed = mix(pixels, is_valid, settings)
        assert mixed.partners.is_cuda


def test_nothing_waits_for_the_gpu() -> None:
    run_ranks(mix_without_waiting, world_size=1)  # a process of its own, for its sync debug mode
