"""The collectives of FSDP2 in a live run: how often, how many bytes, how long, and for how long compute waits.

Note [What is timed]: ``seconds`` of a collective go from when its input is ready to when its output is. That
includes waiting for slower ranks, and for other collectives on the same connections. ``exposed_s`` is the part of
them during which compute has nothing to do but wait: from when the compute stream comes to need the result, if that
is before its end. The rest is overlapped with compute. On a GPU all of this is read off events in the streams of
FSDP2, some steps later, so the host never waits. On a CPU a collective blocks where it is issued: all of it is exposed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

# Private, seen in torch 2.13 to 2.15: all that DTensor sends.
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

# Private, seen in torch 2.13 to 2.15: which parameters are gathered together, and when their collectives are waited
# for. The public setters of FSDPModule can replace its collectives, but not say which ones it had.
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from lit_fsdp.profiling.clock import Clock, Mark
from lit_fsdp.profiling.collectives import TRAFFIC, Collective, Traffic, count_full_bytes, count_wire_bytes
from lit_fsdp.profiling.replaced_calls import make_stand_in, watch_layers
from lit_fsdp.sharding.replaced_method import ReplacedMethod
from lit_fsdp.sharding.sequence import watch_exchanges
from lit_fsdp.sharding.tensor_parallel import get_split_shape

_LAYERS = "split layers"
_ATTENTION = "split attention"  # before and after which tokens are exchanged for heads
_MAX_PENDING = 8  # steps that the GPU is behind; what is older is dropped, not waited for


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Some collectives of a step, on this rank."""

    calls: int = 0
    num_bytes: int = 0  # their full sizes: what came out of gathers, what went into reductions
    wire_bytes: float = 0.0  # what a rank had to send for them, see ``count_wire_bytes``
    seconds: float = 0.0  # how long they took, see Note [What is timed]; those of several streams may run at once
    exposed_s: float = 0.0  # how much of that compute waited

    @property
    def overlapped_s(self) -> float:
        """How much of that compute did not wait."""
        return self.seconds - self.exposed_s

    @property
    def bandwidth_gb_s(self) -> float:
        """The bus bandwidth."""
        return self.wire_bytes / self.seconds / 1e9 if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class UnitCommunication(Communication):
    """The collectives of one kind that one unit had in a step."""

    unit: str  # its name, as in the plan of units
    collective: Traffic


@dataclass(frozen=True, kw_only=True)
class StepCommunication:
    """The collectives of one optimizer step on this rank."""

    tag: Any  # given to ``end_step``
    step_s: float  # seconds of the step, without pauses
    units: Sequence[UnitCommunication]  # in the order of modules, without what a unit did not have
    uses: Mapping[str, int] = field(default_factory=dict)  # by unit: how often forward ran it

    def add_up(self, collective: Traffic | None = None) -> Communication:
        """Return the sums over all units, of one kind of collective or of all."""
        return add_up([unit for unit in self.units if collective in (None, unit.collective)])


def add_up(parts: Sequence[Communication]) -> Communication:
    """Return the sums over some collectives."""
    return Communication(**{f.name: sum(getattr(part, f.name) for part in parts) for f in fields(Communication)})


class CommunicationMeter:
    """Measures what FSDP2 sends in the steps between ``attach`` and ``detach``. Numerical results stay the same.

    Collectives are timed by marks around them, nothing is waited for. Only what lies between ``resume`` and ``pause``
    counts, so that a validation in a step does not. Communication that the user gave to FSDP2 (its
    ``set_custom_all_gather``, symmetric memory, ...) goes on working, if it was set before ``attach``; what is set
    meanwhile is not measured. Neither are modules that ``fully_shard`` has not seen.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._clock = Clock(device)
        self._blocks = device.type != "cuda"
        self._groups = _list_groups(model)
        # The modules of one unit share one.
        self._states = dict.fromkeys(m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule))
        self._probes: list[_Probe | ReplacedMethod] = []
        self._watch = ExitStack()
        self._is_split = any(get_split_shape(p) != p.shape for p in model.parameters())
        self._is_on = False
        self._calls: list[_Call] = []  # of the step that is not over
        self._uses: Counter[str] = Counter()  # likewise
        self._stretches: list[tuple[Mark, Mark]] = []
        self._begin: Mark | None = None
        self._pending: deque[_Step] = deque()
        self._queues: dict[int, _Queue] = {}
        self.num_dropped = 0  # steps of which the marks came too late to be read

    @property
    def num_units(self) -> int:
        """How many units there are to measure; 0 if nothing is sharded."""
        return len(self._groups)

    def attach(self) -> None:
        """Begin to measure."""
        assert not self._probes, "attached already"
        self._probes = [_Probe(self, name, group) for name, group in self._groups]
        self._watch.enter_context(watch_exchanges(self._begin_exchange))
        if self._is_split:
            self._watch.enter_context(watch_layers(self._begin_of_layer))
        for state in self._states:
            # Where torch 2.15 waits for all reductions of a root; before, it did when it finalized the first group.
            if hasattr(state, "_end_backward_iteration"):
                end = partial(self._end_backward, state)
                self._probes.append(ReplacedMethod(state, "_end_backward_iteration", end))

    def detach(self) -> None:
        """Give FSDP2 back what it had. Steps that were measured can still be taken. No effect if not attached."""
        for probe in self._probes:
            probe.remove()
        self._probes = []
        self._watch.close()

    def resume(self) -> None:
        """Go on with a step, or begin one."""
        if self._begin is None:
            self._begin = self._clock.mark()
            self._is_on = True

    def pause(self) -> None:
        """Interrupt a step, between its micro-batches."""
        if self._begin is not None:
            self._stretches.append((self._begin, self._clock.mark()))
        self._begin, self._is_on = None, False

    def end_step(self, tag: Any = None) -> None:
        """Close the step, of which ``tag`` will say which it was; the next begins with ``resume``."""
        self.pause()
        self._pending.append(_Step(tag, self._stretches, self._calls, self._uses))
        self._stretches, self._calls, self._uses = [], [], Counter()
        if len(self._pending) > _MAX_PENDING:  # each holds some hundred events
            self.num_dropped += 1
            self._pending.popleft()

    def take(self, *, wait: bool = False) -> list[StepCommunication]:
        """Return the steps that ended since the last call. Without ``wait``, only those the device has finished."""
        taken = []
        while self._pending and (wait or all(self._clock.is_past(end) for _, end in self._pending[0].stretches)):
            taken.append(self._read(self._pending.popleft()))
        return taken

    def begin_call(self, unit: str, collective: Traffic, num_bytes: int, num_ranks: int) -> _Call | None:
        """Note that a collective is issued; ``None`` outside of a step."""
        if not self._is_on:
            return None
        call = _Call(unit, collective, num_bytes, num_ranks, self._clock.mark())
        self._calls.append(call)
        return call

    def note_use(self, unit: str) -> None:
        """Note that forward runs a unit; computing it once more for backward is none."""
        if self._is_on:
            self._uses[unit] += 1

    def _begin_exchange(self, num_bytes: int, num_ranks: int) -> Callable[[], None]:
        call = self.begin_call(_ATTENTION, "all_to_all", num_bytes, num_ranks)

        def end() -> None:
            if call is not None:
                call.end, call.need = self.mark(), call.begin

        return end

    def _begin_of_layer(self, kind: Collective, num_bytes: int, num_ranks: int) -> Callable[[Tensor], Tensor]:
        call = self.begin_call(_LAYERS, "tensor", num_bytes, num_ranks)

        def end(found: Tensor) -> Tensor:
            if call is not None:
                found = functional.wait_tensor(found)  # as whoever called does next
                call.need, call.end, call.operation = call.begin, self._clock.mark(), kind
            return found

        return end

    def mark(self) -> Mark | None:
        """Set a mark; ``None`` outside of a step."""
        return self._clock.mark() if self._is_on else None

    def get_queue(self, context: Any) -> _Queue:
        """Return what is under way in the streams of a root, which are the ``FSDPCommContext`` of all below it."""
        return self._queues.setdefault(id(context), _Queue())

    def need_reductions(self, context: Any) -> Mark | None:
        """Note that compute comes to wait for all reductions of a root; return the mark, if there are any."""
        queue = self.get_queue(context)
        need = self.mark() if queue.unneeded else None
        for call in queue.unneeded:
            call.need = need if call.need is None else call.need
        queue.unneeded.clear()
        return need

    def _end_backward(self, state: Any, run: Callable[[], None]) -> None:
        self.need_reductions(state._comm_ctx)
        run()

    def _read(self, step: _Step) -> StepCommunication:
        self._measure(step.calls)
        names = {name: i for i, (name, _) in enumerate(self._groups)}
        names |= {_LAYERS: len(names), _ATTENTION: len(names) + 1}
        found: dict[tuple[str, Traffic], list[_Call]] = {}
        for call in step.calls:
            found.setdefault((call.unit, call.collective), []).append(call)
        keys = sorted(found, key=lambda key: (names[key[0]], TRAFFIC.index(key[1])))
        seconds = [self._clock.measure_s(begin, end) for begin, end in step.stretches]
        return StepCommunication(
            tag=step.tag,
            step_s=sum(seconds),
            units=[_sum_calls(*key, found[key]) for key in keys],
            uses=step.uses,
        )

    def _measure(self, calls: list[_Call]) -> None:
        measure_s = self._clock.measure_s
        awaited: dict[int, list[tuple[float, _Call]]] = {}  # by mark: what compute waits for there, by its end
        for call in calls:
            if call.end is None:  # it failed, or its result was never waited for
                continue
            if call.after is not None and measure_s(call.begin, call.after) > 0:
                call.begin = call.after
            call.seconds = max(measure_s(call.begin, call.end), 0.0)
            if self._blocks and not call.is_async:
                call.exposed_s = call.seconds
            elif call.need is not None:
                awaited.setdefault(id(call.need), []).append((measure_s(call.need, call.end), call))
        for together in awaited.values():
            before = 0.0  # the end of the one before, from which on compute waits for the next: nothing counts twice
            for end, call in sorted(together, key=lambda pair: pair[0]):
                call.exposed_s = min(max(end - before, 0.0), call.seconds)
                before = max(before, end)


@dataclass(slots=True, eq=False)
class _Call:
    """One collective that was issued."""

    unit: str
    collective: Traffic
    num_bytes: int
    num_ranks: int
    begin: Mark
    operation: Collective | None = None  # if it is another than ``collective`` says
    end: Mark | None = None
    need: Mark | None = None  # on the compute stream, which comes to wait for it there
    after: Mark | None = None  # another mark that it began after
    is_async: bool = False  # issued with async_op
    seconds: float = 0.0
    exposed_s: float = 0.0


@dataclass(slots=True)
class _Queue:
    """Reductions under way under one root."""

    scatters: deque[_Call | None] = field(default_factory=deque)  # one for each buffer that FSDP2 keeps
    unneeded: list[_Call] = field(default_factory=list)  # those that nothing has waited for
    last_all_reduce: Mark | None = None


@dataclass(slots=True)
class _Step:
    tag: Any
    stretches: list[tuple[Mark, Mark]]
    calls: list[_Call]
    uses: Mapping[str, int]


class _Probe:
    """Stands between one group of parameters and its collectives."""

    def __init__(self, meter: CommunicationMeter, name: str, group: FSDPParamGroup) -> None:
        self.name = name
        self._meter, self._group = meter, group
        self._gather: _Call | None = None  # issued, and not waited for
        self._scatter: _Call | None = None  # issued in the post_backward that runs
        self._is_reduced = False  # in the post_backward that runs
        self._reduced: Mark | None = None  # when what is all-reduced was ready
        self._before = (group._all_gather_comm, group._reduce_scatter_comm, group._all_reduce_hook)
        gather, scatter, hook = self._before
        self._comms = (
            make_stand_in(gather, self._run_gather),
            make_stand_in(scatter, self._run_scatter, self._note_reduction),
        )
        group._all_gather_comm, group._reduce_scatter_comm = self._comms
        self._hook: Callable[[Tensor], None] | None = None
        if isinstance(group.mesh_info, DDPMeshInfo):
            # Runs right after the all-reduce. Not where there is none: FSDP2 would change streams for it.
            self._hook = group._all_reduce_hook = partial(self._end_all_reduce, hook)
        methods = ("pre_forward", "wait_for_unshard", "post_backward", "finalize_backward")
        self._methods = [ReplacedMethod(group, name, getattr(self, f"_{name}")) for name in methods]

    def remove(self) -> None:
        """Give the group back what it had, except for what somebody else has replaced since."""
        group, (gather, scatter, hook) = self._group, self._before
        if group._all_gather_comm is self._comms[0]:
            group._all_gather_comm = gather
        if group._reduce_scatter_comm is self._comms[1]:
            group._reduce_scatter_comm = scatter
        if self._hook is not None and group._all_reduce_hook is self._hook:
            group._all_reduce_hook = hook
        for method in self._methods:
            method.remove()

    # Its collectives

    def _run_gather(self, comm: Any, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        num_ranks = output_tensor.numel() // input_tensor.numel()
        num_bytes = count_full_bytes(comm, output_tensor, num_ranks)
        call = self._meter.begin_call(self.name, "all_gather", num_bytes, num_ranks)
        work = comm(output_tensor, input_tensor, *args, **kwargs)
        if call is not None:
            # The end of an asynchronous one lies in a stream of the backend: for us it is when compute has its result.
            call.is_async = isinstance(work, dist.Work)
            call.end = None if call.is_async else self._meter.mark()
        self._gather = call
        return work

    def _run_scatter(self, comm: Any, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        num_ranks = input_tensor.numel() // output_tensor.numel()
        num_bytes = count_full_bytes(comm, input_tensor, num_ranks)
        call = self._meter.begin_call(self.name, "reduce_scatter", num_bytes, num_ranks)
        result = comm(output_tensor, input_tensor, *args, **kwargs)
        if call is not None:
            call.end = self._reduced = self._meter.mark()
            self._meter.get_queue(self._group.comm_ctx).unneeded.append(call)
        self._scatter = call
        return result

    def _note_reduction(self) -> None:
        """Called when memory for a reduction is taken: first for its input, then, in its stream, for its output."""
        self._is_reduced = True
        if self._hook is not None:  # of one shard, nothing is scattered
            self._reduced = self._meter.mark()

    def _end_all_reduce(self, hook: Callable[[Tensor], None] | None, output: Tensor) -> None:
        num_ranks = self._group._all_reduce_process_group.size()
        call = self._meter.begin_call(self.name, "all_reduce", output.nbytes, num_ranks) if num_ranks > 1 else None
        if call is not None and self._reduced is not None:
            queue = self._meter.get_queue(self._group.comm_ctx)
            call.begin, call.end, call.after = self._reduced, call.begin, queue.last_all_reduce
            queue.last_all_reduce = call.end
            queue.unneeded.append(call)
        if hook is not None:
            hook(output)

    # Where compute waits for them

    def _pre_forward(self, run: Callable[..., Any], *args: Any) -> Any:
        self._meter.note_use(self.name)
        return run(*args)

    def _wait_for_unshard(self, wait: Callable[[], None]) -> None:
        call, self._gather = self._gather, None
        if call is not None:
            call.need = self._meter.mark()
        wait()
        if call is not None and call.is_async:
            call.end = self._meter.mark()

    def _post_backward(self, run: Callable[..., None], *unused: Any) -> None:
        context = self._group.comm_ctx
        states, scatters = context.reduce_scatter_states, self._meter.get_queue(context).scatters
        while len(scatters) > len(states):  # FSDP2 has waited for all of them at the end of a backward
            scatters.popleft()
        num_states, need = len(states), self._meter.mark() if states else None
        self._scatter, self._is_reduced = None, False
        run(*unused)
        # Before it reduces, it waits for the oldest reduce-scatter, of which it then frees the input.
        for _ in range(num_states + self._is_reduced - len(states)):
            call = scatters.popleft() if scatters else None
            if call is not None:
                call.need = need
        if self._is_reduced:
            scatters.append(self._scatter)

    def _finalize_backward(self, run: Callable[[], None]) -> None:
        need = self._meter.need_reductions(self._group.comm_ctx)
        gather, self._gather = self._gather, None  # in vain, if there is one
        if gather is not None and gather.need is None:
            gather.need = self._meter.mark() if need is None else need
        run()


def _sum_calls(unit: str, collective: Traffic, calls: Sequence[_Call]) -> UnitCommunication:
    return UnitCommunication(
        unit=unit,
        collective=collective,
        calls=len(calls),
        num_bytes=sum(call.num_bytes for call in calls),
        wire_bytes=sum(
            count_wire_bytes(call.operation or call.collective, call.num_bytes, call.num_ranks) for call in calls
        ),
        seconds=sum(call.seconds for call in calls),
        exposed_s=sum(call.exposed_s for call in calls),
    )


def _list_groups(model: nn.Module) -> list[tuple[str, FSDPParamGroup]]:
    """Return all groups of parameters with the names of their modules, as in a plan of units."""
    names = {module: name or "(root)" for name, module in model.named_modules()}
    groups: dict[FSDPParamGroup, str] = {}
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        found = [group for group in module._get_fsdp_state()._fsdp_param_groups if group not in groups]
        for i, group in enumerate(found):
            name = " + ".join(names[member] for member in group.modules)
            # Of one module, several may be sharded over different ranks: shard_placement_fn.
            groups[group] = name if len(found) == 1 else f"{name} [{i}]"
    return [(name, group) for group, name in groups.items()]
