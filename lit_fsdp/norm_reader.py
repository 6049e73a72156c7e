"""Rules for norms that compute in float32 otherwise than most: where they cast, and what they keep."""

from __future__ import annotations

from typing import Any

from lit_fsdp.reader import Reader
from lit_fsdp.tape import FLOAT32

# Multiply by the weight in float32, and cast then.
LATE_CASTS = {"Olmo2RMSNorm", "Olmo3RMSNorm", "FlexOlmoRMSNorm"}


def is_wide_layer_norm(module: Any) -> bool:
    """Whether it is the LayerNorm of Cohere, which Transformers writes operator by operator."""
    return type(module).__name__ in {"CohereLayerNorm", "Cohere2LayerNorm"}


def read_wide_layer_norm(reader: Reader, module: Any, x: int) -> int:
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
