"""Steps as both engines see them, and as they are on tensors that have values."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from lit_fsdp.adapters.layers import list_adapter_parameters
from lit_fsdp.optim.factory import Optimizer, build_optimizer
from lit_fsdp.optim.muon import list_hidden_matrices
from lit_fsdp.planning.closed_form.engine import StepEstimate, estimate_step
from lit_fsdp.planning.step_parts import MicroBatch, ModelToTrain, Ranks
from lit_fsdp.planning.trace.apart import run_apart
from lit_fsdp.planning.trace.dry_run import TracedStep, fake_ranks, trace_training_step
from lit_fsdp.planning.trace.short_model import Stack, choose_stacks, shorten_model
from lit_fsdp.planning.trace.unfold import unfold_trace
from lit_fsdp.profiling.memory_log import StepMemory
from lit_fsdp.profiling.memory_trace import MemoryTrace
from lit_fsdp.sharding.activation_offload import watch_host_memory
from lit_fsdp.sharding.mesh import build_mesh
from lit_fsdp.sharding.mixed_precision import cast_parameters, read_precision
from lit_fsdp.sharding.parallelize import shard_module
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.shard import no_sync, register_steps, reshard
from lit_fsdp.sharding.wrap import plan_module
from lit_fsdp.weights.load import init_weights, materialize


def describe_module(
    module: nn.Module, settings: Settings, *, precision: str, optimizer: Optimizer | None = None
) -> ModelToTrain:
    """Cast a module, and return it as estimates take it."""
    dtypes = read_precision(precision)
    cast_parameters(module, dtypes, keep=list_adapter_parameters(module))
    units = plan_module(module, settings.wrap)
    return ModelToTrain(module=module, units=units, dtypes=dtypes, optimizer=optimizer or Optimizer())


def estimate(
    module: nn.Module,
    micro_batch: MicroBatch,
    *,
    precision: str = "32-true",
    world_size: int = 1,
    num_micro_batches: int = 1,
    device_type: str = "cpu",
    optimizer: Optimizer | None = None,
    **settings: Any,
) -> StepEstimate:
    """Estimate a step on one node by the closed form."""
    chosen = Settings(**settings)
    return estimate_step(
        describe_module(module, chosen, precision=precision, optimizer=optimizer),
        chosen,
        micro_batch,
        ranks=Ranks(num_nodes=1, per_node=world_size),
        num_micro_batches=num_micro_batches,
        device_type=device_type,
    )


def trace(
    module: Any,
    batch: Mapping[str, Any],
    *,
    precision: str = "32-true",
    world_size: int = 1,
    num_micro_batches: int = 1,
    device_type: str = "cpu",
    optimizer: Optimizer | None = None,
    marked: Sequence[str] = (),
    **settings: Any,
) -> TracedStep:
    """Trace the same step, the method ``step`` of the module, in a process that has its ranks to itself."""

    def run() -> TracedStep:
        with fake_ranks(world_size):
            return trace_training_step(
                module,
                Settings(**settings),
                batch,
                dtypes=read_precision(precision),
                compute_loss=lambda batch: module.step(batch),  # noqa: PLW0108  looked up when it is sharded
                build_optimizer=lambda: build_optimizer(
                    module.parameters(),
                    optimizer or Optimizer(),
                    is_scaled=read_precision(precision).needs_loss_scaling,
                    hidden=list_hidden_matrices(module) if optimizer and optimizer.name == "muon" else (),
                ),
                step_name="step",
                ranks_per_node=world_size,
                num_micro_batches=num_micro_batches,
                device_type=device_type,
                marked=marked,
            )

    return run_apart(run, "test")


def trace_short(module: Any, batch: Mapping[str, Any], **options: Any) -> tuple[TracedStep, list[Stack]]:
    """Trace the same step on as few blocks as hold all that the others do, and return it unfolded, and those blocks."""
    settings = Settings(**{key: value for key, value in options.items() if key in vars(Settings())})
    stacks = choose_stacks(module, plan_module(module, settings.wrap), settings, reach=1)
    shorten_model(module, stacks)
    traced = trace(module, batch, marked=[name for stack in stacks for name in stack.blocks], **options)
    return unfold_trace(traced, stacks), stacks


def run_for_real(module: Any, settings: Settings, batch: Any, options: dict[str, Any], make: Callable) -> StepMemory:
    """Run the same two steps on tensors that have values, on the device of the batch."""
    device = batch["input_ids"].device
    sizes = {"world_size": dist.get_world_size(), "ranks_per_node": dist.get_world_size()}
    mesh = build_mesh(settings.mesh, device_type=device.type, timeout_s=60, **sizes)
    plan = shard_module(module, settings, dtypes=options["dtypes"], mesh=mesh, device=device)
    materialize(module, device)
    register_steps(module, ["step"])
    init_weights(module.model, 0)
    optimizer = make(module)
    trace = MemoryTrace(module, [optimizer], plan=plan, device=device)
    num = options.get("num_micro_batches", 1)
    stack = ExitStack()
    for is_traced in (False, True):
        if is_traced:
            stack.enter_context(trace)
            trace.add_inputs(batch)
            stack.enter_context(watch_host_memory(partial(trace.count_on_host, int)))
        for i in range(num):
            trace.begin_phase("forward")
            loss = module.step(batch)
            trace.begin_phase("backward")
            with no_sync(*([module] if settings.sharding.no_sync and i + 1 < num else [])):  # type: ignore[list-item]
                loss.backward()
            del loss
        reshard(module)
        trace.begin_phase("optimizer")
        optimizer.step()
        optimizer.zero_grad()
    stack.close()
    return trace.finish()
