"""Collectives of gloo that leave nothing behind, for those who count what is alive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from lit_fsdp.sharding.torch_internals import make_finished_work


def is_collective_of_gloo(operator: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator with these arguments sends tensors on the CPU to other processes."""
    if operator.namespace not in ("c10d", "lit_fsdp_c10d"):
        return False
    groups = [dist.ProcessGroup.unbox(arg) for arg in args if _is_boxed(arg, dist.ProcessGroup)]
    is_on_cpu = any(isinstance(arg, Tensor) and arg.device.type == "cpu" for arg in tree_leaves(args))
    return is_on_cpu and any("gloo" in dist.get_backend_config(group) for group in groups)


def run_on_copies(operator: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a collective on copies of its tensors, wait for it, and return work that is done.

    A thread of gloo lets go of the tensors of a collective, and of a buffer as large as the input of a
    reduce-scatter, at some time after the collective is over, and later on a busy machine: whoever watches them would
    count them for longer or shorter. Values are the same; asynchronous collectives are over at once.
    """
    copies: dict[int, tuple[UntypedStorage, UntypedStorage]] = {}  # of whole storages: tensors may share one
    originals: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of a copy, which is kept so that no other gets it

    def copy(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in copies:
            copies[storage._cdata] = storage, storage.clone()
        copied = copies[storage._cdata][1]
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        alike = empty.set_(copied, tensor.storage_offset(), tensor.size(), tensor.stride())
        originals[id(alike)] = (tensor, alike)
        return alike

    def replace(out: Any) -> Any:
        if not _is_boxed(out, dist.Work):
            return originals[id(out)][0] if id(out) in originals else out
        return make_finished_work(results).boxed()

    copied_args, copied_kwargs = tree_map_only(Tensor, copy, (args, dict(kwargs)))
    leaves = tree_leaves(found := operator(*copied_args, **copied_kwargs))
    works = [dist.Work.unbox(leaf) for leaf in leaves if _is_boxed(leaf, dist.Work)]
    for work in works:
        work.wait()
    for storage, copied in copies.values():
        storage.copy_(copied)
    results = [originals[id(leaf)][0] for leaf in leaves if id(leaf) in originals]
    return tree_map(replace, found)


def _is_boxed(value: Any, kind: type) -> bool:
    return isinstance(value, torch.ScriptObject) and str(value._type()).endswith(f".c10d.{kind.__name__}")
