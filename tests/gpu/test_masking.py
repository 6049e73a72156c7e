"""Masks of language models are drawn on CUDA as on a CPU, and wait for no GPU."""

import pytest
import torch

from lit_fsdp.tasks.masked_lm.masking import Masking, mask_batch
from ranks import run_ranks

pytestmark = pytest.mark.gpu


def mask_without_waiting() -> None:
    shares = {"mlm_probability": 0.3, "mask_replace_prob": 0.8, "random_replace_prob": 0.1}
    masking = Masking(**shares, mask_id=4, special_ids=range(40), vocab_size=64)
    ids = torch.randint(64, (4, 32), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    on_gpu = {name: values.cuda() for name, values in batch.items()}
    torch.cuda.set_sync_debug_mode("error")
    found = mask_batch(on_gpu, masking, seed=0, epoch=1)
    torch.cuda.set_sync_debug_mode("default")
    for name, values in mask_batch(batch, masking, seed=0, epoch=1).items():
        assert torch.equal(found[name].cpu(), values), name


def test_nothing_waits_for_the_gpu() -> None:
    run_ranks(mask_without_waiting, world_size=1, is_on_gpus=True)
