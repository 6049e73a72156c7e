"""What an estimate takes from a module and its strategy, and the time of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_fsdp.optim.factory import Optimizer
from lit_fsdp.optim.muon import count_work, list_hidden_matrices
from lit_fsdp.planning.closed_form.overrides import list_overrides
from lit_fsdp.planning.step_parts import Exchange, MicroBatch, ModelToTrain, NoEstimateError, Ranks, Replay
from lit_fsdp.planning.timing.hardware import Gpu
from lit_fsdp.planning.timing.links import Interconnect, choose_links
from lit_fsdp.planning.timing.step_time import (
    Machine,
    MeasuredSpeed,
    StepTime,
    Workload,
    count_update_bytes,
    estimate_time,
)
from lit_fsdp.profiling.expected_communication import UnitBytes, estimate_bytes
from lit_fsdp.profiling.flops import Flops
from lit_fsdp.profiling.memory_log import StepMemory
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.shard import find_roots
from lit_fsdp.sharding.wrap import count_shard_bytes, plan_module
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The GPU of every rank, and the links between them; ``speed`` where it was measured."""

    gpu: Gpu
    links: Interconnect
    speed: MeasuredSpeed | None = None


class StepCost(Protocol):
    """What an engine says of a step: ``StepEstimate`` or ``TracedStep``."""

    @property
    def memory(self) -> StepMemory: ...  # noqa: D102
    @property
    def flops(self) -> Flops: ...  # noqa: D102
    @property
    def moved_bytes(self) -> int: ...  # noqa: D102
    @property
    def exchanges(self) -> Sequence[Exchange]: ...  # noqa: D102
    @property
    def split_units(self) -> Sequence[UnitBytes]: ...  # noqa: D102
    @property
    def replay(self) -> Replay | None: ...  # noqa: D102


@contextmanager
def estimate_beside_training() -> Iterator[None]:
    """Let nothing that an estimate does end a run: for one rank that reads a sharded module while others train.

    Raises:
        NoEstimateError: Whatever went wrong, and in place of every collective, which other ranks would answer with
            another one: indexing a sharded parameter is enough for that.
    """
    try:
        with _NoCollectives():
            yield
    except NoEstimateError:
        raise
    except Exception as error:  # a task's own read_step may raise anything
        text = (str(error).strip() or "no message").split("\n")[0]
        raise NoEstimateError(text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}") from error


def make_example_batch(data: object) -> Any:
    """Return a micro-batch, as the data module's ``make_example_batch`` says: dicts, lists and tuples of tensors.

    Raises:
        NoEstimateError: It has no such method, or that returns nothing with a tensor.
    """
    make: Any = getattr(data, "make_example_batch", None)
    if make is None:
        what = "not set" if data is None else f"{type(data).__name__} has no method make_example_batch"
        raise NoEstimateError(
            f"data: {what}: a plan needs one that returns a micro-batch of the sizes that training will have, without "
            "reading data; see docs/planning.md"
        )
    batch: object = make()
    if isinstance(batch, Mapping):
        return batch
    if not _list_tensors(batch):
        made = f"{type(data).__name__}.make_example_batch returned a {type(batch).__name__}"
        raise NoEstimateError(f"data: {made}: expected a dict, list or tuple of tensors, as training_step takes it")
    return batch


def measure_batch(module: LightningModule, batch: Any) -> MicroBatch:
    """Return the shape of a micro-batch, as the module's ``measure_batch`` says.

    Raises:
        NoEstimateError: It has no such method, or says that this batch has no such shape.
    """
    measure: Any = getattr(module, "measure_batch", None)
    found: MicroBatch | None = measure(batch) if measure is not None and isinstance(batch, Mapping) else None
    if found is None:
        raise NoEstimateError(f"{_get_name(module)} does not say what shape its batches have (measure_batch)")
    return found


def guess_shape(batch: Any) -> MicroBatch:
    """Return what a search by traces takes for the shape of a micro-batch that nobody measures: rows of one token."""
    tensors = [tensor for tensor in _list_tensors(batch) if tensor.dim()]
    return MicroBatch(rows=len(tensors[0]) if tensors else 1, length=1)


def _list_tensors(batch: Any) -> list[Tensor]:
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def get_optimizer(module: LightningModule) -> Optimizer:
    """Return the settings of a module's optimizer.

    Raises:
        NoEstimateError: It builds one of its own, of which nothing is known.
    """
    optimizer = getattr(module, "optimizer_settings", None)
    owner, replaced = list_overrides(module)
    if "configure_optimizers" in replaced:
        raise NoEstimateError(f"{owner} overrides configure_optimizers, so it builds an optimizer of its own")
    if not isinstance(optimizer, Optimizer):
        raise NoEstimateError(f"{_get_name(module)} builds an optimizer of its own")
    return optimizer


def guess_optimizer(module: LightningModule) -> Optimizer:
    """Return what a search by traces times in place of an optimizer of the module's own."""
    given = getattr(module, "optimizer_settings", None)
    return given if isinstance(given, Optimizer) else Optimizer()


def describe_model(
    module: LightningModule, strategy: FSDP2Strategy, optimizer: Optimizer | None = None
) -> ModelToTrain:
    """Return a module as estimates take it; ``optimizer`` in place of its own, which may be unknown.

    Raises:
        NoEstimateError: It builds an optimizer of its own.
    """
    return ModelToTrain(
        module=module,
        # FSDP2 puts classes of its own before those of the model, so a sharded one cannot be planned by class names.
        units=strategy.plan if find_roots(module) else plan_module(module, strategy.settings.wrap),
        dtypes=strategy.precision_plugin.mixed_precision,
        optimizer=optimizer or get_optimizer(module),
    )


def estimate_step_time(
    model: ModelToTrain,
    settings: Settings,
    hardware: Hardware,
    cost: StepCost,
    *,
    ranks: Ranks,
    micro_batch: MicroBatch,
    num_micro_batches: int,
    dtype: str | None = None,
) -> StepTime:
    """Estimate the time of an optimizer step from what an engine has counted.

    ``cost`` is of all micro-batches of a rank. ``dtype`` is that of products, by default that of the parameters.

    Raises:
        ValueError: The GPU does not compute in this dtype, or there is no link between nodes.
    """
    sizes = ranks.resolve(settings.mesh)
    replicas, shards = sizes.replicate, sizes.num_shards
    trained = [parameter.element_size() for parameter in model.module.parameters() if parameter.requires_grad]
    counts = {"num_shards": shards, "num_replicas": replicas, "num_micro_batches": num_micro_batches}
    reshard = settings.sharding.reshard_after_forward
    matrix_flops, matrix_exchanges = _count_muon(model, shards) if model.optimizer.name == "muon" else (0, [])
    work = Workload(
        flops=cost.flops,
        plan=model.units,
        units=cost.split_units or estimate_bytes(model.module, model.units, settings.sharding, model.dtypes, **counts),
        tokens=-(-micro_batch.num_tokens // sizes.num_sharing),
        num_micro_batches=num_micro_batches,
        moved_bytes=cost.moved_bytes,
        update_bytes=count_update_bytes(
            model.units, model.optimizer, num_shards=shards * sizes.tensor, itemsize=max(trained, default=4)
        ),
        update_flops=matrix_flops,
        update_exchanges=matrix_exchanges,
        overlaps_update=model.optimizer.name not in ("adafactor", "muon")
        and settings.cpu_offload is not None
        and settings.cpu_offload.overlap_optimizer,
        offloaded_bytes=_count_offloaded(model, cost, shards, settings),
        exchanges=cost.exchanges,
        regather_ranks=None if isinstance(reshard, bool) else reshard,
        is_compiled=settings.compile is not None,
        gather_bits=settings.sharding.gather_bits,
        reduce_bits=settings.sharding.reduce_bits,
        num_reduce_buffers=settings.sharding.reduce_scatter_max_input_buffers,
    )
    machine = Machine(
        gpu=hardware.gpu,
        links=choose_links(hardware.gpu, ranks.per_node) if hardware.links.is_usual else hardware.links,
        num_shards=shards,
        num_replicas=replicas,
        num_split=sizes.tensor,
        ranks_per_node=ranks.per_node,
        dtype=dtype or str(model.compute_dtype).removeprefix("torch."),
        speed=hardware.speed,
    )
    return estimate_time(work, machine)


def _count_muon(model: ModelToTrain, num_shards: int) -> tuple[int, list[Exchange]]:
    """Return the FLOPs of a rank in the products of Muon, and what ranks send each other for them."""
    flops, sizes = count_work([p.shape for p in list_hidden_matrices(model.module) if p.requires_grad], num_shards)
    return flops, [Exchange("all_to_all", size, num_shards) for size in sizes]


def _count_offloaded(model: ModelToTrain, cost: StepCost, num_shards: int, settings: Settings) -> int:
    """Return the bytes of a rank's shards in host memory: those that a trace has seen, as layers may be split."""
    if settings.cpu_offload is None:
        return 0
    if settings.mesh.tensor > 1:
        return cost.memory.host_by_kind["parameters"]
    return sum(count_shard_bytes(model.module, unit, num_shards) for unit in model.units)


class _NoCollectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # A DTensor runs its operators and collectives on what it holds, which come here again.
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        if "c10d" in func.namespace:
            raise NoEstimateError(f"reading the module would send to other ranks ({func})")
        return func(*args, **(kwargs or {}))


def _get_name(module: LightningModule) -> str:
    return type(module).__name__.removeprefix("FSDP")
