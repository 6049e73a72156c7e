"""What stands between FSDP2 or DTensor and what it calls, for as long as somebody measures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Private, seen in torch 2.13 to 2.15: all that DTensor sends.
import torch.distributed._functional_collectives as functional
from torch import Tensor

from lit_fsdp.profiling.collectives import Collective
from lit_fsdp.sharding.replaced_method import ReplacedMethod

# Through which DTensor sends, and its groups have names. What layers reduce in other ways is not seen.
_OF_LAYERS: tuple[tuple[str, Collective], ...] = (
    *(("all_reduce", "all_reduce"), ("all_gather_single", "all_gather"), ("reduce_scatter_single", "reduce_scatter")),
)


def make_stand_in(comm: Any, run: Callable[..., Any], note: Callable[[], None] | None = None) -> Any:
    """Return a communication that runs another one, and passes for it where torch looks at its class.

    Args:
        comm: One of FSDP2's, or the user's own.
        run: Called with ``comm`` and the arguments.
        note: Called before memory is taken.
    """

    def allocate(_: Any, *args: Any, **kwargs: Any) -> Tensor:
        if note is not None:
            note()
        return comm.allocate(*args, **kwargs)

    def call(_: Any, *args: Any, **kwargs: Any) -> Any:
        return run(comm, *args, **kwargs)

    def find(_: Any, name: str) -> Any:
        return getattr(comm, name)

    kind = type(comm)
    body = {"allocate": allocate, "__call__": call, "__getattr__": find}
    return object.__new__(type(f"Timed{kind.__name__}", (kind,), body))


@contextmanager
def watch_layers(watcher: Callable[[Collective, int, int], Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Have ``watcher`` told of what the ranks that split a layer (``mesh.tensor``) send each other.

    It is called before each collective with its kind, the bytes of its full size and the number of ranks, and returns
    what is called with the result, and returns it.
    """

    def replace(kind: Collective) -> Callable[..., Tensor]:
        def run(collective: Callable[..., Tensor], tensor: Tensor, *args: Any, group: Any, **kwargs: Any) -> Tensor:
            mesh, dim = group if isinstance(group, tuple) else (None, 0)
            if mesh is None or (mesh.mesh_dim_names or ())[dim : dim + 1] != ("tensor",):
                return collective(tensor, *args, group=group, **kwargs)
            end = watcher(kind, tensor.nbytes * (mesh.size(dim) if kind == "all_gather" else 1), mesh.size(dim))
            return end(collective(tensor, *args, group=group, **kwargs))

        return run

    replaced = [ReplacedMethod(functional, name, replace(kind)) for name, kind in _OF_LAYERS]
    try:
        yield
    finally:
        for method in replaced:
            method.remove()
