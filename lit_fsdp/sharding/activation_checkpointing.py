"""Activation checkpointing: forget activations in forward, compute them again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lit_fsdp.quantization.kernels import load_kernels
from lit_fsdp.quantization.quantize import KeepDequantized
from lit_fsdp.sharding.activation_offload import InputOffload
from lit_fsdp.sharding.buffers import iterate_saved_buffers
from lit_fsdp.sharding.mlp_chunks import split_mlps
from lit_fsdp.sharding.torch_internals import HIDES_KEPT_OUTPUTS

# Matrix products and attention: most of the compute of a block in a small part of its activations. By name, as
# those of bitsandbytes exist only once it is imported.
DEFAULT_SAVED_OPS = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten._grouped_mm",
    "bitsandbytes.gemm_4bit",
    "lit_fsdp.multiply_int8",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "torch_attn._varlen_attn",
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
        keep_dequantized: For ``full`` and quantized weights: dequantize those of linear layers twice in a step instead
            of three times, as what recomputation has dequantized is kept until backward has used it. That needs memory
            for the weights of one block in the precision of the run.
        offload: Keep the inputs of these blocks, but the last one, in host memory between forward and backward. What
            is left grows with the length of rows and not with depth. Copies run beside compute; on short rows they may
            take longer than that.
        mlp_chunks: For ``full``: run the MLP of each block over that many pieces of the sequence, so that what it
            computes inside, several times as wide as its input, is never in memory whole. Compute stays the same, but
            for blocks with a norm or a sum after the MLP, which compute it a third time. ``null`` runs it at once.

    In training, blocks that are computed again fill no cache of keys and values, whatever ``use_cache`` says.
    """

    mode: Literal["none", "full", "selective"] = "none"
    every_n_blocks: int = 1
    saved_ops: Sequence[str] = ()
    keep_dequantized: bool = False
    offload: bool = False
    mlp_chunks: int | None = None

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
        if self.keep_dequantized and self.mode != "full":
            raise ValueError(
                f"activation_checkpointing.keep_dequantized: not used by mode {self.mode!r}, which computes no product "
                "again; set mode to 'full', or leave it out"
            )
        if self.mode == "none" and self.offload:
            raise ValueError(
                "activation_checkpointing.offload: got true with mode 'none', which keeps more than inputs; set mode "
                "to 'full'"
            )
        if self.mlp_chunks is not None and self.mlp_chunks < 2:
            raise ValueError(
                f"activation_checkpointing.mlp_chunks: got {self.mlp_chunks}: expected 2 or more, or null for all "
                "at once"
            )
        if self.mlp_chunks is not None and self.mode != "full":
            raise ValueError(
                f"activation_checkpointing.mlp_chunks: got {self.mlp_chunks} with mode {self.mode!r}, which keeps what "
                "MLPs compute; set mode to 'full', or leave mlp_chunks out"
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
        # The inner block is gathered while the outer one is computed again, by operators that forward did not count.
        _refuse_nested(blocks, "mode: got 'selective'")
        options["context_fn"] = partial(_make_contexts, settings.saved_ops or DEFAULT_SAVED_OPS)
    if settings.offload:
        # The input of the inner block would go to the host as well, though the outer one computes it again.
        _refuse_nested(blocks, "offload: got true")
    chosen = list(blocks)[:: settings.every_n_blocks]
    if settings.keep_dequantized:
        from lit_fsdp.quantization.layers import QuantizedLinear  # brings Transformers

        if not any(isinstance(m, QuantizedLinear) for name in chosen for m in model.get_submodule(name).modules()):
            raise ValueError(
                "activation_checkpointing.keep_dequantized: got true, and no linear layer of the blocks is quantized; "
                "leave it out"
            )
        # All that lies inside the outer block would be kept, while that is computed again.
        _refuse_nested(blocks, "keep_dequantized: got true")
        options["context_fn"] = _make_keeping_contexts
    if settings.mlp_chunks is not None:
        # The inner block would be recomputed within each piece, and the outer one for it.
        _refuse_nested(blocks, f"mlp_chunks: got {settings.mlp_chunks}")
        split_mlps(model, settings.mlp_chunks, chosen, options)
    offload = InputOffload() if settings.offload else None
    for name in chosen:
        block = model.get_submodule(name)
        sent = "" if name == chosen[-1] else name
        block.forward = _Checkpointed(block.forward, options, offload, sent, list(iterate_saved_buffers(block)))
    return chosen


class _Checkpointed:
    """The ``forward`` of a block, to be computed again in backward, from an input that may wait in host memory.

    Not a ``functools.partial``, of which ``torch.compile`` compiles nothing, seen in torch 2.13 to 2.15. Nor a
    function: a copy of the model would go on with the weights of the original.
    """

    def __init__(
        self,
        forward: Any,
        options: dict[str, Any],
        offload: InputOffload | None,
        sent: str,
        buffers: list[tuple[nn.Module, str]],
    ) -> None:
        self.forward, self.options, self.offload, self.sent, self.buffers = forward, options, offload, sent, buffers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            block = getattr(self.forward, "__self__", None)
            args = tuple(_leave_out(value, "cache", block) for value in args)
            kwargs = {name: _leave_out(value, name, block) for name, value in kwargs.items()}
            if kwargs.get("use_cache"):
                kwargs["use_cache"] = False
        options = self.options
        if self.buffers and not torch.compiler.is_compiling():  # compiled code computes again without changing them
            options = {**options, "context_fn": partial(_keep_buffers, self.buffers, options.get("context_fn"))}
        if self.offload is None:
            return checkpoint(self.forward, *args, use_reentrant=False, **options, **kwargs)
        recompute = partial(checkpoint, use_reentrant=False, **options, **HIDES_KEPT_OUTPUTS)
        return self.offload.run(recompute, self.forward, self.sent, *args, **kwargs)


def _leave_out(value: Any, name: str, block: Any) -> Any:
    """Return ``None`` in place of a cache of Transformers, to which a block would add its keys a second time."""
    if not hasattr(value, "get_seq_length"):
        return value
    if _is_filled(value, _find_layer(block)):
        raise ValueError(
            f"{name}: it is not empty, and a block that is computed again in backward would add to it twice: set "
            "activation_checkpointing.mode to 'none', or run without a cache"
        )
    return None


def _is_filled(cache: Any, index: int) -> bool:
    """Return whether a layer of a cache holds something; of linear attention it has states, of MLPs nothing."""
    layer: Any = dict(enumerate(getattr(cache, "layers", ()))).get(index)
    if layer is not None and not hasattr(layer, "get_seq_length"):
        return any(getattr(layer, "has_previous_state", {}).values())
    return bool(cache.get_seq_length(index))


def _find_layer(block: Any) -> int:
    """Return which layer of a cache a block fills."""
    parts = block.modules() if isinstance(block, nn.Module) else ()
    indices: Iterator[Any] = (getattr(part, "layer_idx", None) for part in parts)
    return next((index for index in indices if isinstance(index, int)), 0)


def _refuse_nested(blocks: Sequence[str], what: str) -> None:
    for outer in blocks:
        if inner := next((name for name in blocks if name.startswith(f"{outer}.")), None):
            raise ValueError(
                f"activation_checkpointing.{what}: block {inner} lies inside block {outer}; set mode to 'full' without "
                "offload, keep_dequantized and mlp_chunks, or wrap to blocks that do not nest"
            )


def _keep_buffers(buffers: list[tuple[nn.Module, str]], make_contexts: Callable[[], Any] | None) -> Any:
    forward, recompute = (nullcontext(), nullcontext()) if make_contexts is None else make_contexts()
    return forward, _CopiedBuffers(buffers, recompute)


class _CopiedBuffers:
    """Lets a block be computed again on copies of its buffers: running statistics would count its batch twice.

    Args:
        buffers: Where those are that checkpoints hold.
        inner: Entered within, so that it does not see the copies being made.
    """

    def __init__(self, buffers: list[tuple[nn.Module, str]], inner: AbstractContextManager[Any]) -> None:
        self._buffers, self._inner = buffers, inner
        self._own: list[Tensor | None] = []

    def __enter__(self) -> None:
        self._own = [module._buffers[name] for module, name in self._buffers]
        for (module, name), buffer in zip(self._buffers, self._own, strict=True):
            module._buffers[name] = None if buffer is None else buffer.detach().clone()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        for (module, name), buffer in zip(self._buffers, self._own, strict=True):
            module._buffers[name] = buffer
        self._own = []
        return self._inner.__exit__(*error)


def _make_keeping_contexts() -> Any:
    return nullcontext(), KeepDequantized()


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
