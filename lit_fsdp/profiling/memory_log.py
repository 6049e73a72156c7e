"""The memory of one step, as a trace has written it down: event by event, and what was alive after each operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lit_fsdp.profiling.memory import KINDS, Kind

PHASES = ("forward", "backward", "optimizer")
OUTSIDE = "(outside units)"


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The moment at which most was alive."""

    num_bytes: int
    operator: int  # number of the operator, from 0
    phase: str  # the part of the step
    unit: str  # the unit that was computing
    by_kind: Mapping[Kind, int]  # bytes of each kind
    by_unit: Mapping[str, Mapping[Kind, int]]  # bytes of each kind, for each unit that has any


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """The memory of one step."""

    peak: Peak  # its largest moment
    by_kind: Mapping[Kind, Sequence[int]]  # bytes of each kind after each operator
    # ``(name, first operator, end)``, in order; with several micro-batches they repeat
    phases: Sequence[tuple[str, int, int]]
    # Bytes that a trace was told to count as host memory, each kind at its largest
    host_by_kind: Mapping[Kind, int] = field(default_factory=dict)


class MemoryEvent(NamedTuple):
    """Memory that came, went, or was found to be for something else."""

    operator: int  # number of the operator that is the first to see it
    unit: str
    kind: Kind
    is_on_host: bool
    num_bytes: int  # negative: it went
    storage: int = -1  # number of what came or went, the same for both
    stream: int = 0  # on which it was made, by number; 0: that of compute
    is_renamed: bool = False  # nothing came or went: a pair of events says what the same memory is for now


class Mark(NamedTuple):
    """A border in a step."""

    name: str  # of a phase, or of a block that is marked
    is_backward: bool  # whether it is the backward of the block that begins
    operator: int  # number of the next operator
    event: int  # number of the next event
    work: tuple[int, ...]  # what ``count_work`` returned


@dataclass(frozen=True, kw_only=True)
class MemoryLog:
    """The memory of one step, event by event."""

    events: Sequence[MemoryEvent]
    units: Sequence[str]  # of each operator: the unit that was computing
    phases: Sequence[tuple[str, int]]  # name and first operator
    marks: Sequence[Mark] = ()
    num_first: int = 0  # events of what was there before the step

    def summarize(self) -> StepMemory:
        """Return what was alive after each operator.

        Raises:
            RuntimeError: There was no operator.
        """
        num_operators = len(self.units)
        if not num_operators:
            raise RuntimeError("no operator ran while the memory was traced")
        by_kind = {kind: np.zeros(num_operators + 1, dtype=np.int64) for kind in KINDS}
        host, largest = Counter[Kind](), dict[Kind, int]()
        for operator, _, kind, is_on_host, num_bytes, *_ in self.events:
            if is_on_host:
                host[kind] += num_bytes
                largest[kind] = max(largest.get(kind, 0), host[kind])
            else:
                by_kind[kind][min(operator, num_operators)] += num_bytes
        alive = {kind: np.cumsum(changes[:-1]) for kind, changes in by_kind.items()}
        total = sum(alive.values(), np.zeros(num_operators, dtype=np.int64))
        peak = int(total.argmax())
        by_unit: dict[str, Counter[Kind]] = {}
        for operator, unit, kind, is_on_host, num_bytes, *_ in self.events:
            if operator <= peak and not is_on_host:
                by_unit.setdefault(unit, Counter())[kind] += num_bytes
        ends = [begin for _, begin in self.phases[1:]] + [num_operators]
        phases = [(name, begin, end) for (name, begin), end in zip(self.phases, ends, strict=True)]
        return StepMemory(
            peak=Peak(
                num_bytes=int(total[peak]),
                operator=peak,
                phase=next((name for name, begin, end in reversed(phases) if begin <= peak < end), PHASES[0]),
                unit=self.units[peak],
                by_kind={kind: int(column[peak]) for kind, column in alive.items()},
                by_unit={unit: +kinds for unit, kinds in by_unit.items() if +kinds},
            ),
            by_kind={kind: column.tolist() for kind, column in alive.items()},
            phases=[(name, begin, end) for name, begin, end in phases if end > begin],
            host_by_kind=largest,
        )
