"""Which tokens of a row are hidden, drawn from the row itself.

Note [Masks of a row]: what is drawn for a token depends on the seed, the epoch, the tokens of its row and its place
there, and on nothing else. So a row has the same mask on whichever rank it is, beside whatever rows, with however much
padding, and after a resume; and another one in the next epoch. No generator has a state that a checkpoint would need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_fsdp.tasks.loading import mix_seeds
from lit_fsdp.tasks.text.batches import IGNORED, Batch

# Of splitmix64, as int64.
_STEP, _FIRST, _SECOND = (n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_MANTISSA = 53  # bits of a float64


@dataclass(frozen=True, kw_only=True)
class Masking:
    """How tokens are hidden, as ``DataCollatorForLanguageModeling`` of Transformers does.

    Args:
        mlm_probability: Share of the tokens that are to be predicted; special ones never are.
        mask_replace_prob: Share of these that become the mask token.
        random_replace_prob: Share of these that become a token at random; the rest stay as they are.
        mask_id: The mask token.
        special_ids: Tokens that are never hidden.
        vocab_size: Random tokens are below it.
    """

    mlm_probability: float
    mask_replace_prob: float
    random_replace_prob: float
    mask_id: int
    special_ids: Sequence[int]
    vocab_size: int


def mask_batch(batch: Batch, masking: Masking, *, seed: int, epoch: int) -> Batch:
    """Return a batch with tokens hidden, and labels of these only; see Note [Masks of a row].

    Args:
        batch: ``input_ids`` and ``labels`` [batch, length], -100 where a token may not be hidden, and maybe
            ``attention_mask``.
        masking: How.
        seed: Of the draws.
        epoch: Of them as well.
    """
    ids, labels = batch["input_ids"], batch["labels"]
    is_there = batch.get("attention_mask")
    places = torch.arange(ids.shape[1], device=ids.device)
    codes = _scramble(ids + places * _STEP)
    row = _scramble((codes if is_there is None else codes * is_there).sum(1, keepdim=True))  # [batch, 1]
    base = row + mix_seeds(seed, epoch) + 3 * places * _STEP
    chosen, kind, token = (_to_share(_scramble(base + draw)) for draw in range(3))  # each [batch, length]
    is_hidden = (chosen < masking.mlm_probability) & (labels != IGNORED) & ~_is_any(ids, masking.special_ids)
    is_masked = is_hidden & (kind < masking.mask_replace_prob)
    is_random = is_hidden & ~is_masked & (kind < masking.mask_replace_prob + masking.random_replace_prob)
    changed = torch.where(is_masked, masking.mask_id, ids)
    changed = torch.where(is_random, (token * masking.vocab_size).to(ids.dtype), changed)
    return {**batch, "input_ids": changed, "labels": torch.where(is_hidden, ids, IGNORED)}


def _is_any(ids: Tensor, chosen: Sequence[int]) -> Tensor:
    """Return whether each token is one of the chosen; ``torch.isin`` waits for a GPU if there are many of them."""
    ordered = torch.tensor(sorted({-1, *chosen}), dtype=ids.dtype)  # and one that no token is, so that none is before
    ordered = ordered.to(ids.device, non_blocking=True)  # or a GPU would be waited for, too
    return ordered[torch.bucketize(ids, ordered, right=True) - 1] == ids


def _scramble(numbers: Tensor) -> Tensor:
    """Return 64 bits that look random for each number: the finalizer of splitmix64."""
    numbers = (numbers ^ _shift(numbers, 30)) * _FIRST
    numbers = (numbers ^ _shift(numbers, 27)) * _SECOND
    return numbers ^ _shift(numbers, 31)


def _shift(numbers: Tensor, bits: int) -> Tensor:
    """Shift to the right, as if there was no sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def _to_share(numbers: Tensor) -> Tensor:
    """Return 64 bits as a number from 0 to below 1."""
    return _shift(numbers, 64 - _MANTISSA).double() * 2.0**-_MANTISSA
