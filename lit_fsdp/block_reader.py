"""Reads the modules of a transformer block onto a tape: what each would run, from what it is made of."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from lit_fsdp.expert_reader import is_mixture, read_mixture
from lit_fsdp.linear_reader import find_linears, get_features, read_linear
from lit_fsdp.norm_reader import LATE_CASTS, is_wide_layer_norm, read_wide_layer_norm
from lit_fsdp.reader import SAVES_INPUT, Context, Reader, UnreadableModuleError
from lit_fsdp.tape import FLOAT32

_SAVES_OUTPUT = {"ReLU", "Tanh", "Sigmoid"}
# Blocks whose attention and MLP may read the same; how many norms they have then.
_PARALLEL = {"GPTNeoXLayer": 2, "CohereDecoderLayer": 1, "Cohere2DecoderLayer": 1}


def read_block(reader: Reader, name: str, block: nn.Module, x: int) -> int:
    """Add a block with attention, an MLP and norms before, after or around both; return its output.

    A second attention is to ``reader.context``.

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
    num_parts = 2 if reader.context is None else 3
    around, after = len(norms) == 2 * num_parts, len(norms) == 2 and "post_feed" in norms[1][0]
    num_parallel = _PARALLEL.get(type(block).__name__.removeprefix("FSDP"), 0)
    is_parallel = getattr(block, "use_parallel_residual", num_parallel == 1)
    known = len(norms) == num_parallel if is_parallel else len(norms) in (num_parts, 2 * num_parts)
    are_parts = len(attention) == num_parts - 1 and len(rest) == 1
    if not are_parts or not known or len(dropouts) > (2 if num_parallel else 1):
        found = ", ".join(f"{key} ({type(child).__name__})" for key, child in block.named_children())
        raise UnreadableModuleError(name, f"a block of {found}")
    parts, y = [], x
    for i, key in enumerate((*attention, *rest)):
        if not after and (i == 0 or len(norms) > 1):
            y = read_norm(reader, *norms[2 * i if around else i], x)
        part = f"{name}.{key}"
        with reader.tape.part("MLP" if key in rest else "attention"):
            if key in rest:
                out = read_mlp(reader, part, others[key], y)
            else:
                out = read_attention(reader, part, others[key], y, reader.context if i else None)
        if around or after:
            out = read_norm(reader, *norms[2 * i + 1 if around else i], out)
        for probability in dropouts if len(dropouts) == 1 else dropouts[i : i + 1]:
            out = reader.tape.add_dropout(out, probability)
        parts.append(out)
        if not is_parallel:
            x = y = reader.tape.add_sum(x, out)
    if not is_parallel:
        return x
    # GPT-NeoX adds up the parts first, Cohere starts with its input.
    first, last = ((parts[1], parts[0]), x) if len(norms) == 2 else ((x, parts[0]), parts[1])
    return reader.tape.add_sum(reader.tape.add_sum(*first), last)


def read_embedding(reader: Reader, module: nn.Embedding, ids: int) -> int:
    """Add an embedding of every token, or of as many codes."""
    weights = reader.list_trained(module.weight)
    return reader.tape.add("embedding", (ids,), reader.count_bytes(module.embedding_dim), saves=(ids,), weights=weights)


def read_norm(reader: Reader, name: str, module: Any, x: int) -> int:
    """Add LayerNorm, RMSNorm of torch, or one of the RMSNorms of Transformers, which compute in float32.

    Raises:
        UnreadableModuleError: It is of another kind.
    """
    with reader.tape.part("norms"):
        read = read_wide_layer_norm(reader, module, x) if is_wide_layer_norm(module) else None
        return _read_norm(reader, name, module, x) if read is None else read


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
    # Gemma as well multiplies in float32, and casts then.
    is_late = not hasattr(module, "variance_epsilon") or type(module).__name__ in LATE_CASTS
    if not is_late:
        y = tape.add_cast(y, FLOAT32, tape.itemsize)
    width_bytes = tape.sizes[y]
    temp = width_bytes if weights else 0
    y = tape.add("mul", (y,), width_bytes, saves=(y,) if weights else (), weights=weights, backward_temp=temp)
    return tape.add_cast(y, FLOAT32, tape.itemsize) if is_late else y


def read_attention(reader: Reader, name: str, module: Any, x: int, context: Context | None = None) -> int:
    """Add attention with separate or joint projections, grouped heads, norms of heads and rotary positions.

    Args:
        reader: Its tokens are those of ``x``.
        name: Of the module.
        module: That attends.
        x: What goes in.
        context: What it attends to; ``None`` is ``x`` itself.

    Raises:
        UnreadableModuleError: It is of another kind.
    """
    tape = reader.tape
    linears = find_linears(module)
    norms = [(f"{name}.{key}", child) for key, child in module.named_children() if is_norm(child)]
    known = len(linears) in ((2, 4) if context is None else (4,)) and len(norms) in (0, 2)
    if not known or len(linears) + len(norms) < sum(1 for c in module.children() if any(True for _ in c.parameters())):
        raise UnreadableModuleError(name, f"attention of {_list_children(module)}")
    *inner, (out_name, out) = [(f"{name}.{key}", child) for key, child in linears.items()]
    head_dim = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
    if head_dim is None:
        raise UnreadableModuleError(name, f"attention of {_list_children(module)}")
    query = get_features(out)[0]
    total = sum(get_features(child)[1] for _, child in inner)
    key_width = (total - query) // 2
    if len(inner) == 1:
        q = k = v = read_linear(reader, *inner[0], x)  # views of one storage
    else:
        other = x if context is None else context.value
        q, k, v = (read_linear(reader, n, child, y) for (n, child), y in zip(inner, (x, other, other), strict=True))
    if norms:
        q, k = read_norm(reader, *norms[0], q), read_norm(reader, *norms[1], k)
    is_rotated = "position_embeddings" in inspect.signature(type(module).forward).parameters
    if is_rotated and len(inner) == 1:
        return _attend_rotated(reader, module, q, (query, key_width, head_dim), (out_name, out))
    if is_rotated and _rotates(module):
        q, k = _rotate(reader, module, q), _rotate(reader, module, k)
        tape.tables[f"{reader.length} x {head_dim}"] = 2 * reader.length * head_dim * tape.itemsize  # of one row
    y = _attend(reader, module, (q, k, v), (query, key_width, head_dim), context)
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
    joined = read_linear(reader, *inner[0], x)
    if get_features(inner[0][1])[1] == 2 * get_features(down)[0]:
        y = _gate(reader, name, others[0], joined)
    else:
        y = _activate(reader, name, others[0], joined)
    if len(inner) > 1:
        y = tape.add_product(y, read_linear(reader, *inner[1], x))
    y = read_linear(reader, down_name, down, y)
    return tape.add_dropout(y, _find_dropout(module, "dropout"))


def is_norm(module: nn.Module) -> bool:
    """Whether it normalizes the last dimension: by its class, which Transformers has one of for each family."""
    is_own = type(module).__name__.endswith("RMSNorm") or is_wide_layer_norm(module)
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or is_own


def _rotates(module: Any) -> bool:
    """Whether it uses the positions that it gets: of Cohere 2, only layers with a window do."""
    return type(module).__name__ != "Cohere2Attention" or module.sliding_window is not None


def _rotate(reader: Reader, module: Any, x: int) -> int:
    tape = reader.tape
    is_wide = type(module).__name__ in {"CohereAttention", "Cohere2Attention"}  # in float32
    x = tape.add_cast(x, tape.itemsize, FLOAT32) if is_wide else x
    size = tape.sizes[x]
    # Both halves of the sum are gradients at once; cosine and sine are kept once for all blocks.
    y = tape.add("rotary", (x,), size, forward_temp=3 * size, backward_temp=2 * size)
    return tape.add_cast(y, FLOAT32, tape.itemsize) if is_wide else y


def _attend_rotated(
    reader: Reader, module: Any, qkv: int, widths: tuple[int, int, int], out: tuple[str, nn.Module]
) -> int:
    """Add attention of one projection, of whose output queries and keys are rotated in part, as in GPT-NeoX."""
    tape, (query, _, head_dim) = reader.tape, widths
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", "sdpa")
    if implementation == "eager" or not hasattr(module, "rotary_ndims"):
        raise UnreadableModuleError(out[0], f"joint projections and {implementation} attention with rotary positions")
    size = reader.count_bytes(query)
    turned = size * module.rotary_ndims // head_dim
    tape.tables[f"{reader.length} x {module.rotary_ndims}"] = 2 * reader.length * module.rotary_ndims * tape.itemsize
    # Of both at once. The values stay a view; their gradient waits for that of the others.
    rotated = tape.add("rotary", (qkv,), 2 * size, forward_temp=3 * turned, backward_temp=size)
    y = _attend(reader, module, (rotated, rotated, rotated), widths, kept=(rotated, qkv))
    y = tape.add("clone", (y,), size)  # queries lie head by head in memory, and so does what comes out
    return tape.add_dropout(read_linear(reader, *out, y), _find_dropout(module, "resid_dropout"))


def _attend(
    reader: Reader,
    module: Any,
    qkv: tuple[int, int, int],
    widths: tuple[int, int, int],
    context: Context | None = None,
    *,
    kept: tuple[int, ...] | None = None,
) -> int:
    tape = reader.tape
    length, is_masked = (reader.length, reader.is_masked) if context is None else (context.length, context.is_masked)
    query, key_width, head_dim = widths
    num_heads = query // head_dim
    groups = query // key_width
    size = reader.count_bytes(query)
    products = 2 * 2 * reader.num_tokens * length * query
    backward: Any = {"flops": products, "backward_flops": 2 * products}
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", "sdpa")
    if implementation == "eager" and context is None:
        return _attend_eagerly(reader, module, qkv, groups, (num_heads, size), products)
    if implementation != "sdpa" and not implementation.startswith("flash"):
        raise UnreadableModuleError(type(module).__name__, f"attention implementation {implementation}")
    extra = reader.num_tokens * num_heads * FLOAT32  # logarithms of sums
    # Of the layer, or of all layers.
    window = getattr(module, "sliding_window", getattr(getattr(module, "config", None), "sliding_window", None))
    is_local = window is not None and window <= reader.length
    if implementation == "sdpa" and (is_masked or is_local):
        # With a mask, heads are not shared inside the kernel, which keeps the mask as numbers of its dtype.
        mask = reader.num_tokens * length
        tape.masks[is_local, mask] = mask
        extra += mask * tape.itemsize
        if groups > 1:
            q, k, v = qkv
            wide = size // reader.length * length
            qkv = (q, tape.add("repeat", (k,), wide), tape.add("repeat", (v,), wide))
    # The gradients of views are put together in one more tensor.
    joined = tape.sizes[qkv[0]] if qkv[0] == qkv[1] else 0
    return tape.add(
        "_scaled_dot_product_flash_attention",
        qkv,
        size,
        saves=kept or tuple(dict.fromkeys(qkv)),
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


def _gate(reader: Reader, name: str, module: nn.Module, joined: int) -> int:
    """Multiply one half by the activation of the other, views of one tensor."""
    tape, kind = reader.tape, type(module).__name__
    if kind not in SAVES_INPUT:
        raise UnreadableModuleError(name, f"activation {kind} of a half")
    half = tape.sizes[joined] // 2
    gate = tape.add(kind, (joined,), half, saves=(joined,))
    # The gradient of the other half is put together with that of the gate, there.
    y = tape.add("mul", (gate,), half, saves=(gate, joined), backward_temp=half)
    tape.release(joined)
    return y


def _find_dropout(module: Any, name: str) -> float:
    return float(getattr(getattr(module, name, None), "p", 0.0))


def _list_children(module: nn.Module) -> str:
    return ", ".join(f"{key} ({type(child).__name__})" for key, child in module.named_children())
