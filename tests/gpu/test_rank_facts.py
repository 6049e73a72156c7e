"""What a rank tells of a real GPU before the first collective."""

import re

import pytest
import torch

from lit_fsdp.sharding.mixed_precision import read_precision
from lit_fsdp.strategy.rank_facts import list_device_facts, list_device_notes
from ranks import run_ranks

pytestmark = pytest.mark.gpu


def check_facts() -> None:
    device = torch.device("cuda", 0)
    facts = list_device_facts(device, read_precision("bf16-mixed"))
    lacks_bfloat16 = torch.version.hip is None and torch.cuda.get_device_capability(device)[0] < 8
    assert facts["device"] == "cuda"
    assert re.match(r"2\.\d+\.\d+", facts["NCCL"])
    assert ("emulated" in facts["dtypes"]) == lacks_bfloat16
    assert re.fullmatch(
        rf"{re.escape(torch.cuda.get_device_name(device))} \([1-9]\d* GiB\)", list_device_notes(device)["GPU"]
    )


def test_a_gpu_is_told_by_name_memory_and_dtypes() -> None:
    run_ranks(check_facts, world_size=1, backend="cpu:gloo,cuda:nccl")
