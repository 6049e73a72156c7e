"""How the ranks are arranged: full copies of the model, each split over some of them, and who shares rows."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lit_fsdp.sharding.torch_internals import set_timeout

Made = TypeVar("Made")

_MADE: WeakKeyDictionary[dist.ProcessGroup, dict[Any, Any]] = WeakKeyDictionary()  # by the group of all ranks


class MeshSizes(NamedTuple):
    """How many ranks each dimension has; their product is the number of all ranks."""

    replicate: int
    shard: int
    sequence: int = 1
    tensor: int = 1

    @property
    def by_name(self) -> dict[str, int]:
        """All sizes, by the name of their dimension."""
        return {
            "replicate": self.replicate,
            "shard": self.shard,
            "sequence": self.sequence,
            "tensor": self.tensor,
        }

    @property
    def num_shards(self) -> int:
        """Over how many ranks FSDP2 splits a copy: those that share rows hold shards of their own, too."""
        return self.shard * self.sequence

    @property
    def num_data_ranks(self) -> int:
        """How many groups of ranks have rows of their own."""
        return self.replicate * self.shard

    @property
    def num_sharing(self) -> int:
        """How many ranks work on the same rows."""
        return self.sequence * self.tensor


@dataclass(frozen=True, kw_only=True)
class DataRanks:
    """Which rows are this rank's: the ranks that differ in ``sequence`` or ``tensor`` alone share theirs.

    Args:
        count: How many groups of ranks have rows of their own.
        index: Which of them this rank is in.
        place: Which one in that group it is.
        copies: How many ranks compute each number: a sum over all ranks counts each so often. Above 1 with ``tensor``,
            not with ``sequence``, whose ranks have tokens of their own.
    """

    count: int = 1
    index: int = 0
    place: int = 0
    copies: int = 1


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """How the ranks are arranged.

    Args:
        replicate: How many full copies of the model to keep. Above 1, gradients are also all-reduced between
            the copies (hybrid sharding), which suits a slow link between nodes. ``-1`` takes all ranks that
            the others leave.
        shard: Over how many ranks one copy is split: a number, ``node`` for those of one node, or ``-1`` for all
            ranks that the others leave.
        sequence: How many neighbouring ranks share the tokens of a row. Each holds a part of them, and a shard.
        tensor: How many neighbouring ranks share the products of a layer (tensor parallelism): each holds a part of
            its weights and computes with it, on the same rows.
    """

    replicate: int = 1
    shard: int | Literal["node"] = -1
    sequence: int = 1
    tensor: int = 1

    def resolve(self, *, world_size: int, ranks_per_node: int) -> MeshSizes:
        """Return the sizes of all dimensions, whose product is ``world_size``; a ``ValueError`` names the nearest."""
        num_sharing = self._check_sharing(world_size)
        world_size, ranks_per_node = world_size // num_sharing, max(ranks_per_node // num_sharing, 1)
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
            started = f"{world_size} were started"
            if num_sharing > 1:
                started = f"{world_size * num_sharing} were started, which share rows by {num_sharing}"
                needed *= num_sharing
            raise ValueError(
                f"mesh {self.replicate}x{self.shard} (replicate x shard) needs {needed} ranks, {started}"
                f"; set replicate={near} shard={world_size // near} or start {needed} ranks"
            )
        return MeshSizes(replicate, shard, self.sequence, self.tensor)

    def locate(self, rank: int, *, world_size: int, ranks_per_node: int) -> DataRanks:
        """Return which rows are those of a rank; a ``ValueError`` as ``resolve``."""
        sizes = self.resolve(world_size=world_size, ranks_per_node=ranks_per_node)
        index, place = divmod(rank, sizes.num_sharing)
        return DataRanks(count=sizes.num_data_ranks, index=index, place=place, copies=sizes.tensor)

    def _check_sharing(self, world_size: int) -> int:
        """Return how many ranks share rows."""
        for name, degree in (("sequence", self.sequence), ("tensor", self.tensor)):
            if degree < 1:
                raise ValueError(f"mesh.{name}: got {degree!r}: expected 1 or more")
        num_sharing = self.sequence * self.tensor
        if world_size % num_sharing:
            names = [name for name in ("sequence", "tensor") if getattr(self, name) > 1]
            others = num_sharing // getattr(self, names[-1])
            fits = [n for n in range(1, world_size + 1) if world_size % (n * others) == 0]
            near = f"set {names[-1]}={max(fits)} or " if fits and len(names) == 1 else ""
            given = " x ".join(f"{name} {getattr(self, name)}" for name in names)
            more = -(-world_size // num_sharing) * num_sharing
            raise ValueError(
                f"mesh.{names[-1]}: got {given}: it must divide the {world_size} ranks that were started; "
                f"{near}start {more} ranks"
            )
        return num_sharing


class ModuleMesh(DeviceMesh):
    """The mesh as a LightningModule sees it, where ``mesh["data_parallel"]`` is all of it but ``tensor``.

    ``mesh["tensor_parallel"]`` is that. So code that was written for Lightning's ``ModelParallelStrategy`` can
    parallelize and shard itself.
    """

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        if mesh_dim_names == "data_parallel":
            return get_fsdp_mesh(self)
        if mesh_dim_names == "tensor_parallel":
            mesh_dim_names = "tensor"
        if "tensor" in (mesh_dim_names, *mesh_dim_names) and "tensor" not in (self.mesh_dim_names or ()):
            raise ValueError(
                f'device_mesh["tensor_parallel"]: the mesh has no such dimension, only '
                f"{', '.join(self.mesh_dim_names or ())}; set mesh.tensor of the strategy, such as 2"
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
    """Make the process groups: the dimension ``shard``, and ``replicate`` before and ``tensor`` after it if above 1.

    Ranks of one ``sequence`` are neighbours in ``shard``, see :func:`build_sequence_mesh`. Neighbouring ranks share a
    layer, then a row, then a copy, so that most is sent inside a node where that is possible. Needs an initialized
    process group, and all ranks must call it.
    """
    sizes = mesh.resolve(world_size=world_size, ranks_per_node=ranks_per_node)
    dims = {"replicate": sizes.replicate, "shard": sizes.num_shards, "tensor": sizes.tensor}
    dims = {name: size for name, size in dims.items() if size > 1 or name == "shard"}

    def make() -> DeviceMesh:
        made = init_device_mesh(device_type, tuple(dims.values()), mesh_dim_names=tuple(dims))
        if len(dims) > 1:
            _set_timeouts(made, timeout_s)
        return made

    return make_once(make, "mesh", device_type, *dims.items(), timeout_s)


def build_sequence_mesh(
    mesh: Mesh, *, device_type: str, world_size: int, ranks_per_node: int, timeout_s: float = 1800.0
) -> DeviceMesh:
    """Make the process groups of the ranks that share the tokens of a row, as a mesh of the dimension ``sequence``.

    Beside the mesh that shards, of which they are neighbours in ``shard``. All ranks must call it.
    """
    sizes = mesh.resolve(world_size=world_size, ranks_per_node=ranks_per_node)
    shape = (sizes.num_data_ranks, sizes.sequence, sizes.tensor)

    def make() -> DeviceMesh:
        made = init_device_mesh(device_type, shape, mesh_dim_names=("data", "sequence", "tensor"))
        _set_timeouts(made, timeout_s)
        return made["sequence"]

    return make_once(make, "sequence", device_type, shape, timeout_s)


def make_group(name: str, timeout_s: float | None) -> dist.ProcessGroup:
    """Return a group of all ranks over gloo that nothing with another name uses. All ranks must call it.

    Without ``timeout_s`` its collectives may take as long as torch lets them.
    """

    def make() -> dist.ProcessGroup:
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert group is not None
        return group

    return make_once(make, "group", name, timeout_s)


def make_once(make: Callable[[], Made], *key: Any) -> Made:
    """Return what was made under this key for an earlier run in this process; groups keep connections and memory."""
    world = dist.group.WORLD
    assert world is not None
    made = _MADE.setdefault(world, {})
    if key not in made:
        made[key] = make()
    return made[key]


def get_fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the dimensions that FSDP2 shards and replicates over: all but ``tensor``."""
    names = tuple(name for name in mesh.mesh_dim_names or () if name != "tensor")
    return mesh if len(names) == mesh.ndim else DeviceMesh.__getitem__(mesh, names)


def gather_objects(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return what every rank gives, anything that can be pickled. All ranks must call it, and wait for it."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [own]
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, own, group=group)
    return parts


def _set_timeouts(mesh: DeviceMesh, timeout_s: float) -> None:
    for group in mesh.get_all_groups():
        set_timeout(group, timeout_s)  # new ones start with the backend's, not with that of the world
