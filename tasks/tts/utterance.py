"""One piece of speech as a model reads it, and a batch of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Batch = dict[str, Tensor]
Codes = NDArray[np.integer[Any]]


@dataclass(frozen=True, kw_only=True)
class Utterance:
    """One piece of speech, as the model reads it.

    Args:
        text_ids: Of the text, from ``Family.encode_text``.
        codes: [frames, codebooks]; ``None`` where they are to be generated.
        language: Id from ``FamilyConfig.get_language_id``.
        speaker: An embedding, the id of a built-in voice, or ``None``.
        is_counted: Whether it counts in losses; false where it only fills a batch up.
        context_ids: Text that was said before it, by a model that reads such, as ids of ``Family.encode_text``; empty
            where nothing was.
        context_codes: How that was said: [frames, codebooks].
        instruct_ids: How it shall be said, from ``Family.encode_instruct``; empty where nothing is asked for.
    """

    text_ids: Sequence[int]
    codes: Codes | None = None
    language: int | None = None
    speaker: NDArray[np.float32] | int | None = None
    is_counted: bool = True
    context_ids: Sequence[int] = ()
    context_codes: Codes | None = None
    instruct_ids: Sequence[int] = ()


def get_codes(utterance: Utterance) -> NDArray[np.int64]:
    """Return the codes of an utterance that has some, in memory."""
    assert utterance.codes is not None
    return np.asarray(utterance.codes, dtype=np.int64)


def get_context(utterance: Utterance) -> NDArray[np.int64]:
    """Return the codes of what was said before an utterance [frames, codebooks], in memory; [0, 0] where none is."""
    if utterance.context_codes is None:
        return np.zeros((0, 0), dtype=np.int64)
    return np.asarray(utterance.context_codes, dtype=np.int64)
