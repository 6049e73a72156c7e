"""What a step takes on given GPUs and links, from its settings and what it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lit_fsdp.optim.factory import Optimizer
from lit_fsdp.planning.hardware import Gpu
from lit_fsdp.planning.links import Interconnect
from lit_fsdp.planning.plan import Ranks
from lit_fsdp.planning.step_time import Machine, StepTime, Workload, count_update_bytes, predict_time
from lit_fsdp.profiling.expected_communication import predict_bytes
from lit_fsdp.profiling.flops import Flops
from lit_fsdp.sharding.mixed_precision import MixedPrecision
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.wrap import Unit, count_shard_bytes


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What a step would run on.

    Args:
        gpu: Of every rank.
        links: Between them.
    """

    gpu: Gpu
    links: Interconnect


@dataclass(frozen=True, kw_only=True)
class ModelToTrain:
    """A model as it will be trained.

    Args:
        module: On the meta device, cast as it will be.
        units: Of it.
        dtypes: What the Trainer's precision comes to.
        optimizer: Its settings.
    """

    module: nn.Module
    units: Sequence[Unit]
    dtypes: MixedPrecision
    optimizer: Optimizer


def estimate_time(
    model: ModelToTrain,
    settings: Settings,
    hardware: Hardware,
    *,
    ranks: Ranks,
    flops: Flops,
    moved_bytes: int,
    tokens: int,
    num_micro_batches: int,
    dtype: str | None = None,
) -> StepTime:
    """Predict the time of an optimizer step.

    Args:
        model: That is trained.
        settings: Of the strategy.
        hardware: Where.
        ranks: Nodes and their ranks; the mesh is that of ``settings``.
        flops: Of all micro-batches of a rank, from either engine.
        moved_bytes: Of all micro-batches: what operators other than products and attention read and write.
        tokens: Of a micro-batch of a rank.
        num_micro_batches: Accumulated in a step.
        dtype: That products are computed in, as of ``Gpu.get_peak_tflops``; by default that of the parameters.

    Raises:
        ValueError: The GPU does not compute in this dtype, or there is no link between nodes.
    """
    replicas, shards = settings.mesh.resolve(world_size=ranks.world_size, ranks_per_node=ranks.per_node)
    parameters = list(model.module.parameters())
    trained = [parameter.element_size() for parameter in parameters if parameter.requires_grad]
    compute = model.dtypes.build_policy().param_dtype or max(
        (p.dtype for p in parameters if p.is_floating_point()), key=lambda dtype: dtype.itemsize
    )
    counts = {"num_shards": shards, "num_replicas": replicas, "num_micro_batches": num_micro_batches}
    reshard = settings.sharding.reshard_after_forward
    is_offloaded = settings.cpu_offload is not None
    work = Workload(
        flops=flops,
        plan=model.units,
        units=predict_bytes(model.module, model.units, settings.sharding, model.dtypes, **counts),
        tokens=tokens,
        num_micro_batches=num_micro_batches,
        moved_bytes=moved_bytes,
        update_bytes=count_update_bytes(
            model.units, model.optimizer, num_shards=shards, itemsize=max(trained, default=4)
        ),
        offloaded_bytes=sum(count_shard_bytes(model.module, u, shards) for u in model.units) if is_offloaded else 0,
        regather_ranks=None if isinstance(reshard, bool) else reshard,
        is_compiled=settings.compile is not None,
    )
    machine = Machine(
        gpu=hardware.gpu,
        links=hardware.links,
        num_shards=shards,
        num_replicas=replicas,
        ranks_per_node=ranks.per_node,
        dtype=dtype or str(compute).removeprefix("torch."),
    )
    return predict_time(work, machine)
