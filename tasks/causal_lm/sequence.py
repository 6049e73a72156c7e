"""Rows whose tokens are split over ranks: the batch of a rank, and attention that sees whole rows.

Transformers looks up attention and its mask by name. Here each implementation gets a second name, under which it
exchanges tokens for heads before and after; see Note [Ulysses]. It does so where a model is called with ``sequence``,
which Transformers hands through to attention: a call without it, such as generation, is that of whole rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import and_masks, packed_sequence_mask_function, remap_positions_for_packed_sequence

from lit_fsdp.sharding.sequence import SequenceGroup, count_shared_heads
from lit_fsdp.sharding.wrap import get_class
from lit_fsdp.tasks.attention import find_documents, get_eager, number_documents
from lit_fsdp.tasks.text.batches import DOCUMENT_LENGTHS, IGNORED, Batch

_IMPLEMENTATIONS = ("sdpa", "eager", "varlen_sdpa", "varlen_eager")
_PREFIX = "ulysses_"
_PIECE = 8  # tokens of each rank in the probe
_ROWS: ContextVar[WholeRows | None] = ContextVar("rows of the forward that runs", default=None)


@dataclass(frozen=True, kw_only=True)
class WholeRows:
    """What masks are made of: of all tokens of the rows, each [batch, length], or ``None``."""

    padding: Tensor | None  # 1 where a token is
    positions: Tensor
    documents: Tensor | None  # the number of each token's document in its row; ``None`` if each row is one


@dataclass(frozen=True, kw_only=True)
class SplitBatch:
    """The part of a batch that one rank of a sequence group computes.

    Args:
        inputs: Of the model: ``input_ids``, ``position_ids`` and ``attention_mask`` [batch, own tokens]; of packed
            rows ``document_lengths``, of all tokens.
        targets: The labels, shifted: what each of these tokens shall predict, -100 for nothing.
        rows: For the masks.
    """

    inputs: dict[str, Any]
    targets: Tensor
    rows: WholeRows


def shift_labels(labels: Tensor) -> Tensor:
    """Return for each token the label that it predicts, that of the next one [batch, length]."""
    return functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def split_batch(batch: Batch, sequence: SequenceGroup) -> SplitBatch:
    """Take this rank's tokens of a batch that all ranks of the group have.

    Rows are filled up so that all ranks get as many tokens. What fills them up comes after all tokens of a row, so
    that none of them sees it.

    Args:
        batch: ``input_ids`` and ``labels`` [batch, length], maybe ``position_ids`` (packed) or ``attention_mask``
            (padded on the right).
        sequence: The group.
    """
    ids, positions, padding = batch["input_ids"], batch.get("position_ids"), batch.get("attention_mask")
    if unknown := sorted(batch.keys() - {"input_ids", "labels", "position_ids", "attention_mask", DOCUMENT_LENGTHS}):
        what = f"of {', '.join(unknown)} in a batch nothing is known"
        raise ValueError(f"mesh.sequence: got {sequence.size}: {what}, so it cannot be split; set 1")
    documents = number_documents(batch)
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    num_more = -ids.shape[1] % sequence.size
    fill = partial(functional.pad, pad=(0, num_more))
    whole = WholeRows(
        padding=None if padding is None else fill(padding, value=1),  # unseen, and no reason to make a mask
        positions=fill(positions),
        documents=None if documents is None else functional.pad(documents, (0, num_more), value=-1),
    )
    present = torch.ones_like(ids) if padding is None else padding
    inputs = {
        "input_ids": fill(ids),
        "position_ids": whole.positions,
        # Always there: with it Transformers does not look for documents in the positions of a slice.
        "attention_mask": fill(present),
    }
    own: dict[str, Any] = {name: sequence.get_slice(values) for name, values in inputs.items()}
    if (lengths := find_documents(batch)) is not None:
        own[DOCUMENT_LENGTHS] = [[*row, *([num_more] if num_more else [])] for row in lengths]
    return SplitBatch(
        inputs=own,
        targets=sequence.get_slice(fill(shift_labels(batch["labels"]), value=IGNORED)),
        rows=whole,
    )


@contextmanager
def mask_whole_rows(rows: WholeRows) -> Iterator[None]:
    """Let masks of attention be those of whole rows, for a forward of a split batch."""
    token = _ROWS.set(rows)
    try:
        yield
    finally:
        _ROWS.reset(token)


def check_heads(config: PreTrainedConfig, size: int) -> None:
    """Refuse a group that cannot share the heads of a model, or a model that looks at other tokens elsewhere.

    Raises:
        ValueError: With the sizes that fit.
    """
    text = config.get_text_config()
    num_heads = getattr(text, "num_attention_heads", None)
    if num_heads is not None and num_heads % size:
        fits = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise ValueError(
            f"mesh.sequence: got {size}: the ranks share the {num_heads} attention heads of the model evenly: "
            f"expected one of {fits}"
        )
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ValueError(
            f"mesh.sequence: got {size}: {config.model_type} has layers of {' and '.join(sorted(kinds))}, which look "
            "at other tokens in their own way; set 1"
        )
    if getattr(text, "output_router_logits", False):
        raise ValueError(
            f"mesh.sequence: got {size} with config.output_router_logits: the loss of expert routers is no sum over "
            "tokens, so each rank would balance its own slice alone; set output_router_logits: false, or "
            "mesh.sequence: 1"
        )


def split_attention(model: PreTrainedModel) -> None:
    """Let the attention of a model exchange tokens for heads where it is called with ``sequence``; in place.

    Raises:
        ValueError: Its attention is not looked up by name, or there is no split one of this name.
    """
    given = model.config._attn_implementation  # private in all but name, seen in transformers 5.23
    name = type(model).__name__
    if given not in _IMPLEMENTATIONS:
        raise ValueError(
            f"attention: got {given!r}: mesh.sequence splits varlen, sdpa and eager only; set attention: auto"
        )
    _register()
    model.set_attn_implementation(_PREFIX + given)
    if model.config._attn_implementation != _PREFIX + given:
        raise ValueError(f"mesh.sequence: {name} has attention of its own, which cannot be split; set 1")


@torch.no_grad()
def check_split(
    compute_logits: Callable[..., Tensor], sequence: SequenceGroup, vocab_size: int, device: torch.device, model: str
) -> None:
    """Refuse a model that looks at other tokens elsewhere than in its attention, or leaves ``sequence`` out.

    Such a model would train on slices as if they were rows, without a word. So a row runs twice, whole and split: both
    must give the same logits. Two forward passes of 8 tokens a rank; all ranks must call it.

    Args:
        compute_logits: From inputs of the model to logits [1, length, vocabulary].
        sequence: The group.
        vocab_size: Ids are drawn below it.
        device: Of the inputs.
        model: Names it in the error.
    """
    shape = (1, _PIECE * sequence.size)
    ids = torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
    part = split_batch({"input_ids": ids, "labels": ids}, sequence)
    whole = sequence.get_slice(compute_logits(input_ids=ids, position_ids=part.rows.positions))
    tolerance = 1e-3 if whole.dtype == torch.float32 else 0.05
    try:
        with mask_whole_rows(part.rows):
            own = compute_logits(**part.inputs, sequence=sequence)
    except TypeError as error:
        raise ValueError(f"mesh.sequence: got {sequence.size}: {model} cannot be split: {error}; set 1") from error
    # Of the token in the middle: rounding may send a few to other experts.
    change = ((own - whole).float().abs().amax(-1) / whole.float().std()).median()
    dist.all_reduce(change, op=dist.ReduceOp.MAX)  # the first slice is right in any case
    if not float(change) < tolerance:
        raise ValueError(
            f"mesh.sequence: got {sequence.size}: {model} computes something else of split rows (logits change by "
            f"{float(change):.0%} of their spread): other layers than attention look at other tokens; set 1"
        )


def _register() -> None:
    for name in _IMPLEMENTATIONS:
        AttentionInterface.register(_PREFIX + name, partial(_attend, name))
        AttentionMaskInterface.register(_PREFIX + name, partial(_make_mask, name))


def _make_mask(name: str, *, mask_function: Callable[..., Any], **arguments: Any) -> Any:
    """Make the mask of whole rows, where a split batch runs; ``mask_function`` is that of one document."""
    make: Callable[..., Any] = AttentionMaskInterface()[name]
    rows = _ROWS.get()
    if rows is None:
        return make(mask_function=mask_function, **arguments)
    length = rows.positions.shape[1]
    arguments.update(q_length=length, kv_length=length, attention_mask=rows.padding)
    if rows.padding is not None:
        arguments["attention_mask"] = rows.padding.to(arguments["device"], torch.bool)
    if rows.documents is not None:
        inside = remap_positions_for_packed_sequence(mask_function, rows.positions)
        mask_function = and_masks(packed_sequence_mask_function(rows.documents), inside)
        arguments["allow_is_causal_skip"] = False
    return make(mask_function=mask_function, **arguments)


def _attend(
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequence: SequenceGroup | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend with the implementation of that name, to the tokens of all ranks.

    Args:
        name: Of the implementation.
        module: Whose attention this is.
        query: [batch, heads, own tokens, width]; ``key`` and ``value`` may have fewer heads.
        key: As ``query``.
        value: As ``query``.
        attention_mask: [batch, 1, all tokens, all tokens], or ``None``.
        sequence: The ranks that have the tokens; ``None``: all are here.
        options: Of the implementation.
    """
    attend: Callable[..., Any] = AttentionInterface().get(name, get_eager(module))
    if sequence is None:
        return attend(module, query, key, value, attention_mask, **options)
    times = count_shared_heads(key.shape[1], sequence.size)
    if times > 1:
        key, value = (states.repeat_interleave(times, dim=1) for states in (key, value))
    query, key, value = sequence.scatter_heads(query, key, value)
    own: Any = _OwnHeads(module, sequence, query.shape[1], key.shape[1])
    output, _ = attend(own, query, key, value, attention_mask, **options)  # [batch, all tokens, own heads, width]
    return sequence.gather_heads(output), None


class _OwnHeads:
    """An attention module as it would be with the heads of one rank alone."""

    def __init__(self, module: nn.Module, sequence: SequenceGroup, num_heads: int, num_key_value_heads: int) -> None:
        self._module = module
        self.attention_class = get_class(module)
        self.num_key_value_groups = num_heads // num_key_value_heads
        if (sinks := getattr(module, "sinks", None)) is not None:  # GPT-OSS: one for each head
            self.sinks = sinks[sequence.rank * num_heads :][:num_heads]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
