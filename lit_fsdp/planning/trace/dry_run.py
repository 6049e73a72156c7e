"""A training step on tensors without values and ranks without processes: what it would hold, at no cost in memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

# Private, seen in torch 2.13: collectives that do nothing, for any number of ranks.
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

from lit_fsdp.optim.adamw_8bit import make_code_books
from lit_fsdp.planning.closed_form.overrides import keeps_gradients
from lit_fsdp.planning.step_parts import Exchange, Replay
from lit_fsdp.planning.trace.fake_gpu_ops import run_as_gpus
from lit_fsdp.profiling.collectives import Collective
from lit_fsdp.profiling.expected_communication import UnitBytes
from lit_fsdp.profiling.flops import Flops, WorkCounter
from lit_fsdp.profiling.memory import Kind
from lit_fsdp.profiling.memory_log import MemoryLog, StepMemory
from lit_fsdp.profiling.memory_trace import MemoryTrace
from lit_fsdp.profiling.replaced_calls import watch_layers
from lit_fsdp.quantization.layers import iterate_quantized
from lit_fsdp.quantization.quantize import prepare_tables
from lit_fsdp.sharding.activation_offload import watch_host_memory
from lit_fsdp.sharding.cpu_offload import CPUOffload, count_pinned_rounding, count_staged_bytes, round_pinned
from lit_fsdp.sharding.grad_clipping import clip_grad_norm
from lit_fsdp.sharding.mesh import build_mesh
from lit_fsdp.sharding.mixed_precision import MixedPrecision
from lit_fsdp.sharding.parallelize import shard_module
from lit_fsdp.sharding.sequence import watch_exchanges
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.shard import find_roots, no_sync, register_steps, reshard
from lit_fsdp.weights.load import materialize

_DEVICE = torch.device("cpu")  # where fake tensors say they are: torch cannot fake a GPU without CUDA


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """What a step would hold and do, on the first rank.

    Args:
        memory: Of the GPU, or whatever would compute.
        flops: Of all micro-batches.
        moved_bytes: Of all micro-batches: what operators other than products and attention read and write.
        exchanges: Of all micro-batches: what ranks that work on the same rows send each other, in order.
        split_units: What FSDP2 sends of each unit, where ranks hold parts of layers, which only a trace knows.
        log: Of the memory; ``None`` where storages cannot be told apart.
        replay: Of the log; ``None`` if it was not replayed.
        is_unfolded: Whether a model of few blocks was traced, and the rest repeats it.
    """

    memory: StepMemory
    flops: Flops
    moved_bytes: int
    exchanges: tuple[Exchange, ...] = ()
    split_units: tuple[UnitBytes, ...] = ()
    log: MemoryLog | None = None
    replay: Replay | None = None
    is_unfolded: bool = False


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of ``world_size`` ranks whose collectives return at once, and change nothing.

    Raises:
        RuntimeError: There is a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError("a dry run needs a process of its own: there is a process group already")
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def trace_training_step(
    module: nn.Module,
    settings: Settings,
    batch: Any,
    *,
    dtypes: MixedPrecision,
    compute_loss: Callable[[Any], Tensor],
    build_optimizer: Callable[[], torch.optim.Optimizer],
    step_name: str,
    ranks_per_node: int,
    num_micro_batches: int = 1,
    clip_norm: float | None = None,
    device_type: str = "cuda",
    marked: Sequence[str] = (),
) -> TracedStep:
    """Shard a module and run two steps of training on fake tensors; return what the second held and did.

    Everything but the values is real. Afterwards the module holds fake tensors and is of no other use. Inside
    ``fake_ranks``, whose first rank is traced: the one with the largest shards.

    Args:
        module: Not sharded; parameters that are not on the meta device go there.
        settings: Of the strategy; ``compile`` is left out: what compiled blocks keep is known once they run.
        batch: One micro-batch, real or on the meta device; only shapes and dtypes matter.
        dtypes: What the Trainer's precision comes to.
        compute_loss: Returns the loss of a micro-batch; looks up the method ``step_name`` of the module each time, as
            sharding replaces it.
        build_optimizer: Called once the module is sharded.
        step_name: The method through which a sharded module is run.
        ranks_per_node: For ``mesh.shard: node``.
        num_micro_batches: Accumulated in a step.
        clip_norm: Clip gradients by norm before the optimizer; ``None`` does not.
        device_type: Whose kernels: those of ``cpu`` keep more where something is dropped.
        marked: Names of blocks to mark in the log of the memory, with the work up to there: FLOPs of forward, of
            backward and of what is recomputed, bytes moved, and exchanges.
    """
    sizes = {"world_size": dist.get_world_size(), "ranks_per_node": ranks_per_node}
    mesh = build_mesh(settings.mesh, device_type=_DEVICE.type, timeout_s=60.0, **sizes)
    if any(iterate_quantized(module)):  # brings bitsandbytes, which takes seconds
        prepare_tables(_DEVICE)
    make_code_books(_DEVICE)
    _drop_values(module)
    num_shards, offload = settings.mesh.resolve(**sizes).num_shards, settings.cpu_offload
    # Where fake tensors say they are, nothing can be pinned.
    settings = replace(settings, compile=None, cpu_offload=None if offload is None else CPUOffload())
    plan = shard_module(module, settings, dtypes=dtypes, mesh=mesh, device=_DEVICE)
    # Once layers are split.
    rounding = count_pinned_rounding(module, offload, num_shards=num_shards, device_type=device_type)
    staged_bytes = count_staged_bytes(module, plan, offload, num_shards=num_shards, device_type=device_type)
    with _leave_out_values(device_type):
        materialize(module, _DEVICE)
        register_steps(module, [step_name])
        optimizer = build_optimizer()
        given = dict(batch) if isinstance(batch, Mapping) else batch
        fake = tree_map_only(Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device=_DEVICE), given)
        run = partial(
            _run_step, module, optimizer, lambda: compute_loss(fake), is_held=settings.sharding.no_sync, clip=clip_norm
        )
        run(1, lambda _: None)  # makes the state of the optimizer
        is_offloaded = settings.cpu_offload is not None
        counter, exchanges = WorkCounter(), list[Exchange]()
        staged = torch.empty(staged_bytes, dtype=torch.uint8, device=_DEVICE)  # for the whole step

        def count_work() -> tuple[int, ...]:
            flops = counter.flops
            return flops.forward, flops.backward, flops.recomputed, counter.moved_bytes, len(exchanges)

        trace = MemoryTrace(
            module,
            [optimizer],
            plan=plan,
            device=_DEVICE,
            is_offloaded=is_offloaded,
            marked=marked,
            count_work=count_work,
        )

        def begin_phase(name: str) -> None:
            trace.begin_phase(name)
            counter.is_counting = name != "optimizer"

        size_on_host = int if device_type == "cpu" else round_pinned
        watched = watch_host_memory(partial(trace.count_on_host, size_on_host))
        with trace, counter, _note_exchanges(counter, exchanges), watched:
            trace.add_inputs(fake)
            trace.add_inputs(staged, "communication")
            run(num_micro_batches, begin_phase)
    memory = trace.finish()
    return TracedStep(
        memory=add_pinned_rounding(memory, rounding),
        flops=counter.flops,
        moved_bytes=counter.moved_bytes,
        exchanges=tuple(exchanges),
        log=trace.get_log(),
    )


@contextmanager
def _note_exchanges(counter: WorkCounter, noted: list[Exchange]) -> Iterator[None]:
    """Note what ranks of the same rows send each other, while the counter counts: not norms of gradients."""

    def note_rows(num_bytes: int, num_ranks: int) -> Callable[[], None]:
        noted.append(Exchange("all_to_all", num_bytes, num_ranks))
        return lambda: None

    def note_layer(kind: Collective, num_bytes: int, num_ranks: int) -> Callable[[Tensor], Tensor]:
        if counter.is_counting:
            noted.append(Exchange(kind, num_bytes, num_ranks))
        return lambda found: found

    with watch_exchanges(note_rows), watch_layers(note_layer):
        yield


def add_pinned_rounding(memory: StepMemory, rounding: tuple[int, int]) -> StepMemory:
    """Add to the memory of the host what ``count_pinned_rounding`` found."""
    kinds: tuple[Kind, Kind] = ("parameters", "gradients")
    added = {kind: memory.host_by_kind[kind] + more for kind, more in zip(kinds, rounding, strict=True) if more}
    return replace(memory, host_by_kind={**memory.host_by_kind, **added})


@contextmanager
def _leave_out_values(device_type: str) -> Iterator[None]:
    # Non-fake inputs are constants that a model or library has made before.
    kernels: AbstractContextManager[Any] = nullcontext() if device_type == "cpu" else run_as_gpus()
    with FakeTensorMode(allow_non_fake_inputs=True), kernels, warnings.catch_warnings():
        # For those who would change such a view in place; in a trace no value can go wrong.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        yield


def _drop_values(module: nn.Module) -> None:
    """Move plain parameters to the meta device, shared ones together: FSDP2 would ask fake shards for addresses."""
    made: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if type(parameter) is not nn.Parameter or parameter.is_meta:
                continue
            if id(parameter) not in made:
                empty = torch.empty_like(parameter, device="meta")
                made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                made[id(parameter)].__dict__.update(parameter.__dict__)
            child._parameters[name] = made[id(parameter)]


def _run_step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    compute_loss: Callable[[], Tensor],
    num_micro_batches: int,
    begin_phase: Callable[[str], None],
    *,
    is_held: bool,
    clip: float | None,
) -> None:
    is_kept = keeps_gradients(module)
    for i in range(num_micro_batches):
        begin_phase("forward")
        loss = compute_loss()
        if is_kept and i == 0:  # the gradients of the step before
            optimizer.zero_grad()
        begin_phase("backward")
        with no_sync(*(find_roots(module) if is_held and i + 1 < num_micro_batches else [])):
            loss.backward()
        del loss
    reshard(module)
    begin_phase("optimizer")
    if clip is not None:
        clip_grad_norm(module.parameters(), clip)
    optimizer.step()
    if not is_kept:
        optimizer.zero_grad()
