"""Activation checkpointing: forget activations in forward, compute them again in backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lit_fsdp.quantization.kernels import load_kernels

# Matrix products and attention: most of the compute of a block in a small part of its activations. By name, as
# those of bitsandbytes exist only once it is imported.
DEFAULT_SAVED_OPS = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten._grouped_mm",
    "bitsandbytes.gemm_4bit",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
)


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing:
    """Which activations are computed again in backward instead of kept.

    Args:
        mode: ``none`` keeps all. ``full`` keeps only the inputs of a block: least memory, about a third more
            compute. ``selective`` keeps also the outputs of ``saved_ops`` and computes the rest again.
        every_n_blocks: Treat only every n-th block like this, starting with the first.
        saved_ops: For ``selective``: operators such as ``aten.mm`` whose outputs are kept. Empty keeps matrix
            products, those with 4-bit weights included, and attention.
    """

    mode: Literal["none", "full", "selective"] = "none"
    every_n_blocks: int = 1
    saved_ops: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "saved_ops", tuple(self.saved_ops))  # YAML gives a list

    def check(self) -> None:
        """Raise a ``ValueError`` for settings that would be ignored or that name nothing."""
        if self.every_n_blocks < 1:
            raise ValueError(f"activation_checkpointing.every_n_blocks: got {self.every_n_blocks}: expected 1 or more")
        if self.mode == "none" and self.every_n_blocks != 1:
            raise ValueError(
                f"activation_checkpointing.every_n_blocks: got {self.every_n_blocks} with mode "
                "'none'; set mode to 'full'"
            )
        if self.saved_ops and self.mode != "selective":
            raise ValueError(
                f"activation_checkpointing.saved_ops: not used by mode {self.mode!r}; set mode to 'selective'"
            )
        for name in self.saved_ops:
            if name.startswith("bitsandbytes."):
                load_kernels("activation_checkpointing.saved_ops")  # its operators exist from then on
            if _find_op(name) is None:
                raise ValueError(
                    f"activation_checkpointing.saved_ops: got {name!r}: torch has no such operator; "
                    "expected one such as aten.mm"
                )


def apply_activation_checkpointing(
    model: nn.Module, settings: ActivationCheckpointing, blocks: Sequence[str]
) -> list[str]:
    """Checkpoint every n-th of these blocks; return their names. Must run before the model is sharded.

    Only their ``forward`` is replaced: a wrapper module would change the names of all parameters inside it.
    """
    settings.check()
    if settings.mode == "none":
        return []
    if not blocks:
        raise ValueError(
            f"activation_checkpointing.mode: got {settings.mode!r}: no blocks were found to recompute; "
            "name their classes in wrap.module_classes"
        )
    options: dict[str, Any] = {}
    if settings.mode == "selective":
        _refuse_nested(blocks)
        options["context_fn"] = partial(_make_contexts, settings.saved_ops or DEFAULT_SAVED_OPS)
    chosen = list(blocks)[:: settings.every_n_blocks]
    for name in chosen:
        block = model.get_submodule(name)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
    return chosen


def _refuse_nested(blocks: Sequence[str]) -> None:
    # The inner block is gathered while the outer one is computed again, by operators that forward did not count.
    for outer in blocks:
        if inner := next((name for name in blocks if name.startswith(f"{outer}.")), None):
            raise ValueError(
                f"activation_checkpointing.mode: got 'selective': block {inner} lies inside "
                f"block {outer}; set mode to 'full', or wrap to blocks that do not nest"
            )


def _make_contexts(saved_ops: Sequence[str]) -> Any:
    # For each forward of a block: only then all operators that it runs are there.
    packets = [packet for name in saved_ops if (packet := _find_op(name)) is not None]
    # Those that write into a tensor they are given must do so again: what they return was made before.
    saved = [getattr(packet, name) for packet in packets for name in packet.overloads() if not name.endswith("out")]
    return create_selective_checkpoint_contexts(saved)


def _find_op(name: str) -> Any:
    namespace, _, op = name.partition(".")
    try:
        return getattr(getattr(torch.ops, namespace), op)
    except (AttributeError, RuntimeError):
        return None
