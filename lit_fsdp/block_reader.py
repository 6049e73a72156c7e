"""Reads the modules of a transformer block onto a tape: what each would run, from what it is made of."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from lit_fsdp.expert_reader import is_mixture, read_mixture
from lit_fsdp.quantized_layers import QuantizedLinear
from lit_fsdp.reader import SAVES_INPUT, Reader, UnreadableModuleError
from lit_fsdp.tape import FLOAT32

_SAVES_OUTPUT = {"ReLU", "Tanh", "Sigmoid"}


def read_block(reader: Reader, name: str, block: nn.Module, x: int) -> int:
    """Add a block with attention, an MLP and norms before, or around, both; return its output.

    Raises:
        UnreadableModuleError: It is of another kind.
    """
    norms, dropouts, others = [], [], {}
    for key, child in block.named_children():
        if is_norm(child):
            norms.append((f"{name}.{key}", child))
        elif isinstance(child, nn.Dropout):
            dropouts.append(child.p)
        elif any(True for _ in child.parameters()):
            others[key] = child
    attention = [key for key in others if "attn" in key or "attention" in key]
    rest = [key for key in others if key not in attention]
    is_parallel = getattr(block, "use_parallel_residual", False) or any("post_feed" in n for n, _ in norms[:2])
    if len(attention) != 1 or len(rest) != 1 or len(norms) not in (2, 4) or len(dropouts) > 1 or is_parallel:
        found = ", ".join(f"{key} ({type(child).__name__})" for key, child in block.named_children())
        raise UnreadableModuleError(name, f"a block of {found}")
    around = len(norms) == 4
    for i, key in enumerate((attention[0], rest[0])):
        part, (norm_name, norm) = f"{name}.{key}", norms[2 * i if around else i]
        y = read_norm(reader, norm_name, norm, x)
        with reader.tape.part("attention" if i == 0 else "MLP"):
            y = read_attention(reader, part, others[key], y) if i == 0 else read_mlp(reader, part, others[key], y)
        if around:
            y = read_norm(reader, *norms[2 * i + 1], y)
        for probability in dropouts:
            y = reader.tape.add_dropout(y, probability)
        x = reader.tape.add_sum(x, y)
    return x


def read_linear(reader: Reader, name: str, module: Any, x: int) -> int:
    """Add a linear layer: dense, quantized, or with an adapter.

    Raises:
        UnreadableModuleError: It is of another kind.
    """
    tape = reader.tape
    if hasattr(module, "lora_A"):
        return _read_adapted(reader, name, module, x)
    if not is_linear(module):
        raise UnreadableModuleError(name, f"a {type(module).__name__}")
    num_in, num_out = get_features(module)
    num_rows = tape.sizes[x] // (num_in * tape.itemsize)
    flops = 2 * num_rows * num_in * num_out
    size = num_rows * num_out * tape.itemsize
    if isinstance(module, QuantizedLinear):
        dense = num_in * num_out
        is_4bit = module.quantization.type != "int8"
        # int8: as floats, once more multiplied by the maxima, and cast; 4 bits at once, in forward inside the kernel.
        temp = dense * tape.itemsize if is_4bit else dense * (2 * FLOAT32)
        weights = reader.list_trained(module.bias)
        options: dict[str, Any] = {"forward_temp": 0 if is_4bit else temp, "backward_temp": temp, "weights": weights}
        options |= {"forward_moved": temp, "backward_moved": temp}  # the dense weight: written once in each
        return tape.add("quantized", (x,), size, flops=flops, backward_flops=flops * tape.needs_grad[x], **options)
    weights = reader.list_trained(module.weight, module.bias)
    is_trained = module.weight.requires_grad
    return tape.add(
        "mm" if module.bias is None else "addmm",
        (x,),
        size,
        saves=(x,) if is_trained else (),
        weights=weights,
        flops=flops,
        backward_flops=flops * (is_trained + tape.needs_grad[x]),
    )


def read_norm(reader: Reader, name: str, module: Any, x: int) -> int:
    """Add LayerNorm, RMSNorm of torch, or one of the RMSNorms of Transformers, which compute in float32.

    Raises:
        UnreadableModuleError: It is of another kind.
    """
    with reader.tape.part("norms"):
        return _read_norm(reader, name, module, x)


def _read_norm(reader: Reader, name: str, module: Any, x: int) -> int:
    tape = reader.tape
    width, weight = module.weight.numel(), module.weight
    size = tape.sizes[x]
    num_rows = size // (width * tape.itemsize)
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        weights = reader.list_trained(weight, getattr(module, "bias", None))
        numbers = 2 if isinstance(module, nn.LayerNorm) else 1
        extra = num_rows * numbers * FLOAT32
        return tape.add("norm", (x,), size, saves=(x,), extra=extra, weights=weights)
    if not hasattr(module, "variance_epsilon") and not hasattr(module, "eps"):
        raise UnreadableModuleError(name, f"a {type(module).__name__}")
    wide = size // tape.itemsize * FLOAT32
    x32 = tape.add_cast(x, tape.itemsize, FLOAT32)
    inverse = tape.add(
        "mean_square",
        (x32,),
        num_rows * FLOAT32,
        saves=(x32,),
        saves_output=True,
        forward_temp=wide,
        backward_temp=3 * wide,
    )
    y = tape.add("mul", (x32, inverse), wide, saves=(x32, inverse), backward_temp=wide)
    weights = reader.list_trained(weight)
    is_late = not hasattr(module, "variance_epsilon")  # Gemma multiplies in float32, and casts then
    if not is_late:
        y = tape.add_cast(y, FLOAT32, tape.itemsize)
    width_bytes = tape.sizes[y]
    temp = width_bytes if weights else 0
    y = tape.add("mul", (y,), width_bytes, saves=(y,) if weights else (), weights=weights, backward_temp=temp)
    return tape.add_cast(y, FLOAT32, tape.itemsize) if is_late else y


def read_attention(reader: Reader, name: str, module: Any, x: int) -> int:
    """Add self-attention with separate or joint projections, grouped heads, norms of heads and rotary positions.

    Raises:
        UnreadableModuleError: It is of another kind.
    """
    tape = reader.tape
    linears = find_linears(module)
    norms = [(f"{name}.{key}", child) for key, child in module.named_children() if is_norm(child)]
    known = len(linears) in (2, 4) and len(norms) in (0, 2)
    if not known or len(linears) + len(norms) < sum(1 for c in module.children() if any(True for _ in c.parameters())):
        raise UnreadableModuleError(name, f"attention of {_list_children(module)}")
    *inner, (out_name, out) = [(f"{name}.{key}", child) for key, child in linears.items()]
    head_dim = module.head_dim
    query = get_features(out)[0]
    total = sum(get_features(child)[1] for _, child in inner)
    key_width = (total - query) // 2
    if len(inner) == 1:
        q = k = v = read_linear(reader, *inner[0], x)  # views of one storage
    else:
        q, k, v = (read_linear(reader, n, child, x) for n, child in inner)
    if norms:
        q, k = read_norm(reader, *norms[0], q), read_norm(reader, *norms[1], k)
    if "position_embeddings" in inspect.signature(type(module).forward).parameters:
        q, k = _rotate(reader, q), _rotate(reader, k)
        tape.table_bytes = 2 * reader.length * head_dim * tape.itemsize  # of one row
    y = _attend(reader, module, (q, k, v), (query, key_width, head_dim))
    y = read_linear(reader, out_name, out, y)
    return tape.add_dropout(y, _find_dropout(module, "resid_dropout"))


def read_mlp(reader: Reader, name: str, module: Any, x: int) -> int:
    """Add an MLP of two linear layers, of three with a gate, or a mixture of experts.

    Raises:
        UnreadableModuleError: It is of another kind.
    """
    if is_mixture(module):
        return read_mixture(reader, name, module, x)
    tape = reader.tape
    linears = find_linears(module)
    others = [c for key, c in module.named_children() if key not in linears and not isinstance(c, nn.Dropout)]
    if len(linears) not in (2, 3) or len(others) != 1 or any(True for _ in others[0].parameters()):
        raise UnreadableModuleError(name, f"an MLP of {_list_children(module)}")
    *inner, (down_name, down) = [(f"{name}.{key}", child) for key, child in linears.items()]
    y = _activate(reader, name, others[0], read_linear(reader, *inner[0], x))
    if len(inner) > 1:
        y = tape.add_product(y, read_linear(reader, *inner[1], x))
    y = read_linear(reader, down_name, down, y)
    return tape.add_dropout(y, _find_dropout(module, "dropout"))


def is_norm(module: nn.Module) -> bool:
    """Whether it normalizes the last dimension: by its class, which Transformers has one of for each family."""
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__name__.endswith("RMSNorm")


def is_linear(module: nn.Module) -> bool:
    """Whether it multiplies by a matrix."""
    return isinstance(module, nn.Linear) or _is_conv1d(module) or hasattr(module, "lora_A")


def find_linears(module: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers directly inside a module."""
    return {key: child for key, child in module.named_children() if is_linear(child)}


def get_features(module: Any) -> tuple[int, int]:
    """Return how many numbers go into a linear layer, and come out."""
    module = getattr(module, "base_layer", module)
    if _is_conv1d(module):
        return module.weight.shape[0], module.weight.shape[1]
    return module.in_features, module.out_features


def _is_conv1d(module: nn.Module) -> bool:
    # By name: its class comes with all of Transformers.
    return type(module).__name__ == "Conv1D"


def _read_adapted(reader: Reader, name: str, module: Any, x: int) -> int:
    tape = reader.tape
    y = read_linear(reader, name, module.base_layer, x)
    for key, lora_a in module.lora_A.items():
        if len(module.lora_magnitude_vector) or type(module.lora_dropout[key]) not in (nn.Identity, nn.Dropout):
            raise UnreadableModuleError(name, "an adapter with dora")
        dropped = tape.add_dropout(x, getattr(module.lora_dropout[key], "p", 0.0))
        low = read_linear(reader, name, lora_a, dropped)
        y = tape.add_sum(y, tape.add_pointwise("mul", read_linear(reader, name, module.lora_B[key], low)))
    return y


def _rotate(reader: Reader, x: int) -> int:
    size = reader.tape.sizes[x]
    # Both halves of the sum are gradients at once; cosine and sine are kept once for all blocks.
    return reader.tape.add("rotary", (x,), size, forward_temp=3 * size, backward_temp=2 * size)


def _attend(reader: Reader, module: Any, qkv: tuple[int, int, int], widths: tuple[int, int, int]) -> int:
    tape = reader.tape
    query, key_width, head_dim = widths
    num_heads = query // head_dim
    groups = query // key_width
    size = reader.count_bytes(query)
    products = 2 * 2 * reader.num_tokens * reader.length * query
    backward: Any = {"flops": products, "backward_flops": 2 * products}
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", "sdpa")
    if implementation == "eager":
        return _attend_eagerly(reader, module, qkv, groups, (num_heads, size), products)
    if implementation != "sdpa" and not implementation.startswith("flash"):
        raise UnreadableModuleError(type(module).__name__, f"attention implementation {implementation}")
    extra = reader.num_tokens * num_heads * FLOAT32  # logarithms of sums
    # Of the layer, or of all layers.
    window = getattr(module, "sliding_window", getattr(getattr(module, "config", None), "sliding_window", None))
    is_local = window is not None and window <= reader.length
    if implementation == "sdpa" and (reader.is_masked or is_local):
        # With a mask, heads are not shared inside the kernel, which keeps the mask as numbers of its dtype.
        mask = reader.rows * reader.length * reader.length
        tape.masks[is_local] = mask
        extra += mask * tape.itemsize
        if groups > 1:
            q, k, v = qkv
            qkv = (q, tape.add("repeat", (k,), size), tape.add("repeat", (v,), size))
    # The gradients of views are put together in one more tensor.
    joined = tape.sizes[qkv[0]] if qkv[0] == qkv[1] else 0
    return tape.add(
        "_scaled_dot_product_flash_attention",
        qkv,
        size,
        saves=tuple(dict.fromkeys(qkv)),
        extra=extra,
        saves_output=True,
        backward_temp=joined,
        again_flops=products // 2,
        **backward,
    )


def _attend_eagerly(
    reader: Reader,
    module: Any,
    qkv: tuple[int, int, int],
    groups: int,
    sizes: tuple[int, int],
    products: int,
) -> int:
    tape = reader.tape
    num_heads, size = sizes
    q, k, v = qkv
    if groups > 1:  # copies, whose gradients are summed
        k, v = (tape.add("repeat", (value,), size) for value in (k, v))
    scores = reader.num_tokens * reader.length * num_heads * tape.itemsize
    half: Any = {"flops": products // 2, "backward_flops": products}
    s = tape.add("bmm", (q, k), scores, saves=(q, k), **half)
    s = tape.add_pointwise("mul", s)
    if getattr(module, "attn_logit_softcapping", None) is not None:  # Gemma 2
        s = tape.add_pointwise("tanh", tape.add_pointwise("div", s), saves_output=True)
        s = tape.add_pointwise("mul", s)
    s = tape.add("add", (s,), scores, shares_grad=True)
    s = tape.add_cast(s, tape.itemsize, FLOAT32)
    s = tape.add_pointwise("softmax", s, saves_output=True)
    s = tape.add_dropout(tape.add_cast(s, FLOAT32, tape.itemsize), _find_dropout(module, "attn_dropout"))
    return tape.add("bmm", (s, v), size, saves=(s, v), **half)


def _activate(reader: Reader, name: str, module: nn.Module, x: int) -> int:
    tape = reader.tape
    kind = type(module).__name__
    if kind in SAVES_INPUT:
        return tape.add_pointwise(kind, x, saves_input=True)
    if kind in _SAVES_OUTPUT:
        return tape.add_pointwise(kind, x, saves_output=True)
    if kind == "NewGELUActivation":  # 0.5 x (1 + tanh(c (x + 0.044715 x^3))), operator by operator
        half = tape.add_pointwise("mul", x)
        cube = tape.add_pointwise("mul", tape.add_pointwise("pow", x, saves_input=True, temps=2))
        inner = tape.add_pointwise("mul", tape.add_sum(x, cube))
        bent = tape.add_pointwise("tanh", inner, saves_output=True)
        return tape.add_product(half, tape.add("add", (bent,), tape.sizes[bent], shares_grad=True))
    if kind == "QuickGELUActivation":  # x sigmoid(1.702 x)
        gate = tape.add_pointwise("sigmoid", tape.add_pointwise("mul", x), saves_output=True)
        return tape.add_product(x, gate)
    raise UnreadableModuleError(name, f"activation {kind}")


def _find_dropout(module: Any, name: str) -> float:
    return float(getattr(getattr(module, name, None), "p", 0.0))


def _list_children(module: nn.Module) -> str:
    return ", ".join(f"{key} ({type(child).__name__})" for key, child in module.named_children())
