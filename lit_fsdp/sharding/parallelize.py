"""From a model to shards: every setting applied, in the one order that works."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lit_fsdp.adapters.layers import check_units, list_adapter_parameters
from lit_fsdp.sharding.activation_checkpointing import apply_activation_checkpointing
from lit_fsdp.sharding.cpu_offload import build_offload_policy
from lit_fsdp.sharding.mesh import get_fsdp_mesh
from lit_fsdp.sharding.mixed_precision import MixedPrecision, cast_parameters
from lit_fsdp.sharding.roots import split_by_child
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.shard import broadcast_parameters, compile_blocks, list_whole, refuse_lazy, shard_model
from lit_fsdp.sharding.stock_quantized import view_as_bytes
from lit_fsdp.sharding.tensor_parallel import parallelize_layers, refuse_split
from lit_fsdp.sharding.wrap import Unit, iterate_blocks, plan_module


def shard_module(
    module: nn.Module,
    settings: Settings,
    *,
    dtypes: MixedPrecision,
    mesh: DeviceMesh,
    device: torch.device,
    is_whole: bool = True,
    leaves_whole: bool = True,
    has_changing_lengths: bool = False,
) -> list[Unit]:
    """Cast, split, plan, checkpoint, compile and shard a module in place; return its units.

    Args:
        module: The root; its parameters may be on the meta device.
        settings: Of the strategy. A ``ValueError`` names what does not fit the module.
        dtypes: What ``precision`` and ``settings.mixed_precision`` come to.
        mesh: From ``build_mesh``.
        device: Where the module will compute.
        is_whole: Shard the module as one root; otherwise each of its children.
        leaves_whole: See ``shard_model``.
        has_changing_lengths: Whether rows are padded to another length in each batch, see ``compile_blocks``.
    """
    refuse_split(module)
    refuse_lazy(module)
    view_as_bytes(module, device)
    cast_parameters(module, dtypes, keep=list_adapter_parameters(module))
    broadcast_parameters(module)
    parallelize_layers(module, mesh)
    plan = plan_module(module, settings.wrap)
    check_units(module, [name for unit in plan for name in unit.names])
    blocks = list(iterate_blocks(plan))
    apply_activation_checkpointing(module, settings.activation_checkpointing, blocks)
    if settings.compile is not None:
        compile_blocks(module, settings.compile, blocks, has_changing_lengths=has_changing_lengths)
    mp_policy, offload_policy = dtypes.build_policy(), build_offload_policy(settings.cpu_offload, device)
    over = get_fsdp_mesh(mesh)
    roots = [(module, plan)]
    if not is_whole:
        offloads = settings.cpu_offload is not None
        whole = list_whole(module, dist.get_world_size(), offloads, mp_policy.param_dtype, settings.sharding)
        roots = split_by_child(module, plan, whole=whole if leaves_whole else ())
    for root, part in roots:
        shard_model(
            root,
            part,
            mesh=over,
            sharding=settings.sharding,
            mp_policy=mp_policy,
            offload_policy=offload_policy,
            leaves_whole=leaves_whole,
        )
    return plan
