"""Rules for rotary positions: of whole heads, or of a part of each, which is put together again with the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_fsdp.planning.reader import Reader, UnreadableModuleError, find_source
from lit_fsdp.planning.tape import FLOAT32


def find_part(module: Any, head_dim: int) -> int | None:
    """Return how many numbers of each head are rotated, where the rest is joined to them; ``None`` rotates all."""
    size: int | None = getattr(module, "rotary_ndims", None)
    if size is not None:
        return size
    settings = getattr(getattr(module, "config", None), "rope_parameters", None)
    # Families that can rotate a part have a factor in their settings, and join also where it is 1.
    factor = settings.get("partial_rotary_factor") if isinstance(settings, Mapping) else None
    return None if factor is None or "_pass" not in _find_source(module) else int(head_dim * factor)


def rotate(reader: Reader, module: Any, values: tuple[int, int], head_dim: int) -> tuple[int, int]:
    """Add the rotation of queries and keys; return both."""
    tape, part, source = reader.tape, find_part(module, head_dim), _find_source(module)
    size = 2 * reader.length * (part or head_dim) * tape.itemsize  # cosines and sines of one row
    kept: tuple[int, ...] = ()
    if "repeat_interleave" in source:  # each layer repeats them for itself
        tape.passed[f"positions {size}"] = size
        kept = (tape.add("repeat_interleave", (), size),)
    else:
        tape.tables[f"positions {size}"] = size
    q, k = (_rotate(reader, x, (part or head_dim, head_dim), kept, is_wide=".float()" in source) for x in values)
    return q, k


def rotate_views(reader: Reader, module: Any, qkv: int, widths: tuple[int, int, int]) -> int:
    """Add the rotation of queries and keys that are views of one tensor, in part; return both as one value.

    Raises:
        UnreadableModuleError: They are rotated otherwise.
    """
    query, key, head_dim = widths
    tape, part, source = reader.tape, find_part(module, head_dim), _find_source(module)
    if part is None or "repeat_interleave" in source or ".float()" in source:
        raise UnreadableModuleError(type(module).__name__, "joint projections, of which whole heads are rotated")
    table = 2 * reader.length * part * tape.itemsize
    tape.tables[f"positions {table}"] = table
    # Of both at once. The values stay a view; their gradient waits for that of the others.
    size = reader.count_bytes(query)
    both = size + reader.count_bytes(key)
    return tape.add("rotary", (qkv,), both, forward_temp=3 * size * part // head_dim, backward_temp=size)


def _find_source(module: Any) -> str:
    """Return the code that rotates, as nothing else says in which order and with which dtype."""
    return find_source(module, "apply_rotary_pos_emb")


def _rotate(reader: Reader, x: int, widths: tuple[int, int], kept: tuple[int, ...], *, is_wide: bool) -> int:
    tape, (part, head_dim) = reader.tape, widths
    x = tape.add_cast(x, tape.itemsize, FLOAT32) if is_wide else x
    size = tape.sizes[x]
    # Both halves of the sum are gradients at once; where a part is rotated, both of them are smaller.
    temp, backward_temp = 3 * size * part // head_dim, size if part < head_dim else 2 * size
    y = tape.add("rotary", (x, *kept), size, saves=kept, forward_temp=temp, backward_temp=backward_temp)
    return tape.add_cast(y, FLOAT32, tape.itemsize) if is_wide else y
