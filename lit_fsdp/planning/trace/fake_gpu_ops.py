"""Drops and attends, on tensors without values that say they are on a CPU, as GPUs do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lit_fsdp.sharding.torch_internals import SHARES_HEADS_IN_FLOAT32

_DROPOUT_P = 4  # its place among the arguments of attention


@contextmanager
def run_as_gpus() -> Iterator[None]:
    """Let dropout and attention keep what they keep on GPUs.

    Dropout keeps a byte for each number; on a CPU a number of the same dtype. Attention that drops does it inside a
    kernel, which keeps two numbers to draw the same again; on a CPU it keeps all scores. Only for tensors without
    values: here, attention drops nothing. In float32 no kernel of GPUs shares heads before torch 2.14, so there grouped
    heads keep all scores, which they do not on a CPU; what those drop is counted as on a CPU.
    """
    # Replaced, as a mode would be left while backward computes again.
    drop, attend = F.dropout, F.scaled_dot_product_attention
    F.dropout, F.scaled_dot_product_attention = partial(_drop, drop), partial(_attend, attend)
    try:
        yield
    finally:
        F.dropout, F.scaled_dot_product_attention = drop, attend


def _drop(
    drop: Any,
    input: Tensor,  # noqa: A002  as torch names it
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    if not training or not p or inplace:
        dropped: Tensor = drop(input, p, training, inplace)
        return dropped
    return torch.native_dropout(input, p, True)[0]


def _attend(attend: Any, query: Tensor, *args: Any, enable_gqa: bool = False, **options: Any) -> Tensor:
    given = [query, *args]
    if has_kernel := not enable_gqa or query.dtype != torch.float32 or SHARES_HEADS_IN_FLOAT32:
        options.pop("dropout_p", None)
        given[_DROPOUT_P : _DROPOUT_P + 1] = [0.0] * (len(given) > _DROPOUT_P)
    with nullcontext() if has_kernel else sdpa_kernel(SDPBackend.MATH):
        attended: Tensor = attend(*given, enable_gqa=enable_gqa, **options)
    return attended
