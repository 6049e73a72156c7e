"""Sees that all ranks take the same path through a sharded module: the same units, in the same order.

Note [Other paths]: FSDP2 gathers a unit where a rank comes to it, and reduces what has a gradient there. Ranks meet by
order alone. Where one is at another unit of the same size, all compute with parts of both, or average gradients of
other parameters, and nothing fails. So each rank keeps a checksum of what it has gathered and reduced, and ranks
compare them once in each optimizer step, over gloo. Ranks that differ in how often they do so wait for each other, of
which hang reports tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lit_fsdp.errors import join_names
from lit_fsdp.sharding.mesh import gather_objects, get_fsdp_mesh, make_group
from lit_fsdp.sharding.shard import find_roots
from lit_fsdp.sharding.torch_internals import UnitInternals, list_units
from lit_fsdp.strategy.roll_call import name_ranks

_MAX_KEPT = 100_000  # of a step, with evaluations before it; what comes after is compared, too, but not named

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Use:
    """What a rank has done with a unit.

    Args:
        unit: Its name.
        reduced: The parameters whose gradients it has reduced; ``None`` where it has gathered the unit.
    """

    unit: str
    reduced: tuple[str, ...] | None = None


@dataclass(kw_only=True)
class _Path:
    """What a rank has done since the last comparison."""

    uses: list[Use] = field(default_factory=list)
    checksum: int = 0
    reductions: int = 0  # the checksum of reductions alone

    def note(self, use: Use, key: bytes) -> None:
        self.checksum = crc32(key, self.checksum)
        if use.reduced is not None:
            self.reductions = crc32(key, self.reductions)
        if len(self.uses) < _MAX_KEPT:
            self.uses.append(use)


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """One that has begun."""

    step: int
    path: _Path
    checksums: Tensor  # [rank, 2]
    work: dist.Work


def watch_paths(module: nn.Module, mesh: DeviceMesh, *, timeout_s: float, is_deferred: bool) -> RankPaths | None:
    """Begin to note what this rank gathers and reduces; ``None`` where ranks share no units. All ranks must call it.

    Args:
        module: Sharded. Units on another mesh, which its user has made, are left out.
        mesh: Of all ranks.
        timeout_s: How long a rank waits for the others.
        is_deferred: See :class:`RankPaths`.
    """
    if get_fsdp_mesh(mesh).size() == 1:
        return None
    ranks = get_fsdp_mesh(mesh).mesh.tolist()
    units = [unit for root in find_roots(module) for unit in list_units(root) if unit.ranks == ranks]
    if min(gather_objects(len(units))) == 0:
        return None
    return RankPaths(module, units, mesh, timeout_s=timeout_s, is_deferred=is_deferred)


class RankPaths:
    """Compares what ranks do with the units of a module, see Note [Other paths]. All must make the same calls.

    Args:
        module: That has the units.
        units: What is noted.
        mesh: Of all ranks.
        timeout_s: How long a rank waits for the others.
        is_deferred: Whether ranks read the result of a comparison with the next one. They wait for nobody then, but
            have made the step.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[UnitInternals],
        mesh: DeviceMesh,
        *,
        timeout_s: float,
        is_deferred: bool,
    ) -> None:
        self._units, self._is_deferred = units, is_deferred
        self._path = _Path()
        self._begun: _Comparison | None = None
        self._group = make_group("paths", timeout_s)
        self._sharing, self._reducing = _list_groups(mesh)
        modules = {part: name for name, part in module.named_modules()}
        parameters = {id(parameter): name for name, parameter in module.named_parameters()}
        for unit in units:
            names = [parameters.get(id(shard), "a parameter") for shard in unit.list_shards()]
            self._follow(unit, modules.get(unit.module) or "(root)", names)

    def _follow(self, unit: UnitInternals, name: str, parameters: Sequence[str]) -> None:
        gathered = Use(unit=name)
        gathered_key = repr(gathered).encode()
        known: dict[tuple[bool, ...], tuple[Use, bytes]] = {}

        def gather() -> None:
            self._path.note(gathered, gathered_key)

        def reduce(end: Callable[[], None]) -> None:
            is_reduced = unit.list_reduced()
            if any(is_reduced):
                if is_reduced not in known:
                    use = Use(unit=name, reduced=tuple(p for p, i in zip(parameters, is_reduced, strict=True) if i))
                    known[is_reduced] = use, repr(use).encode()
                self._path.note(*known[is_reduced])
            end()

        if unit.is_split:  # what one rank has whole it copies alone
            unit.call_after_gather(gather)
        unit.call_around_reduction(reduce)

    def detach(self) -> None:
        """Give torch back what it had. May be called twice."""
        for unit in self._units:
            unit.undo()

    def forget(self) -> None:
        """Begin anew, after a step that all ranks have undone: they may have come to different places in it."""
        self._path = _Path()

    def compare_after(self, closure: Callable[[], Result], step: int) -> Callable[[], Result]:
        """Return a closure that computes the gradients of a step, and then compares what ranks did for them."""

        def run() -> Result:
            result = closure()
            self.compare(step)
            return result

        return run

    def compare(self, step: int) -> None:
        """Compare what ranks did since the last call; read the result at once, or with the next call.

        Args:
            step: The number of the optimizer step that comes now, for the error.

        Raises:
            ValueError: They differ. It is raised on all ranks.
        """
        self.finish()
        path, self._path = self._path, _Path()
        own = torch.tensor([path.checksum, path.reductions], dtype=torch.int64, device="cpu")
        checksums = torch.empty(dist.get_world_size(), 2, dtype=torch.int64, device="cpu")
        work = dist.all_gather_single(checksums.view(-1), own, group=self._group, async_op=True)
        assert work is not None
        self._begun = _Comparison(step=step, path=path, checksums=checksums, work=work)
        if not self._is_deferred:
            self.finish()

    def finish(self) -> None:
        """Read the result of the last comparison.

        Raises:
            ValueError: As :meth:`compare`.
        """
        if self._begun is None:
            return
        begun, self._begun = self._begun, None
        begun.work.wait()
        rows: list[list[int]] = begun.checksums.tolist()
        for column, groups in enumerate((self._sharing, self._reducing)):
            for ranks in groups:
                if len({rows[rank][column] for rank in ranks}) > 1:
                    self._refuse(begun, ranks, is_whole=column == 0)

    def _refuse(self, begun: _Comparison, ranks: Sequence[int], *, is_whole: bool) -> None:
        told = gather_objects(begun.path.uses, self._group)
        uses = {rank: [use for use in told[rank] if is_whole or use.reduced is not None] for rank in ranks}
        made = f"; step {begun.step} was made: resume from a checkpoint before it" if self._is_deferred else ""
        raise ValueError(
            f"ranks use different modules: in optimizer step {begun.step}, or an evaluation before it, "
            f"{describe_difference(uses)}: expected the same modules in the same order on all ranks: use those that "
            "only some ranks need on all of them, with a weight of 0 where they are not wanted, see docs/limits.md"
            f"{made}"
        )


def describe_difference(uses: Mapping[int, Sequence[Use]]) -> str:
    """Return the first thing that ranks did not all do, and which ranks did what instead."""
    longest = max(map(len, uses.values()))
    for i in range(longest):
        found: dict[Use | None, list[int]] = {}
        for rank, known in uses.items():
            found.setdefault(known[i] if i < len(known) else None, []).append(rank)
        if len(found) > 1:
            return "; ".join(f"{name_ranks(ranks)} {_describe(use, list(found))}" for use, ranks in found.items())
    return f"ranks differ in what they gathered or reduced after the first {longest:,} times"


def _describe(use: Use | None, others: Sequence[Use | None]) -> str:
    if use is None:
        return "did nothing more"
    if use.reduced is None:
        return f"gathered {use.unit}"
    same_unit = [
        set(other.reduced) for other in others if other is not None and other.unit == use.unit and other.reduced
    ]
    if len(same_unit) < len(others):
        return f"reduced gradients of {use.unit}"
    shared = set.intersection(*same_unit)
    own = [name for name in use.reduced if name not in shared]
    return f"reduced gradients of {join_names(own)}" if own else "did not"


def _list_groups(mesh: DeviceMesh) -> tuple[list[list[int]], list[list[int]]]:
    """Return the groups of ranks that gather together, and those that reduce together: all copies of a shard.

    Ranks that differ in ``tensor`` alone have units of their own.
    """
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=True))
    ranks = mesh.mesh.reshape(-1, sizes["shard"], sizes.get("tensor", 1))  # [replicate, shard, tensor]
    by_copy = ranks.transpose(1, 2)  # [replicate, tensor, shard]
    return by_copy.flatten(0, 1).tolist(), by_copy.transpose(0, 1).flatten(1).tolist()
