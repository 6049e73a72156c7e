"""The longest rows and the largest batch that fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lit_fsdp.planning.estimate import Hardware
from lit_fsdp.planning.timing.step_time import StepTime
from lit_fsdp.planning.trials import Trial, Trials
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
from lit_fsdp.sharding.cpu_offload import CPUOffload
from lit_fsdp.sharding.settings import Settings

Size = Literal["seq_length", "batch_size"]

_LENGTH_STEP, _MOST_TOKENS, _MOST_ROWS = 128, 2**20, 4096
_NUM_STRAIGHT = 3  # guesses on a straight line, before the middle is tried
_CLOSE = 0.01  # a limit is found to 1 %: below the error of the estimate


@dataclass(frozen=True, kw_only=True)
class Limit:
    """How large one size may be, with some settings.

    Args:
        changes: Settings other than configured, as in YAML.
        value: The largest that fits; ``None`` if nothing does.
        is_bound: Whether it is the most that the model takes, or that was tried: memory would allow more.
        trial: The step of that size; of the smallest one if nothing fits.
        time: Of that step, where a GPU was named.
    """

    changes: Mapping[str, Any]
    value: int | None
    is_bound: bool
    trial: Trial
    time: StepTime | None


def find_limits(trials: Trials, size: Size, device_bytes: int, hardware: Hardware | None) -> list[Limit]:
    """Return the largest value of a size that fits: as configured, with all that saves memory, and with offload too.

    All of these train the same. Memory rises with both sizes, so each limit takes about six estimates.

    Args:
        trials: Of the step; its variant with ``model.loss_chunks`` counts, if it has one.
        size: Which setting of the data.
        device_bytes: Memory of a GPU.
        hardware: To estimate times for.

    Raises:
        NoEstimateError: The data module has no such setting.
    """
    sizes = _list_lengths(trials) if size == "seq_length" else trials.list_sizes(_MOST_ROWS)
    found = []
    for number, settings in list_frugal(trials):

        def try_size(count: int, number: int = number, settings: Settings = settings) -> Trial:
            value = sizes[count - 1]
            length, rows = (value, None) if size == "seq_length" else (None, value)
            return trials.estimate(settings, number=number, length=length, rows=rows)

        def count_left(count: int, try_size: Callable[[int], Trial] = try_size) -> int:
            return device_bytes - try_size(count).needed_bytes

        count = find_largest(count_left, len(sizes))
        trial = try_size(count or 1)
        found.append(
            Limit(
                changes=trial.changes,
                value=None if count is None else sizes[count - 1],
                is_bound=count == len(sizes),
                trial=trial,
                time=None if hardware is None else trial.estimate_time(hardware),
            )
        )
    return found


def find_largest(count_left: Callable[[int], int], high: int) -> int | None:
    """Return the largest whole number from 1 for which something is left, or one at most 1 % below it.

    Args:
        count_left: What is left; it falls as the number rises. Expensive, and often nearly a straight line.
        high: The largest; ``None`` is returned if nothing is left for it, nor for 1.
    """
    low = 1
    left_low, left_high = count_left(low), count_left(high)
    if left_high >= 0:  # first: with no_sync, one micro-batch of a global batch holds less than several smaller ones
        return high
    if left_low < 0:
        return None
    num_straight = _NUM_STRAIGHT
    while high - low > max(1, _CLOSE * low):
        middle = round((low * high) ** 0.5)
        if num_straight:
            middle = low + int((high - low) * left_low / (left_low - left_high))
            num_straight -= 1
        # A little beyond, so that both ends move, however small the error of the line.
        middle = min(max(middle + round(_CLOSE / 2 * low), low + 1), high - 1)
        left = count_left(middle)
        if left >= 0:
            low, left_low = middle, left
        else:
            high, left_high = middle, left
    return low


def list_frugal(trials: Trials) -> list[tuple[int, Settings]]:
    """Return settings that train the same: as configured, with all that saves memory, and with offload as well.

    Each with the number of its step.
    """
    given = trials.settings
    frugal = replace(given, sharding=given.sharding.keep_least())
    recompute = given.activation_checkpointing
    has_blocks = any(unit.kind == "block" for unit in trials.estimate().model.units)
    if has_blocks:
        least = ActivationCheckpointing(mode="full", offload=recompute.offload, mlp_chunks=recompute.mlp_chunks)
        frugal = replace(frugal, activation_checkpointing=least)
    number = trials.find_chunked_loss() or 0
    found = [(0, given)]
    if frugal != given or number:
        found.append((number, frugal))
    if trials.can_offload:
        found.append((number, replace(frugal, cpu_offload=CPUOffload())))
    return found


def _list_lengths(trials: Trials) -> Sequence[int]:
    """Return lengths of rows, up to what the task or the configuration of its model says."""
    module = trials.steps[0][0].module
    config = getattr(getattr(module, "model", None), "config", None)
    text: Any = config if config is None or not hasattr(config, "get_text_config") else config.get_text_config()
    longest = getattr(module, "longest_row", None) or getattr(text, "max_position_embeddings", None)
    bound = longest if isinstance(longest, int) and longest > 0 else _MOST_TOKENS
    step = min(_LENGTH_STEP, bound)
    return [*range(step, bound, step), bound]
