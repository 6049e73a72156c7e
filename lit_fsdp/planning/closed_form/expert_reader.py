"""Reads a mixture of experts onto a tape, as Transformers computes it with products in groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lit_fsdp.planning.closed_form.linear_reader import read_product
from lit_fsdp.planning.closed_form.reader import SAVES_INPUT, Reader, UnreadableModuleError, list_children
from lit_fsdp.planning.closed_form.tape import FLOAT32, INDEX
from lit_fsdp.quantization.groups import count_part
from lit_fsdp.quantization.layers import QuantizedExperts

_SHARED = {"shared_expert", "shared_expert_gate"}  # which are read elsewhere


def is_mixture(module: nn.Module) -> bool:
    """Whether a module has experts, and something that routes tokens to them."""
    return getattr(module, "experts", None) is not None and getattr(module, "gate", None) is not None


def read_mixture(reader: Reader, name: str, module: Any, x: int) -> int:
    """Add a router, and experts with a gate; every token goes to ``top_k`` of them.

    Raises:
        UnreadableModuleError: It is of another kind.
    """
    router, experts = module.gate, module.experts
    known = {"experts", "gate"} == {key for key, _ in module.named_children()} - _SHARED
    implementation = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    is_plain = getattr(experts, "has_gate", False) and not experts.has_bias and not experts.has_post_expert_norm
    if not known or not is_plain or not type(router).__name__.endswith("TopKRouter"):
        raise UnreadableModuleError(name, f"a mixture of {list_children(module)}")
    kind = type(experts.act_fn).__name__
    if kind not in SAVES_INPUT:
        raise UnreadableModuleError(f"{name}.experts", f"activation {kind}")
    scores, scores_itemsize = _read_router(reader, router, x)
    if implementation != "grouped_mm" and not isinstance(experts, QuantizedExperts):
        raise UnreadableModuleError(name, f"experts implementation {implementation}")
    return _read_in_groups(reader, experts, (x, scores, scores_itemsize, router.top_k))


def _read_router(reader: Reader, router: Any, x: int) -> tuple[int, int]:
    """Return what each token gives its experts, and the bytes of one such number."""
    tape, tokens = reader.tape, reader.num_tokens
    num_experts, width = router.weight.shape
    flops = 2 * tokens * num_experts * width
    logits = read_product(reader, "mm", x, tokens * num_experts * tape.itemsize, flops, router.weight)
    logits = tape.add_cast(logits, tape.itemsize, FLOAT32)
    probabilities = tape.add_pointwise("softmax", logits, saves_output=True)
    top = tape.add("topk", (probabilities,), tokens * router.top_k * FLOAT32, extra=tokens * router.top_k * INDEX)
    top = tape.add_pointwise("div", top, saves_input=True)  # some do not, which is next to nothing
    if not hasattr(router, "norm_topk_prob"):  # Mixtral multiplies in float32
        return top, FLOAT32
    return tape.add_cast(top, FLOAT32, tape.itemsize), tape.itemsize


def _read_in_groups(reader: Reader, experts: Any, routed: tuple[int, int, int, int]) -> int:
    tape = reader.tape
    x, scores, scores_itemsize, top_k = routed
    _, both, width = _get_shape(experts, "gate_up_proj")
    if experts.is_transposed:
        both, width = width, both
    rows = reader.num_tokens * top_k
    wide, half = rows * width * tape.itemsize, rows * both // 2 * tape.itemsize
    own = tape.add("index", (x,), wide, extra=rows * INDEX)
    joined = _multiply(reader, experts, "gate_up_proj", own)
    # Both halves are views of one tensor, whose gradient is put together from theirs.
    gate = tape.add("activation", (joined,), half, saves=(joined,))
    y = tape.add("mul", (gate, joined), half, saves=(gate, joined))
    y = _multiply(reader, experts, "down_proj", y)
    product = rows * width * scores_itemsize
    # What is summed for the scores, and the gradient of the product before it is cast to the dtype of the rows.
    wide_products = 1 + (scores_itemsize != tape.itemsize)
    y = tape.add("mul", (y, scores), product, saves=(y,), backward_temp=wide_products * product)
    y = tape.add("index", (y,), tape.sizes[y], extra=rows * INDEX)
    y = tape.add("sum", (y,), tape.sizes[y] // top_k)
    if not isinstance(experts, QuantizedExperts):
        tape.release(own)  # Transformers' function has a name for it
    return tape.add_cast(y, scores_itemsize, tape.itemsize)


def _get_shape(experts: Any, name: str) -> torch.Size:
    shape: torch.Size = (
        experts.dense_shapes[name] if isinstance(experts, QuantizedExperts) else experts.get_parameter(name).shape
    )
    return shape


def _multiply(reader: Reader, experts: Any, name: str, x: int) -> int:
    """Multiply rows that are sorted by expert, each by the matrix of its own."""
    tape = reader.tape
    num_experts, num_out, num_in = _get_shape(experts, name)
    if experts.is_transposed:
        num_out, num_in = num_in, num_out
    rows = tape.sizes[x] // num_in // tape.itemsize
    flops, size = 2 * rows * num_in * num_out, rows * num_out * tape.itemsize
    if not isinstance(experts, QuantizedExperts):
        return read_product(reader, "_grouped_mm", x, size, flops, experts.get_parameter(name))
    sizes = (num_experts, num_in, num_out)
    moved = num_experts * num_in * num_out * tape.itemsize  # what is dequantized, written once
    return tape.add(
        "_grouped_mm",
        (x,),
        size,
        forward_temp=_count_part(experts, tape.itemsize, rows, *sizes),
        backward_temp=_count_part(experts, tape.itemsize, rows, num_experts, num_out, num_in),
        flops=flops,
        backward_flops=flops * tape.needs_grad[x],
        # The outputs of a part are copied into the whole.
        forward_moved=moved + 2 * size,
        backward_moved=moved + 2 * tape.sizes[x],
    )


def _count_part(
    experts: QuantizedExperts, itemsize: int, rows: int, num_experts: int, num_in: int, num_out: int
) -> int:
    """Return the bytes of what ``multiply_groups`` makes of a part of the matrices, and frees."""
    settings = experts.quantization
    num_outputs = count_part(num_experts, num_in, num_out, settings)
    weights = num_experts * num_in * num_outputs
    # Beside the dense part either its codes and maxima, as far as they are copied, or what it is multiplied to.
    is_whole = num_outputs == num_out
    codes = 0 if is_whole else weights // settings.codes_per_byte
    maxima = weights // settings.block_size * FLOAT32 if settings.is_double or not is_whole else 0
    if settings.type == "int8":
        maxima = 0
    return weights * itemsize + max(codes + maxima, rows * num_outputs * itemsize)
