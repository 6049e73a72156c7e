"""What the tensors of a Transformers model are called and made of in its files, as Transformers itself has it.

Note [Rows of converted tensors]: files of mixture-of-experts models hold each expert by itself, where the model has
one tensor whose rows are the experts. Where an operation keeps rows apart, a rank reads only what its rows are
made of: stacking along dimension 0 takes whole stored tensors, joining along it takes ranges of them, and
operations inside of rows take the same rows of each. All other conversions, such as splitting a fused projection, need
their stored tensors in full: these are read and converted one after another, so a rank holds the full tensors of
one conversion at a time, and all ranks read them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from lit_fsdp.adapters.layers import clean_name
from lit_fsdp.errors import get_first_line
from lit_fsdp.weights.safetensors_io import StoredTensor

Rows = Literal["stacked", "joined", "inside"]
Read = Callable[[str, int, int], Tensor]


@dataclass(kw_only=True)
class Conversion:
    """How one or more tensors of the model are made of stored ones.

    Args:
        first_target: The tensor of the model, or the first of several.
        sources: Stored tensors in order, each with the pattern of the converter that it matches.
        converter: Operations of Transformers, none where a tensor is stored as it is, or under another name.
        shapes: Of all tensors that come out of it.
        rows: Which rows of the sources the rows of a shard need, if not all; see Note [Rows of converted tensors].
    """

    first_target: str
    sources: list[tuple[str, str]] = field(default_factory=list)
    converter: WeightConverter | None = None
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    rows: Rows | None = None


def plan_conversions(
    model: nn.Module, stored: Mapping[str, StoredTensor], targets: Mapping[str, Any]
) -> tuple[list[Conversion], list[str]]:
    """Return how the model's tensors are made of stored ones, and which stored ones it has no use for. Pure.

    A model that is not of Transformers has its tensors stored as they are.

    Args:
        model: Sharded or not.
        stored: What there is, by stored name.
        targets: What is to be filled, by the names of the model without wrappers.

    Raises:
        ValueError: The stored tensors of a conversion do not fit each other, or one is there twice.
    """
    if not isinstance(model, PreTrainedModel):
        known = [Conversion(first_target=n, sources=[(n, n)], shapes={n: stored[n].shape}) for n in stored]
        return [c for c in known if c.first_target in targets], [n for n in stored if n not in targets]
    mapping = _read_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    rename = partial(rename_source_key, base_model_prefix=model.base_model_prefix, meta_state_dict=dict(targets))
    found: dict[str, Conversion] = {}
    unknown: list[str] = []
    # As convert_and_load_state_dict_in_model of Transformers: in its order, which is that of experts and layers.
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename(name, renamings, converters)
        if target not in targets and name in targets:
            target, pattern = rename(name, [], [])
        if target not in targets:
            unknown.append(name)
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        conversion = found.setdefault(target, Conversion(first_target=target, converter=converter))
        if conversion.sources and (pattern is None or conversion.converter is None):
            raise ValueError(f"{target} is stored twice, as {conversion.sources[0][1]} and as {name}; remove one")
        conversion.sources.append((pattern or name, name))
    for conversion in found.values():
        _set_shapes(model, conversion, stored)
    unread = _list_unread(model)
    return list(found.values()), [name for name in unknown if not any(p.search(name) for p in unread)]


def list_optional(model: nn.Module) -> list[re.Pattern[str]]:
    """Return patterns of names that files may lack, because the model's initializer sets them well."""
    return [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()]


def describe_sources(conversion: Conversion) -> str:
    """Return the stored tensors of a conversion in words, for errors: the name of one, else how many of each kind."""
    if conversion.converter is None:
        return conversion.sources[0][1]
    found = [pattern for pattern, _ in conversion.sources]
    counts = [f"{found.count(pattern)} stored {pattern}" for pattern in conversion.converter.source_patterns]
    return f"{' and '.join(counts)} (such as {conversion.sources[0][1]})"


def convert_rows(
    model: nn.Module,
    conversion: Conversion,
    stored: Mapping[str, StoredTensor],
    read: Read,
    dtype: torch.dtype,
    span: tuple[int, int] | None = None,
) -> dict[str, Tensor]:
    """Return the tensors that come out of a conversion, or rows of them.

    Args:
        model: Whose configuration the operations ask.
        conversion: With a converter.
        stored: What there is.
        read: Returns rows from the first to before the last of a stored tensor.
        dtype: Cast to before converting, as Transformers does.
        span: Only these rows, for a conversion with ``rows``. Only what they are made of is read.
    """
    assert conversion.converter is not None
    converter = deepcopy(conversion.converter)
    for pattern, name, begin, end in _list_reads(conversion, stored, span):
        # Called when its operation runs, not now.
        load: Any = partial(_read_cast, read, name, begin, end, dtype)
        converter.add_tensor(conversion.first_target, name, pattern, load)
    result = converter.convert(conversion.first_target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in result.items()}


def _list_reads(
    conversion: Conversion, stored: Mapping[str, StoredTensor], span: tuple[int, int] | None
) -> Iterator[tuple[str, str, int, int]]:
    """Yield pattern, name, first and last row of what the rows of a shard are made of."""
    num_seen: dict[str, int] = {}
    for pattern, name in _order_sources(conversion):
        num_rows = stored[name].num_rows
        if span is None:
            yield pattern, name, 0, num_rows
        elif conversion.rows == "inside":
            yield pattern, name, *span
        elif conversion.rows == "stacked":
            place = num_seen.get(pattern, 0)
            num_seen[pattern] = place + 1
            if span[0] <= place < span[1]:
                yield pattern, name, 0, num_rows
        else:
            place = num_seen.get("", 0)
            num_seen[""] = place + num_rows
            begin, end = (min(max(edge - place, 0), num_rows) for edge in span)
            yield pattern, name, begin, end


def _order_sources(conversion: Conversion) -> list[tuple[str, str]]:
    """Return the sources pattern by pattern, which is the order in which operations join them."""
    assert conversion.converter is not None
    order = conversion.converter.source_patterns
    return sorted(conversion.sources, key=lambda source: order.index(source[0]))


def _read_cast(read: Read, name: str, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    return read(name, begin, end).to(dtype)


def _set_shapes(model: nn.Module, conversion: Conversion, stored: Mapping[str, StoredTensor]) -> None:
    """Run a conversion on the meta device, which costs nothing, to learn what comes out of it."""
    if conversion.converter is None:
        conversion.shapes = {conversion.first_target: stored[conversion.sources[0][1]].shape}
        return

    def read(name: str, begin: int, end: int) -> Tensor:
        shape = stored[name].shape
        return torch.empty((end - begin, *shape[1:]) if shape else (), dtype=stored[name].dtype, device="meta")

    try:
        result = convert_rows(model, conversion, stored, read, stored[conversion.sources[0][1]].dtype)
    except Exception as error:  # whatever an operation of Transformers raises; the cause is chained
        reason = get_first_line(error)
        raise ValueError(
            f"{conversion.first_target} cannot be made of {describe_sources(conversion)}: {reason}"
        ) from error
    conversion.shapes = {name: tuple(tensor.shape) for name, tensor in result.items()}
    conversion.rows = _classify_rows(conversion.converter.operations)


def _classify_rows(operations: list[ConversionOps]) -> Rows | None:
    first, rest = operations[0], operations[1:]
    if type(first) is MergeModulelist and first.dim == 0:
        return "stacked" if all(map(_is_inside_rows, rest)) else None
    if type(first) is Concatenate and first.dim == 0:
        return "joined" if all(map(_is_inside_rows, rest)) else None
    return "inside" if all(map(_is_inside_rows, operations)) else None


def _is_inside_rows(operation: ConversionOps) -> bool:
    if type(operation) is Transpose:
        return not operation.check_dims and min(operation.dim0, operation.dim1) > 0
    return type(operation) in (Concatenate, Chunk, Interleave) and operation.dim > 0  # type: ignore[attr-defined]


def _list_unread(model: PreTrainedModel) -> list[re.Pattern[str]]:
    """Return patterns of stored names that the model once had; Transformers skips the same."""
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ())]
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.append(r"(^|\.)position_ids$")
    return [re.compile(pattern) for pattern in patterns]


def _read_mapping(model: PreTrainedModel) -> list[Any]:
    with _own_classes(model):
        mapping = get_model_conversion_mapping(model)
    for entry in mapping:
        if entry.scope_prefix:
            entry.scope_prefix = clean_name(entry.scope_prefix)
    return mapping


@contextmanager
def _own_classes(model: nn.Module) -> Iterator[None]:
    """Give sharded modules their own classes back for a while.

    FSDP2 makes a class for each, in a module of torch, and Transformers then takes the model for custom code that has
    no conversions. Where the own class stands among its bases is private, seen in torch 2.13.
    """
    sharded = [(module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        for module, made in sharded:
            module.__class__ = made.__mro__[made._orig_cls_mro_index]
        yield
    finally:
        for module, made in sharded:
            module.__class__ = made
