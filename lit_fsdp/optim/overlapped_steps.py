"""Steps of an optimizer on the host, in a thread, FSDP unit by FSDP unit, while the device computes.

Note [Two phases]: a step that clips by the norm of all gradients cannot begin before the last of them has arrived. So
there are two phases. As the gradients of a unit arrive on the host, the thread adds them to those of the micro-batches
before, multiplies them with what the loss still lacks, and takes their norms. After backward the thread clips and steps
one unit after the other, in the order in which forward uses them. ``step()`` does not wait for it: the next gather of
a unit does.

Each element sees the same operations in the same order as without the thread, so all bits are the same. No unit is
stepped before all gradients are known: a skipped step, or an error in backward, leaves no weight changed. Steps taken
back where clipping turns out to be needed would start earlier, but they need a copy of weights and state.
"""

from __future__ import annotations

import traceback
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_fsdp.optim.adamw import AdamW
from lit_fsdp.optim.adamw_8bit import AdamW8bit
from lit_fsdp.sharding.grad_clipping import compute_norms, group_gradients, scale_gradients
from lit_fsdp.sharding.torch_internals import UnitInternals, call_after_backward, list_units, to_local

# What they do to a parameter depends on no other. Subclasses may do anything.
_OPTIMIZERS = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.SGD),
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.ASGD, torch.optim.RMSprop, torch.optim.Rprop),
    *(AdamW, AdamW8bit),
)
# Of how many units gradients may wait in host memory to be added to those of the micro-batches before.
_MAX_ADDITIONS = 2


def describe_whole(optimizer: Optimizer) -> str | None:
    """Return why an optimizer cannot be stepped unit by unit, if it cannot."""
    if type(optimizer) not in _OPTIMIZERS:
        return f"{type(optimizer).__name__} may need all gradients at once"
    # Private, seen in torch 2.13; they may read what was stepped.
    if optimizer._optimizer_step_post_hooks:
        return f"{type(optimizer).__name__} has hooks that run after a step"
    return None


class _Number:
    """A number of the device on its way to the host."""

    def __init__(self, value: Tensor) -> None:
        is_cuda = value.device.type == "cuda"
        self._value = torch.empty_like(value, device="cpu", pin_memory=is_cuda).copy_(value, non_blocking=True)
        self._event = torch.cuda.current_stream().record_event() if is_cuda else None

    def read(self) -> Tensor:
        """Return it, having waited for it."""
        if self._event is not None:
            self._event.synchronize()
        return self._value


class HostStepError(Exception):
    """A unit lacks a step that others have. It does not pass for memory that ran out, after which steps are redone."""


class _Unit:
    """An FSDP unit between two steps."""

    def __init__(self, internals: UnitInternals) -> None:
        self.internals = internals
        self.step: Future[None] | None = None
        self.keep_state: Callable[[], None]
        self.num_forwards = self.num_arrivals = 0  # since the last backward has ended
        self.is_scaled = False

    def finish(self) -> None:
        """Wait for its step."""
        if self.step is not None:
            step, self.step = self.step, None
            if (error := step.exception()) is not None:
                failed = HostStepError(
                    f"cpu_offload.overlap_optimizer: a step of the optimizer has failed: {type(error).__name__}: "
                    f"{error}; units that are stepped cannot be undone: resume from the last checkpoint"
                )
                failed.add_note("".join(traceback.format_exception(error)))  # no cause, see HostStepError
                raise failed
            self.keep_state()


class OverlappedSteps:
    """Steps an optimizer of parameters in host memory beside what the device computes; see Note [Two phases].

    Args:
        roots: Sharded models.
        is_deferred: Whether steps shall be deferred, see :meth:`defer`. Otherwise gradients are received beside
            backward, and that is all.
    """

    def __init__(self, roots: Sequence[nn.Module], *, is_deferred: bool = True) -> None:
        self.is_deferred = is_deferred
        self.norms: dict[Tensor, Tensor] = {}  # of this rank's part of gradients, once a backward has ended
        self._units = [_Unit(internals) for root in roots for internals in list_units(root)]
        self._gathered: list[_Unit] = []  # since the last step, in this order
        # A thread begins on GPU 0, where waiting for an event would open a context.
        start: Any = (torch.cuda.set_device, (torch.cuda.current_device(),)) if torch.cuda.is_initialized() else ()
        self._pool = ThreadPoolExecutor(1, "optimizer", *start)
        self._arrivals: deque[Future[None]] = deque()
        self._additions: deque[Future[None]] = deque()
        self._factor: _Number | None = None
        self._takes_norms = False
        self._clip: _Number | None = None
        for unit in self._units:
            self._follow(unit)
        self._undo: list[Callable[[], None]] = [call_after_backward(root, self._end_backward) for root in roots]

    def _follow(self, unit: _Unit) -> None:
        def gather() -> None:
            if unit.step is not None:
                self._gathered.append(unit)
                unit.finish()

        def forward() -> None:
            unit.num_forwards += torch.is_grad_enabled()

        if _list_offloaded(unit):
            if unit.internals.copies_in_compute:
                unit.internals.copy_beside_compute()
            unit.internals.call_before_forward(forward)
            unit.internals.call_around_reduction(lambda end: self._reduce(unit, end))
            unit.internals.call_before_gather(gather)

    # Gradients arrive

    def scale_arriving(self, factor: Tensor, *, takes_norms: bool) -> list[Tensor]:
        """Multiply the gradients of the next backward as they arrive, and take their norms; return which.

        To be called before backward, in the last micro-batch of a step, and only if nothing else reads or changes
        gradients before backward has ended. What is not returned is left as it is.

        Args:
            factor: One number, of any device.
            takes_norms: Whether ``norms`` shall have those of the gradients.
        """
        self._factor, self._takes_norms = _Number(factor), takes_norms
        return [shard for unit in self._units for shard in _list_offloaded(unit)]

    def _reduce(self, unit: _Unit, end: Callable[[], None]) -> None:
        """End the backward of a unit, and leave to the thread what is to be done with its gradients.

        FSDP2 would add new gradients to old ones itself, and wait for them: it finds no old ones.
        """
        shards = _list_offloaded(unit)
        held = _list_gradients(shards)
        while len(self._additions) >= _MAX_ADDITIONS and held:
            self._additions.popleft().result()
        for shard in held:
            shard.grad = None
        try:
            end()
            arrived = _list_gradients(shards)
        finally:
            for shard, gradient in held.items():
                shard.grad = gradient
        if not arrived:
            return
        unit.num_arrivals += 1
        if unit.is_scaled:
            raise RuntimeError(
                "cpu_offload.overlap_optimizer: got gradients of a unit that was used once more than in forward, after "
                "they were scaled; set cpu_offload.overlap_optimizer: false"
            )
        pairs = [(held[shard], gradient) for shard, gradient in arrived.items() if shard in held]
        # A unit that backward uses again, by recomputing it in a way of the model's own, waits for the end.
        is_complete = self._factor is not None and unit.num_arrivals == unit.num_forwards
        unit.is_scaled = is_complete
        whole = _list_gradients(shards) if is_complete else {}
        future = self._pool.submit(self._receive, unit.internals.list_arrivals(), pairs, whole)
        self._arrivals.append(future)
        if pairs:
            self._additions.append(future)

    @torch.no_grad()
    def _receive(
        self, events: Iterable[Any], pairs: Sequence[tuple[Tensor, Tensor]], whole: Mapping[Tensor, Tensor]
    ) -> None:
        for event in events:
            event.synchronize()
        if pairs:
            olds, news = ([to_local(gradient) for gradient in side] for side in zip(*pairs, strict=True))
            torch._foreach_add_(olds, news)
        self._scale(whole)

    def _scale(self, gradients: Mapping[Tensor, Tensor]) -> None:
        if not gradients:
            return
        assert self._factor is not None
        local = [to_local(gradient) for gradient in gradients.values()]
        torch._foreach_mul_(local, self._factor.read())
        if self._takes_norms:
            self.norms.update(zip(gradients, compute_norms(local), strict=True))

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Receive the gradients of backwards inside this context, and nothing more: others of the step follow."""
        is_deferred, self.is_deferred = self.is_deferred, False
        try:
            yield
        finally:
            self.is_deferred = is_deferred

    def begin_backward(self) -> None:
        """Forget what a backward that has failed has left."""
        self._factor, self.norms, self._clip = None, {}, None
        wait(self._arrivals)  # whatever has become of them
        self._arrivals.clear()
        self._additions.clear()
        for unit in self._units:
            unit.num_arrivals, unit.is_scaled = 0, False

    def drop_step(self) -> None:
        """Forget what forwards and backwards of a step that is undone have left."""
        self.begin_backward()
        for unit in self._units:
            unit.num_forwards = 0

    def _end_backward(self) -> None:
        """Wait for all gradients, so that whoever reads them after backward sees what they are."""
        self._wait_for_arrivals()
        for unit in self._units:
            if self._factor is not None and not unit.is_scaled:
                self._scale(_list_gradients(_list_offloaded(unit)))
            unit.num_forwards = unit.num_arrivals = 0
            unit.is_scaled = False
        self._factor = None

    def _wait_for_arrivals(self) -> None:
        self._additions.clear()
        while self._arrivals:
            self._arrivals.popleft().result()

    # Steps

    def scale_before_step(self, parameters: Iterable[Tensor], factor: Tensor) -> None:
        """Multiply gradients with a number, such as what clipping has found, before they are stepped."""
        if not self.is_deferred:
            scale_gradients(parameters, factor)
            return
        own = {shard for unit in self._units for shard in _list_offloaded(unit)}
        scale_gradients([parameter for parameter in parameters if parameter not in own], factor)
        self._clip = _Number(factor)

    @contextmanager
    def defer(self, optimizer: Optimizer) -> Iterator[None]:
        """Let a step of the optimizer inside this context return before it is done.

        Whatever reads or changes weights or state, other than a forward, has to call :meth:`finish` before. Parameters
        outside of the units are stepped at once.
        """
        hook = optimizer.register_step_pre_hook(self._take_over)
        try:
            yield
        finally:
            hook.remove()

    def _take_over(self, optimizer: Optimizer, *_: Any) -> None:
        """Take the gradients out of an optimizer's hands when it begins a step: it has nothing to do for them."""
        clip, self._clip = self._clip, None
        self.finish()
        places = {shard: unit for unit in self._units for shard in _list_offloaded(unit)}
        work: dict[_Unit, dict[int, dict[Tensor, Tensor]]] = {}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.grad is not None and (unit := places.get(parameter)) is not None:
                    work.setdefault(unit, {}).setdefault(number, {})[parameter] = parameter.grad
                    parameter.grad = None
        # What a schedule or a user sets from now on is of the next step.
        settings = [
            {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}
            for group in optimizer.param_groups
        ]
        # As the last forward has gathered them; before the first one, as the model has them.
        order = dict.fromkeys([*self._gathered, *self._units])
        self._gathered.clear()
        for unit in order:
            if unit in work:
                # Of a parameter that has none yet, the thread fills one that nobody else sees before it is done.
                states = {p: optimizer.state.get(p, {}) for members in work[unit].values() for p in members}
                part = _take_part(optimizer, settings, work[unit], states)
                unit.step = self._pool.submit(_step, part, clip)
                unit.keep_state = partial(_keep_state, optimizer, states)

    def finish(self) -> None:
        """Wait until all weights are those after the last step."""
        for unit in self._units:
            unit.finish()

    def close(self) -> None:
        """Finish, and let go of the model and the optimizer."""
        try:
            self.finish()
        finally:
            while self._undo:
                self._undo.pop()()
            for unit in self._units:
                unit.internals.undo()
            self._pool.shutdown()


def _list_offloaded(unit: _Unit) -> list[nn.Parameter]:
    return [shard for shard in unit.internals.list_shards() if shard.device.type == "cpu"]


def _list_gradients(shards: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    return {shard: shard.grad for shard in shards if shard.grad is not None}


def _take_part(
    optimizer: Optimizer,
    settings: Sequence[Mapping[str, Any]],
    members: Mapping[int, Mapping[Tensor, Tensor]],
    states: Mapping[Tensor, dict[str, Any]],
) -> Optimizer:
    """Return an optimizer that steps some of the parameters, of which this is the state.

    Its parameters share memory with the real ones, whose gradients may come and go meanwhile.
    """
    part: Optimizer = object.__new__(type(optimizer))
    # Without ``step``, which a learning rate schedule may have replaced in the instance, to count.
    vars(part).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    vars(part).update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
    part.state, part.param_groups = defaultdict(dict), []
    for number, gradients in members.items():
        twins = []
        for parameter, gradient in gradients.items():
            twin = nn.Parameter(parameter.detach())
            twin.grad = gradient
            part.state[twin] = states[parameter]
            twins.append(twin)
        part.param_groups.append({**settings[number], "params": twins})
    return part


def _keep_state(optimizer: Optimizer, states: Mapping[Tensor, dict[str, Any]]) -> None:
    optimizer.state.update({parameter: state for parameter, state in states.items() if state})


def _step(part: Optimizer, clip: _Number | None) -> None:
    parameters = [parameter for group in part.param_groups for parameter in group["params"]]
    if clip is not None and (factor := clip.read()) != 1:  # most often nothing is to be clipped
        with torch.no_grad():
            for gradients in group_gradients(parameters):
                torch._foreach_mul_(gradients, factor)
    part.step()
