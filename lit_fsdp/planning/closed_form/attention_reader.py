"""Rules for attention: projections, norms of heads, rotary positions, and the kernels that attend."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from lit_fsdp.planning.closed_form.linear_reader import get_features, list_linears, read_linear
from lit_fsdp.planning.closed_form.norm_reader import is_norm, read_norm
from lit_fsdp.planning.closed_form.reader import (
    Context,
    Reader,
    UnreadableModuleError,
    check_dropouts,
    get_dropout,
    get_forward,
    get_source,
    list_children,
)
from lit_fsdp.planning.closed_form.tape import FLOAT32
from lit_fsdp.sharding.torch_internals import SHARES_HEADS_IN_FLOAT32

_DROPOUTS = ("attn_dropout", "attention_dropout")  # of what each token gives the others
_ROTATION = "apply_rotary_pos_emb"  # whose code alone says in which order and with which dtype
_KERNELS = "attention_interface"  # of Transformers, chosen by a setting; others write all of it down
_DROPS_BY_NUMBER = "else self.dropout,"  # what it passes to the kernel
_SCALED_QUERIES = "self.q_proj(hidden_states) * self.scaling"
_LARGEST_SHARED = 256  # numbers in a head that kernels share
_OUTPUT_DROPOUTS = ("resid_dropout", "residual_dropout")


def read_attention(reader: Reader, name: str, module: Any, x: int, context: Context | None = None) -> int:
    """Add attention with separate or joint projections, grouped heads, norms of heads and rotary positions.

    ``context`` is what it attends to; ``None`` is ``x`` itself.

    Raises:
        UnreadableModuleError: It is of another kind.
    """
    tape = reader.tape
    # In the order of forward: Phi-3 has the last first, OPT the queries last.
    linears = dict(sorted(list_linears(module).items(), key=lambda item: (item[0] == "o_proj", item[0] != "q_proj")))
    norms = [(f"{name}.{key}", child) for key, child in module.named_children() if is_norm(child)]
    known = len(linears) in ((2, 4) if context is None else (4,)) and len(norms) in (0, len(linears) - 2)
    head_dim = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
    num_layers = sum(1 for child in module.children() if any(True for _ in child.parameters()))
    if not known or len(linears) + len(norms) < num_layers or head_dim is None:
        raise UnreadableModuleError(name, f"attention of {list_children(module)}")
    if _KERNELS not in get_forward(module):
        raise UnreadableModuleError(name, f"a {type(module).__name__}, which attends by itself")
    check_dropouts(name, module, (*_list_dropouts(module), *_OUTPUT_DROPOUTS))
    *inner, (out_name, out) = [(f"{name}.{key}", child) for key, child in linears.items()]
    query = get_features(out)[0]
    key_width = (sum(get_features(child)[1] for _, child in inner) - query) // 2
    widths = (query, key_width, head_dim)
    is_rotated = "position_embeddings" in inspect.signature(type(module).forward).parameters and _rotates(module)
    if len(inner) == 1:
        q = k = v = joint = read_linear(reader, *inner[0], x)  # views of one storage
        if is_rotated:
            q = k = _rotate_views(reader, module, joint, widths)
    else:
        other = x if context is None else context.value
        q, k, v = (read_linear(reader, n, child, y) for (n, child), y in zip(inner, (x, other, other), strict=True))
        if _SCALED_QUERIES in get_forward(module):  # others leave it to the kernel
            q = tape.add_pointwise("mul", q)
        if norms:
            q, k = read_norm(reader, *norms[0], q), read_norm(reader, *norms[1], k)
        if is_rotated:
            q, k = _rotate(reader, module, (q, k), head_dim)
    y = _attend(reader, module, (q, k, v), widths, context)
    if is_rotated and _get_rotated(module, head_dim) is not None and _get_implementation(module) != "eager":
        y = tape.add("clone", (y,), tape.sizes[y])  # queries lie head by head in memory, and so does what comes out
    return tape.add_dropout(read_linear(reader, out_name, out, y), get_dropout(module, *_OUTPUT_DROPOUTS))


def _rotates(module: Any) -> bool:
    """Whether it uses the positions that it gets: of Cohere 2, only layers with a window do."""
    return type(module).__name__ != "Cohere2Attention" or module.sliding_window is not None


def _get_rotated(module: Any, head_dim: int) -> int | None:
    """Return how many numbers of each head are rotated, where the rest is joined to them; ``None`` rotates all."""
    size: int | None = getattr(module, "rotary_ndims", None)
    if size is not None:
        return size
    settings = getattr(getattr(module, "config", None), "rope_parameters", None)
    # Families that can rotate a part have a factor in their settings, and join also where it is 1.
    factor = settings.get("partial_rotary_factor") if isinstance(settings, Mapping) else None
    return None if factor is None or "_pass" not in get_source(module, _ROTATION) else int(head_dim * factor)


def _rotate(reader: Reader, module: Any, values: tuple[int, int], head_dim: int) -> tuple[int, int]:
    """Add the rotation of queries and keys; return both."""
    tape, part, source = reader.tape, _get_rotated(module, head_dim), get_source(module, _ROTATION)
    size = 2 * reader.length * (part or head_dim) * tape.itemsize  # cosines and sines of one row
    kept: tuple[int, ...] = ()
    if "repeat_interleave" in source:  # each layer repeats them for itself
        tape.passed[f"positions {size}"] = size
        kept = (tape.add("repeat_interleave", (), size),)
    else:
        tape.tables[f"positions {size}"] = size
    q, k = (_rotate_one(reader, x, (part or head_dim, head_dim), kept, is_wide=".float()" in source) for x in values)
    return q, k


def _rotate_views(reader: Reader, module: Any, qkv: int, widths: tuple[int, int, int]) -> int:
    """Add the rotation of queries and keys that are views of one tensor, in part; return both as one value.

    Raises:
        UnreadableModuleError: They are rotated otherwise.
    """
    query, key, head_dim = widths
    tape, part, source = reader.tape, _get_rotated(module, head_dim), get_source(module, _ROTATION)
    if part is None or "repeat_interleave" in source or ".float()" in source:
        raise UnreadableModuleError(type(module).__name__, "joint projections, of which whole heads are rotated")
    table = 2 * reader.length * part * tape.itemsize
    tape.tables[f"positions {table}"] = table
    # Of both at once. The values stay a view; their gradient waits for that of the others.
    size = reader.count_bytes(query)
    both = size + reader.count_bytes(key)
    return tape.add("rotary", (qkv,), both, forward_temp=3 * size * part // head_dim, backward_temp=size)


def _rotate_one(reader: Reader, x: int, widths: tuple[int, int], kept: tuple[int, ...], *, is_wide: bool) -> int:
    tape, (part, head_dim) = reader.tape, widths
    x = tape.add_cast(x, tape.itemsize, FLOAT32) if is_wide else x
    size = tape.sizes[x]
    # Both halves of the sum are gradients at once; where a part is rotated, both of them are smaller.
    temp, backward_temp = 3 * size * part // head_dim, size if part < head_dim else 2 * size
    y = tape.add("rotary", (x, *kept), size, saves=kept, forward_temp=temp, backward_temp=backward_temp)
    return tape.add_cast(y, FLOAT32, tape.itemsize) if is_wide else y


def _list_dropouts(module: Any) -> tuple[str, ...]:
    return (*_DROPOUTS, "dropout") if _DROPS_BY_NUMBER in get_forward(module) else _DROPOUTS


def _get_implementation(module: Any) -> str:
    return getattr(getattr(module, "config", None), "_attn_implementation", "sdpa")


def _attend(
    reader: Reader,
    module: Any,
    qkv: tuple[int, int, int],
    widths: tuple[int, int, int],
    context: Context | None = None,
) -> int:
    tape = reader.tape
    length, is_masked = (reader.length, reader.is_masked) if context is None else (context.length, context.is_masked)
    query, key_width, head_dim = widths
    num_heads, groups = query // head_dim, query // key_width
    size = reader.count_bytes(query)
    products = 2 * 2 * reader.num_tokens * length * query
    backward: Any = {"flops": products, "backward_flops": 2 * products}
    implementation = _get_implementation(module)
    # Of the layer, or of all layers.
    window: Any = getattr(module, "sliding_window", getattr(getattr(module, "config", None), "sliding_window", None))
    is_local = bool(window) and window <= reader.length  # 0 is none as well
    if implementation == "eager" and context is None:
        if is_masked or getattr(module, "is_causal", False):  # of numbers, for all layers of a kind
            mask = reader.num_tokens * length * tape.itemsize
            tape.passed[f"mask {is_local} {mask}"] = mask
        return _attend_eagerly(reader, module, qkv, groups, (num_heads, size), products)
    if implementation != "sdpa" and not implementation.startswith(("flash", "varlen_sdpa")):
        raise UnreadableModuleError(type(module).__name__, f"attention implementation {implementation}")
    has_mask = implementation == "sdpa" and (is_masked or is_local)
    mask = reader.num_tokens * length if has_mask else 0
    if has_mask:  # of a window alone one for all rows
        tape.passed[f"mask {is_local} {mask}"] = mask if is_masked else mask // reader.rows
    # Transformers leaves it to the kernel to share heads where it believes that there is one that can.
    # Where there is no kernel for all documents at once, our own code knows as much of kernels for one after another.
    is_in_turn = (
        is_masked and implementation.startswith("varlen_sdpa") and not (tape.is_gpu and tape.itemsize < FLOAT32)
    )
    is_unshared = tape.is_gpu and tape.itemsize == FLOAT32 and not SHARES_HEADS_IN_FLOAT32
    repeats = groups > 1 and implementation == "sdpa" and (has_mask or head_dim > _LARGEST_SHARED)
    repeats = repeats or (groups > 1 and is_in_turn and (is_unshared or head_dim > _LARGEST_SHARED))
    drops = get_dropout(module, *_list_dropouts(module)) > 0
    has_no_kernel = groups > 1 and not repeats and is_unshared if tape.is_gpu else drops
    if implementation == "sdpa" and has_no_kernel:
        return _attend_in_float32(reader, qkv, groups, length, (num_heads, size), products, drops=drops)
    if repeats:
        wide = size // reader.length * length
        qkv = (qkv[0], tape.add("repeat", (qkv[1],), wide), tape.add("repeat", (qkv[2],), wide))
    # Each layer makes numbers of the mask. No product: selective recomputation makes them again.
    numbers = (tape.add("where", (), mask * tape.itemsize),) if has_mask else ()
    is_joint = qkv[0] == qkv[1]
    y = tape.add(
        "_scaled_dot_product_flash_attention",
        (*(qkv[:2] if is_joint else qkv), *numbers),  # the gradient of a view waits for those of the others
        size,
        saves=(*dict.fromkeys(qkv), *numbers),
        extra=reader.num_tokens * num_heads * FLOAT32,  # logarithms of sums
        saves_output=True,
        backward_temp=tape.sizes[qkv[0]] if is_joint else 0,  # gradients of views are put together in one more tensor
        again_flops=products // 2,
        **backward,
    )
    return tape.add("cat", (y,), size, shares_grad=True) if is_in_turn else y


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
    wide = FLOAT32 if _widens_scores(module) else tape.itemsize
    s = tape.add_pointwise("softmax", tape.add_cast(s, tape.itemsize, wide), saves_output=True)
    s = tape.add_dropout(tape.add_cast(s, wide, tape.itemsize), get_dropout(module, *_list_dropouts(module)))
    return tape.add("bmm", (s, v), size, saves=(s, v), **half)


def _widens_scores(module: Any) -> bool:
    """Whether its softmax is in float32: most are, but not that of GPT-2; nothing but the code says so."""
    source = get_source(module, "eager_attention_forward")
    return not source or "float32" in source


def _attend_in_float32(
    reader: Reader,
    qkv: tuple[int, int, int],
    groups: int,
    length: int,
    sizes: tuple[int, int],
    products: int,
    *,
    drops: bool,
) -> int:
    """Add what torch does where it has no kernel: all scores, in float32.

    On CPUs that is where something is dropped, on GPUs before torch 2.14 where heads are shared in float32, see
    ``run_as_gpus``. Masks of dropout would be smaller on GPUs.
    """
    tape, (num_heads, size) = reader.tape, sizes
    query = size // tape.itemsize * FLOAT32
    wide = query // reader.length * length
    q, k, v = qkv
    if tape.itemsize != FLOAT32:
        q, k, v = (tape.add("to", (x,), total) for x, total in ((q, query), (k, wide // groups), (v, wide // groups)))
    if groups > 1:
        k, v = (tape.add("repeat", (value,), wide) for value in (k, v))
    q, k = tape.add("mul", (q,), query), tape.add("mul", (k,), wide)
    scores = reader.num_tokens * length * num_heads * FLOAT32
    half: Any = {"flops": products // 2, "backward_flops": products}
    s = tape.add("bmm", (q, k), scores, saves=(q, k), **half)
    s = tape.add("add", (s,), scores, shares_grad=True)
    s = tape.add_pointwise("softmax", s, saves_output=True)
    if drops:
        s = tape.add("dropout", (s,), scores, extra=scores)
    y = tape.add("bmm", (s, v), query, saves=(s, v), **half)
    return tape.add_cast(y, FLOAT32, tape.itemsize)
