"""A micro-batch in parts, by its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

# A part, and what its loss is multiplied with before losses are added up to that of the batch.
BatchPart = tuple[Any, float]


def split_rows(batch: Any, num_parts: int) -> list[BatchPart]:
    """Split a batch into parts of as many rows, or one more; each weighs as its share of the rows.

    That is right where the loss is a mean over rows. Tensors, arrays and lists have the rows as their first dimension.
    Numbers, strings, ``None`` and tensors without a dimension go to all parts.

    Args:
        batch: A tensor, or a mapping, list or tuple of what there is of each row.
        num_parts: How many parts; a batch of fewer rows gives one for each row.

    Raises:
        ValueError: It has no rows, or another number of them in another place.
    """
    sizes = {name: len(value) for name, value in _iterate(batch) if _has_rows(value)}
    if not sizes:
        raise ValueError(f"a batch of {type(batch).__name__} has no tensors with rows")
    first, num_rows = next(iter(sizes.items()))
    for name, size in sizes.items():
        if size != num_rows:
            raise ValueError(f"{name} of the batch has {size} rows, and {first} has {num_rows}")
    if num_rows == 0:
        return [(batch, 1.0)]
    num_parts = min(num_parts, num_rows)
    ends = [(i + 1) * num_rows // num_parts for i in range(num_parts)]
    spans = zip([0, *ends[:-1]], ends, strict=True)
    return [(_cut(batch, slice(begin, end)), (end - begin) / num_rows) for begin, end in spans]


def _iterate(batch: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(batch, Mapping):
        yield from ((str(name), value) for name, value in batch.items())
    elif isinstance(batch, list | tuple):
        yield from ((f"place {i}", value) for i, value in enumerate(batch))
    else:
        yield "the tensor", batch


def _has_rows(value: Any) -> bool:
    return bool(value.ndim) if isinstance(value, Tensor | np.ndarray) else isinstance(value, list | tuple)


def _cut(batch: Any, rows: slice) -> Any:
    def cut(value: Any) -> Any:
        return value[rows] if _has_rows(value) else value

    if isinstance(batch, Mapping):
        return {name: cut(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [cut(value) for value in batch]
        return parts if isinstance(batch, list) else tuple(parts)
    return cut(batch)
