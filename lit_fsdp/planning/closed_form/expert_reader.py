"""Reads a mixture of experts onto a tape, as Transformers computes it with products in groups."""

from __future__ import annotations

from typing import Any

from torch import nn

from lit_fsdp.planning.closed_form.linear_reader import read_product
from lit_fsdp.planning.closed_form.reader import SAVES_INPUT, Reader, UnreadableModuleError, list_children
from lit_fsdp.planning.closed_form.tape import FLOAT32, INDEX
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
    if isinstance(experts, QuantizedExperts):
        if experts.quantization.type == "int8":
            raise UnreadableModuleError(f"{name}.experts", "experts in int8")
        return _read_one_by_one(reader, experts, (x, scores, router.top_k))
    if implementation != "grouped_mm":
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


def _read_one_by_one(reader: Reader, experts: Any, routed: tuple[int, int, int]) -> int:
    """Add what ``QuantizedExperts`` does, with as many tokens for each expert."""
    tape = reader.tape
    x, scores, top_k = routed
    num_experts, both, width = experts.dense_shapes["gate_up_proj"]
    if experts.is_transposed:
        both, width = width, both
    itemsize, rows = tape.itemsize, reader.num_tokens * top_k
    share, half = rows // num_experts, both // 2
    dense, size = both * width * itemsize, reader.count_bytes(width)
    weights = num_experts * (both + half) * width * itemsize  # dequantized, one expert after another
    flops = 2 * rows * width * (both + half)
    return tape.add(
        "experts",
        (x, scores),
        size,
        # Of every expert: both halves, the activated one, what comes out, before and after it is weighed, and the
        # numbers of tokens and places.
        extra=rows * ((both + half + 2 * width) * itemsize + 2 * INDEX),
        forward_temp=dense + share * (both + width) * itemsize,
        # The gradient of each expert's tokens is spread over all tokens before it is added.
        backward_temp=size + dense + share * (both + 2 * width) * itemsize,
        flops=flops,
        backward_flops=flops,
        # Choosing tokens, activation and product, weighing, and adding up; in backward of each, twice that, and all
        # tokens for each expert.
        forward_moved=weights + rows * (7 * width + 5 * half) * itemsize,
        backward_moved=weights + 2 * rows * (7 * width + 5 * half) * itemsize + 4 * num_experts * size,
    )


def _read_in_groups(reader: Reader, experts: Any, routed: tuple[int, int, int, int]) -> int:
    tape = reader.tape
    x, scores, scores_itemsize, top_k = routed
    _, both, width = experts.gate_up_proj.shape
    if experts.is_transposed:
        both, width = width, both
    rows = reader.num_tokens * top_k
    wide, half = rows * width * tape.itemsize, rows * both // 2 * tape.itemsize
    own = tape.add("index", (x,), wide, extra=rows * INDEX)
    joined = _multiply(reader, experts.gate_up_proj, own, rows)
    # Both halves are views of one tensor, whose gradient is put together from theirs.
    gate = tape.add("activation", (joined,), half, saves=(joined,))
    y = tape.add("mul", (gate, joined), half, saves=(gate, joined))
    y = _multiply(reader, experts.down_proj, y, rows)
    product = rows * width * scores_itemsize
    # What is summed for the scores, and the gradient of the product before it is cast to the dtype of the rows.
    wide_products = 1 + (scores_itemsize != tape.itemsize)
    y = tape.add("mul", (y, scores), product, saves=(y,), backward_temp=wide_products * product)
    y = tape.add("index", (y,), tape.sizes[y], extra=rows * INDEX)
    y = tape.add("sum", (y,), tape.sizes[y] // top_k)
    return tape.add_cast(y, scores_itemsize, tape.itemsize)


def _multiply(reader: Reader, weight: Any, x: int, rows: int) -> int:
    """Multiply rows that are sorted by expert, each by the matrix of its own."""
    tape = reader.tape
    num_in = tape.sizes[x] // rows // tape.itemsize
    num_out = weight.shape[1:].numel() // num_in  # from its shape: indexing a sharded weight gathers it
    flops = 2 * rows * num_in * num_out
    return read_product(reader, "_grouped_mm", x, rows * num_out * tape.itemsize, flops, weight)
