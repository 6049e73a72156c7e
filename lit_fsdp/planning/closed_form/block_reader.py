"""Reads the modules of a transformer block onto a tape: what each would run, from what it is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lit_fsdp.planning.closed_form.attention_reader import read_attention
from lit_fsdp.planning.closed_form.expert_reader import is_mixture, read_mixture
from lit_fsdp.planning.closed_form.linear_reader import get_features, is_linear, read_linear
from lit_fsdp.planning.closed_form.norm_reader import is_norm, read_norm
from lit_fsdp.planning.closed_form.reader import (
    SAVES_INPUT,
    Reader,
    UnreadableModuleError,
    check_dropouts,
    get_dropout,
    get_forward,
    list_children,
)

_SAVES_OUTPUT = {"ReLU", "Tanh", "Sigmoid"}
# Blocks whose attention and MLP may read the same; how many norms they have then.
_PARALLEL = {"GPTNeoXLayer": 2, "PhiDecoderLayer": 1, "StableLmDecoderLayer": 1}
_PARALLEL |= {"CohereDecoderLayer": 1, "Cohere2DecoderLayer": 1}
_ADD_PARTS_FIRST = {"GPTNeoXLayer", "PhiDecoderLayer"}  # others start with what came in
_DROPOUTS = ("dropout", "residual_dropout")  # of an MLP
_DROP_MLP_ONLY = {"StableLmDecoderLayer", "PersimmonDecoderLayer"}


@dataclass
class _Children:
    """What is directly inside a block, by what it does; of what is there for each part none, or as many as parts."""

    norms: list[tuple[str, nn.Module]] = field(default_factory=list)
    dropouts: list[float] = field(default_factory=list)
    scales: list[nn.Module] = field(default_factory=list)
    paths: list[float] = field(default_factory=list)
    others: dict[str, nn.Module] = field(default_factory=dict)


def read_block(reader: Reader, name: str, block: nn.Module, x: int) -> int:
    """Add a block with attention, an MLP and norms before, after or around both; return its output.

    A second attention is to ``reader.context``.

    Raises:
        UnreadableModuleError: It is of another kind.
    """
    kind = type(block).__name__.removeprefix("FSDP")
    num_parts = 2 if reader.context is None else 3
    children = _sort_children(name, block, num_parts)
    norms, others = children.norms, children.others
    attention = [key for key in others if "attn" in key or "attention" in key]
    rest = [key for key in others if key not in attention]
    around, after = len(norms) == 2 * num_parts, len(norms) == 2 and "post_feed" in norms[1][0]
    num_parallel = _PARALLEL.get(kind, 0)
    is_parallel = getattr(block, "use_parallel_residual", num_parallel == 1)
    known = len(norms) == num_parallel if is_parallel else len(norms) in (num_parts, 2 * num_parts)
    if len(attention) != num_parts - 1 or len(rest) not in (1, 3) or not known:
        raise UnreadableModuleError(name, f"a block of {list_children(block)}")
    if len(children.dropouts) == 1:
        children.dropouts = [0.0] * (kind in _DROP_MLP_ONLY) + children.dropouts * num_parts
    parts, y = [], x
    for i, key in enumerate((*attention, None)):
        if not after and (i == 0 or len(norms) > 1):
            y = read_norm(reader, *norms[2 * i if around else i], x)
        with reader.tape.part("attention" if key else "MLP"):
            if key is None and len(rest) > 1:  # the layers of an MLP themselves
                out = _read_layers(reader, name, {key: others[key] for key in rest}, y)
            elif key is None:
                out = read_mlp(reader, f"{name}.{rest[0]}", others[rest[0]], y)
            else:
                out = read_attention(reader, f"{name}.{key}", others[key], y, reader.context if i else None)
        reader.tape.release(y)
        if around or after:
            out = read_norm(reader, *norms[2 * i + 1 if around else i], out)
        out = _finish_part(reader, children, i, out)
        parts.append(out)
        if not is_parallel:
            x = y = reader.tape.add_sum(x, out)
    if not is_parallel:
        return x
    first, last = ((parts[1], parts[0]), x) if kind in _ADD_PARTS_FIRST else ((x, parts[0]), parts[1])
    return reader.tape.add_sum(reader.tape.add_sum(*first), last)


def _sort_children(name: str, block: nn.Module, num_parts: int) -> _Children:
    found = _Children()
    for key, child in block.named_children():
        kind = type(child).__name__
        if is_norm(child):
            found.norms.append((f"{name}.{key}", child))
        elif isinstance(child, nn.Dropout):
            found.dropouts.append(child.p)
        elif kind.endswith("LayerScale") and len(list(child.parameters())) == 1:
            found.scales.append(child)
        elif kind.endswith("DropPath"):
            found.paths.append(get_dropout(block, key))
        elif not isinstance(child, nn.Identity):
            found.others[key] = child
    drops = get_forward(block).count("p=self.dropout,") == num_parts
    if drops:  # after each part, without a layer for it
        found.dropouts += [get_dropout(block, "dropout")] * num_parts
    repeated = (0, 1, num_parts)
    own = [key for key, _ in block.named_parameters(recurse=False)]
    are_known = len(found.dropouts) in repeated and len(found.paths) in repeated and not own
    if not are_known or len(found.scales) not in (0, num_parts):
        raise UnreadableModuleError(name, f"a block of {', '.join([list_children(block), *own])}")
    check_dropouts(name, block, [key for key, _ in block.named_children()] + ["dropout"] * drops)
    found.paths *= num_parts if len(found.paths) == 1 else 1
    return found


def _finish_part(reader: Reader, children: _Children, i: int, x: int) -> int:
    """Add what drops and scales the output of attention or the MLP, before it is added to what went in."""
    tape, size = reader.tape, reader.tape.sizes[x]
    for probability in children.dropouts[i : i + 1]:
        x = tape.add_dropout(x, probability)
    for scale in children.scales[i : i + 1]:
        weights = reader.list_trained(*scale.parameters())
        # Of a scale that does not train backward needs only the scale, up to which a block is computed again.
        saves, temp = ((x,), size) if weights else ((tape.add_value(0),), 0)
        x = tape.add("mul", (x,), size, saves=saves, weights=weights, backward_temp=temp)
    if any(probability > 0 for probability in children.paths[i : i + 1]):
        # All rows are made larger before some are dropped.
        y = tape.add("mul", (tape.add_pointwise("div", x),), size, extra=reader.rows * tape.itemsize)
        tape.release(x)
        return y
    return x


def read_embedding(reader: Reader, module: nn.Embedding, ids: int) -> int:
    """Add an embedding of every token, or of as many codes."""
    weights = reader.list_trained(module.weight)
    return reader.tape.add("embedding", (ids,), reader.count_bytes(module.embedding_dim), saves=(ids,), weights=weights)


def read_mlp(reader: Reader, name: str, module: Any, x: int) -> int:
    """Add an MLP of two linear layers, of three with a gate, or a mixture of experts.

    Raises:
        UnreadableModuleError: It is of another kind.
    """
    if is_mixture(module):
        return _read_experts(reader, name, module, x)
    check_dropouts(name, module, _DROPOUTS)
    layers = {key: child for key, child in module.named_children() if not isinstance(child, nn.Dropout)}
    y = _read_layers(reader, name, layers, x)
    return reader.tape.add_dropout(y, get_dropout(module, *_DROPOUTS))


def _read_layers(reader: Reader, name: str, layers: dict[str, nn.Module], x: int) -> int:
    tape, others = reader.tape, [child for child in layers.values() if not is_linear(child)]
    linears = [(f"{name}.{key}", child) for key, child in layers.items() if is_linear(child)]
    if len(linears) not in (2, 3) or len(others) != 1 or any(True for _ in others[0].parameters()):
        found = ", ".join(f"{key} ({type(child).__name__})" for key, child in layers.items())
        raise UnreadableModuleError(name, f"an MLP of {found}")
    *inner, (down_name, down) = linears
    joined = read_linear(reader, *inner[0], x)
    if get_features(inner[0][1])[1] == 2 * get_features(down)[0]:
        y = _gate(reader, name, others[0], joined)
    else:
        y = _activate(reader, name, others[0], joined)
    if len(inner) > 1:
        y = tape.add_product(y, read_linear(reader, *inner[1], x))
    return read_linear(reader, down_name, down, y)


def _read_experts(reader: Reader, name: str, module: Any, x: int) -> int:
    """Add a mixture of experts, and the one that all tokens go to, if there is one, weighed by a gate."""
    tape, shared = reader.tape, getattr(module, "shared_expert", None)
    if shared is None:
        return read_mixture(reader, name, module, x)
    always = read_mlp(reader, f"{name}.shared_expert", shared, x)
    y = read_mixture(reader, name, module, x)
    if getattr(module, "shared_expert_gate", None) is None:
        raise UnreadableModuleError(name, "a shared expert without a gate")
    weight = read_linear(reader, f"{name}.shared_expert_gate", module.shared_expert_gate, x)
    weight = tape.add_pointwise("sigmoid", weight, saves_output=True)
    size = tape.sizes[always]
    weighed = tape.add("mul", (weight, always), size, saves=(weight, always), backward_temp=size)
    return tape.add_sum(y, weighed)


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
    if kind == "ReLUSquaredActivation":
        return tape.add_pointwise("pow", tape.add_pointwise("relu", x, saves_output=True), saves_input=True, temps=2)
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
