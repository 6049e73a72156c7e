"""Lets a dry run build the attention masks that a real run would."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from transformers import masking_utils

from lit_fsdp.sharding.replaced_method import ReplacedMethod


def needs_mask(batch: Mapping[str, Any]) -> bool:
    """Return whether attention needs a mask: rows of several documents, or padded ones."""
    positions, padding = batch.get("position_ids"), batch.get("attention_mask")
    # Private in all but name, seen in transformers 5.23.
    is_packed = positions is not None and masking_utils.find_packed_sequence_indices(positions) is not None
    return is_packed or (padding is not None and not bool(padding.all()))


@contextmanager
def keep_branches(batch: Mapping[str, Any]) -> Iterator[None]:
    """Answer for tensors without values what Transformers asks of the values of this batch.

    Whether rows hold several documents decides if there is a mask at all; not knowing, Transformers takes the way
    of a traced graph, which needs memory that no run needs.

    Args:
        batch: With values; ``position_ids`` and masks of padding [batch, length], such as ``attention_mask``, if the
            model gets them. Of several, some padded, the model's are known by their shapes.
    """
    # Asked once in a forward.
    positions, masks = (
        batch.get("position_ids"),
        [m for name, m in batch.items() if name.endswith("mask") and m is not None],
    )
    is_packed = positions is not None and masking_utils.find_packed_sequence_indices(positions) is not None
    padded = {tuple(mask.shape) for mask in masks if not bool(mask.all())}
    whole = {tuple(mask.shape) for mask in masks} - padded

    def find(original: Callable[[Tensor], Tensor | None], position_ids: Tensor) -> Tensor | None:
        return original(position_ids) if is_packed else None

    def ignore(original: Callable[..., bool], padding_mask: Tensor | None, *args: Any, **kwargs: Any) -> bool:
        is_whole = padding_mask is not None and (tuple(padding_mask.shape) in whole if padded else bool(whole))
        return bool(original(None if is_whole else padding_mask, *args, **kwargs))

    # Private, seen in transformers 5.23, the last of encoders: whether nothing is padded, so that there is no mask.
    with ExitStack() as stack:
        stack.callback(ReplacedMethod(masking_utils, "_ignore_causal_mask_sdpa", ignore).remove)
        stack.callback(ReplacedMethod(masking_utils, "_ignore_bidirectional_mask_sdpa", ignore).remove)
        stack.callback(ReplacedMethod(masking_utils, "find_packed_sequence_indices", find).remove)
        yield
