"""Attention of packed rows without a mask: each token sees its own document, and no matrix of a row's length squared.

Note [Documents instead of a mask]: Transformers looks up attention, and what makes its mask, by name. Under the names
here, the mask of a packed row is a :class:`DocumentMask`: a few numbers that say where documents begin and how far
their tokens look back. Every model that takes masks of any backend hands it on to its attention, also through
activation checkpointing. Where documents begin comes from the batch, by :func:`pack_documents`; without it, in
generation or for padded rows, these names do what ``sdpa`` or ``eager`` of Transformers do.

On GPUs in half precision attention is ``varlen_attn`` of torch, one kernel for all documents. Elsewhere documents go
one by one through the implementation of Transformers, where each is causal and needs no mask; the tokens of a sliding
window go through it in parts of one window.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils

from lit_fsdp.sharding.replaced_method import ReplacedMethod
from lit_fsdp.sharding.torch_internals import SHARES_HEADS_IN_FLOAT32
from lit_fsdp.sharding.wrap import get_class
from lit_fsdp.tasks.text.batches import (
    DOCUMENT_LENGTHS,
    DocumentLengths,
    add_document_lengths,
)

Attention = Literal[
    "auto",
    "varlen",
    "sdpa",
    "eager",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
]
VARLEN = "varlen"
_NAMES = {"sdpa": f"{VARLEN}_sdpa", "eager": f"{VARLEN}_eager"}  # by what attends to one document
_KERNEL = "torch.nn.attention.varlen"  # imported late, as it takes a second
_WIDEST_HEAD, _HEAD_STEP = 256, 8  # of the kernel
_FIRST_WITH_FLASH = (8, 0)  # compute capability
_DOCUMENTS: ContextVar[DocumentLengths | None] = ContextVar("documents of the forward that runs", default=None)
_PLANNED: ContextVar[_Planned | None] = ContextVar("what a dry run stands for", default=None)


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """What tensors without values cannot tell."""

    device_type: str
    documents: DocumentLengths | None


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentMask:
    """What attention gets in place of a mask; see Note [Documents instead of a mask].

    Args:
        lengths: Tokens of each document, row after row.
        cu_seq_lens: Where documents begin in all rows one after the other, and the end, [documents + 1] in int32.
        max_length: Tokens of the longest document.
        window: How many tokens a token sees, itself included; ``None`` for all before it.
        is_before_flash: Whether the GPU has no flash kernels: compiled code could not ask it.
    """

    lengths: DocumentLengths
    cu_seq_lens: Tensor
    max_length: int
    window: int | None
    is_before_flash: bool


def choose_attention(model: PreTrainedModel, wanted: Attention, *, is_packed: bool, needs_one_graph: bool) -> str:
    """Set how a model attends, as the setting ``attention`` says; return the name that Transformers has for it.

    Args:
        model: On the meta device, built with what Transformers would choose, or with what is wanted.
        wanted: The setting.
        is_packed: Whether rows hold several documents, as far as is known.
        needs_one_graph: Whether blocks are compiled, and nothing may be left to Python.

    Raises:
        ValueError: ``varlen`` cannot be had.
    """
    current = str(model.config._attn_implementation)  # private in all but name, seen in transformers 5.23
    if wanted != VARLEN and (wanted != "auto" or not is_packed or needs_one_graph):
        return current
    # Private, seen in transformers 5.23: whether attention is looked up by name.
    has_choice = getattr(model, "_supports_attention_backend", False) and not chooses_tokens(model)
    name = _NAMES.get(current) if has_choice else None
    if name is not None:
        model.set_attn_implementation(name)
        current = str(model.config._attn_implementation)
    if wanted == VARLEN and current != name:
        raise ValueError(
            f"attention: got {VARLEN!r}: {type(model).__name__} has attention of its own, which takes masks only; set "
            f"attention: auto, which is {current} here"
        )
    return current


def chooses_tokens(model: nn.Module) -> bool:
    """Return whether a model chooses what tokens see by an indexer, or compresses it: both write into a mask.

    Among them are DeepSeek V3.2 and V4, GLM 5 and MiniMax M3. Transformers applies the choice of an indexer under the
    names ``sdpa`` and ``eager`` only; under others attention would be dense, without a word.
    """
    return any(word in type(module).__name__ for module in model.modules() for word in ("Indexer", "Compressor"))


def describe_attention(name: str, device: torch.device, precision: str) -> str:
    """Say what an implementation does with packed rows.

    Args:
        name: For Transformers.
        device: Where it computes.
        precision: Of the Trainer, or the dtype of its compute.
    """
    if name == _NAMES["sdpa"]:
        if device.type == "cuda" and "16" in precision and not is_before_flash(device):
            return f"{VARLEN}: varlen_attn of torch, and what it does not take one document after another"
        return f"{VARLEN}: sdpa of one document after another"
    if name == _NAMES["eager"]:
        return f"{VARLEN}: eager attention of one document after another, as the model has no sdpa"
    return f"{name} with a mask of the row length squared"


@contextmanager
def pack_documents(batch: Mapping[str, Any], implementation: str) -> Iterator[dict[str, Any]]:
    """Tell attention inside of a context where the documents of a batch begin; yield the inputs of the model.

    Args:
        batch: ``input_ids`` and whatever else the model takes; of packed rows ``document_lengths``, or
            ``position_ids`` [batch, length] that begin again with each document.
        implementation: Of attention, as the model's configuration has it.
    """
    inputs = {name: values for name, values in batch.items() if name != DOCUMENT_LENGTHS}
    is_flash = implementation.startswith("flash_attention")
    documents = find_documents(batch) if is_flash or VARLEN in implementation else None
    if is_flash and documents is not None:
        mask = make_document_mask(documents, None, inputs["input_ids"].device)
        inputs |= {"cu_seq_lens_q": mask.cu_seq_lens, "cu_seq_lens_k": mask.cu_seq_lens}
        inputs |= {"max_length_q": mask.max_length, "max_length_k": mask.max_length}
    token = _DOCUMENTS.set(documents)
    answered = ReplacedMethod(masking_utils, "find_packed_sequence_indices", partial(_number_documents, batch))
    try:
        yield inputs
    finally:
        answered.remove()
        _DOCUMENTS.reset(token)


def number_documents(batch: Mapping[str, Any]) -> Tensor | None:
    """Return for each token of a batch the number of its document in the row [batch, length]; ``None`` if all are 0."""
    positions: Tensor | None = batch.get("position_ids")
    find = masking_utils.find_packed_sequence_indices
    return None if positions is None else _number_documents(batch, find, positions)


def _number_documents(
    batch: Mapping[str, Any], find: Callable[[Tensor], Tensor | None], positions: Tensor
) -> Tensor | None:
    # Whether there are several documents is known on the host; Transformers would wait for the GPU to know it.
    if DOCUMENT_LENGTHS not in batch or positions is not batch.get("position_ids"):  # a model may make its own
        return find(positions)
    if max(map(len, batch[DOCUMENT_LENGTHS])) == 1:
        return None
    return (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1)


def find_documents(batch: Mapping[str, Any]) -> DocumentLengths | None:
    """Return the lengths of the documents of a batch, ``None`` if it is not packed; of a dry run those planned."""
    if DOCUMENT_LENGTHS not in batch and (planned := _PLANNED.get()) is not None:
        return None if "attention_mask" in batch else planned.documents
    found: DocumentLengths | None = add_document_lengths(batch).get(DOCUMENT_LENGTHS)
    return found


@contextmanager
def plan_attention(batch: Mapping[str, Any], device_type: str) -> Iterator[None]:
    """Attend inside of a context, to tensors without values, as a run on such devices would to this batch.

    Args:
        batch: With values.
        device_type: ``cuda`` or ``cpu``.
    """
    documents = add_document_lengths(batch).get(DOCUMENT_LENGTHS)
    token = _PLANNED.set(_Planned(device_type=device_type, documents=documents))
    try:
        yield
    finally:
        _PLANNED.reset(token)


def make_document_mask(documents: DocumentLengths, window: int | None, device: torch.device) -> DocumentMask:
    """Return where documents begin, for attention on a device."""
    if _get_device_type(device) == "cuda":
        import_module(_KERNEL)  # its operator has to be there before a block is checkpointed
    lengths = [length for row in documents for length in row]
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    longest = max(lengths)
    return DocumentMask(
        lengths=documents,
        cu_seq_lens=ends.to(device, non_blocking=True),  # or a GPU would be waited for
        max_length=longest,
        window=window if window is not None and window < longest else None,
        is_before_flash=is_before_flash(device),
    )


def get_eager(module: nn.Module) -> Callable[..., Any] | None:
    """Return the eager attention of a model, given its attention module; it is no name of Transformers."""
    kind = getattr(module, "attention_class", None) or get_class(module)
    found: Callable[..., Any] | None = getattr(sys.modules[kind.__module__], "eager_attention_forward", None)
    return found


def _make_mask(inner: str, **arguments: Any) -> Any:
    """Return a :class:`DocumentMask` for packed rows, and for others the mask that ``inner`` takes.

    Args:
        inner: What attends to one document: ``sdpa`` or ``eager``.
        arguments: As Transformers gives them to whatever makes masks.
    """
    documents, window = _DOCUMENTS.get(), arguments.get("local_size")
    length, num_rows = arguments["q_length"], arguments["batch_size"]
    if (
        documents is None
        or arguments.get("attention_mask") is not None
        or arguments.get("use_vmap", False)  # the model adds rules of its own
        or "allow_is_bidirectional_skip" in arguments
        # Llama 4: of chunks, not of a window.
        or (window is not None and getattr(arguments["config"], "attention_chunk_size", None) is not None)
        or length != arguments["kv_length"]
        or [sum(row) for row in documents] != [length] * num_rows
        # Causal as they are.
        or (inner == "sdpa" and max(map(len, documents)) == 1 and (window is None or window >= length))
    ):
        make: Callable[..., Any] = AttentionMaskInterface()[inner]
        return make(**arguments)
    return make_document_mask(documents, window, arguments["device"])


def _attend(
    inner: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attend to the documents of packed rows; to anything else as ``inner`` does.

    Args:
        inner: ``sdpa`` or ``eager``.
        module: Whose attention this is.
        query: [batch, heads, length, width]; ``key`` and ``value`` may have fewer heads.
        key: As ``query``.
        value: As ``query``.
        attention_mask: A :class:`DocumentMask`, or what ``inner`` takes.
        options: As ``inner`` takes them.
    """
    if not isinstance(attention_mask, DocumentMask):
        return _get_inner(inner, module)(module, query, key, value, attention_mask, **options)
    if inner == "sdpa" and torch.is_autocast_enabled(query.device.type):  # as it casts for sdpa, but not for a kernel
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if inner == "sdpa" and not attention_mask.is_before_flash and has_kernel(query, value, options):
        return attend_at_once(query, key, value, attention_mask, options.get("scaling")), None
    return _attend_in_turn(inner, module, query, key, value, attention_mask, options), None


def _get_inner(inner: str, module: nn.Module) -> Callable[..., Any]:
    found: Callable[..., Any] = AttentionInterface().get(inner, get_eager(module))
    return found


def has_kernel(query: Tensor, value: Tensor, options: Mapping[str, Any]) -> bool:
    """Return whether ``varlen_attn`` takes these: on GPUs, in half precision, with nothing but a causal window."""
    width = query.shape[-1]
    return (
        _get_device_type(query.device) == "cuda"
        and query.dtype in (torch.bfloat16, torch.float16)
        and width == value.shape[-1] <= _WIDEST_HEAD
        and width % _HEAD_STEP == 0
        and not options.get("dropout")
        and all(options.get(name) is None for name in ("softcap", "s_aux", "position_bias"))
    )


def is_before_flash(device: torch.device) -> bool:
    """Return whether a GPU is older than Ampere: a T4 or V100 has float16, but no flash kernels."""
    return (
        device.type == "cuda"
        and _PLANNED.get() is None
        and torch.cuda.is_available()  # else it is planned
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) < _FIRST_WITH_FLASH
    )


def _get_device_type(device: torch.device) -> str:
    planned = _PLANNED.get()
    return device.type if planned is None else planned.device_type


def attend_at_once(query: Tensor, key: Tensor, value: Tensor, mask: DocumentMask, scale: float | None) -> Tensor:
    """Return [batch, length, heads, width], by one call of ``varlen_attn`` for all documents of all rows."""
    num_rows, num_heads, length, _ = query.shape
    rows = [states.transpose(1, 2).flatten(0, 1) for states in (query, key, value)]  # [tokens, heads, width]
    starts, longest = mask.cu_seq_lens, mask.max_length
    # Of ``_KERNEL``, which is there when a mask is: compiled code could not import it.
    kernels: Any = torch.nn.attention
    attended: Tensor = kernels.varlen.varlen_attn(
        *rows,
        starts,
        starts,
        longest,
        longest,
        scale=scale,
        # How many more than itself.
        window_size=(-1 if mask.window is None else mask.window - 1, 0),
        enable_gqa=num_heads != key.shape[1],
    )
    return attended.unflatten(0, (num_rows, length))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # or each batch would be compiled anew
def _attend_in_turn(
    inner: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: DocumentMask,
    options: dict[str, Any],
) -> Tensor:
    """Return [batch, length, heads, width]."""
    if options.get("position_bias") is not None:
        name = type(module).__name__
        raise ValueError(f"attention: got {VARLEN!r}: {name} adds a bias for each pair of tokens; set attention: sdpa")
    # What torch's kernels have not is left to the model's own code.
    is_plain = inner == "sdpa" and all(options.get(name) is None for name in ("softcap", "s_aux"))
    attend = partial(attend_fused if is_plain else partial(_attend_eagerly, module), options=options)
    # Splits, whose gradients are put together in one: those of slices would each be as large as all rows.
    by_row = [states.split(1) if len(mask.lengths) > 1 else [states] for states in (query, key, value)]
    rows = []
    for lengths, *states in zip(mask.lengths, *by_row, strict=True):
        pieces = zip(*(s.split(lengths, dim=2) if len(lengths) > 1 else [s] for s in states), strict=True)
        rows.append(_join([_attend_to_one(attend, mask.window, *piece) for piece in pieces], dim=1))
    return _join(rows, dim=0)


def _attend_to_one(
    attend: Callable[..., Tensor], window: int | None, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Return what the tokens of one document see, [1, length, heads, width]; of a long one a window after another."""
    length = query.shape[2]
    if window is None or window >= length:
        return attend(query, key, value, window=length)
    parts = []
    for begin in range(0, length, window):
        end, first = min(begin + window, length), max(0, begin - window + 1)
        seen = slice(first, end)
        parts.append(attend(query[:, :, begin:end], key[:, :, seen], value[:, :, seen], window=window))
    return _join(parts, dim=1)


def attend_fused(query: Tensor, key: Tensor, value: Tensor, *, window: int, options: Mapping[str, Any]) -> Tensor:
    """Attend from the last tokens of some to a window each, by a kernel of torch; [1, queries, heads, width]."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    mask = None if num_queries == num_keys else _make_band(num_queries, num_keys, window, query)
    groups = query.shape[1] // key.shape[1]
    # As Transformers believes of kernels, which on GPUs is true of flash kernels only, so neither in float32 nor where
    # there are none; without a kernel, all scores are kept.
    has_sharing = mask is None and query.shape[-1] == value.shape[-1] <= _WIDEST_HEAD
    is_on_gpu = _get_device_type(query.device) == "cuda"
    if is_on_gpu and (query.dtype == torch.float32 or is_before_flash(query.device)):
        has_sharing = has_sharing and SHARES_HEADS_IN_FLOAT32
    if groups > 1 and not has_sharing:
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    attended = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=options.get("dropout", 0.0),
        is_causal=mask is None,
        scale=options.get("scaling"),
        enable_gqa=groups > 1 and has_sharing,
    )
    return attended.transpose(1, 2)


def _attend_eagerly(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *, window: int, options: Mapping[str, Any]
) -> Tensor:
    """The same by the model's own code."""
    seen = _make_band(query.shape[2], key.shape[2], window, query)
    hidden = torch.full_like(seen, torch.finfo(query.dtype).min, dtype=query.dtype)
    attended: Tensor = _get_inner("eager", module)(module, query, key, value, hidden.masked_fill(seen, 0), **options)[0]
    return attended


def _make_band(num_queries: int, num_keys: int, window: int, like: Tensor) -> Tensor:
    """Return what the last tokens of some see, each a window, [1, 1, queries, keys]."""
    places = torch.arange(num_keys, device=like.device)
    distance = places[num_keys - num_queries :, None] - places
    return ((distance >= 0) & (distance < window))[None, None]


def _join(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


# When the file is imported: also where a model is unpickled that has the names already.
for _inner, _name in _NAMES.items():
    AttentionInterface.register(_name, partial(_attend, _inner))
    AttentionMaskInterface.register(_name, partial(_make_mask, _inner))
