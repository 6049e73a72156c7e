"""Where adapters start: drawn, or made of the base weight that they are added to."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lit_fsdp.adapters.layers import ADAPTER, is_adapter
from lit_fsdp.adapters.lora import KEEPS_BASE


def reset_adapter(module: nn.Module) -> bool:
    """Give an adapter its first values, if ``module`` is a layer that has one; returns whether it is."""
    if not is_adapter(module):
        return False
    layer: Any = module
    layer.reset_lora_parameters(ADAPTER, True if layer.initialization == "default" else layer.initialization)
    for magnitude in layer.lora_magnitude_vector.parameters():
        nn.init.ones_(magnitude)  # until the base weight is in place
    return True


def is_decomposed(layer: Any) -> bool:
    """Whether the adapter of a layer starts from its base weight, see :func:`decompose`."""
    return ADAPTER in layer.lora_A and layer.initialization not in KEEPS_BASE


def decompose(layer: Any, weight: Tensor, requantize: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return where an adapter starts that is made of its base weight, and what becomes of that.

    Args:
        layer: Whose rank, scaling and initialization count.
        weight: Dense, ``float32`` [out, in].
        requantize: Returns what quantization makes of a weight, for LoftQ.

    Returns:
        ``A`` [r, in], ``B`` [out, r], and the base weight to store [out, in].
    """
    r, scaling = layer.r[ADAPTER], layer.scaling[ADAPTER]
    if layer.initialization == "olora":
        q, triangle = torch.linalg.qr(weight)
        left, right = q[:, :r].contiguous(), triangle[:r].contiguous()
        return right, left, weight - scaling * left @ right
    # LoftQ: its algorithm 1 with one iteration, the default of peft.
    strong = weight - requantize(weight) if layer.initialization == "loftq" else weight
    left, right = _find_strongest(strong, r, is_exact=layer.initialization != "pissa_niter_16")
    rest = weight if layer.initialization == "loftq" else weight - left @ right
    return right / math.sqrt(scaling), left / math.sqrt(scaling), rest


def _find_strongest(weight: Tensor, r: int, *, is_exact: bool) -> tuple[Tensor, Tensor]:
    """Return the factors of the best approximation of rank ``r``: [out, r] and [r, in]."""
    if is_exact:
        u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # of the CPU: the same on all ranks and machines
            u, s, v = (factor.to(weight.device) for factor in torch.svd_lowrank(weight.cpu(), q=r, niter=16))
        vh = v.T
    root = s[:r].sqrt()
    return u[:, :r] * root, root[:, None] * vh[:r]
