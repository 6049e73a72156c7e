"""Lets torch believe that the machine has a GPU, and notes who starts CUDA; imported by ``sitecustomize`` of a test."""

import os
import time
import traceback
from pathlib import Path
from typing import Any

import torch

# What starts CUDA when Python calls it (torch/csrc/DeviceAccelerator.cpp); seen in torch 2.13.
_STARTS = (
    *("_cuda_init", "_accelerator_getDeviceIndex", "_accelerator_setDeviceIndex", "_accelerator_getStream"),
    *("_accelerator_setStream", "_accelerator_exchangeDevice", "_accelerator_maybeExchangeDevice"),
)


def pretend(notes: Path) -> None:
    """Show one GPU wherever ``CUDA_VISIBLE_DEVICES`` does not hide it; to start CUDA fails, and leaves a note."""

    def start(*_: Any) -> None:
        stack = "".join(traceback.format_stack()[:-1])
        (notes / f"{os.getpid()}_{time.monotonic_ns()}.txt").write_text(stack)
        raise RuntimeError("CUDA was started")

    parts: Any = torch._C
    for name in _STARTS:
        setattr(parts, name, start)
    parts._cuda_getDeviceCount = lambda: int(os.environ.get("CUDA_VISIBLE_DEVICES") != "")
    parts._cuda_getCurrentRawStream = start
    parts._accelerator_getAccelerator = lambda: torch.device("cuda")
    torch.cuda._cudart = torch.cuda._cudart or object()  # type: ignore[attr-defined]  # only asked whether it is there
    assert torch.cuda.is_available()
    assert torch.accelerator.is_available()
