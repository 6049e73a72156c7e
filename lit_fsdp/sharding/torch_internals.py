"""What can only be read or set through private parts of torch, or differs by its release; seen in 2.13 to 2.15."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import wraps
from typing import Any, cast
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from lightning_utilities.core import rank_zero
from torch import Tensor, nn
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._common_utils import collect_grad_tensors
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as _AllGather
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as _ReduceScatter

# Drop it, with what uses it, when FSDP2 ends a forward that fails.
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState, _from_local_no_grad
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from torch.nn.utils import stateless

from lit_fsdp.sharding.replaced_method import ReplacedMethod

# The memory-efficient kernel of GPUs, the only one for float32, takes grouped heads; drop it when we need 2.14.
SHARES_HEADS_IN_FLOAT32: bool = torch.__version__ >= "2.14"
# FSDP2 lets go of a unit's last gradient only once all are reduced: a name in a loop. Drop it when we need 2.15.
KEEPS_LAST_GRADIENT: bool = torch.__version__ < "2.15"
# For ``checkpoint``: hooks on saved tensors do not see what selective mode keeps. Otherwise 2.14 warns, and says that a
# later release will show it to them; always pass it when we need 2.14.
HIDES_KEPT_OUTPUTS: dict[str, Any] = {"respect_saved_tensors_hooks": False} if torch.__version__ >= "2.14" else {}

if torch.__version__ < "2.15":
    # Where gradients are held, FSDP2 reads those of units that were never gathered, which have none, and fails. Drop it
    # when we need 2.15.
    _hold = FSDPParam.to_accumulated_grad_if_needed

    def _hold_if_gathered(self: FSDPParam) -> None:
        if hasattr(self, "_unsharded_param"):
            _hold(self)

    FSDPParam.to_accumulated_grad_if_needed = _hold_if_gathered  # type: ignore[method-assign]


def _leave_inference_mode(function: Any) -> Any:
    @wraps(function)
    def call(*args: Any) -> None:
        if not torch.is_inference_mode_enabled():
            return function(*args)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args)

    return call


# FSDP2 makes the tensors that parameters are gathered into once: if first in a forward under inference_mode, as of a
# method that draws samples, no later step could use them. Seen in torch 2.13.
for _name in ("init_all_gather_outputs", "init_unsharded_param"):
    setattr(FSDPParam, _name, _leave_inference_mode(getattr(FSDPParam, _name)))

_call_with = stateless._functional_call


def _refuse_to_call_with(module: nn.Module, tensors: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    with torch.enable_grad():  # lists what a step has not gathered yet, see ``gather_when_used``
        own: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
    for name, tensor in tensors.items():
        current = own.get(name)
        is_sharded = isinstance(current, DTensor) and "shard" in (current.device_mesh.mesh_dim_names or ())
        if is_sharded and current is not tensor:
            raise RuntimeError(
                f"functional_call: got another tensor for {name}, which is sharded: its unit gathers its own weights "
                "and would compute with those; let the model be one unit, which a step may call with other weights: "
                "wrap.policy min_size, with a min_num_params above the size of the model"
            )
    return _call_with(module, tensors, *args, **kwargs)


# FSDP2 puts what it gathers in the place of the tensors that ``torch.func.functional_call`` was given.
stateless._functional_call = _refuse_to_call_with  # type: ignore[assignment]

_ROOTS: WeakSet[Any] = WeakSet()  # states of FSDP2


def read_data(self: Tensor) -> Tensor:
    """Return what ``Tensor.data`` does, and know it: who keeps it has the values of now, whatever is assigned."""
    given: Tensor = Tensor.data.__get__(self)  # type: ignore[attr-defined]
    # In its memory: parameters that weak references know cannot be converted, as ``to`` swaps them.
    # ``to_local`` takes as long as all else here, for a gradient that this has not.
    storage: Any = (given._local_tensor if isinstance(given, DTensor) else given).untyped_storage()
    storage.given = [*(known for known in getattr(storage, "given", ()) if known() is not None), ref(given)]
    return given


@torch.no_grad()
def assign_data(self: Tensor, value: Tensor) -> None:
    """Take over the values of a tensor, whole or in shards, where torch would change nothing that a step reads."""
    if value.shape != self.shape or value.dtype != self.dtype:
        own, got = (f"{tensor.dtype} of {list(tensor.shape)}" for tensor in (self, value))
        raise RuntimeError(f"data = ...: got {got} for shards of {own}: shape and dtype are fixed")
    local, rows = to_local(self.detach()), value
    if isinstance(self, DTensor):
        place = self.device_mesh, self.placements
        rows = value.redistribute(*place).to_local() if isinstance(value, DTensor) else cut_shard(value, *place)
    elif isinstance(value, DTensor):
        rows = value.full_tensor()
    for known in getattr(local.untyped_storage(), "given", ()):
        given = known()
        part: Any = None if given is None else to_local(given)
        if part is not None and given is not value and part.data_ptr() == local.data_ptr():
            part.set_(part.clone())
    if isinstance(self, DTensor) and self.device_mesh.device_type != local.device.type:
        wait_for_gathers()
    local.copy_(rows)
    if local.is_cuda:
        let_gathers_wait()


def make_shard(whole: Tensor, spec: Any) -> DTensor:
    """Return this rank's part of a tensor that all ranks have, where that is: ``from_local`` would send it to a GPU."""
    meta = spec.tensor_meta._replace(dtype=whole.dtype)
    return _from_local_no_grad(cut_shard(whole, spec.mesh, spec.placements), replace(spec, tensor_meta=meta))


def cut_shard(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """Return this rank's part of a tensor that all ranks have, as a view of it."""
    shape, offset = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    for dim, (first, size) in enumerate(zip(offset, shape, strict=True)):
        whole = whole.narrow(dim, first, size)
    return whole


DTensor.data = property(read_data, assign_data)  # type: ignore[assignment]


_PLACES: set[tuple[str, int]] = set()  # in code, as was said


def _read_number(op_call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG001
    """Return a number as torch does, of what this rank holds, and say so where that is not all."""
    tensor, frame = args[0], sys._getframe(1)
    if tensor.device_mesh.size() > 1 and not all(placement.is_replicate() for placement in tensor.placements):
        while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ("torch", "lightning"):
            frame = frame.f_back
        place = frame.f_code.co_filename, frame.f_lineno
        if place not in _PLACES:
            _PLACES.add(place)
            rank_zero.rank_zero_warn(
                "{}:{} takes a number of what is computed from shards: it is what the rows of this rank give; "
                "take full_tensor() first, on all ranks, see docs/limits.md".format(*place)
            )
    return op_call(tensor._local_tensor)


# For ``item``, ``float``, ``bool`` and ``if``.
DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = _read_number


class _TakesMemory:
    """Takes buffers from torch's allocator."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_TakesMemory, _AllGather):
    """What ``set_custom_all_gather`` takes."""


class ReduceScatter(_TakesMemory, _ReduceScatter):
    """What ``set_custom_reduce_scatter`` takes."""


@contextmanager
def share_groups_after_forward() -> Iterator[None]:
    """Let units that are sharded in this context, on one mesh, stay split over the same groups of ranks after forward.

    Each ``fully_shard`` makes two groups of its own, seen in torch 2.13: connections of gloo, or memory for NCCL.
    """
    module: Any = _fully_shard
    make, made = module._get_post_forward_mesh_info, {}

    def make_once(size: bool | int, mesh_info: Any) -> Any:
        if isinstance(size, bool):  # needs none
            return make(size, mesh_info)
        if size not in made:
            made[size] = make(size, mesh_info)
        return made[size]

    module._get_post_forward_mesh_info = make_once
    try:
        yield
    finally:
        module._get_post_forward_mesh_info = make


def set_timeout(group: dist.ProcessGroup, timeout_s: float) -> None:
    """Set how long a collective of a group that exists may take."""
    if dist.get_backend(group) == "fake":  # of plans, which wait for nobody
        return
    # Public since torch 2.14, where the private one warns; drop it when we need 2.14.
    change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    change(timedelta(seconds=timeout_s), group)


def make_finished_work(tensors: list[Tensor]) -> dist.Work:
    """Return what a collective returns that is over already, with these results: DDP takes the first of them."""
    done: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    done.set_result(tensors)
    return _create_work_from_future(done)


def iterate_sharded(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield every sharded parameter of ``model``, as torch's ``FSDPParam``, with the name of its unit.

    A unit of several modules has the name of the first. Before the first forward nothing was gathered yet.
    """
    seen: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:
            if id(group) not in seen:
                seen.add(id(group))
                for parameter in group.fsdp_params:
                    yield name, parameter


def is_in_forward(root: Any) -> bool:
    """Whether the forward of a sharded root runs at this moment."""
    return bool(root._get_fsdp_state()._training_state == TrainingState.FORWARD)


def leave_forward(root: nn.Module) -> None:
    """Bring the units below a root to where they are between forwards, after an error inside of its forward.

    The root itself goes there by its own hook when its forward returns. Otherwise a unit would take itself to be in
    its forward in the next one, and might compute with what it gathered before weights were changed.
    """
    for module in root.modules():
        if not isinstance(module, FSDPModule) or module is root:
            continue
        state = module._get_fsdp_state()
        for group in state._fsdp_param_groups:
            if group._training_state == TrainingState.FORWARD or group._all_gather_result is not None:
                group.wait_for_unshard()  # of a prefetch
                group.reshard()
                group._training_state = TrainingState.IDLE
        state._training_state = TrainingState.IDLE
        state._modules_to_run_forward.clear()


def end_step(root: Any) -> None:
    """Bring a sharded root and the units below it to where they are between steps, after an error; drop all gradients.

    What its collectives were to bring is lost. They have to come to an end on the device, which this waits for in its
    stream.
    """
    if root._get_fsdp_state()._is_root is not None:  # else there was no forward yet
        root.reset_iter_state()
    for module in root.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                # torch 2.13 leaves what was being copied, and gradients that no_sync adds up.
                parameter.free_unsharded_param()
                if torch.__version__ < "2.15":  # else it is the gradient of the gathered form
                    parameter.unsharded_accumulated_grad = None
                if (gathered := get_gathered(parameter)) is not None:
                    gathered.grad = None
                parameter.grad_offload_event = None
                parameter.sharded_param.grad = None


def settle_root(root: FSDPModule) -> None:
    """Let a sharded module be the root of the units inside it, once all have their memory.

    Left alone, FSDP2 takes what is called first, which in a hook may be a unit inside.
    """
    state: Any = root._get_fsdp_state()
    state._lazy_init()
    _ROOTS.add(state)


def let_gathers_wait() -> None:
    """Let gathers wait for what this stream has written to shards: FSDP2 does so once, at the beginning of a step."""
    for state in _ROOTS:
        _wait_for_writes(state)


def wait_for_gathers() -> None:
    """Let the host wait until gathers have copied what it is to change: a GPU comes to that later."""
    for state in _ROOTS:
        state._device_handle.current_stream().synchronize()
        state._comm_ctx.all_gather_copy_in_stream.synchronize()


def _wait_for_writes(state: Any) -> None:
    now = state._device_handle.current_stream()
    state._comm_ctx.all_gather_copy_in_stream.wait_stream(now)
    state._comm_ctx.all_gather_stream.wait_stream(now)


def gather_when_called(root: Any) -> None:
    """Let modules gather what is a sharded root's own when they are called while that is sharded.

    Such as a network that a hook draws samples from: its own units gather, and nothing else does. With gradients only
    inside of the root's forward, where a ``state_dict`` lets go of what is gathered: elsewhere its backward would not
    reduce them.
    """
    state = root._get_fsdp_state()
    for group in state._fsdp_param_groups:

        def gather(*_: Any, group: Any = group) -> None:
            if torch.compiler.is_compiling() or group.is_unsharded:
                return
            if not torch.is_grad_enabled() or state._training_state == TrainingState.FORWARD:
                _wait_for_writes(state)
                root.unshard()

        for module in dict.fromkeys((*root.children(), *_list_around(root, _list_holders(group)))):
            module.register_forward_pre_hook(gather, prepend=True)


def _list_holders(group: Any) -> list[nn.Module]:
    """Return the modules that have the parameters of a unit as attributes."""
    infos = [parameter._module_info for parameter in group.fsdp_params]
    return list(dict.fromkeys(module for info in infos for module in (info.module, *info.shared_modules)))


def _list_around(root: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return modules below a root, and those that they are in."""
    inner = set(modules)
    return [m for m in root.modules() if m is not root and not inner.isdisjoint(m.modules())]


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class _Read(dict[str, Any]):
    """The parameters of a module, with a function that is called before one is read as an attribute."""

    def __init__(self, own: dict[str, Any], before: Callable[[], None]) -> None:
        super().__init__(own)
        self._before = before

    def __getitem__(self, name: str) -> Any:
        self._before()
        return super().__getitem__(name)

    def __reduce__(self) -> Any:
        self._before()
        return dict, (dict(self),)


def list_gathered(parameter: Any) -> list[Tensor]:
    """Return the tensors that hold a gathered parameter; their storage has no bytes while it is sharded.

    On one rank the shard is the whole parameter, and may be its gathered form too.
    """
    return list(parameter.all_gather_outputs)


def get_shard(parameter: Any) -> nn.Parameter:
    """Return this rank's shard, a DTensor."""
    return parameter.sharded_param


def get_gathered(parameter: Any) -> nn.Parameter | None:
    """Return the gathered form of a parameter, which has no memory while it is sharded; before the first, none."""
    return getattr(parameter, "_unsharded_param", None)


def list_unreduced_gradients(parameter: Any) -> list[Tensor]:
    """Return the gradients at full size that a parameter has at this moment, before they are reduced."""
    gathered = get_gathered(parameter)
    gradient, held = None if gathered is None else gathered.grad, parameter.unsharded_accumulated_grad
    # In torch 2.13 and 2.14 what no_sync adds up is another tensor; in 2.15 it is the gradient itself.
    return [tensor for tensor in (gradient, None if held is gradient else held) if tensor is not None]


def list_edited(model: nn.Module, *, is_exact: bool) -> list[str]:
    """Return the parameters whose gathered form was changed in place, or replaced: the shards know nothing.

    FSDP2 fills them past their version counters. Changes through ``.data`` have counters of their own: they are found
    in what is gathered now, if gathers are exact.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = []
    for _, parameter in iterate_sharded(model):
        gathered = get_gathered(parameter)
        if gathered is None:  # not in this forward
            continue
        sources, shard = list_gathered(parameter), cast("DTensor", get_shard(parameter))
        # A shard that says itself how it is gathered may make another tensor of what was sent.
        is_own = len(sources) != 1 or hasattr(shard.to_local(), "fsdp_post_all_gather")
        local = to_local(gathered)
        is_replaced = not is_own and local.data_ptr() != sources[0].data_ptr()
        if local._version or is_replaced or (is_exact and not is_own and _differs(parameter, local)):
            found.append(names.get(id(gathered)) or names.get(id(shard)) or "a parameter")
    return found


def _differs(parameter: Any, gathered: Tensor) -> bool:
    """Whether a gathered parameter has other values than this rank's rows of it, where it is gathered."""
    if parameter.sharded_state != ShardedState.UNSHARDED or parameter.fsdp_placement.dim:
        return False
    shard, place = parameter._sharded_param_data, parameter.mesh_info.shard_mesh_rank
    rows = gathered.detach().view(-1)[place * shard.numel() : (place + 1) * shard.numel()]
    own = shard[: rows.numel()].to(rows)
    return not torch.equal(own.view(torch.uint8), rows.view(torch.uint8))  # numbers that are none are equal, too


def to_local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor; it shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def call_after_backward(root: nn.Module, function: Callable[[], None]) -> Callable[[], None]:
    """Call a function at the end of each backward in which FSDP2 takes part: on all ranks, whatever each has used.

    Returns what undoes it.
    """

    def end_and_call(end: Callable[[], None]) -> None:
        end()
        function()

    # Whichever unit comes first in a backward queues its own, once for all units of a root.
    states = dict.fromkeys(m._get_fsdp_state() for m in root.modules() if isinstance(m, FSDPModule))
    replaced = [ReplacedMethod(state, "_root_post_backward_final_callback", end_and_call) for state in states]

    def undo() -> None:
        for method in replaced:
            method.remove()

    return undo


def call_after_this_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the backward that runs, whatever it reaches; from a hook of autograd."""
    Variable._execution_engine.queue_callback(function)


def find_gradients(output: Any) -> list[Tensor]:
    """Return the tensors that need a gradient in what a module returns, as far as FSDP2 finds them."""
    found: list[Tensor] = list(collect_grad_tensors(output))
    return found


def will_end_backward(root: nn.Module) -> bool:
    """Whether the end of the backward that runs is still to come for FSDP2, as it has reached a unit of a root."""
    states = (module._get_fsdp_state() for module in root.modules() if isinstance(module, FSDPModule))
    return any(state._state_ctx.post_backward_final_callback_queued for state in states)


class UnitInternals:
    """A sharded unit from inside: torch's ``FSDPParamGroup``, with places where other code can run."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._replaced: list[ReplacedMethod] = []
        self._lets_go: Any = None  # after which forwards, where it is kept for now

    @property
    def module(self) -> nn.Module:
        """The module of the unit, the first if there are several."""
        module: nn.Module = self._group.modules[0]
        return module

    @property
    def ranks(self) -> list[Any]:
        """The ranks that it is sharded over, nested as its mesh is."""
        ranks: list[Any] = self._group.mesh_info.mesh.mesh.tolist()
        return ranks

    @property
    def is_split(self) -> bool:
        """Whether several ranks hold parts of it, and send them to gather it."""
        return getattr(self._group.mesh_info, "shard_mesh_size", 1) > 1

    @property
    def copies_in_compute(self) -> bool:
        """Whether what is gathered comes from the host in the stream of compute, as FSDP2 does with one shard."""
        return bool(self._group.device.type == "cuda" and self._group.mesh_info.shard_mesh_size == 1)

    @property
    def is_gathered(self) -> bool:
        """Whether the module has gathered parameters at this moment, or those that stay split over fewer ranks."""
        return not self._group.is_sharded

    @property
    def is_kept(self) -> bool:
        """Whether ``keep`` was called since the last ``reshard``."""
        return self._lets_go is not None

    def reshard(self) -> None:
        """Let go of gathered parameters; whatever needs them next gathers them again."""
        if self._lets_go is not None:
            self._group.reshard_after_backward, self._group.post_forward_mesh_info = True, self._lets_go[0]
            self._lets_go = None
        self._group.reshard()

    def keep(self) -> None:
        """Let parameters stay gathered after forwards and backwards, until ``reshard``."""
        if self._group.reshard_after_backward:
            self._lets_go = (self._group.post_forward_mesh_info,)
            self._group.reshard_after_backward, self._group.post_forward_mesh_info = False, None

    def gather_when_used(self, others: Sequence[UnitInternals]) -> Callable[[], None]:
        """Let the module's own parameters be gathered in a forward by what reads them; return what undoes it.

        That is what gets, lists or copies them while gradients are on, a call, see ``gather_when_called``, and a gather
        of the units below: they come after it on all ranks, whatever one rank alone has read. Until then code without
        gradients has the shards, as between steps, and so has ``state_dict``.

        Args:
            others: All units of the module; it may be one of them.
        """
        group, root = self._group, cast("Any", self.module)
        state = root._get_fsdp_state()

        def gather() -> None:
            # A gather puts parameters in their places, and places may look what they have.
            if (
                group._training_state == TrainingState.FORWARD
                and not group.is_unsharded
                and group._all_gather_result is None
            ):
                _wait_for_writes(state)
                root.unshard()

        def gather_for_gradients() -> None:
            if torch.is_grad_enabled():
                gather()

        def gather_first(gather_other: Callable[..., None], *args: Any) -> None:
            gather()
            gather_other(*args)

        def gather_and_list(list_members: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            gather_for_gradients()
            return list_members(*args, **kwargs)

        holders = _list_holders(group)
        for module in holders:
            module._parameters = _Read(module._parameters, gather_for_gradients)
        around = (root, *_list_around(root, holders))
        replaced = [ReplacedMethod(module, "_named_members", gather_and_list) for module in around]
        replaced += [ReplacedMethod(u._group, "unshard", gather_first) for u in others if u._group is not group]
        # What looks after ``load_state_dict`` for the shards.
        replaced += [ReplacedMethod(p, "reset_sharded_param", torch.no_grad()(_call)) for p in group.fsdp_params]

        def undo() -> None:
            for method in replaced:
                method.remove()
            for module in holders:
                if isinstance(module._parameters, _Read):
                    module._parameters = dict(module._parameters)

        return undo

    def begin_without_gather(self) -> None:
        """Let the forward that begins next gather nothing of the module's own, see ``gather_when_used``."""

        def begin(_: Any, __: nn.Module, *inputs: Any) -> Any:
            replaced.remove()
            self._group._training_state = TrainingState.FORWARD
            return self._group._register_post_backward_hook(*inputs)

        replaced = ReplacedMethod(self._group, "pre_forward", begin)

    def end(self) -> None:
        """Let go of what an error in a step has left gathered; this waits for no other rank, see ``end_step``."""
        if self._group._training_state != TrainingState.IDLE:
            state: Any = cast("Any", self.module)._get_fsdp_state()
            self._group._training_state = state._training_state = TrainingState.IDLE
            state._state_ctx.iter_forward_root = None
            self._group.reshard()

    @property
    def is_compiled(self) -> bool:
        """Whether a compiler reads the module's own parameters, past hooks: in a module, or in a method of one."""
        modules = [self.module, *_list_around(self.module, _list_holders(self._group))]
        return any(m._compiled_call_impl is not None or _has_compiled(m) for m in modules)

    def call_before_backward(self, function: Callable[[], None]) -> ReplacedMethod:
        """Call a function whenever a backward reaches the unit, before it gathers; return what undoes it."""

        def call_and_begin(begin: Callable[..., None], *args: Any) -> None:
            function()
            begin(*args)

        return ReplacedMethod(self._group, "pre_backward", call_and_begin)

    def list_shards(self) -> list[nn.Parameter]:
        """Return this rank's shards, which FSDP2 may replace before the first forward."""
        return [parameter.sharded_param for parameter in self._group.fsdp_params]

    def list_arrivals(self) -> list[Any]:
        """Return the events of the gradients that are on their way to the host since the last backward has ended."""
        events = (parameter.grad_offload_event for parameter in self._group.fsdp_params)
        return [event for event in events if event is not None]

    def call_before_gather(self, function: Callable[[], None]) -> None:
        """Call a function before each gather, or copy from the host; not where the unit is gathered already."""

        def wait_and_gather(gather: Any, async_op: bool = False) -> None:
            if not self._group.is_unsharded:
                function()
            gather(async_op)

        self._replaced.append(ReplacedMethod(self._group, "unshard", wait_and_gather))

    def call_after_gather(self, function: Callable[[], None]) -> None:
        """Call a function whenever a gather has begun, or a copy from the host."""
        group = self._group

        def gather_and_call(gather: Any, async_op: bool = False) -> None:
            was_begun = group._all_gather_result is not None
            gather(async_op)
            if not was_begun and group._all_gather_result is not None:
                function()

        self._replaced.append(ReplacedMethod(self._group, "unshard", gather_and_call))

    def call_before_forward(self, function: Callable[[], None]) -> None:
        """Call a function for each forward that the unit will reduce gradients of; not where one is computed again."""

        def note_and_register(register: Any, args: Any, kwargs: Any) -> Any:
            function()
            return register(args, kwargs)

        self._replaced.append(ReplacedMethod(self._group, "_register_post_backward_hook", note_and_register))

    def list_reduced(self) -> tuple[bool, ...]:
        """Return for each parameter whether the end of the unit's backward will reduce a gradient of it."""
        group = self._group
        if not group.reduce_grads:
            return ()
        takes_unused = group.reduce_scatter_unused_params
        # A list first, as it takes half as long.
        is_reduced = [
            (gathered := getattr(parameter, "_unsharded_param", None)) is not None
            and (
                gathered.grad is not None
                or parameter.unsharded_accumulated_grad is not None
                or (takes_unused and gathered.requires_grad)
            )
            for parameter in group.fsdp_params
        ]
        return tuple(is_reduced)

    def call_around_reduction(self, function: Callable[[Callable[[], None]], None]) -> None:
        """Let a function run the end of the unit's backward, which hands gradients to its shards."""
        self._replaced.append(ReplacedMethod(self._group, "post_backward", lambda end, *_: function(end)))

    def copy_beside_compute(self) -> None:
        """Let the shards of a unit come from the host in a stream of their own, as FSDP2 does with several shards.

        They come while the unit before computes, so they take device memory beside it, in the dtype they are stored in.
        """
        group = self._group
        copies: list[Tensor] = []
        arrived: list[Any] = []

        def begin(gather: Any, async_op: bool = False) -> None:
            was_begun = group._all_gather_result is not None
            gather(async_op)
            # Before the first forward FSDP2 has no streams.
            if (
                was_begun
                or group._all_gather_result is None
                or not hasattr(group.comm_ctx, "all_gather_copy_in_stream")
            ):
                return
            stream = group.comm_ctx.all_gather_copy_in_stream
            with group.device_handle.stream(stream):
                shards = [parameter._sharded_param_data for parameter in group.fsdp_params]
                copies[:] = [shard.to(group.device, non_blocking=True) for shard in shards]
                arrived[:] = [stream.record_event()]

        def end(wait: Any) -> None:
            if group._all_gather_result is None or not copies:
                wait()
                return
            group.device_handle.current_stream().wait_event(arrived[0])
            shards = [parameter._sharded_param_data for parameter in group.fsdp_params]
            try:
                for parameter, copy in zip(group.fsdp_params, copies, strict=True):
                    parameter._sharded_param_data = copy  # to which torch's own copy to the device is none
                # When this returns, the stream of the copies waits until they have been read: they may be let go of.
                wait()
            finally:
                for parameter, shard in zip(group.fsdp_params, shards, strict=True):
                    parameter._sharded_param_data = shard
                copies.clear()

        self._replaced.append(ReplacedMethod(self._group, "unshard", begin))
        self._replaced.append(ReplacedMethod(self._group, "wait_for_unshard", end))

    def undo(self) -> None:
        """Take out everything that was put in."""
        while self._replaced:
            self._replaced.pop().remove()


def _has_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile`` made the module, or something that it, its class or the file of its class has."""
    own = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
    file = sys.modules.get(own.__module__)
    holders = [module, *type(module).__mro__, *([] if file is None else [file])]
    functions = (value for holder in holders for value in vars(holder).values() if callable(value))
    return "_orig_mod" in module._modules or any(hasattr(f, "_torchdynamo_orig_callable") for f in functions)


def list_units(root: nn.Module) -> list[UnitInternals]:
    """Return the sharded units of a model, the root first."""
    states = dict.fromkeys(m._get_fsdp_state() for m in root.modules() if isinstance(m, FSDPModule))
    return [UnitInternals(group) for state in states for group in state._fsdp_param_groups]
