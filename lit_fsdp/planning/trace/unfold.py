"""Unfolds the memory of a short model's step to the depth of the model that it stands for, see Note [Short model].

The log of the short step is cut where blocks begin, in forward and in backward. Before the first block after a gap,
what the blocks of the gap do is put in: the piece of the block that stands for each, with its own name. In the
optimizer, what belongs to a block alone is repeated after it, and what several have in common grows by their parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from lit_fsdp.planning.trace.dry_run import TracedStep
from lit_fsdp.planning.trace.replay import tell_storages_apart
from lit_fsdp.planning.trace.short_model import Stack
from lit_fsdp.profiling.memory_log import PHASES, Mark, MemoryEvent, MemoryLog

Relabel = Callable[[str], str]


class UnevenBlocksError(ValueError):
    """Blocks that should do the same do not."""


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """What happens between two marks."""

    mark: Mark
    phase: str
    stack: int  # number of the stack of its block; -1: of none
    place: int  # among the kept blocks
    turn: int  # how often the mark was there before
    operators: range
    events: range
    work: tuple[int, ...]


@dataclass
class _Unfolded:
    events: list[MemoryEvent] = field(default_factory=list)
    num_first: int = 0
    units: list[str] = field(default_factory=list)
    phases: list[tuple[str, int]] = field(default_factory=list)
    work: list[int] = field(default_factory=lambda: [0] * 4)
    exchanges: list[range] = field(default_factory=list)


def unfold_trace(traced: TracedStep, stacks: Sequence[Stack]) -> TracedStep:
    """Return the step of the whole model.

    Args:
        traced: The step of the short model, with the marks of all blocks of its stacks.
        stacks: As they were shortened.

    Raises:
        UnevenBlocksError: Two blocks that stand for others do not do the same, or the peak is in the optimizer, so a
            longer trace has to tell.
    """
    assert traced.log is not None
    flops = traced.flops
    work = (flops.forward, flops.backward, flops.recomputed, traced.moved_bytes, len(traced.exchanges))
    out = _Unfolding(traced.log, stacks, work).run()
    forward, backward, recomputed, moved_bytes = (a + int(b) for a, b in zip(work, out.work, strict=False))
    log = MemoryLog(events=out.events, units=out.units, phases=out.phases, num_first=out.num_first)
    memory = log.summarize()
    if memory.peak.phase == "optimizer":  # temporaries of loops over parameters were up to 6 % too high
        raise UnevenBlocksError("the peak is in the optimizer, of which a trace of all blocks has to tell")
    told = tell_storages_apart(out.events)
    return replace(
        traced,
        memory=memory,
        flops=replace(flops, forward=forward, backward=backward, recomputed=recomputed),
        moved_bytes=moved_bytes,
        exchanges=tuple(traced.exchanges[i] for span in out.exchanges for i in span),
        log=None if told is None else replace(log, events=told),
        is_unfolded=True,
    )


class _Unfolding:
    def __init__(self, log: MemoryLog, stacks: Sequence[Stack], work: Sequence[int]) -> None:
        self._log, self._stacks = log, stacks
        self._places = {name: (s, i) for s, stack in enumerate(stacks) for i, name in enumerate(stack.blocks)}
        self._label_places: dict[str, tuple[int, int] | None] = {}
        self._copies: dict[tuple[int, int], list[int]] = {}  # of each template
        for s, stack in enumerate(stacks):
            for i, place in stack.templates.items():
                self._copies.setdefault((s, place), []).append(i)
        self._pieces = list(self._cut(work))
        self._by_turn = {(p.stack, p.place, p.mark.is_backward, p.turn): p for p in self._pieces if p.stack >= 0}
        self._moved: dict[tuple[int, int, bool, int], list[MemoryEvent]] = {}  # by stack, number, direction and turn
        self._gone_once = frozenset(self._find_gone_once())
        self._out = _Unfolded()

    def run(self) -> _Unfolded:
        """Return the events of the whole step, and the work of what was put in."""
        self._check_twins()
        out = self._out
        for event in self._log.events[: self._log.num_first]:
            self._put(event, 0, self._relabel_in_place, copies=True)
        out.num_first = len(out.events)
        # What happens before the first mark, if anything, counts as of its first operator.
        first = self._log.marks[0]
        self._put_events(range(self._log.num_first, first.event), 0, self._relabel_in_place, copies=True)
        for piece in self._pieces:
            if piece.mark.name in PHASES:
                out.phases.append((piece.mark.name, len(out.units)))
            if piece.stack >= 0:
                for template, i in self._list_missing(piece):
                    self._put_piece(template, self._shift_to(template, i), number=i)
                    out.work = [a + b for a, b in zip(out.work, template.work, strict=False)]
            if piece.phase == "optimizer":
                self._put_optimizer(piece)
            elif piece.stack >= 0:
                number = self._stacks[piece.stack].kept[piece.place]
                self._put_piece(piece, self._shift_to(piece, number), number=number, is_own=True)
            else:
                self._put_piece(piece, self._relabel_in_place, is_own=True)
        return out

    def _cut(self, work: Sequence[int]) -> Iterator[_Piece]:
        marks, turns, phase = self._log.marks, Counter[tuple[str, bool]](), PHASES[0]
        end = Mark("", False, len(self._log.units), len(self._log.events), tuple(work))
        for mark, after in zip(marks, [*marks[1:], end], strict=True):
            phase = mark.name if mark.name in PHASES else phase
            stack, place = self._places.get(mark.name, (-1, -1))
            yield _Piece(
                mark=mark,
                phase=phase,
                stack=stack,
                place=place,
                turn=turns[mark[:2]],
                operators=range(mark.operator, after.operator),
                events=range(mark.event, after.event),
                work=tuple(b - a for a, b in zip(mark.work, after.work, strict=True)),
            )
            turns[mark[:2]] += 1

    def _list_missing(self, piece: _Piece) -> Iterator[tuple[_Piece, int]]:
        """Yield the blocks that come before a piece and are not in the short model, with what stands for each."""
        stack = self._stacks[piece.stack]
        if piece.mark.is_backward:
            end = stack.kept[piece.place + 1] if piece.place + 1 < len(stack.kept) else stack.depth
            numbers = range(end - 1, stack.kept[piece.place], -1)
        else:
            begin = stack.kept[piece.place - 1] + 1 if piece.place else 0
            numbers = range(begin, stack.kept[piece.place])
        for i in numbers:
            key = (piece.stack, stack.templates[i], piece.mark.is_backward, piece.turn)
            if (template := self._by_turn.get(key)) is not None:
                yield template, i

    def _find_gone_once(self) -> Iterator[int]:
        """Yield what goes in a block and came from outside of all that is repeated, such as a mask that blocks share.

        It goes with the last of them: in the whole model that is the last block of the same kind.
        """
        makers: dict[int, _Piece] = {}
        for piece in self._pieces:
            for i in piece.events:
                event = self._log.events[i]
                if event.num_bytes > 0 and not event.is_renamed:
                    makers.setdefault(event.storage, piece)
                elif piece.stack >= 0 and not event.is_renamed and self._came_once(makers.get(event.storage), piece):
                    last = self._find_last_alike(piece)
                    if last is not None:
                        moved = event._replace(operator=event.operator - piece.operators.start)
                        key = (piece.stack, last, piece.mark.is_backward, piece.turn)
                        self._moved.setdefault(key, []).append(moved)
                        yield i

    def _came_once(self, maker: _Piece | None, piece: _Piece) -> bool:
        if maker is None:  # before the step
            return False
        is_near = maker.stack == piece.stack and abs(maker.place - piece.place) <= self._stacks[piece.stack].reach
        return not is_near and (maker.stack, maker.place) not in self._copies

    def _find_last_alike(self, piece: _Piece) -> int | None:
        """Return which block of the whole is the last to run of those of its kind, if of the kept ones it is itself."""
        stack, choose = self._stacks[piece.stack], min if piece.mark.is_backward else max
        kind = stack.kinds[stack.kept[piece.place]]
        if choose(i for i in stack.kept if stack.kinds[i] == kind) != stack.kept[piece.place]:
            return None
        return choose(i for i in range(stack.depth) if stack.kinds[i] == kind)

    def _put_piece(self, piece: _Piece, relabel: Relabel, *, number: int = -1, is_own: bool = False) -> None:
        start = len(self._out.events)
        self._put_events(
            piece.events, len(self._out.units) - piece.operators.start, relabel, copies=is_own, piece=piece
        )
        if moved := self._moved.get((piece.stack, number, piece.mark.is_backward, piece.turn)):
            for event in moved:
                self._put(event, len(self._out.units), self._relabel_in_place, copies=False)
            self._out.events[start:] = sorted(self._out.events[start:], key=attrgetter("operator"))
        self._out.units += [relabel(self._log.units[i]) for i in piece.operators]
        self._out.exchanges.append(range(piece.mark.work[4], piece.mark.work[4] + piece.work[4]))

    def _put_events(
        self, numbers: range, base: int, relabel: Relabel, *, copies: bool, piece: _Piece | None = None
    ) -> None:
        for i in numbers:
            if i not in self._gone_once:
                event = self._log.events[i]
                self._put(event, base, relabel, copies=copies and self._is_of_all(event, piece))

    def _put(self, event: MemoryEvent, base: int, relabel: Relabel, *, copies: bool) -> None:
        moved = event._replace(operator=event.operator + base)
        self._out.events.append(moved._replace(unit=relabel(event.unit)))
        if copies:
            for label in self._list_copies(event.unit):
                self._out.events.append(moved._replace(unit=label))

    def _is_of_all(self, event: MemoryEvent, piece: _Piece | None) -> bool:
        """Whether an event outside of a block's own doing happens to all blocks, such as that gradients are freed."""
        if piece is None or piece.stack < 0:
            return True
        place = self._find_place(event.unit)
        stack = self._stacks[piece.stack]
        if place is None or piece.place not in (0, len(stack.kept) - 1):
            return False
        is_near = place[0] == piece.stack and abs(place[1] - piece.place) <= stack.reach
        return not is_near or (event.kind == "gradients" and piece.phase == "forward")

    def _put_optimizer(self, piece: _Piece) -> None:
        """Put in the optimizer: each run of operators of one unit, and after it those of the units it stands for."""
        log, out = self._log, self._out
        borders = [i for i in piece.operators if i == piece.operators.start or log.units[i] != log.units[i - 1]]
        runs = [range(a, b) for a, b in zip(borders, [*borders[1:], piece.operators.stop], strict=True)]
        events: dict[int, list[MemoryEvent]] = {}
        for event in log.events[piece.events.start : piece.events.stop]:
            events.setdefault(max(event.operator, piece.operators.start), []).append(event)
        for run in runs:
            unit = log.units[run.start]
            place = self._find_place(unit)
            copies = self._copies.get(place, []) if place else []
            # What it leaves goes with the first operator after it.
            left = [event for event in events.get(run.stop, []) if event.unit == unit] if copies else []
            base = len(out.units) - run.start
            for i in run:
                for event in events.get(i, []):
                    if not (copies and event.unit == unit):
                        self._put(event, base, self._relabel_in_place, copies=True)
            for label in [self._relabel_in_place(unit), *self._list_copies(unit)] if copies else [""]:
                if label:
                    base = len(out.units) - run.start
                    own = [event for i in run for event in events.get(i, []) if event.unit == unit]
                    out.events += [
                        event._replace(operator=event.operator + base, unit=label) for event in (*own, *left)
                    ]
                out.units += [label or self._relabel_in_place(log.units[i]) for i in run]
            if left:
                events[run.stop] = [event for event in events[run.stop] if event.unit != unit]

    def _check_twins(self) -> None:
        for s, stack in enumerate(self._stacks):
            for pair in stack.twins:
                for is_backward in (False, True):
                    first, other = (self._by_turn.get((s, place, is_backward, 0)) for place in pair)
                    if (first is None) != (other is None) or (first and other and self._differ(first, other)):
                        raise UnevenBlocksError(f"blocks {pair} of {stack.name} are not alike")

    def _differ(self, first: _Piece, other: _Piece) -> bool:
        if len(first.operators) != len(other.operators) or first.work != other.work:
            return True
        columns = []
        for piece in (first, other):
            changes: Counter[tuple[int, str, bool]] = Counter()
            for i in piece.events:
                event = self._log.events[i]
                if i not in self._gone_once:
                    changes[event.operator - piece.operators.start, event.kind, event.is_on_host] += event.num_bytes
            columns.append({key: change for key, change in changes.items() if change})
        return columns[0] != columns[1]

    def _find_place(self, label: str) -> tuple[int, int] | None:
        """Return the stack and the place of the block that a unit is, or is part of."""
        if label not in self._label_places:
            self._label_places[label] = self._search_place(label.partition(" + ")[0])
        return self._label_places[label]

    def _search_place(self, name: str) -> tuple[int, int] | None:
        while name:
            if name in self._places:
                return self._places[name]
            name = name.rpartition(".")[0]
        return None

    def _relabel_in_place(self, label: str) -> str:
        place = self._find_place(label)
        return label if place is None else self._rename(label, place, self._stacks[place[0]].kept[place[1]])

    def _list_copies(self, label: str) -> list[str]:
        place = self._find_place(label)
        return [] if place is None else [self._rename(label, place, i) for i in self._copies.get(place, [])]

    def _shift_to(self, template: _Piece, number: int) -> Relabel:
        """Return what names units as seen from a block that was put in: its neighbours are those around it."""
        stack = self._stacks[template.stack]

        def relabel(label: str) -> str:
            place = self._find_place(label)
            if place is None or place[0] != template.stack:
                return self._relabel_in_place(label)
            if abs(place[1] - template.place) > stack.reach:
                return self._relabel_in_place(label)
            return self._rename(label, place, number + place[1] - template.place)

        return relabel

    def _rename(self, label: str, place: tuple[int, int], number: int) -> str:
        name = self._stacks[place[0]].name
        old = f"{name}.{place[1]}"
        parts = [
            f"{name}.{number}{part.removeprefix(old)}" if part == old or part.startswith(f"{old}.") else part
            for part in label.split(" + ")
        ]
        return " + ".join(parts)
