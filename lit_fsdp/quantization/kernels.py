"""The door to bitsandbytes, whose import starts CUDA: opened by the first layer or optimizer that needs it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from types import FunctionType, ModuleType
from typing import Any

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
        # On the CPU, as models are built under "meta", where tensors that modules keep would have no values.
        with compile_later(), torch.device("cpu"):
            import bitsandbytes
    except ModuleNotFoundError as error:
        if error.name != "bitsandbytes":
            raise
        raise ModuleNotFoundError(f"{user} needs the package bitsandbytes: pip install bitsandbytes") from error
    return bitsandbytes


@contextmanager
def compile_later() -> Iterator[None]:
    """Let functions that a package decorates with ``torch.compile`` when it is imported compile when they are called.

    The decorator imports Inductor, which takes 2 s of CPU time. bitsandbytes has it on kernels that are used only where
    its library has none (``backends/default/ops.py``, seen in 0.50).
    """
    compile_now = torch.compile

    def decorate(model: Any = None, **options: Any) -> Any:
        if model is None:
            return partial(decorate, **options)
        if not isinstance(model, FunctionType):
            return compile_now(model, **options)
        compiled = cache(partial(compile_now, model, **options))

        @wraps(model)
        def run(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        return run

    torch.compile = decorate
    try:
        yield
    finally:
        torch.compile = compile_now


def is_loaded() -> bool:
    """Whether anything has imported bitsandbytes; before that, none of its operators can run."""
    return sys.modules.get("bitsandbytes") is not None
