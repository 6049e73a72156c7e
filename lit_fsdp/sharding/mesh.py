"""How the ranks are arranged: full copies of the model, each split over some of them."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lit_fsdp.sharding.torch_internals import set_timeout


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """How the ranks are arranged.

    Args:
        replicate: How many full copies of the model to keep. Above 1, gradients are also all-reduced between
            the copies (hybrid sharding), which suits a slow link between nodes. ``-1`` takes all ranks that
            ``shard`` leaves.
        shard: Over how many ranks one copy is split: a number, ``node`` for the ranks of one node, or ``-1``
            for all ranks that ``replicate`` leaves.
    """

    replicate: int = 1
    shard: int | Literal["node"] = -1

    def resolve(self, *, world_size: int, ranks_per_node: int) -> tuple[int, int]:
        """Return ``(replicate, shard)``, whose product is ``world_size``; a ``ValueError`` names the nearest."""
        replicate, shard = self.replicate, ranks_per_node if self.shard == "node" else self.shard
        for name, degree in (("replicate", replicate), ("shard", shard)):
            if degree == 0 or degree < -1:
                raise ValueError(f"mesh.{name}: got {degree!r}: expected 1 or more, or -1 for the rest")
        if replicate == shard == -1:
            raise ValueError(
                "mesh: replicate and shard are both -1, so neither is known; "
                f"set one of them, such as replicate=1 shard={world_size}"
            )
        known = shard if replicate == -1 else replicate
        rest = max(world_size // known, 1)
        if replicate == -1:
            replicate = rest
        elif shard == -1:
            shard = rest
        if (needed := replicate * shard) != world_size:
            fits = [r for r in range(1, world_size + 1) if world_size % r == 0]
            near = min(fits, key=lambda r: (abs(r - replicate), r))
            raise ValueError(
                f"mesh {self.replicate}x{self.shard} (replicate x shard) needs {needed} ranks, {world_size} were "
                f"started; set replicate={near} shard={world_size // near} or start {needed} ranks"
            )
        return replicate, shard


class ModuleMesh(DeviceMesh):
    """The mesh as a LightningModule sees it, where ``mesh["data_parallel"]`` is all of it.

    So code that was written for Lightning's ``ModelParallelStrategy`` can shard itself.
    """

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        if mesh_dim_names == "data_parallel":
            return self
        if "tensor_parallel" in (mesh_dim_names, *mesh_dim_names):
            raise ValueError(
                'device_mesh["tensor_parallel"]: FSDP2Strategy has no tensor parallelism; its dimensions are '
                f"{', '.join(self.mesh_dim_names or ())}, and data_parallel for all of them"
            )
        return super().__getitem__(mesh_dim_names)


def make_module_mesh(mesh: DeviceMesh) -> ModuleMesh:
    """Return a mesh with the same groups and the names that ``ModuleMesh`` adds."""
    twin = copy(mesh)
    twin.__class__ = ModuleMesh
    assert isinstance(twin, ModuleMesh)
    return twin


def build_mesh(
    mesh: Mesh, *, device_type: str, world_size: int, ranks_per_node: int, timeout_s: float = 1800.0
) -> DeviceMesh:
    """Make the process groups: dimensions ``("shard",)``, or ``("replicate", "shard")`` with several copies.

    Neighbouring ranks share a copy, so that shards are gathered inside a node where that is possible. Needs an
    initialized process group, and all ranks must call it.
    """
    replicate, shard = mesh.resolve(world_size=world_size, ranks_per_node=ranks_per_node)
    if replicate == 1:
        return init_device_mesh(device_type, (shard,), mesh_dim_names=("shard",))
    made = init_device_mesh(device_type, (replicate, shard), mesh_dim_names=("replicate", "shard"))
    for group in made.get_all_groups():
        set_timeout(group, timeout_s)  # new ones start with the backend's, not with that of the world
    return made
