"""The door to bitsandbytes, whose import starts CUDA: opened by the first layer or optimizer that needs it."""

from __future__ import annotations

import sys
from types import ModuleType

import torch


def load_kernels(user: str) -> ModuleType:
    """Return the package bitsandbytes; its operators, ``torch.ops.bitsandbytes``, exist from the first call on.

    Where a GPU is visible the import asks for what it can do, which starts CUDA in this process, and in forks of it
    CUDA cannot be used. Seen in bitsandbytes 0.50 (``cuda_specs.py``); import it at the top when that has gone.

    Args:
        user: What needs it, for the error.

    Raises:
        ModuleNotFoundError: bitsandbytes is not installed.
    """
    if found := sys.modules.get("bitsandbytes"):
        return found
    try:
        with torch.device("cpu"):  # models are built under "meta", where tensors that modules keep would have no values
            import bitsandbytes
    except ModuleNotFoundError as error:
        if error.name != "bitsandbytes":
            raise
        raise ModuleNotFoundError(f"{user} needs the package bitsandbytes: pip install bitsandbytes") from error
    return bitsandbytes


def is_loaded() -> bool:
    """Whether anything has imported bitsandbytes; before that, none of its operators can run."""
    return sys.modules.get("bitsandbytes") is not None
