"""Traces a planned step: a dry run of it, and in one line why there can be none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lit_fsdp.errors import ConfigError, is_debugging
from lit_fsdp.planning.planned_step import PlannedStep
from lit_fsdp.planning.trace.apart import run_apart
from lit_fsdp.planning.trace.dry_run import TracedStep, add_pinned_rounding, fake_ranks, trace_training_step
from lit_fsdp.planning.trace.replay import replay_step
from lit_fsdp.planning.trace.short_model import Stack, choose_stacks, shorten_model
from lit_fsdp.planning.trace.unfold import UnevenBlocksError, unfold_trace
from lit_fsdp.profiling.expected_communication import estimate_bytes
from lit_fsdp.sharding.cpu_offload import count_pinned_rounding
from lit_fsdp.sharding.sequence import build_sequence_group
from lit_fsdp.sharding.wrap import plan_module

_NUM_REACHES = 2  # to try: how far a block's neighbours matter
_MAX_TRACED = 2  # micro-batches: all after the second hold what it holds
# Of the bytes that a trace sees moved, what the closed form counts, with which step_time.MEMORY_SHARE was fitted: 0.76
# in the median of 317 steps of 300 tokens or more in benchmarks/results/plan_{accuracy,settings,matrix}, 0.29 to 0.91;
# 0.78 of language models on several ranks; least of ViTs in full, and on one rank, which had copies of FSDP2 then
# (decision 117) and has not been fitted since.
_COUNTED_SHARE = 0.75
# Where torch defines what fake tensors raise, and what it logs beside it; seen in torch 2.13.
_FAKE_TENSORS = "torch._subclasses.fake_tensor"
_SYMBOLS = "torch.fx.experimental.symbolic_shapes"
# Plain errors of torch that a real run on a GPU would not have.
_NO_VALUES = (
    "is not supported for tensor subclasses",  # numpy
    "Cannot access data pointer of Tensor",
    "its data is not allocated yet",
    "Could not run '",  # an operator without a rule
    "Expected inputs of BF16 type",  # the grouped product of experts has no rule for float32
)
_HELP = (
    "it asks for values, as .item(), float(), if on a tensor, boolean masks such as x[mask], nonzero and unique do; "
    "torch.where or a product with the mask needs none; see docs/planning.md"
)


def unfold_step(step: PlannedStep, *, who: str = "plan") -> TracedStep:
    """Return what ``trace_step`` does, from a trace of few blocks where the others repeat them.

    The short model is traced in a process of its own. All blocks are traced, in this one, if none repeats, if those
    that should do the same do not, if the model does not run with fewer, if the peak is in the optimizer, and with
    ``mesh.tensor`` and ``mesh.sequence``. Afterwards the step is of no other use.

    Args:
        step: To be traced.
        who: Asks, for errors of the process.

    Raises:
        ConfigError: The step fails, or asks for what a tensor without values has not.
    """
    settings = step.strategy.settings
    first = max(1, settings.sharding.forward_prefetch, settings.sharding.backward_prefetch)
    units = plan_module(step.module, settings.wrap)
    is_shared = settings.mesh.tensor > 1 or settings.mesh.sequence > 1  # rows or layers, by ranks
    for reach in () if is_shared else range(first, first + _NUM_REACHES):
        if not (stacks := choose_stacks(step.module, units, settings, reach=reach)):
            break
        try:
            traced = run_apart(partial(_trace_short, step, stacks), who)
        except ConfigError:  # of which the trace of all blocks tells more
            break
        if traced is not None:
            return traced
    return trace_step(step)


def trace_step(step: PlannedStep) -> TracedStep:
    """Return what a step holds and does, followed operator by operator on tensors without values.

    The bytes moved are those that the closed form would count. Afterwards the step is of no other use.

    Raises:
        ConfigError: The step fails, or asks for what a tensor without values has not.
    """
    settings = step.strategy.settings
    units = plan_module(step.module, settings.wrap)  # FSDP2 puts classes of its own before those of the model
    traced = _scale(step, _trace(step))
    if settings.mesh.tensor == 1:
        return traced
    sizes, dtypes = step.ranks.resolve(settings.mesh), step.strategy.precision_plugin.mixed_precision
    counts = {"num_replicas": sizes.replicate, "num_micro_batches": step.num_micro_batches}
    split = estimate_bytes(step.module, units, settings.sharding, dtypes, num_shards=sizes.num_shards, **counts)
    return replace(traced, split_units=tuple(split))


def _trace_short(step: PlannedStep, stacks: Sequence[Stack]) -> TracedStep | None:
    """Return the step of the whole model; ``None`` if blocks that stand for others are not alike."""
    module, offload = step.module, step.strategy.settings.cpu_offload
    num_shards = step.ranks.resolve(step.strategy.settings.mesh).num_shards
    rounding = count_pinned_rounding(module, offload, num_shards=num_shards, device_type=step.device_type)
    shorten_model(module, stacks)
    try:
        traced = unfold_trace(_trace(step, marked=[name for stack in stacks for name in stack.blocks]), stacks)
    except UnevenBlocksError:
        return None
    except Exception as error:  # of any model that does not run with fewer blocks
        raise ConfigError(f"plan: no trace of few blocks: {error}") from error
    return _scale(step, replace(traced, memory=add_pinned_rounding(traced.memory, rounding)))


def _trace(step: PlannedStep, *, marked: Sequence[str] = ()) -> TracedStep:
    module, strategy = step.module, step.strategy
    enter_dry_run: Callable[..., AbstractContextManager[None]]
    enter_dry_run = getattr(module, "enter_dry_run", lambda _: nullcontext())
    name = type(module).__name__.removeprefix("FSDP")
    index = (0,) if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2) else ()  # as Lightning
    with _explain_errors(name), fake_ranks(step.ranks.world_size), enter_dry_run(step.batch):
        strategy.sequence_group = build_sequence_group(
            strategy.settings.mesh,
            device_type="cpu",
            world_size=step.ranks.world_size,
            ranks_per_node=step.ranks.per_node,
        )
        return trace_training_step(
            module,
            strategy.settings,
            step.batch,
            dtypes=strategy.precision_plugin.mixed_precision,
            # Looked up when it is sharded.
            compute_loss=lambda batch: _compute_loss(name, module.training_step, batch, *index),
            build_optimizer=step.build_optimizer,
            step_name="training_step",
            ranks_per_node=step.ranks.per_node,
            num_micro_batches=min(step.num_micro_batches, _MAX_TRACED),
            clip_norm=step.clip_norm,
            device_type=step.device_type,
            marked=marked,
        )


def _scale(step: PlannedStep, traced: TracedStep) -> TracedStep:
    """Return the work of all micro-batches, of which some were traced, and what the allocator takes."""
    num_traced = min(step.num_micro_batches, _MAX_TRACED)
    share = step.num_micro_batches / num_traced
    moved_bytes = int(int(traced.moved_bytes * share) * _COUNTED_SHARE)
    exchanges = traced.exchanges[: len(traced.exchanges) // num_traced] * step.num_micro_batches
    replay = None if traced.log is None else replay_step(traced.log)
    work: dict[str, Any] = {"flops": traced.flops * share, "moved_bytes": moved_bytes, "exchanges": exchanges}
    return replace(traced, **work, replay=replay, log=None)


@contextmanager
def _explain_errors(name: str) -> Iterator[None]:
    logger = logging.getLogger(_FAKE_TENSORS)
    level = logger.level
    if not is_debugging():
        logger.setLevel(logging.CRITICAL)  # it logs each failure with its traceback
    try:
        yield
    except RuntimeError as error:  # also of backward and the optimizer
        if is_debugging():
            raise
        raise _explain(name, error) from error
    finally:
        logger.setLevel(level)


def _compute_loss(name: str, step: Callable[..., Any], *args: Any) -> Tensor:
    """Return the loss of a micro-batch; errors of sizes and settings are explained, others raised as they are."""
    try:
        output = step(*args)
    except (ValueError, IndexError) as error:  # a RuntimeError is explained with those of backward
        if is_debugging():
            raise
        raise _explain(name, error) from error
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        what = f"a {type(output).__name__} without loss" if isinstance(output, Mapping) else repr(loss)[:50]
        raise ConfigError(
            f"model: {name}.training_step returned {what}: a plan needs a step that trains: return the loss, or a "
            "dict with loss"
        )
    return loss


def _explain(name: str, error: Exception) -> ConfigError:
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    is_limit = type(error).__module__ in (_FAKE_TENSORS, _SYMBOLS) or any(text in str(error) for text in _NO_VALUES)
    if is_limit:
        return ConfigError(f"plan: the step of {name} cannot run on tensors without values ({reason}): {_HELP}")
    return ConfigError(f"plan: the step itself fails: {name}: {reason}; LIT_FSDP_DEBUG=1 shows where")
