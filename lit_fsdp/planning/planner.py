"""Plans a training step: gets a module ready as ``fit`` would, and asks an engine what its step holds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn

from lit_fsdp.adapters.layers import list_adapter_parameters
from lit_fsdp.errors import ConfigError
from lit_fsdp.optim.factory import Optimizer
from lit_fsdp.planning.auto_strategy import AutoFSDP2Strategy
from lit_fsdp.planning.closed_form import StepPrediction
from lit_fsdp.planning.dry_run import TracedStep, fake_ranks, trace_training_step
from lit_fsdp.planning.estimate import Hardware, estimate_time
from lit_fsdp.planning.forecast import NoForecastError, describe_model, forecast_step, measure_batch
from lit_fsdp.planning.overrides import find_untraced
from lit_fsdp.planning.plan import Plan, Ranks
from lit_fsdp.planning.step_time import StepTime
from lit_fsdp.planning.trace_errors import compute_loss, explain_trace
from lit_fsdp.planning.variants import list_variants
from lit_fsdp.profiling.expected_communication import predict_bytes, predict_collectives
from lit_fsdp.profiling.flops import Flops
from lit_fsdp.quantization.layers import count_weights, iterate_quantized
from lit_fsdp.sharding.mixed_precision import cast_parameters
from lit_fsdp.sharding.wrap import plan_module
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy
from lit_fsdp.strategy.trainer_settings import check_trainer, refuse_overfit

_MAX_TRACED = 2  # micro-batches: all after the second hold what it holds
# Of the bytes that a trace sees moved, what the closed form counts, with which step_time.MEMORY_SHARE was fitted: 0.76
# in the median of 317 steps of 300 tokens or more in benchmarks/results/plan_{accuracy,settings,matrix}, 0.29 to 0.91;
# 0.78 of language models on several ranks; least of ViTs in full, and on one rank, where FSDP2's copies are seen too.
COUNTED_SHARE = 0.75


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """What an engine is given: everything that a step is made of.

    Args:
        module: On the meta device.
        strategy: With its settings and dtypes.
        batch: One micro-batch.
        ranks: That take part.
        device_type: ``cuda`` or ``cpu``.
        num_micro_batches: Accumulated in a step.
        clip_norm: Of ``gradient_clip_val``.
        build_optimizer: Called once the module is sharded.
        notes: What to know about it.
    """

    module: LightningModule
    strategy: FSDP2Strategy
    batch: Mapping[str, Any]
    ranks: Ranks
    device_type: str
    num_micro_batches: int
    clip_norm: float | None
    build_optimizer: Callable[[], torch.optim.Optimizer]
    notes: Sequence[str]


def prepare_step(
    trainer: Trainer, module: LightningModule, data: LightningDataModule | None, *, searches: bool = False
) -> PlannedStep:
    """Build the model of a run on the meta device, and find out what its step is made of.

    Args:
        trainer: Of the run, with its strategy.
        module: Not built yet.
        data: That would give the data.
        searches: Whether other settings will be tried as well.

    Raises:
        ConfigError: It is none that can be planned.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, FSDP2Strategy):
        raise ConfigError(
            f"trainer.strategy: got {type(strategy).__name__}: only FSDP2Strategy can be planned; set fsdp2"
        )
    _check_step(trainer, module, data)
    strategy.settings.check_accumulation(
        num_micro_batches=trainer.accumulate_grad_batches, is_automatic=module.automatic_optimization
    )
    notes = _prepare_module(trainer, module, data)
    batch = _make_batch(data)
    if isinstance(strategy, AutoFSDP2Strategy):
        help_text = "" if searches else "; add --search true"
        notes.append(f"fsdp2_auto chooses its settings when fit starts: here are those of fsdp2{help_text}")
    return describe_step(trainer, module, batch, notes=notes)


def describe_step(
    trainer: Trainer, module: LightningModule, batch: Mapping[str, Any], *, notes: Sequence[str] = ()
) -> PlannedStep:
    """Cast a module that has its model already, and return what its step is made of."""
    strategy = trainer.strategy
    assert isinstance(strategy, FSDP2Strategy)
    nodes, per_node = trainer.num_nodes, strategy.num_processes
    replicas, shards = strategy.settings.mesh.resolve(world_size=nodes * per_node, ranks_per_node=per_node)
    cast_parameters(module, strategy.precision_plugin.mixed_precision, keep=list_adapter_parameters(module))
    return PlannedStep(
        module=module,
        strategy=strategy,
        batch=batch,
        ranks=Ranks(num_nodes=nodes, per_node=per_node, num_replicas=replicas, num_shards=shards),
        device_type=strategy.root_device.type,
        num_micro_batches=trainer.accumulate_grad_batches,
        clip_norm=_find_clip_norm(trainer),
        build_optimizer=lambda: _find_optimizer(module),
        notes=notes,
    )


def prepare_variants(
    trainer: Trainer, module: LightningModule, data: LightningDataModule | None
) -> list[tuple[PlannedStep, dict[str, Any]]]:
    """Return the step of a run, and those of what could be trained in its place, with the settings for it.

    What cannot be built is left out, and the reason is a note of the first. What building another says is kept as its
    notes, where it was not said of the first.
    """
    variants = list_variants(module)
    first, warned = _prepare_quietly(trainer, module, data)
    for warning in warned:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    steps, notes = [], list(first.notes)
    said = {*notes, *(str(warning.message) for warning in warned)}
    for variant, changes in variants:
        try:
            step, warned = _prepare_quietly(trainer, variant, data)
        except ValueError as error:
            notes.append(f"search: not tried: {', '.join(changes)}: {error}")
            continue
        own = [*step.notes, *(str(warning.message) for warning in warned)]
        steps.append((replace(step, notes=[note for note in own if note not in said]), changes))
    trainer.strategy.connect(module)
    return [(replace(first, notes=notes), {}), *steps]


def _prepare_quietly(
    trainer: Trainer, module: LightningModule, data: LightningDataModule | None
) -> tuple[PlannedStep, list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        return prepare_step(trainer, module, data, searches=True), caught


def plan_step(step: PlannedStep, *, exact: bool, hardware: Hardware | None = None) -> Plan:
    """Plan a step, with the closed form where that has rules for it.

    Args:
        step: Afterwards of no other use, if it was traced.
        exact: Trace it, and compare.
        hardware: To predict the time on. Without the module's ``measure_batch``, or with an optimizer of its own,
            there is none, and a note says so.

    Raises:
        ConfigError: It cannot be traced, and has to be.
    """
    settings, ranks, notes = step.strategy.settings, step.ranks, list(step.notes)
    counts = {"num_replicas": ranks.num_replicas, "num_micro_batches": step.num_micro_batches}
    units, dtypes = plan_module(step.module, settings.wrap), step.strategy.precision_plugin.mixed_precision
    traffic = predict_bytes(step.module, units, settings.sharding, dtypes, num_shards=ranks.num_shards, **counts)
    weights = count_weights(step.module)
    num_trained = sum(weights[name] for name, p in step.module.named_parameters() if p.requires_grad)
    quantized_bytes = _count_quantized(step.module, ranks.num_shards)
    prediction = _forecast(step, notes)
    if unseen := find_untraced(step.module):
        notes.append(f"left out: what {', '.join(unseen)} of the task does, which no engine follows")
    traced = trace_exactly(step) if prediction is None or exact else None
    found = prediction or traced
    assert found is not None
    time = None
    if hardware is not None:
        moved_bytes = int(found.moved_bytes * (COUNTED_SHARE if prediction is None else 1.0))
        time = _estimate_time(step, hardware, flops=found.flops, moved_bytes=moved_bytes, notes=notes)
    if found.flops.uncounted:
        notes.append(f"FLOPs: none are known of {', '.join(found.flops.uncounted)}")
    if settings.compile is not None:
        notes.append("compile is left out: compiled blocks keep fewer activations, which no plan can see")
    if settings.cpu_offload is not None:
        notes.append("offload: shards, gradients and optimizer state are in host memory, where the optimizer runs")
    return Plan(
        memory=found.memory if traced is None else traced.memory,
        ranks=ranks,
        traffic=traffic,
        collectives=predict_collectives(units, settings.sharding, num_shards=ranks.num_shards, **counts),
        num_micro_batches=step.num_micro_batches,
        num_weights=sum(weights.values()),
        num_trained=num_trained,
        quantized_bytes=quantized_bytes,
        engine="closed form" if traced is None else "exact trace",
        closed_form_bytes=None if prediction is None else prediction.peak.num_bytes,
        flops=found.flops,
        activations={} if prediction is None else _split_activations(prediction),
        time=time,
        notes=notes,
    )


def _estimate_time(
    step: PlannedStep, hardware: Hardware, *, flops: Flops, moved_bytes: int, notes: list[str]
) -> StepTime | None:
    """Return what a step takes; where that cannot be said, note why."""
    try:
        shape = measure_batch(step.module, step.batch)
        model = describe_model(step.module, step.strategy)
    except NoForecastError as error:
        notes.append(f"no time of a step: {error}")
        return None
    time = estimate_time(
        model,
        step.strategy.settings,
        hardware,
        ranks=step.ranks,
        flops=flops,
        moved_bytes=moved_bytes,
        tokens=shape.rows * shape.length,
        num_micro_batches=step.num_micro_batches,
    )
    notes += time.notes
    return time


def _forecast(step: PlannedStep, notes: list[str]) -> StepPrediction | None:
    """Return what the closed form says; where it has no rules, note why."""
    try:
        return forecast_step(
            step.module,
            step.strategy,
            measure_batch(step.module, step.batch),
            world_size=step.ranks.world_size,
            ranks_per_node=step.ranks.per_node,
            num_micro_batches=step.num_micro_batches,
            device_type=step.device_type,
        )
    except NoForecastError as error:
        notes.append(f"no closed form, so the step was traced: {error}")
        return None


def trace_exactly(step: PlannedStep) -> TracedStep:
    """Return what a step holds and does, followed operator by operator on tensors without values."""
    module, strategy = step.module, step.strategy
    if strategy.settings.cpu_offload is not None and step.ranks.num_shards == 1:
        raise ConfigError(
            "exact: offload with one shard cannot be traced yet, as the shard is the whole; leave exact, search or "
            "offload out, or use --devices 2"
        )
    num_traced = min(step.num_micro_batches, _MAX_TRACED)
    find_context: Callable[..., AbstractContextManager[None]]
    find_context = getattr(module, "enter_dry_run", lambda _: nullcontext())
    name = type(module).__name__.removeprefix("FSDP")
    with explain_trace(name), fake_ranks(step.ranks.world_size), find_context(step.batch):
        traced = trace_training_step(
            module,
            strategy.settings,
            step.batch,
            dtypes=strategy.precision_plugin.mixed_precision,
            compute_loss=lambda batch: compute_loss(name, module.training_step, batch),  # looked up when it is sharded
            build_optimizer=step.build_optimizer,
            step_name="training_step",
            ranks_per_node=step.ranks.per_node,
            num_micro_batches=num_traced,
            clip_norm=step.clip_norm,
            device_type=step.device_type,
        )
    share = step.num_micro_batches / num_traced
    return replace(traced, flops=traced.flops * share, moved_bytes=int(traced.moved_bytes * share))


def _make_batch(data: LightningDataModule | None) -> Mapping[str, Any]:
    make: Any = getattr(data, "make_example_batch", None)
    if make is None:
        what = "data: not set" if data is None else f"data: {type(data).__name__} has no method make_example_batch"
        raise ConfigError(
            f"{what}: a plan needs one that returns a micro-batch of the sizes that training will have, without "
            "reading data; see docs/planning.md"
        )
    batch: Mapping[str, Any] = make()
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"data: {type(data).__name__}.make_example_batch returned a {type(batch).__name__}: expected a dict of "
            "tensors"
        )
    return batch


def _prepare_module(trainer: Trainer, module: LightningModule, data: LightningDataModule | None) -> list[str]:
    """Let a module build its model as at the start of ``fit``, but for its data and weights."""
    if not module.automatic_optimization:
        raise ConfigError(
            f"model: {type(module).__name__} optimizes manually: only training_step knows what a step is, so it "
            "cannot be planned"
        )
    enter_fit(trainer, module)
    trainer.datamodule = data  # type: ignore[attr-defined]  # which models look at, such as for the size of images
    prepare: Any = getattr(module, "prepare_plan", lambda _: [])
    notes = list(prepare(data))
    module.configure_model()
    module.train()
    if not any(parameter.is_meta for parameter in module.parameters()):
        notes.append("the model was not built on the meta device: this process has allocated it")
    return notes


def _check_step(trainer: Trainer, module: LightningModule, data: LightningDataModule | None) -> None:
    """Refuse what ``fit`` refuses before it reads data."""
    trainer.state.fn = TrainerFn.FITTING
    check_trainer(trainer)
    if any(owner.__module__.startswith("lit_fsdp.tasks.") for owner in type(data).__mro__):  # which have our loaders
        refuse_overfit(trainer)
    for name in ("training_step", "configure_optimizers"):
        if getattr(type(module), name) is getattr(LightningModule, name) and name not in vars(module):
            raise ConfigError(f"model: {type(module).__name__} has no {name}, so it does not train; write one")


def enter_fit(trainer: Trainer, module: LightningModule) -> None:
    """Let a module see its trainer as in ``fit``, where what it logs goes nowhere."""
    trainer.state.fn, trainer.training = TrainerFn.FITTING, True
    trainer.strategy.connect(module)
    module.trainer = trainer
    for name in ("log", "log_dict"):
        setattr(module, name, lambda *_, **__: None)


def _find_optimizer(module: LightningModule) -> torch.optim.Optimizer:
    task: Any = module
    settings = getattr(module, "optimizer_settings", None)
    if isinstance(settings, Optimizer) and settings.name == "adamw_8bit_paged":  # needs a GPU, and counts alike
        task.optimizer_settings = replace(settings, name="adamw_8bit")
    found: Any = module.configure_optimizers()
    while isinstance(found, list | tuple | dict):
        if isinstance(found, list | tuple) and len(found) != 1 and not isinstance(found[0], list | tuple):
            raise ConfigError(
                f"model: {type(module).__name__}.configure_optimizers returned {len(found)} optimizers: expected one"
            )
        found = found["optimizer"] if isinstance(found, dict) else found[0]
    optimizer: torch.optim.Optimizer = found.optimizer if isinstance(found, LightningOptimizer) else found
    return optimizer


def _find_clip_norm(trainer: Trainer) -> float | None:
    by_value = trainer.gradient_clip_algorithm == "value"
    return None if by_value or not trainer.gradient_clip_val else float(trainer.gradient_clip_val)


def _split_activations(prediction: StepPrediction) -> dict[str, int]:
    peak = prediction.peak
    rest = peak.by_kind["activations"] - sum(peak.activations.values())
    return {**peak.activations, **({"tables, masks and temporaries": rest} if rest else {})}


def _count_quantized(module: LightningModule, num_shards: int) -> int:
    """Return the bytes of codes and scales of one rank, before anything is sharded."""
    total = 0
    for _, layer in iterate_quantized(module):
        for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
            if tensor.dtype == torch.uint8:
                rows, *others = tensor.shape
                total += (ceil(rows / num_shards) if isinstance(tensor, torch.nn.Parameter) else rows) * prod(others)
    return total
