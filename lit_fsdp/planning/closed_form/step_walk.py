"""Walks a training step along its tape, and adds up what is alive: the buffers and gradients of FSDP2 as well.

Note [Order of FSDP2]: what is gathered, copied and freed when was seen in torch 2.13 to 2.15. In forward the buffer
of a gather stays until that of the next unit was copied out. In backward the next unit is gathered while one computes,
and the buffer of a reduce-scatter stays until the next one, or as many later as there may be at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_fsdp.planning.closed_form.tape import QUANTIZED, Op, Tape
from lit_fsdp.profiling.memory import KINDS, Kind
from lit_fsdp.profiling.memory_log import OUTSIDE
from lit_fsdp.sharding.shard import Sharding

# Products of rows: their gradients are views of matrices, to which autograd adds nothing in place.
_GIVE_VIEWS = ("mm", "addmm")


@dataclass(frozen=True, kw_only=True)
class UnitSizes:
    """Bytes of one unit on one rank."""

    label: str
    gathered: int  # all its parameters, in the dtype of compute
    cast: int  # the shard in the dtype of compute, where that is another than it is stored in
    reduce: int  # what its gradients are reduced from, at full size
    reduced: int  # the shard that comes out, in the dtype of reduction
    gradient: int  # the shard of the gradient that is kept
    kept: int  # what stays of a gather after forward, where it is resharded to fewer ranks
    last_gradient: int  # of its last parameter, where FSDP2 frees it later
    reshards: bool  # after forward
    is_gathered_again: bool  # by backward, unless it is gathered still
    trains: bool
    is_root: bool
    is_embedding: bool
    is_idle: bool  # no step has a use for it
    is_reached: bool  # backward gathers it ahead: not what is frozen before the first unit that trains
    num_parameters: int
    gather_scratch: int = 0  # while a gather rounds what it sends
    reduce_scratch: int = 0  # while a reduce-scatter does


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The most that was alive during one part of the step: one unit in ``forward``, ``backward`` or ``optimizer``."""

    phase: str
    unit: str
    num_bytes: int
    by_kind: Mapping[Kind, int]
    activations: Mapping[str, int]  # by the part of the model that made them


@dataclass(frozen=True, kw_only=True)
class WalkSettings:
    """How a step goes."""

    num_shards: int
    is_replicated: bool
    num_micro_batches: int
    sharding: Sharding
    reduce_itemsize: int  # of the dtype that gradients are reduced in
    casts_shards: bool  # gradients are kept in another dtype than they are reduced in
    saved_ops: frozenset[str]  # operators whose outputs are kept although a block is computed again
    keeps_shards: bool  # sharded gradients stay on the device


@dataclass
class Gradient:
    """The gradient of a value, in backward; to a view autograd adds nothing in place."""

    num_bytes: int
    is_view: bool
    refs: int = 1  # how many hold it


@dataclass
class Walk:
    """Follows one step."""

    tape: Tape
    units: Sequence[UnitSizes]
    owners: Mapping[str, int]  # the unit of each parameter that is sharded, by name
    settings: WalkSettings
    fixed: Mapping[Kind, int]  # what is there throughout
    moments: list[Moment] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._live: dict[Kind, int] = {kind: self.fixed.get(kind, 0) for kind in KINDS}
        self._phase, self._unit, self._stack = "forward", OUTSIDE, [OUTSIDE]
        self._best = 0
        self._by_part: Counter[str] = Counter()
        self._gathered: set[int] = set()
        self._pending: set[int] = set()  # gathered ahead, not copied out yet
        self._in_buffer = 0  # of the last gather in forward
        self._out_buffers: list[int] = []  # of the last reduce-scatters
        self._all_reduced = 0
        self._sharded: set[int] = set()  # units with a sharded gradient
        self._unreduced: Counter[str] = Counter()  # gradients of parameters at full size
        self._views: set[str] = set()  # parameters whose gradient is a view
        self._held: dict[int, int] = {}  # the same, by unit, of the micro-batches before
        self._order: list[int] = []
        self._planned = [i for i, unit in enumerate(self.units) if not (unit.is_root or unit.is_idle)]
        self._kept: set[int] = set()
        self._unused: list[int] = []  # what was kept of a block, and is not needed to compute it again
        self._uses: Counter[int] = Counter()
        self._begins: dict[int, int] = {}  # of recomputed blocks, by where they end
        self._waiting: tuple[int, int] | None = None  # a block to compute again when backward first needs its values
        self._frozen: set[int] = set()  # where those begin that have no backward
        begin = 0
        for i, step in enumerate(self.tape.steps):
            if isinstance(step, Op):
                self._uses.update(step.inputs)
            elif step.what == "enter_block":
                begin = i
            elif step.what == "leave_block":
                self._begins[i] = begin
                if not self.tape.needs_grad[step.value]:
                    self._frozen.add(begin)

    def run(self) -> None:
        """Walk forward and backward of the micro-batches; two of several differ."""
        num = min(self.settings.num_micro_batches, 2)
        for i in range(num):
            self._is_reducing = not self.settings.sharding.no_sync or i + 1 == num
            self._run_forward()
            self._run_backward()
        self._free("gathered", sum(self.units[index].gathered for index in self._gathered))
        self._gathered.clear()
        self._enter("optimizer", OUTSIDE)

    def add_temporary(self, kind: Kind, num_bytes: int) -> None:
        """Count what is alive for a moment."""
        self._add(kind, num_bytes)
        self._free(kind, num_bytes)

    def finish(self) -> list[Moment]:
        """Return the moments, one for each part of the step."""
        self._close()
        return self.moments

    def _add(self, kind: Kind, num_bytes: int) -> None:
        self._live[kind] += num_bytes
        total = sum(self._live.values())
        if total > self._best:
            self._best, self._best_kinds, self._best_parts = total, dict(self._live), +self._by_part

    def _free(self, kind: Kind, num_bytes: int) -> None:
        self._live[kind] -= num_bytes
        assert self._live[kind] >= 0, (kind, self._phase, self._stack)

    def _enter(self, phase: str, unit: str) -> None:
        self._close()
        self._phase, self._unit = phase, unit
        self._add("rest", 0)

    def _close(self) -> None:
        if self._best:
            most: dict[str, Any] = {"by_kind": self._best_kinds, "activations": self._best_parts}
            self.moments.append(Moment(phase=self._phase, unit=self._unit, num_bytes=self._best, **most))
        self._best = 0

    # Values of forward: how many still need each.

    def _run_forward(self) -> None:
        self._refs: Counter[int] = Counter()
        self._alive: set[int] = set()
        self._order = []
        self._stack = [OUTSIDE]
        self._enter("forward", OUTSIDE)
        made = {step.output for step in self.tape.steps if isinstance(step, Op)}
        for value in self.tape.held - made:
            self._make(value, 1 + self._uses[value])
        is_recomputed = False
        for i, step in enumerate(self.tape.steps):
            if isinstance(step, Op):
                self._run_op(step, keeps=not is_recomputed)
            elif step.what == "enter_unit":
                self._enter_unit(step.index)
            elif step.what == "leave_unit":
                self._leave_unit(step.index)
            else:
                is_recomputed = step.what == "enter_block" and i not in self._frozen
                if is_recomputed:
                    self._refs[step.value] += 1

    def _make(self, value: int, refs: int) -> None:
        self._refs[value] += refs
        if value not in self._alive:
            self._alive.add(value)
            self._by_part[self.tape.parts[value]] += self.tape.sizes[value]
            self._add("activations", self.tape.sizes[value])

    def _drop(self, value: int) -> None:
        self._refs[value] -= 1
        if self._refs[value] <= 0 and value in self._alive:
            self._alive.remove(value)
            self._by_part[self.tape.parts[value]] -= self.tape.sizes[value]
            self._free("activations", self.tape.sizes[value])

    def _run_op(self, op: Op, *, keeps: bool) -> None:
        """Run forward of an operator; ``keeps`` says whether it keeps what backward needs."""
        self._make(op.output, self._uses[op.output] + (op.output in self.tape.held) + 1)
        self.add_temporary("activations", op.forward_temp)
        if keeps:
            for value in op.saves:
                self._make(value, 1)
        elif op.name in self.settings.saved_ops:
            for value in op.outputs:
                self._make(value, 1)
        for value in op.inputs:
            self._drop(value)
        self._drop(op.output)

    def _recompute_waiting(self) -> None:
        if self._waiting:
            self._recompute(*self._waiting)
            self._waiting = None

    def _recompute(self, begin: int, end: int) -> None:
        """Run forward of a block again, up to the last operator that keeps something."""
        ops = [step for step in self.tape.steps[begin:end] if isinstance(step, Op)]
        last = max((i for i, op in enumerate(ops) if op.saves), default=-1)
        made = {op.output for op in ops}
        self._refs.update(value for op in ops for value in op.inputs if value not in made)
        skipped: set[int] = set()
        for i, op in enumerate(ops):
            if i < last or (i == last and op.output in op.saves):
                is_cached = op.name in self.settings.saved_ops
                self._run_op(op, keeps=True)
                for value in op.outputs if is_cached else ():
                    self._drop(value)
                continue
            skipped.add(op.output)
            if op.name in self.settings.saved_ops:
                self._unused += op.outputs
            if i == last:
                for value in op.saves:
                    self._make(value, 1)
            for value in op.inputs:
                if value not in skipped:  # what was kept of it stays until the block ends
                    self._drop(value)

    # Gradients: of values, shared where backward passes them on, and of parameters.

    def _run_backward(self) -> None:
        self._gradients: dict[int, Gradient] = {}
        self._free("communication", self._in_buffer)
        self._in_buffer = 0
        self._enter("backward", OUTSIDE)
        for value in self.tape.held:
            self._drop(value)
        last = next(step for step in reversed(self.tape.steps) if isinstance(step, Op))
        self._gradients[last.output] = self._new_gradient(self.tape.sizes[last.output])
        postponed: list[int] = []
        for i in range(len(self.tape.steps) - 1, -1, -1):
            step = self.tape.steps[i]
            if isinstance(step, Op):
                self._run_op_backward(step)
            elif step.what == "leave_unit":
                if self.tape.needs_grad[step.value]:
                    self._begin_backward(step.index)
            elif step.what == "leave_block":
                if self.tape.needs_grad[step.value]:
                    self._waiting = self._begins[i], i
            elif step.what == "enter_block":
                self._recompute_waiting()
                for value in [step.value, *self._unused] if i not in self._frozen else ():
                    self._drop(value)
                self._unused = []
            elif self.tape.needs_grad[step.value]:
                self._end_backward(step.index)
            else:
                postponed.append(step.index)
        for index in sorted(postponed, key=lambda i: (not self.units[i].is_root, i)):
            self._end_backward(index)
        self._finish_backward()

    def _new_gradient(self, num_bytes: int, *, is_view: bool = False) -> Gradient:
        self._add("rest", num_bytes)
        return Gradient(num_bytes, is_view)

    def _release(self, gradient: Gradient) -> None:
        gradient.refs -= 1
        if not gradient.refs:
            self._free("rest", gradient.num_bytes)

    def _accumulate(self, value: int, gradient: Gradient) -> None:
        """Add up the gradients of a value: in place, if the first is nobody else's."""
        old = self._gradients.get(value)
        if old is None:
            self._gradients[value] = gradient
            return
        if old.refs > 1 or old.is_view:
            self._gradients[value] = self._new_gradient(gradient.num_bytes)
            self._release(old)
        self._release(gradient)

    def _run_op_backward(self, op: Op) -> None:
        if _asks_for_values(op):
            self._recompute_waiting()
        gradient = self._gradients.pop(op.output, None)
        if gradient is None:
            for value in op.saves:
                self._drop(value)
            return
        sizes = self.tape.sizes
        for _, num_bytes in op.weights:
            self._add("rest", num_bytes)
        is_shared = op.shares_grad or op.splits_grad
        self.add_temporary("rest", op.backward_temp + (0 if is_shared else sum(sizes[v] for v in op.gets_grad)))
        is_view = op.name in _GIVE_VIEWS
        made: list[tuple[int, Gradient]] = []
        for value in op.gets_grad:
            if op.splits_grad or (op.shares_grad and sizes[value] == gradient.num_bytes):
                gradient.refs += 1
                made.append((value, gradient))
            else:
                made.append((value, self._new_gradient(sizes[value], is_view=is_view)))
        self._release(gradient)
        for value in op.saves:
            self._drop(value)
        for value, new in made:
            self._accumulate(value, new)
        for name, num_bytes in op.weights:
            self._keep_gradient(name, num_bytes, is_view=is_view)

    def _keep_gradient(self, name: str, num_bytes: int, *, is_view: bool) -> None:
        """Keep the gradient of a parameter; that of a shared one is a sum, in place as of values."""
        self._free("rest", num_bytes)
        if self._unreduced[name]:
            self.add_temporary("gradients", num_bytes * (1 + (name in self._views)))
            self._views.discard(name)
            return
        self._unreduced[name] = num_bytes
        self._add("gradients", num_bytes)
        if is_view:
            self._views.add(name)

    # Wrap, see Note [Order of FSDP2].

    def _gather(self, index: int) -> None:
        """Start a gather: its buffer is there until it is copied out."""
        unit = self.units[index]
        if index in self._gathered or index in self._pending or self.settings.num_shards == 1:
            return
        self._add("communication", unit.cast)
        self._add("communication", unit.gathered)
        self._free("communication", unit.cast)
        self.add_temporary("communication", unit.gather_scratch)
        self._pending.add(index)

    def _copy_out(self, index: int, *, in_forward: bool) -> None:
        if index in self._gathered:
            return
        unit = self.units[index]
        if self.settings.num_shards == 1:
            self.add_temporary("communication", unit.cast // max(unit.num_parameters, 1))
        self._add("gathered", unit.gathered)
        self._gathered.add(index)
        if index in self._kept:
            self._kept.remove(index)
            self._free("gathered", unit.kept)
        if index in self._pending:
            self._pending.remove(index)
            if in_forward:
                self._free("communication", self._in_buffer)
                self._in_buffer = unit.gathered
            else:
                self._free("communication", unit.gathered)

    def _reshard(self, index: int) -> None:
        if index in self._gathered:
            self._gathered.remove(index)
            self._free("gathered", self.units[index].gathered)

    def _enter_unit(self, index: int) -> None:
        self._stack.append(self.units[index].label)
        self._enter("forward", self._stack[-1])
        self._gather(index)
        self._copy_out(index, in_forward=True)
        if ahead := self.settings.sharding.forward_prefetch:
            for target in [i for i in self._planned if i > index and not self.units[i].is_embedding][:ahead]:
                self._gather(target)

    def _leave_unit(self, index: int) -> None:
        self._stack.pop()
        unit = self.units[index]
        self._order.append(index)
        if unit.reshards:
            self._reshard(index)
            if unit.kept:
                self._add("gathered", unit.kept)
                self._kept.add(index)
        self._enter("forward", self._stack[-1])

    def _begin_backward(self, index: int) -> None:
        self._enter("backward", self.units[index].label)
        if self.units[index].is_gathered_again:
            self._gather(index)
            self._copy_out(index, in_forward=False)
        # Of the root FSDP2 decides, and gathers one ahead; of one, that which ran before; of several, as planned.
        ahead = 1 if self.units[index].is_root else self.settings.sharding.backward_prefetch
        order = self._order if ahead == 1 else self._planned
        place = order.index(index)
        for target in order[max(place - ahead, 0) : place][::-1]:
            if self.units[target].is_reached and self.units[target].is_gathered_again:
                self._gather(target)

    def _end_backward(self, index: int) -> None:
        unit = self.units[index]
        names = [name for name in self._unreduced if self.owners.get(name) == index]
        self._enter("backward", f"{unit.label}, reduced" if self._is_reducing else unit.label)
        if self.settings.sharding.reshard_after_backward:
            self._reshard(index)
        if not self._is_reducing:
            self._hold(index, names)
            return
        if len(self._out_buffers) >= self.settings.sharding.reduce_scatter_max_input_buffers:
            self._free("communication", self._out_buffers.pop(0))
        full = sum(self._unreduced.pop(name) for name in names)
        held = self._held.pop(index, 0)
        if held:
            # What was held takes up this micro-batch's gradients, and is what is reduced.
            self._free("gradients", full)
            full = held
        if not unit.trains:
            return
        self._add("communication", unit.reduce)
        self._out_buffers.append(unit.reduce)
        late = min(unit.last_gradient, full)
        self._free("gradients", full - late)
        self._add("gradients", unit.reduced)
        self.add_temporary("communication", unit.reduce_scratch)
        if self.settings.casts_shards:
            self._add("gradients", unit.gradient)
            if self.settings.is_replicated:  # what was all-reduced stays until backward ends
                self._all_reduced += unit.reduced
            else:
                self._free("gradients", unit.reduced)
        self._free("gradients", late)
        if index in self._sharded or not self.settings.keeps_shards:
            self._free("gradients", unit.gradient)
        else:
            self._sharded.add(index)

    def _hold(self, index: int, names: Sequence[str]) -> None:
        """Add gradients up at full size, in the dtype they will be reduced in."""
        full = sum(self._unreduced.pop(name) for name in names)
        total = full // self.tape.itemsize * self.settings.reduce_itemsize
        if index not in self._held:
            self._held[index] = total
            self._add("gradients", total)
        self._free("gradients", full)

    def _finish_backward(self) -> None:
        for index in sorted(self._pending):
            self._free("communication", self.units[index].gathered)
        self._pending.clear()
        for index in sorted(self._gathered) if self.settings.sharding.reshard_after_backward else ():
            self._reshard(index)
        self._free("communication", sum(self._out_buffers))
        self._out_buffers.clear()
        self._free("gradients", self._all_reduced)
        self._all_reduced = 0


def _asks_for_values(op: Op) -> bool:
    """Whether backward of an operator reads what autograd has saved; products of quantized weights keep them apart."""
    return bool(op.saves) or (bool(op.backward_flops) and op.name not in QUANTIZED)
