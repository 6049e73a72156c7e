"""What a rank sends in collectives, whoever starts them: FSDP2, FSDP1, DDP's reducer, DeepSpeed or the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

# Private, seen in torch 2.13: a group by the name that functional operators are given.
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lit_fsdp.profiling.collectives import Traffic, count_wire_bytes

# By the operator's name: the collective, and which argument is of its full size; seen in torch 2.13.
_OPERATORS: Mapping[str, tuple[Traffic, int]] = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::allgather_": ("all_gather", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d::reduce_scatter_": ("reduce_scatter", 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "lit_fsdp_c10d::all_gather": ("all_gather", 0),  # of gloo_collectives.py, as the next
    "lit_fsdp_c10d::reduce_scatter": ("reduce_scatter", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::broadcast_": ("all_gather", 0),  # along a ring all but one rank send all of it
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
}
_SILENT = ("barrier", "monitored_barrier_", "wait_tensor")  # send nothing to speak of


class SentBytes(TorchDispatchMode):
    """Counts the collectives that start while it is entered, in backward too, and what this rank sends for them.

    Each operator takes some microseconds longer, so this is not for steps that are timed. Results stay the same. What
    is compiled runs as it was written.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wire_bytes: dict[Traffic, float] = {}  # see ``count_wire_bytes``
        self.calls: dict[Traffic, int] = {}
        self.unknown: set[str] = set()  # operators that send, but of which we do not know what

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name: str = func.name().partition(".")[0]
        if "c10d" in func.namespace:
            self._count(name, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        kind: Traffic
        if name == "_c10d_functional::all_gather_into_tensor":
            kind, num_bytes = "all_gather", args[0].nbytes * args[1]
        elif name in _OPERATORS:
            kind, place = _OPERATORS[name]
            num_bytes = sum(leaf.nbytes for leaf in tree_leaves(args[place]) if isinstance(leaf, Tensor))
        else:
            if name.rpartition("::")[2] not in _SILENT:
                self.unknown.add(name)
            return
        self.calls[kind] = self.calls.get(kind, 0) + 1
        sent = count_wire_bytes(kind, num_bytes, _count_ranks(args))
        self.wire_bytes[kind] = self.wire_bytes.get(kind, 0.0) + sent


def _count_ranks(args: tuple[Any, ...]) -> int:
    """Return how many ranks take part; a functional operator names its group."""
    unbox: Callable[[Any], dist.ProcessGroup] = dist.ProcessGroup.unbox
    for arg in args:
        if isinstance(arg, str) and arg.isdigit():
            return _resolve_process_group(GroupName(arg)).size()
        if type(arg).__name__ == "ScriptObject":
            try:
                return unbox(arg).size()
            except RuntimeError:  # another object, such as the kind of reduction
                continue
    return dist.get_world_size()
