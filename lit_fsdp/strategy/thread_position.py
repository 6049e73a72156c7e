"""Where a thread of this process is, read off its stack from another thread: it costs the thread nothing."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import distributed_c10d

# Private, seen in torch 2.13 to 2.15: what stands in the stack while a unit is gathered or reduced.
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from lit_fsdp.sharding import gloo_collectives, low_bit
from lit_fsdp.strategy.roll_call import wait_until

_OURS = str(Path(__file__).parents[1])
_STANDARD = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
_COLLECTIVES = (gloo_collectives.__file__, low_bit.__file__)  # called by FSDP2
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
# What a thread does, by the first frame from inside that is in one of these files.
_ACTIVITIES = (
    ("torch/utils/data/", "data loading"),
    ("lightning/pytorch/loops/fetchers", "data loading"),
    ("torch/distributed/checkpoint/", "a checkpoint"),
    (f"{_OURS}/checkpoint/", "a checkpoint"),
    (f"{_OURS}/export/", "an export"),
    ("torch/autograd/graph.py", "backward"),
    ("torch/optim/", "the optimizer"),
)
# What waits for other ranks and is no collective: it exchanges addresses, or sends from one rank to one other.
_CALLS = ("_new_process_group_helper", "monitored_barrier", "send", "recv")


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a thread is.

    Args:
        place: The line that tells most: the user's, else the innermost one.
        activity: Such as ``data loading``; ``None`` if the stack does not say.
        unit: The FSDP unit whose parameters are gathered or reduced there.
        call: The function of ``torch.distributed`` it is in, or what stands for it between CPUs.
    """

    place: str
    activity: str | None
    unit: str | None
    call: str | None


def find_position(thread: int) -> Position | None:
    """Return where a thread is, by its ``threading.get_ident()``; ``None`` if it has ended."""
    frames = _list_frames(thread)
    if not frames:
        return None
    return Position(
        place=_find_place(frames),
        activity=next((activity for frame in frames if (activity := _find_activity(frame))), None),
        unit=next((name for frame in frames if (name := _find_unit(frame))), None),
        call=_find_call(frames),
    )


def find_wait(thread: int) -> tuple[int, ...] | None:
    """Return where a thread waits for other ranks in something that is no collective; ``None`` if it does not.

    The same as long as it is the same wait, if nothing else of the run has moved. Takes some 10 microseconds.
    """
    frames = _list_frames(thread)
    for i, frame in enumerate(frames[:6]):
        code = frame.f_code
        is_call = code.co_filename == distributed_c10d.__file__ and code.co_name in _CALLS
        if is_call or code is wait_until.__code__:
            return (id(frame), *(number for outer in frames[i + 1 :] for number in (id(outer), outer.f_lasti)))
    return None


def format_stacks(first: int) -> str:
    """Return the stacks of all threads of this process, that of ``first`` first, the caller's left out."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
    order = sorted(frames, key=lambda ident: ident != first)
    return "\n".join(f"thread {names.get(i, i)}:\n{''.join(traceback.format_stack(frames[i]))}" for i in order)


def _list_frames(thread: int) -> list[FrameType]:
    frames, frame = [], sys._current_frames().get(thread)
    while frame is not None:  # the innermost first
        frames.append(frame)
        frame = frame.f_back
    return frames


def _find_place(frames: list[FrameType]) -> str:
    outside = [frame for frame in frames if not _is_standard(frame)] or frames
    for frame in outside:
        path = frame.f_code.co_filename
        if path.startswith(_OURS) or not path.startswith(_INSTALLED):
            return _name_line(frame)
        if "/lightning/" in path:  # further out is only who started the run
            break
    return _name_line(outside[0])


def _is_standard(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    if path in (wait_until.__code__.co_filename, *_COLLECTIVES):
        return True
    return path.startswith("<") or (path.startswith(_STANDARD) and not path.startswith(_INSTALLED))


def _name_line(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _find_activity(frame: FrameType) -> str | None:
    code = frame.f_code
    # An optimizer runs the step inside of its own.
    if code.co_name in _STEPS:
        return code.co_name
    return next((activity for part, activity in _ACTIVITIES if part in code.co_filename), None)


def _find_unit(frame: FrameType) -> str | None:
    if frame.f_code.co_filename != _fsdp_param_group.__file__:
        return None
    group: Any = frame.f_locals.get("self")
    name = getattr(group, "_module_fqn", None)  # none before the first forward
    return "(root)" if name == "" else name


def _find_call(frames: list[FrameType]) -> str | None:
    # Not further out: what is called from there, such as a hook, is somebody else's.
    for file in (gloo_collectives.__file__, distributed_c10d.__file__):  # for some reductions, ours call torch's
        near = [f.f_code.co_name for f in frames[:6] if f.f_code.co_filename == file]
        if (name := next((name for name in near if not name.startswith("_")), None)) is not None:
            return name
    return None
