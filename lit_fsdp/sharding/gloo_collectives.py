"""Gathers and reduce-scatters of FSDP2 between CPUs that send and copy less than gloo's own.

Note [What gloo does]: in torch 2.13 gloo gathers into a second buffer of full size, which it copies. It reduces and
scatters by an all-reduce of a copy of the input, so it sends twice what has to be sent. Here each rank broadcasts its
part to where the others want it, and parts of gradients go from all to all, to be added by who keeps them. On two ranks
the bits are the same; on more, sums are added in the order of the ranks. To be dropped when gloo does as much.

Note [Between nodes]: broadcasts go along trees, two at a time: on one node that is less work than a ring, but between
nodes it leaves network cards idle. From all to all each rank of a node sends to all elsewhere, which is less than twice
a ring for sure only where each rank has a node of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lit_fsdp.sharding.torch_internals import AllGather, ReduceScatter

# Of what is gathered. Below, one call of gloo takes less time than a broadcast for each rank, though it copies more.
_LARGE_BYTES = 2**19

# Operators of their own: what looks on, such as traces of memory, sees one collective, as for gloo's own. What they
# take inside gloo takes too, out of sight.
_LIBRARY = torch.library.Library("lit_fsdp_c10d", "DEF")
_GROUP = "__torch__.torch.classes.c10d.ProcessGroup group"
_LIBRARY.define(f"all_gather(Tensor(a!) output, {_GROUP}) -> ()")
_LIBRARY.define(f"reduce_scatter(Tensor(a!) output, Tensor input, {_GROUP}, bool is_mean) -> ()")


@torch.library.impl(_LIBRARY, "all_gather", "CPU")
def all_gather(output: Tensor, boxed_group: Any) -> None:
    """Fill ``output``, of which each rank has its part already."""
    group = dist.ProcessGroup.unbox(boxed_group)
    parts = output.view(group.size(), -1).unbind()
    # Methods of the group, as torch's functions around them take longer than small shards do.
    for work in [group.broadcast(part, rank) for rank, part in enumerate(parts)]:
        work.wait()


@torch.library.impl(_LIBRARY, "reduce_scatter", "CPU")
def reduce_scatter(output: Tensor, full: Tensor, boxed_group: Any, is_mean: bool) -> None:
    """Write the sum or mean of this rank's part of ``full`` over all ranks into ``output``."""
    group = dist.ProcessGroup.unbox(boxed_group)
    received = torch.empty(group.size(), output.numel(), dtype=full.dtype)
    # As bytes: gloo does not exchange bfloat16.
    group.alltoall_base(received.view(-1).view(torch.uint8), full.view(torch.uint8), [], []).wait()
    first, second, *others = received.unbind()
    torch.add(first, second, out=output)
    for part in others:
        output += part
    if is_mean:
        output.div_(group.size())


class GlooAllGather(AllGather):
    """Each rank broadcasts its part, in place, if it is large. It is over when it returns."""

    @override
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        if output_tensor.nbytes < _LARGE_BYTES:
            self.all_gather(output_tensor, input_tensor, group)
            return
        own = output_tensor.view(group.size(), -1)[group.rank()]
        if own.data_ptr() != input_tensor.data_ptr():  # FSDP2 puts it there
            own.copy_(input_tensor)
        torch.ops.lit_fsdp_c10d.all_gather(output_tensor, group.boxed())

    @staticmethod
    def all_gather(output: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
        """Gather by gloo. Reports of hangs have this name off the stack, as that of the operator."""
        dist.all_gather_single(output, own, group=group)


class GlooReduceScatter(ReduceScatter):
    """Each rank sends the others their parts, and adds up what it gets."""

    @override
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group)
            return
        is_mean = op == dist.ReduceOp.AVG
        torch.ops.lit_fsdp_c10d.reduce_scatter(output_tensor, input_tensor, group.boxed(), is_mean)


def choose_collectives(num_ranks: int, num_nodes: int) -> tuple[GlooAllGather | None, GlooReduceScatter | None]:
    """Return what to use in place of gloo's own, of all ranks of a run; see Note [Between nodes]."""
    gather = GlooAllGather() if num_nodes == 1 else None
    return gather, GlooReduceScatter() if num_nodes in (1, num_ranks) else None


def replace_collectives(model: nn.Module, num_nodes: int, *, gathers: bool, reduces: bool) -> None:
    """Have the units of a model that is sharded over several CPUs use those, for gathers, for reductions or both."""
    gather, reduce = choose_collectives(dist.get_world_size(), num_nodes)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if gathers and gather is not None:
                module.set_custom_all_gather(gather)
            if reduces and reduce is not None:
                module.set_custom_reduce_scatter(reduce)
