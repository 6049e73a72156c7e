"""What the steps of all families put on a tape, for the closed form; see Note [Tape]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lit_fsdp.planning.closed_form.model_reader import ModelReader
from lit_fsdp.planning.closed_form.tape import FLOAT32, Tape
from lit_fsdp.planning.step_parts import MicroBatch

INDEX = 8  # bytes of a code or a place


def describe_batch(batch: Mapping[str, Any], *, rows: int, length: int, is_masked: bool = False) -> MicroBatch:
    """Return the shape of a micro-batch with those of all its tensors.

    Args:
        batch: From ``Family.collate`` or ``make_example_batch``.
        rows: How many.
        length: Positions of each.
        is_masked: Whether attention needs a mask.
    """
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    return MicroBatch(
        rows=rows,
        length=length,
        is_masked=is_masked,
        shapes={name: tuple(value.shape) for name, value in tensors.items()},
        num_bytes=sum(value.nbytes for value in tensors.values()),
    )


def pick(tape: Tape, x: int, num_bytes: int) -> int:
    """Choose rows by their places; backward puts their gradients into zeros for all."""
    return tape.add("index", (x,), num_bytes)


def add_masked(tape: Tape, x: int) -> int:
    """Multiply by a mask of the batch."""
    return tape.add_pointwise("mul", x)


def read_blocks(step: ModelReader, blocks: Any, x: int, reader: Any) -> int:
    """Add a stack of blocks, and return its output."""
    for block in blocks:
        x = step.run(block, x, reader)
    return x


def read_losses(tape: Tape, logits: int, num_targets: int) -> int:
    """Add the cross-entropies of targets in float32, and their weighted sum."""
    wide = tape.add_cast(logits, tape.itemsize, FLOAT32)
    logs = tape.add_pointwise("log_softmax", wide, saves_output=True)
    losses = tape.add("nll_loss", (logs,), num_targets * FLOAT32, saves=(logs,))
    tape.release(wide)
    return tape.add("sum", (losses,), FLOAT32)
