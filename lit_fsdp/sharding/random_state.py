"""The random number generators of a rank, so that dropout goes on after a resume as it would have."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def collect_random_state() -> dict[str, Any]:
    """Return the state of all generators of this process, as plain types and tensors.

    That of the GPU only where CUDA runs: to ask for it would start CUDA in a run on the CPU.
    """
    name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  what libraries draw from
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Go on drawing where the state was collected; a GPU only if it was collected from one."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])


def reseed(state: dict[str, Any], rank: int) -> None:
    """Start fresh generators that depend on a saved state and the rank: for another number of ranks."""
    digest = hashlib.sha256(state["torch"].numpy().tobytes() + rank.to_bytes(4, "little")).digest()
    seed = int.from_bytes(digest[:4], "little")
    torch.manual_seed(seed)  # also of all GPUs
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
