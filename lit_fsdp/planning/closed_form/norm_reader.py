"""Rules for norms: what they keep, and where those that compute in float32 cast."""

from __future__ import annotations

from typing import Any

from torch import nn

from lit_fsdp.planning.closed_form.reader import Reader, UnreadableModuleError
from lit_fsdp.planning.closed_form.tape import FLOAT32

# Multiply by the weight in float32, and cast then.
_LATE_CASTS = {"Olmo2RMSNorm", "Olmo3RMSNorm", "FlexOlmoRMSNorm", "HeliumRMSNorm"}


def is_norm(module: nn.Module) -> bool:
    """Whether it normalizes the last dimension: by its class, which Transformers has one of for each family."""
    is_own = type(module).__name__.endswith("RMSNorm") or _is_wide_layer_norm(module)
    return isinstance(module, nn.LayerNorm | nn.RMSNorm) or is_own


def read_norm(reader: Reader, name: str, module: Any, x: int) -> int:
    """Add LayerNorm, RMSNorm of torch, or one of the RMSNorms of Transformers, which compute in float32.

    Raises:
        UnreadableModuleError: It is of another kind.
    """
    with reader.tape.part("norms"):
        read = _read_wide_layer_norm(reader, module, x) if _is_wide_layer_norm(module) else None
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
    is_late = not hasattr(module, "variance_epsilon") or type(module).__name__ in _LATE_CASTS
    if not is_late:
        y = tape.add_cast(y, FLOAT32, tape.itemsize)
    width_bytes = tape.sizes[y]
    temp = width_bytes if weights else 0
    y = tape.add("mul", (y,), width_bytes, saves=(y,) if weights else (), weights=weights, backward_temp=temp)
    return tape.add_cast(y, FLOAT32, tape.itemsize) if is_late else y


def _is_wide_layer_norm(module: Any) -> bool:
    """Whether it is the LayerNorm of Cohere, which Transformers writes operator by operator."""
    return type(module).__name__ in {"CohereLayerNorm", "Cohere2LayerNorm"}


def _read_wide_layer_norm(reader: Reader, module: Any, x: int) -> int:
    """Add a LayerNorm of the last dimension without a bias; return its output."""
    tape, weight = reader.tape, module.weight
    count = tape.sizes[x] // tape.itemsize
    wide, narrow = count * FLOAT32, count // weight.shape[-1] * FLOAT32
    x32 = tape.add_cast(x, tape.itemsize, FLOAT32)
    mean = tape.add("mean", (x32,), narrow)
    centered = tape.add("sub", (x32, mean), wide, shares_grad=True, backward_temp=wide)
    # Centered twice: of the first the squares are summed.
    inverse = tape.add(
        "mean_square",
        (centered,),
        narrow,
        saves=(centered,),
        saves_output=True,
        forward_temp=wide,
        backward_temp=2 * wide,
    )
    again = tape.add("sub", (x32, mean), wide, shares_grad=True, backward_temp=wide)
    y = tape.add("mul", (again, inverse), wide, saves=(again, inverse), backward_temp=wide)
    weights = reader.list_trained(weight)
    y = tape.add("mul", (y,), wide, saves=(y,) if weights else (), weights=weights, backward_temp=wide)
    return tape.add_cast(y, FLOAT32, tape.itemsize)
