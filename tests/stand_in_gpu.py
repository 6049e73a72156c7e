"""A CPU process that passes for one with a GPU: what is on which of the two is checked, and who waits for whom.

The memory of every tensor is labelled as the host's or the device's. Python sees ``cuda`` devices, so the code runs
that runs on GPUs: FSDP2's offload, its streams, staging. Refused, as a GPU would or as it would compute nonsense:

- operators on tensors of both, other than copies and those that take numbers or indices from the host;
- reading the target of a non-blocking copy to the host, or writing into the source of one to the device, before the
  host has waited for it. Copies end when somebody waits for them, and no sooner.

Kernels, their rounding and their memory stay those of the CPU. What C++ allocates without a hint, such as backward for
a gradient that is missing, gets its label where it is first used. Threads other than the one that enters are followed
where they read or save a tensor, not in their operators; that of the optimizer is followed in these too.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial, wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ranks import run_ranks

_HOST, _DEVICE, _UNKNOWN = "host", "device", "unknown"
_COPIES = {"copy_", "_to_copy", "_foreach_copy_", "_foreach_copy"}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
_TAKES_NUMBERS = {"fill_", "fill", "masked_fill", "masked_fill_", "index_fill", "index_fill_"}  # as pointwise ones do
_READS_NOTHING = {f"{kind}_like" for kind in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")}
_READS_NOTHING |= {f"new_{kind}" for kind in ("empty", "zeros", "ones", "full", "empty_strided")}
_REAL_DEVICE = torch._C.TensorBase.device.__get__  # type: ignore[attr-defined]


class WrongPlaceError(RuntimeError):
    """What a GPU would refuse: an operator on tensors of both host and device."""


class TooEarlyError(RuntimeError):
    """What a GPU would not refuse, and go wrong: memory is used while a copy from or to it may still run."""


class Stream:
    """The copies that somebody waits for who waits for this stream."""

    stream_id = device_index = 0
    device_type = 1  # what FSDP2 of torch 2.15 hands to an operator that does nothing on CUDA

    def __init__(self, *_: Any, **__: Any) -> None:
        self.copies: set[int] = set()

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        self.copies |= event.copies

    def wait_stream(self, other: "Stream") -> None:
        self.copies |= other.copies

    def synchronize(self) -> None:
        _GPU.finish(self.copies)

    def query(self) -> bool:
        self.synchronize()
        return True

    def is_capturing(self) -> bool:
        return False


class Event:
    """The copies that were under way in a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.copies: set[int] = set()

    def record(self, stream: Stream | None = None) -> "Event":
        self.copies = set((stream or _HERE.stream).copies)
        return self

    def wait(self, stream: Stream | None = None) -> None:
        (stream or _HERE.stream).wait_event(self)

    def synchronize(self) -> None:
        _GPU.finish(self.copies)

    def query(self) -> bool:
        self.synchronize()
        return True

    def elapsed_time(self, _: "Event") -> float:
        return 1.0


class _Gpu:
    """The copies between host and device."""

    def __init__(self) -> None:
        self.stream = Stream()  # the default one
        self.num_copies = 0
        self.under_way: set[int] = set()

    def begin_copy(self) -> int:
        self.num_copies += 1
        self.under_way.add(self.num_copies)
        _HERE.stream.copies.add(self.num_copies)
        return self.num_copies

    def finish(self, copies: set[int]) -> None:
        self.under_way -= copies

    def finish_all(self, *_: Any) -> None:
        self.under_way.clear()


_GPU = _Gpu()


class _Here(threading.local):
    """What holds for one thread."""

    def __init__(self) -> None:
        self.stream = _GPU.stream
        self.expected: str | None = None  # where Python asks for memory at this moment

    @contextmanager
    def enter_stream(self, stream: Stream | None) -> Iterator[None]:
        before, self.stream = self.stream, stream or self.stream
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def expect(self, place: str) -> Iterator[None]:
        before, self.expected = self.expected, place
        try:
            yield
        finally:
            self.expected = before


_HERE = _Here()


def find_place(tensor: Tensor) -> str:
    """Return where the memory of a tensor is; nobody knows of what C++ has made and nothing has used."""
    tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return getattr(tensor.untyped_storage(), "place", _HOST)


class _Watch(TorchDispatchMode):
    """Labels what operators make, and refuses what mixes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and _REAL_DEVICE(t).type == "cpu"]
        place = _choose_place(func, name, args, inputs)
        is_copy = name in _COPIES
        if not (_is_view(func) or name in _READS_NOTHING):
            is_queued = is_copy and _DEVICE in (_HERE.expected, *map(find_place, inputs))
            _check_order(func, inputs, args, kwargs, is_queued=is_queued)
        out = func(*args, **kwargs)
        known = {t.untyped_storage()._cdata for t in inputs}
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor) and _REAL_DEVICE(t).type == "cpu"]
        for tensor in made:
            if (storage := tensor.untyped_storage())._cdata not in known:
                storage.place = _HERE.expected or place  # type: ignore[attr-defined]
        if is_copy:
            _note_copies(name, args, kwargs, out)
        elif name in ("_local_scalar_dense", "equal", "nonzero") and _DEVICE in map(find_place, inputs):
            _HERE.stream.synchronize()
        return out


def _choose_place(func: Any, name: str, args: Any, inputs: list[Tensor]) -> str:
    """Return where an operator computes; refuse tensors of both places."""
    strict = inputs
    if name in _INDEXED and find_place(args[0]) == _DEVICE:
        strict = [args[0], *(t for t in args[2:] if isinstance(t, Tensor) and t.ndim)]
    elif torch.Tag.pointwise in func.tags or name in _TAKES_NUMBERS:
        written = [t for t, is_written in _pair_arguments(func, args, {}) if is_written]
        # A number of the host may go along, if it is not written to.
        strict = [t for t in inputs if t.ndim or find_place(t) != _HOST or any(t is w for w in written)] or inputs
    places = {find_place(t) for t in strict} - {_UNKNOWN}
    if len(places) > 1 and name not in _COPIES and name not in _READS_NOTHING:
        found = ", ".join(f"{tuple(t.shape)} on the {find_place(t)}" for t in inputs)
        raise WrongPlaceError(f"{func} mixes host and device: {found}")
    if name not in _COPIES and len(places) == 1:
        for tensor in strict:
            if find_place(tensor) == _UNKNOWN:
                tensor.untyped_storage().place = next(iter(places))  # type: ignore[attr-defined]
    return _find_common(strict)


def _find_common(tensors: list[Tensor]) -> str:
    places = [find_place(t) for t in tensors]
    return next((p for p in (_DEVICE, _HOST) if p in places), _UNKNOWN)


def _check_order(func: Any, inputs: list[Tensor], args: Any, kwargs: Any, *, is_queued: bool) -> None:
    """Refuse what would meet a copy under way; one that a stream runs after it in order is none."""
    ordered = _HERE.stream.copies if is_queued else set()
    written = [t for t, is_written in _pair_arguments(func, args, kwargs) if is_written]
    for tensor in inputs:
        refuse_too_early(tensor, str(func), is_written=any(tensor is w for w in written), ordered=ordered)


def refuse_too_early(tensor: Tensor, what: str, *, is_written: bool = False, ordered: Any = ()) -> None:
    """Refuse to use memory of the host that a copy under way writes, or to write into what one reads."""
    storage = tensor.untyped_storage()
    for attribute, doing in (("arriving", "from the device"), ("leaving", "to the device")):
        copies = (getattr(storage, attribute, set()) & _GPU.under_way).difference(ordered)
        if copies and (is_written or attribute == "arriving"):
            verb = "writes" if is_written else "reads"
            raise TooEarlyError(
                f"{what} {verb} {tuple(tensor.shape)} on the host while a non-blocking copy {doing} may still run"
            )


def _note_copies(name: str, args: Any, kwargs: Any, out: Any) -> None:
    """Begin what does not block; what does waits for its stream."""
    is_async = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    if name.startswith("_foreach_copy"):
        targets, sources = args[0], args[1]
    else:
        targets, sources = ([args[0]], [args[1]]) if name == "copy_" else ([out], [args[0]])
    for target, source in zip(targets, sources, strict=True):
        places = find_place(source), find_place(target)
        if set(places) != {_HOST, _DEVICE}:
            continue
        host = (source if places[0] == _HOST else target).untyped_storage()
        if not is_async:
            _HERE.stream.synchronize()
            continue
        if places[0] == _HOST and not getattr(host, "is_pinned_host", False):
            continue  # CUDA copies from memory that is not pinned before it returns
        attribute = "leaving" if places[0] == _HOST else "arriving"
        host.__dict__.setdefault(attribute, set()).add(_GPU.begin_copy())
        if name == "_to_copy" and attribute == "arriving":
            host.is_pinned_host = True  # type: ignore[attr-defined]  # by torch, so this does not block either


def _pair_arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, bool]]:
    """Yield each tensor among the arguments, and whether it is written to."""
    for i, (key, is_written) in enumerate(_list_arguments(func)):
        value = args[i] if i < len(args) else kwargs.get(key)
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, Tensor):
                yield tensor, is_written


@cache
def _list_arguments(func: Any) -> list[tuple[str, bool]]:
    return [(a.name, a.alias_info is not None and a.alias_info.is_write) for a in func._schema.arguments]


@cache
def _is_view(func: Any) -> bool:
    returns = [r.alias_info for r in func._schema.returns]
    return bool(returns) and all(alias is not None and not alias.is_write for alias in returns)


# What Python sees


def _translate(device: Any) -> tuple[str | None, Any]:
    """Return the place that a device stands for, and the device to take for it; no place for others such as meta."""
    device = torch.device("cuda", device) if isinstance(device, int) else device
    device = torch.device(device) if device is not None else None
    if device is None or device.type not in ("cpu", "cuda"):
        return None, device
    return (_DEVICE if device.type == "cuda" else _HOST), torch.device("cpu")


def _wrap_factory(make: Callable[..., Any], *, is_like: bool) -> Callable[..., Any]:
    @wraps(make)
    def wrapped(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        place, device = _translate(kwargs.get("device"))
        if device is not None:
            kwargs["device"] = device
        if place is None and device is None:
            is_followed = is_like and isinstance(args[0], Tensor) and _real_type(args[0]) == "cpu"
            place = find_place(args[0]) if is_followed else _HOST
        if place is None:
            return make(*args, **kwargs)
        with _HERE.expect(place):
            out = make(*args, **kwargs)
        if find_place(out) != place:  # of `as_tensor`, what was there already
            out = _move(out, place)
        if pin_memory:
            out.untyped_storage().is_pinned_host = True
        return out

    return wrapped


def _real_type(tensor: Tensor) -> str:
    return str(_REAL_DEVICE(tensor._local_tensor if isinstance(tensor, DTensor) else tensor).type)


def _get_device(tensor: Tensor) -> torch.device:
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    real: torch.device = _REAL_DEVICE(tensor)
    if real.type == "cpu" and find_place(tensor) == _DEVICE:
        return torch.device("cuda", torch.cuda.current_device())
    return real


def _move(
    tensor: Tensor,
    place: str,
    *,
    dtype: Any = None,
    is_async: bool = False,
    is_copied: bool = False,
    memory_format: Any = None,
) -> Tensor:
    if not is_copied and find_place(tensor) == place and dtype in (None, tensor.dtype):
        return tensor
    options: dict[str, Any] = {} if memory_format is None else {"memory_format": memory_format}
    with _HERE.expect(place):
        return torch.ops.aten._to_copy.default(tensor, dtype=dtype, non_blocking=is_async, **options)


def _wrap_to(to: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(to)
    def wrapped(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        names = ["device", "dtype", "non_blocking", "copy"]
        if args and isinstance(args[0], torch.dtype):
            names = names[1:]
        elif args and isinstance(args[0], Tensor):
            names = ["other", *names[2:]]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if (other := given.pop("other", None)) is not None:
            given |= {"device": other.device, "dtype": other.dtype}
        place, device = _translate(given.get("device"))
        if place is None or _real_type(self) != "cpu":  # of dtypes, and from or to the meta device
            if place is not None:
                given["device"] = device
            return to(self, **given)  # type: ignore[no-any-return]
        return _move(
            self,
            place,
            dtype=given.get("dtype"),
            is_async=given.get("non_blocking", False),
            is_copied=given.get("copy", False),
            memory_format=given.get("memory_format"),
        )

    return wrapped


def _pin_memory(tensor: Tensor, *_: Any) -> Tensor:
    if find_place(tensor) == _DEVICE:
        raise WrongPlaceError(f"cannot pin {tuple(tensor.shape)}: it is on the device")
    pinned = tensor.clone()
    (pinned._local_tensor if isinstance(pinned, DTensor) else pinned).untyped_storage().is_pinned_host = True  # type: ignore[attr-defined]
    return pinned


def _is_pinned(tensor: Tensor, *_: Any) -> bool:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return getattr(local.untyped_storage(), "is_pinned_host", False)


def _wrap_reader(read: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(read)
    def wrapped(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(self) in (Tensor, torch.nn.Parameter) and _REAL_DEVICE(self).type == "cpu":
            if name in ("numpy", "__array__") and find_place(self) == _DEVICE:
                raise WrongPlaceError(f"{name} of {tuple(self.shape)} on the device; copy it to the host first")
            refuse_too_early(self, name)
            if find_place(self) == _DEVICE:
                _HERE.stream.synchronize()
        return read(self, *args, **kwargs)

    return wrapped


def _patch_tensors() -> None:
    constructors = set(_device_constructors())
    for name, make in list(vars(torch).items()):
        is_like = name.endswith("_like")
        if callable(make) and not name.startswith("_") and (is_like or make in constructors):
            setattr(torch, name, _wrap_factory(make, is_like=is_like))
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "new_empty_strided"):
        setattr(Tensor, name, _wrap_factory(getattr(Tensor, name), is_like=True))
    for name in ("numpy", "__array__", "tolist", "__reduce_ex__"):
        setattr(Tensor, name, _wrap_reader(getattr(Tensor, name), name))
    new: dict[str, Any] = {
        "device": property(_get_device),
        "is_cuda": property(lambda t: _get_device(t).type == "cuda"),
        "is_cpu": property(lambda t: _get_device(t).type == "cpu"),
        "get_device": lambda t: _get_device(t).index if _get_device(t).index is not None else -1,
        "to": _wrap_to(Tensor.to),
        "pin_memory": _pin_memory,
        "is_pinned": _is_pinned,
    }
    new["cpu"] = lambda t, **options: new["to"](t, torch.device("cpu"), **options)
    new["cuda"] = lambda t, device=None, non_blocking=False: new["to"](
        t, torch.cuda.current_device() if device is None else device, non_blocking=non_blocking
    )
    for name, value in new.items():
        setattr(Tensor, name, value)
    clone = torch.UntypedStorage.clone

    def clone_there(storage: Any) -> Any:
        copy = clone(storage)
        copy.place = getattr(storage, "place", _HOST)
        return copy

    torch.UntypedStorage.clone = clone_there  # type: ignore[method-assign]


def _patch_cuda(index: int, num_devices: int) -> None:
    def nothing(*_: Any, **__: Any) -> None:
        return None

    def none_of(*_: Any, **__: Any) -> int:
        return 0

    properties = SimpleNamespace(name="stand-in", total_memory=2**34, major=9, minor=0, multi_processor_count=1)
    generator_state = partial(torch.zeros, 16, dtype=torch.uint8)
    new: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: num_devices,
        "current_device": lambda: index,
        "current_stream": lambda *_: _HERE.stream,
        "default_stream": lambda *_: _GPU.stream,
        "stream": _HERE.enter_stream,
        "synchronize": _GPU.finish_all,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: properties.name,
        "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (properties.total_memory, properties.total_memory),
        "get_rng_state": lambda *_: generator_state(),
        "memory_stats": lambda *_: Counter(),
        "is_bf16_supported": lambda *_, **__: True,
        "device": lambda *_: nullcontext(),
        "_is_in_bad_fork": lambda: False,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=none_of, cudaHostUnregister=none_of),
    }
    new |= dict.fromkeys(("set_device", "empty_cache", "set_rng_state", "manual_seed", "manual_seed_all"), nothing)
    new |= dict.fromkeys(("reset_peak_memory_stats", "_lazy_init", "init", "ipc_collect"), nothing)
    new |= dict.fromkeys(
        ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), none_of
    )
    for name, value in new.items():
        setattr(torch.cuda, name, value)
    torch.accelerator.current_stream = new["current_stream"]
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
    torch.accelerator.is_available = new["is_available"]
    torch._C._cuda_clearCublasWorkspaces = nothing  # type: ignore[attr-defined]
    barrier = dist.barrier
    dist.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group, async_op)


def run_as_gpus(body: Callable[..., None], *args: object, world_size: int = 1) -> None:
    """Run ``body(*args)`` on ranks that pass for ranks with a GPU each: ``run_ranks`` for code of GPUs."""
    __tracebackhide__ = True
    run_ranks(_enter, body, args, world_size=world_size, backend="cpu:gloo,cuda:gloo")


def _enter(body: Callable[..., None], args: tuple[object, ...]) -> None:
    # In a forked rank, which ends afterwards: nothing is put back.
    _patch_tensors()
    _patch_cuda(dist.get_rank(), dist.get_world_size())
    run = threading.Thread.run

    def run_watched(thread: threading.Thread) -> None:
        with _Watch() if thread.name.startswith("optimizer") else nullcontext():  # type: ignore[no-untyped-call]
            run(thread)

    threading.Thread.run = run_watched  # type: ignore[method-assign]
    with _Watch():  # type: ignore[no-untyped-call]
        body(*args)
