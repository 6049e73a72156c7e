"""Replays the allocations of a traced step through a model of CUDA's allocator: what it reserves for those tensors.

Note [Replay]: a step is run twice, as the first one of a run differs: the state of the optimizer is made at its end,
among blocks that are free for the moment. Every storage of the trace is an allocation, on the stream that it was made
on, in the order of the trace. What came before the first step is not replayed: weights that were loaded and quantized
leave fragments too. Neither are workspaces that kernels take, nor batches of other shapes than the traced one.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lit_fsdp.planning.step_parts import Replay
from lit_fsdp.planning.trace.allocator import MIB, Block, CachingAllocator, OutOfMemoryError
from lit_fsdp.profiling.memory import Kind
from lit_fsdp.profiling.memory_log import MemoryEvent, MemoryLog

_PRECISION = 0.005  # of the sizes that are searched for


def replay_step(log: MemoryLog, then: Sequence[MemoryLog] = ()) -> Replay:
    """Return what the allocator takes for a step, in up to two dozen replays: seconds for a deep model.

    Args:
        log: Whose events tell storages apart.
        then: Of steps of the same model that follow, such as those of other rows; by default the same step again.
    """
    tape = _Tape(log, then or [log])
    roomy, expandable = CachingAllocator(), CachingAllocator(is_expandable=True)
    tape.run(roomy)
    tape.run(expandable)
    steady_bytes = _find_least(tape, roomy.peak_allocated_bytes, roomy.peak_reserved_bytes, is_steady=True)
    least_bytes = _find_least(tape, roomy.peak_allocated_bytes, steady_bytes, is_steady=False)
    return Replay(
        reserved_bytes=roomy.peak_reserved_bytes,
        steady_bytes=steady_bytes,
        least_bytes=least_bytes,
        num_retries=tape.run(CachingAllocator(least_bytes)),
        expandable_bytes=expandable.peak_reserved_bytes,
    )


def tell_storages_apart(events: Sequence[MemoryEvent]) -> list[MemoryEvent] | None:
    """Number storages anew where pieces of a log were repeated, in which one number stands for several.

    What goes is what came with the same unit, kind and size: first under the same number, else the oldest.

    Returns:
        The events; ``None`` if something goes that has not come.
    """
    alive: defaultdict[tuple[str, Kind, bool, int], list[tuple[int, int]]] = defaultdict(list)
    renamed: defaultdict[int, deque[int]] = defaultdict(deque)
    told, num_storages = [], 0
    for event in events:
        size = abs(event.num_bytes)
        own = alive[event.unit, event.kind, event.is_on_host, size]
        if event.num_bytes > 0:
            if event.is_renamed and renamed[event.storage]:
                number = renamed[event.storage].popleft()
            else:
                number, num_storages = num_storages, num_storages + 1
            own.append((event.storage, number))
        elif own:
            place = next((i for i, (storage, _) in enumerate(own) if storage == event.storage), 0)
            number = own.pop(place)[1]
            if event.is_renamed:
                renamed[event.storage].append(number)
        elif size:
            return None
        else:
            number = -1  # made without memory, which comes later
        told.append(event._replace(storage=number))
    return told


class _Tape:
    """The allocations of all steps in order: ``(number, bytes, stream)``, where no bytes say that it is freed."""

    def __init__(self, log: MemoryLog, then: Sequence[MemoryLog]) -> None:
        first, step = log.events[: log.num_first], log.events[log.num_first :]
        optimizer = next((begin for name, begin in log.phases if name == "optimizer"), len(log.units))
        begin = next((i for i, event in enumerate(step) if event.operator >= optimizer), len(step))
        made = ("optimizer_state", "gradients")  # by the first step
        writer = _Writer()
        writer.write(event for event in first if event.kind not in made)
        writer.write(step[:begin])
        writer.write(event for event in first if event.kind == "optimizer_state")
        writer.write(step[begin:])
        self._second = len(writer.tape)
        for later in then:
            writer.begin_again(later.events[: later.num_first])
            writer.write(later.events[later.num_first :])
        self._operations = writer.tape

    def run(self, allocator: CachingAllocator) -> int:
        """Return how often an allocator retries after the first step.

        Raises:
            OutOfMemoryError: Its memory is not enough.
        """
        blocks: dict[int, Block] = {}
        num_before = 0
        for i, (number, num_bytes, stream) in enumerate(self._operations):
            if i == self._second:
                num_before = allocator.num_retries
            if num_bytes:
                blocks[number] = allocator.allocate(num_bytes, stream)
            else:
                allocator.free(blocks.pop(number))
        return allocator.num_retries - num_before


class _Alive(NamedTuple):
    number: int
    num_bytes: int
    stream: int


class _Writer:
    def __init__(self) -> None:
        self.tape: list[tuple[int, int, int]] = []
        self._alive: dict[int, _Alive] = {}  # by storage
        self._num_made = 0

    def write(self, events: Iterable[MemoryEvent]) -> None:
        """Add events of memory of the device, but for those that only rename it."""
        for event in events:
            if event.is_on_host or event.is_renamed or not event.num_bytes:
                continue
            old = self._alive.pop(event.storage, None)
            num_bytes, stream = event.num_bytes, event.stream
            if old is not None:
                num_bytes, stream = num_bytes + old.num_bytes, old.stream
                self._free(old)
            if num_bytes > 0:  # less goes where what is freed was not seen to come
                self._alive[event.storage] = self._allocate(num_bytes, stream)

    def begin_again(self, first: Iterable[MemoryEvent]) -> None:
        """Let what a step leaves be what the next one finds, such as gradients that are freed later."""
        found = {e.storage: e for e in first if e.num_bytes > 0 and not e.is_on_host}
        left = {storage: alive for storage, alive in self._alive.items() if storage not in found}
        for storage, event in found.items():
            if storage in self._alive:
                continue
            twin = next((other for other, alive in left.items() if alive.num_bytes == event.num_bytes), None)
            if twin is None:
                self._alive[storage] = self._allocate(event.num_bytes, event.stream)
            else:
                self._alive[storage] = left.pop(twin)
                del self._alive[twin]
        for storage, alive in left.items():
            self._free(alive)
            del self._alive[storage]

    def _allocate(self, num_bytes: int, stream: int) -> _Alive:
        self._num_made += 1
        self.tape.append((self._num_made, num_bytes, stream))
        return _Alive(self._num_made, num_bytes, stream)

    def _free(self, alive: _Alive) -> None:
        self.tape.append((alive.number, 0, 0))


def _find_least(tape: _Tape, low: int, high: int, *, is_steady: bool) -> int:
    """Return the least memory that is enough, between one that may not be and one that is."""
    while high - low > max(_PRECISION * high, 2 * MIB):
        middle = (low + high) // 2
        try:
            is_enough = tape.run(CachingAllocator(middle)) == 0 or not is_steady
        except OutOfMemoryError:
            is_enough = False
        low, high = (low, middle) if is_enough else (middle, high)
    return high
