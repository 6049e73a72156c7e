"""Follows the memory of one step, operator by operator: what is alive, what it is for, and whose it is."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lit_fsdp.profiling.gloo import is_collective_of_gloo, run_on_copies
from lit_fsdp.profiling.memory import Kind, is_on, iterate_states, label_unit, name_units
from lit_fsdp.profiling.memory_log import OUTSIDE, PHASES, Mark, MemoryEvent, MemoryLog, StepMemory
from lit_fsdp.quantization.quantize import count_hidden_bytes
from lit_fsdp.sharding.low_bit import watch_sums
from lit_fsdp.sharding.torch_internals import get_shard, iterate_sharded, list_unreduced_gradients
from lit_fsdp.sharding.wrap import Unit


@dataclass
class _Block:
    num_bytes: int
    kind: Kind
    unit: str
    storage: weakref.ref[torch.UntypedStorage]
    number: int
    stream: int
    is_on_host: bool = False


class MemoryTrace(TorchDispatchMode):
    """Counts the tensors that are alive on a device after every operator, while it is entered.

    Counts storages, not what an allocator rounds them up to or keeps, and of what a kernel takes for itself only whole
    weights that are dequantized inside. It sees
    real and fake tensors alike. Every operator costs some tens of microseconds more; values do not change. Code
    that was compiled runs as it was written. Tensors that were made before are known if they are of the model or its
    optimizers, or passed to :meth:`add_inputs`. An error in counting ends the counting, not what is counted:
    :meth:`finish` raises it.

    Args:
        model: The root, sharded or not; it has run a step before.
        optimizers: Of its parameters.
        plan: Its units, to say whose memory it is; empty leaves that out.
        device: The device that is looked at.
        is_offloaded: Count shards, their gradients and state, and all that the optimizer makes as memory of the
            host, wherever they lie: fake tensors have one device only.
        marked: Names of modules whose forward and backward are marked in the log where they begin.
        count_work: Returns counts to be kept with each mark.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        plan: Sequence[Unit] = (),
        device: torch.device,
        is_offloaded: bool = False,
        marked: Sequence[str] = (),
        count_work: Callable[[], tuple[int, ...]] = tuple,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_offloaded = is_offloaded
        self._marked, self._count_work = marked, count_work
        self._marks: list[Mark] = []
        self._num_first = 0
        self._arriving: list[_Block] = []  # gradients on their way to the host
        self._size_on_host: Callable[[int], int] | None = None  # of what is allocated on the host now
        self._model, self._optimizers = model, list(optimizers)
        self._device = device
        self._owners = name_units(model, plan)
        self._labels = {name: label_unit(unit) for unit in plan for name in unit.names if unit.kind != "root"}
        self._blocks: dict[int, _Block] = {}
        self._num_storages = 0
        # Fake tensors are on CPUs, whose streams are names without a queue; FSDP2 enters them all the same.
        self._get_stream = torch.get_device_module(device).current_stream
        self._streams: dict[Any, int] = {}  # numbers in the order in which they are seen, compute first
        self._events: list[MemoryEvent] = []
        self._units: list[str] = []  # of each operator
        self._phases: list[tuple[str, int]] = []
        self._stack: list[str] = []  # units whose forward runs
        self._unit = OUTSIDE
        self._summands: tuple[_Block, _Block] | None = None  # of a sum that is not recorded yet
        self._sharded: dict[str, list[Any]] = {}
        self._whole: dict[str, list[nn.Parameter]] = {}  # those of one rank, which get their gradients themselves
        self._hooks: list[Any] = []
        self._watch = ExitStack()  # of what no operator tells
        self._error: Exception | None = None  # which ended the counting

    def add_inputs(self, batch: Any, kind: Kind = "rest") -> None:
        """Count the tensors of a batch too."""
        for tensor in tree_iter(batch):
            if isinstance(tensor, Tensor):
                self._add(tensor, kind, OUTSIDE)

    def begin_phase(self, name: str) -> None:
        """Say which part of the step begins: one of ``PHASES``."""
        self._try(self._record_sum)
        for unit in self._whole:
            self._try(self._mark_whole, unit)
        self._phases.append((name, len(self._units)))
        self._mark_border(name)
        if name == "optimizer":
            self._move_arriving()

    @property
    def _phase(self) -> str | None:
        """The part of the step that runs; none before the first."""
        return self._phases[-1][0] if self._phases else None

    @contextmanager
    def count_on_host(self, size: Callable[[int], int]) -> Iterator[None]:
        """Count what is made inside as memory of the host, of which ``size`` says how much the bytes of a tensor take.

        What is copied from there to the device is an activation again.
        """
        self._size_on_host = size
        try:
            yield
        finally:
            self._size_on_host = None

    def finish(self) -> StepMemory:
        """Return what was seen.

        Raises:
            RuntimeError: There was no operator, or an error ended the counting.
        """
        return self.get_log().summarize()

    def get_log(self) -> MemoryLog:
        """Return what was seen, event by event.

        Raises:
            RuntimeError: An error ended the counting.
        """
        self._try(self._record_sum)
        if self._error is not None:
            text = f"the step could not be followed: {type(self._error).__name__}: {self._error}"
            raise RuntimeError(text) from self._error
        return MemoryLog(
            events=self._events,
            units=self._units,
            phases=self._phases,
            marks=self._marks,
            num_first=self._num_first,
        )

    def __enter__(self) -> MemoryTrace:
        parameters = dict(self._model.named_parameters())
        for kind, name, tensor in iterate_states(self._model, self._optimizers):
            is_state = kind in ("optimizer_state", "gradients") or (kind == "parameters" and name in parameters)
            self._add(tensor, kind, self._owners.get(name, OUTSIDE), is_on_host=self._is_offloaded and is_state)
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        for _, sharded in iterate_sharded(self._model):
            unit = self._owners.get(names.get(get_shard(sharded), ""), OUTSIDE)
            self._sharded.setdefault(unit, []).append(sharded)
        for parameter, name in names.items():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                self._whole.setdefault(self._owners.get(name, OUTSIDE), []).append(parameter)
        try:
            for hook in (*self._watch_units(), *self._watch_marked()):
                self._hooks.append(hook)
        except BaseException:
            self._remove_hooks()
            raise
        self._num_first = self._num_first or len(self._events)
        self._look()
        return self

    def __exit__(self, *error: Any) -> None:
        self._look_away()
        self._remove_hooks()
        self._sharded.clear()
        self._whole.clear()

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def pause(self) -> None:
        """Look away: what runs next is not part of the step."""
        self._try(self._record_sum)
        self._look_away()

    def resume(self) -> None:
        """Look again, at what is left of the tensors that were known."""
        for block in self._blocks.values():
            if (storage := block.storage()) is not None:
                self._resize(storage)
        self._look()

    def _look(self) -> None:
        self._watch.enter_context(_watch_resizes(partial(self._try, self._resize)))
        self._watch.enter_context(watch_sums(partial(self._try, self._mark_reduced)))
        super().__enter__()  # type: ignore[no-untyped-call]

    def _look_away(self) -> None:
        super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._watch.close()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # A subclass that holds tensors, such as DTensor, runs operators on those, which come here again.
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        self._try(self._record_sum)
        if func is torch.ops.prim.device.default:  # asked of tensors without values, several times an operator
            return func(*args)
        kwargs = kwargs or {}
        is_copied = self._try(is_collective_of_gloo, func, args)
        if func is torch.ops._c10d_functional.wait_tensor.default and isinstance(args[0], FakeTensor):
            out = args[0]  # as with values; without them torch makes another tensor, seen in torch 2.13
        else:
            out = run_on_copies(func, args, kwargs) if is_copied else func(*args, **kwargs)
        self._try(self._follow, func, args, kwargs, out)
        return out

    def _try(self, look: Callable[..., Any], *args: Any) -> Any:
        """Return what ``look`` does; once there was an error, nothing. What other ranks wait for must not end here."""
        if self._error is None:
            try:
                return look(*args)
            except Exception as error:  # noqa: BLE001  the step goes on, whatever it is; ``finish`` tells
                self._error = error
        return None

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        phase = self._phase or PHASES[0]
        if phase == "backward":
            self._mark_whole(self._unit)
            self._find_backward_unit((args, kwargs))
            self._mark_gradients()
        owners = self._find_owners(args, out) if phase == "optimizer" else {}
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                is_on_host = self._is_offloaded and phase == "optimizer"
                unit = owners.get(id(tensor), self._unit)
                self._add(tensor, self._choose_kind(phase), unit, is_on_host=is_on_host)
        hidden = count_hidden_bytes(func, args, kwargs) + self._mark_communication(func, args, kwargs, out)
        if phase == "backward" and func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled():
            self._summands = self._find_summands(*args)
        if self._summands is None:
            self._record(hidden)

    def _find_owners(self, args: tuple[Any, ...], out: Any) -> dict[int, str]:
        """Find the unit of an operator of the optimizer, and those of its outputs if it has several units."""
        units = {block.unit for t in tree_iter(args) if isinstance(t, Tensor) and (block := self._find(t))}
        units -= {OUTSIDE}  # such as a factor that all have in common
        self._unit = units.pop() if len(units) == 1 else OUTSIDE
        if not isinstance(out, list | tuple) or not args or not isinstance(args[0], list | tuple):
            return {}
        pairs = zip(args[0], out, strict=True) if len(args[0]) == len(out) else ()
        return {id(made): block.unit for source, made in pairs if (block := self._find(source))}

    def _find_summands(self, first: Tensor, second: Any) -> tuple[_Block, _Block] | None:
        """Return what a sum is made of, if autograd may add it up in place when no dispatch mode is on.

        It does where nobody else has the first summand. A view keeps what it is a view of. That is known only after the
        sum. Seen in torch 2.13; a sum inside an operator's backward is taken for one of two gradients too.
        """
        if first._is_view() or not isinstance(second, Tensor):
            return None
        one, other = self._find(first), self._find(second)
        return (one, other) if one and other else None

    def _record_sum(self) -> None:
        """Record the sum that ran last, once it is known what is left of its summands."""
        if self._summands is None:
            return
        (first, second), self._summands = self._summands, None
        is_in_place = first.storage() is None
        self._record(0 if is_in_place or second.storage() is not None else second.num_bytes)

    def _choose_kind(self, phase: str) -> Kind:
        if phase == "forward":
            return "activations"
        # Autograd runs without a graph of its own; what is computed again for it does not.
        is_recomputed = phase == "backward" and torch.is_grad_enabled()
        return "activations" if is_recomputed else "rest"

    def _find_backward_unit(self, arguments: Any) -> None:
        if self._stack:  # recomputed
            return
        kinds = ("gathered", "activations", *(("parameters",) if self._whole else ()))
        for tensor in tree_iter(arguments):
            if isinstance(tensor, Tensor):
                block = self._blocks.get(tensor.untyped_storage()._cdata)
                if block is not None and block.kind in kinds:
                    self._unit = block.unit
                    return

    def _mark_gradients(self) -> None:
        for sharded in self._sharded.get(self._unit, ()):
            for gradient in list_unreduced_gradients(sharded):
                self._mark(gradient, "gradients", self._unit)

    def _mark_whole(self, unit: str) -> None:
        """Tell the gradients that parameters of a unit have got since autograd's last operator."""
        for parameter in self._whole.get(unit, ()):
            if parameter.grad is not None:
                self._mark(parameter.grad, "gradients", unit)

    def _mark_communication(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
        """Tell the buffers of collectives by the operators that FSDP2 fills and empties them with.

        Returns:
            Bytes of copies on the device of what is taken for host memory.
        """
        name = str(func)
        if name.startswith("fsdp.all_gather_copy_in"):
            shards, output = args[0], args[1]
            unit = next((b.unit for t in shards if (b := self._find(t)) and b.kind == "parameters"), self._unit)
            copied = self._count_host_shards(shards)
            for tensor in (*shards, output):
                self._mark(tensor, "communication", unit)
            return copied
        if name in ("aten.copy_.default", "aten._to_copy.default"):
            is_whole = name == "aten.copy_.default"
            source, made = (args[1], args[0]) if is_whole else (args[0], out)
            self._mark_copy(source, made, is_whole=is_whole)
            return self._count_host_shards([source])  # of which there is one shard, so that nothing is gathered
        if name.startswith("fsdp.chunk_cat"):
            self._mark(kwargs["out"] if "out" in kwargs else args[3], "communication", self._unit)
        elif name.startswith("profiler._record_function_exit"):  # such as of FSDP2's reduction
            self._move_arriving()
        elif name.startswith(("c10d._allgather_base_", "c10d.alltoall_base_")):  # what was packed for it
            self._mark_packed(args[:2])
        elif "reduce_scatter" in name:
            for tensor in tree_iter(args[0]):
                if isinstance(tensor, Tensor):  # gradients are views of it, unless their dtype is another
                    self._mark_reduced(tensor)
        return 0

    def _mark_copy(self, source: Tensor, made: Tensor, *, is_whole: bool) -> None:
        """Tell what a copy is for, that of one tensor into another or a cast."""
        block = self._find(source)
        if block is None:
            return
        if block.kind == "activations" and block.is_on_host:
            self._mark(made, "activations", block.unit)
        elif block.kind == "communication" if is_whole else any(block is other for other in self._arriving):
            self._mark_reduced(made)  # of which there is one shard, or cast to the dtype of the parameters

    def _count_host_shards(self, shards: Sequence[Tensor]) -> int:
        if self._phase == "optimizer":  # which computes there
            return 0
        return sum(b.num_bytes for t in shards if (b := self._find(t)) and b.kind == "parameters" and b.is_on_host)

    def _mark_packed(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if (block := self._find(tensor)) and block.kind != "communication":
                self._mark(tensor, "communication", self._unit)

    def _mark_reduced(self, tensor: Tensor) -> None:
        self._mark(tensor, "gradients", self._unit)
        if block := self._find(tensor):
            self._arriving.append(block)

    def _move_arriving(self) -> None:
        """Let gradients arrive on the host: once they are reduced, FSDP2 holds their copies only (torch 2.13)."""
        for block in self._arriving if self._is_offloaded else ():
            if block.storage() is not None:
                self._count(block, -block.num_bytes)
                block.is_on_host = True
                self._count(block, block.num_bytes)
        self._arriving.clear()

    def _mark(self, tensor: Tensor, kind: Kind, unit: str) -> None:
        """Change what a tensor is for; those that stay beyond the step keep what they are."""
        block = self._find(tensor)
        if block is not None and block.kind in ("activations", "rest", "communication"):
            self._count(block, -block.num_bytes, is_renamed=True)
            block.kind, block.unit = kind, unit
            self._count(block, block.num_bytes, is_renamed=True)

    def _find(self, tensor: Tensor) -> _Block | None:
        return self._blocks.get(tensor.untyped_storage()._cdata)

    def _count(self, block: _Block, num_bytes: int, *, is_renamed: bool = False) -> None:
        place = (len(self._units), block.unit, block.kind, block.is_on_host)
        self._events.append(MemoryEvent(*place, num_bytes, block.number, block.stream, is_renamed))

    def _number_storage(self) -> int:
        self._num_storages += 1
        return self._num_storages - 1

    def _number_stream(self) -> int:
        return self._streams.setdefault(self._get_stream(), len(self._streams))

    def _add(self, tensor: Tensor, kind: Kind, unit: str, *, is_on_host: bool = False) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._blocks or not is_on(tensor, self._device):
            return
        reference, num_bytes = weakref.ref(storage, partial(self._release, key)), storage.nbytes()
        if self._size_on_host is not None:
            num_bytes, is_on_host = self._size_on_host(num_bytes), True
        names = self._number_storage(), self._number_stream()
        block = self._blocks[key] = _Block(num_bytes, kind, unit, reference, *names, is_on_host)
        self._count(block, block.num_bytes)

    def _release(self, key: int, _: Any) -> None:
        block = self._blocks.pop(key)
        self._count(block, -block.num_bytes)

    def _resize(self, storage: torch.UntypedStorage) -> None:
        # FSDP2 gathers into, and frees, one and the same tensor.
        if block := self._blocks.get(storage._cdata):
            self._record_sum()
            self._count(block, storage.nbytes() - block.num_bytes)
            block.num_bytes = storage.nbytes()

    def _record(self, hidden: int) -> None:
        if hidden:
            number, storage, stream = len(self._units), self._number_storage(), self._number_stream()
            self._events.append(MemoryEvent(number, self._unit, "rest", False, hidden, storage, stream))
            self._events.append(MemoryEvent(number + 1, self._unit, "rest", False, -hidden, storage, stream))
        self._units.append(self._unit)

    def _watch_units(self) -> Iterator[Any]:
        modules = dict(self._model.named_modules())
        for name, label in self._labels.items():
            module = modules[name]
            # Before FSDP's own hook, so that what it gathers belongs to the unit.
            yield module.register_forward_pre_hook(partial(self._enter_unit, label), prepend=True)
            yield module.register_forward_hook(self._leave_unit, always_call=True)

    def _watch_marked(self) -> Iterator[Any]:
        for name in self._marked:
            module = self._model.get_submodule(name)
            yield module.register_forward_pre_hook(partial(self._enter_marked, name), prepend=True)
            # Before FSDP's own hook, so that what it gathers ahead belongs to the backward that it begins.
            yield module.register_forward_hook(partial(self._leave_marked, name), prepend=True)

    def _enter_marked(self, name: str, *_: Any) -> None:
        if self._phase == "forward":  # what backward computes again is part of it
            self._mark_border(name)

    def _leave_marked(self, name: str, _: Any, __: Any, output: Any) -> None:
        if self._phase == "forward":
            for tensor in tree_iter(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: self._mark_border(name, is_backward=True))
                    return

    def _mark_border(self, name: str, *, is_backward: bool = False) -> None:
        # A sum that is not recorded yet is part of what was before.
        number = len(self._units) + (self._summands is not None)
        self._marks.append(Mark(name, is_backward, number, len(self._events), self._count_work()))

    def _enter_unit(self, label: str, *_: Any) -> None:
        self._stack.append(label)
        self._unit = label

    def _leave_unit(self, *_: Any) -> None:
        del self._stack[-1:]
        self._unit = self._stack[-1] if self._stack else OUTSIDE


@contextmanager
def _watch_resizes(report: Any) -> Iterator[None]:
    """Call ``report`` with every storage that is resized, which no operator tells of."""
    resize = torch.UntypedStorage.resize_

    def resize_and_report(storage: torch.UntypedStorage, size: int) -> Any:
        out = resize(storage, size)
        report(storage)
        return out

    torch.UntypedStorage.resize_ = resize_and_report  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
