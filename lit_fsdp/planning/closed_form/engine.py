"""Estimates the memory and the FLOPs of a training step by counting: in milliseconds, without tensors or ranks.

Parameters, gradients, optimizer state and the buffers of collectives follow from the modules and the plan. Activations
follow from what the blocks are made of, see Note [Tape]; a module without a rule is an error, and the exact trace the
answer there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lit_fsdp.optim.adamw_8bit import BLOCK_SIZE, is_8bit
from lit_fsdp.optim.factory import Optimizer, choose_fused
from lit_fsdp.optim.muon import MAX_STACK, list_hidden_matrices
from lit_fsdp.planning.closed_form.model_reader import ModelReader
from lit_fsdp.planning.closed_form.reader import Reader, UnreadableModuleError
from lit_fsdp.planning.closed_form.step_walk import Moment, UnitSizes, Walk, WalkSettings
from lit_fsdp.planning.closed_form.tape import FLOAT32, QUANTIZED, RELEASE, Op, Tape
from lit_fsdp.planning.step_parts import Exchange, MicroBatch, ModelToTrain, NoEstimateError, Ranks, Replay
from lit_fsdp.profiling.expected_communication import UnitBytes, count_gathered_bytes, get_gather_dtype, pad_numel
from lit_fsdp.profiling.flops import Flops
from lit_fsdp.profiling.memory import KINDS, Kind, label_unit
from lit_fsdp.profiling.memory_log import OUTSIDE, Peak, StepMemory
from lit_fsdp.sharding.activation_checkpointing import DEFAULT_SAVED_OPS, ActivationCheckpointing
from lit_fsdp.sharding.cpu_offload import count_pinned_rounding, count_staged_bytes
from lit_fsdp.sharding.low_bit import count_gather_scratch, count_reduce_scratch
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.shard import check_wire, is_gathered_again, list_whole
from lit_fsdp.sharding.torch_internals import KEEPS_LAST_GRADIENT
from lit_fsdp.sharding.wrap import Unit, count_shard_bytes, iterate_blocks


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """What one rank needs for a step.

    Args:
        peak: The largest moment.
        moments: The largest of each part of the step, in order.
        host_by_kind: Bytes in host memory, with offload.
        flops: Of all micro-batches.
        moved_bytes: Of all micro-batches: what operators other than products and attention read and write. Compiled
            blocks move less.
    """

    peak: Moment
    moments: Sequence[Moment]
    host_by_kind: Mapping[Kind, int]
    flops: Flops
    moved_bytes: int
    exchanges: Sequence[Exchange] = ()  # there are no rules for ranks that share rows
    split_units: Sequence[UnitBytes] = ()
    replay: Replay | None = None  # there is no sequence of allocations to replay

    @property
    def memory(self) -> StepMemory:
        """The same as an exact trace has it, but for units: a moment stands for all operators of its part."""
        peak = self.peak
        phases: list[tuple[str, int, int]] = []
        for i, moment in enumerate(self.moments):
            begin = phases.pop()[1] if phases and phases[-1][0] == moment.phase else i
            phases.append((moment.phase, begin, i + 1))
        return StepMemory(
            peak=Peak(
                num_bytes=peak.num_bytes,
                operator=self.moments.index(peak),
                phase=peak.phase,
                unit=peak.unit,
                by_kind=peak.by_kind,
                by_unit={},
            ),
            by_kind={kind: [moment.by_kind.get(kind, 0) for moment in self.moments] for kind in KINDS},
            phases=phases,
            host_by_kind=self.host_by_kind,
        )


def estimate_step(
    model: ModelToTrain,
    settings: Settings,
    micro_batch: MicroBatch,
    *,
    ranks: Ranks,
    num_micro_batches: int = 1,
    device_type: str = "cuda",
) -> StepEstimate:
    """Estimate the step of the first rank, which has the largest shards.

    ``sdpa`` counts as fused where there is a kernel, compiled blocks as if they were not, which is more than they need.

    Raises:
        ValueError: A setting does not fit, or a module has no rule: an ``UnreadableModuleError``.
    """
    sizes = ranks.resolve(settings.mesh)
    replicas, shards = sizes.replicate, sizes.num_shards
    if sizes.num_sharing > 1:
        name = "tensor" if sizes.tensor > 1 else "sequence"
        raise NoEstimateError(f"mesh.{name}: ranks that share rows have no rules")
    for name in ("keep_dequantized", "offload", "mlp_chunks"):
        if getattr(settings.activation_checkpointing, name):
            raise UnreadableModuleError(f"activation_checkpointing.{name}", "a setting without a rule")
    settings.sharding.check(shards)
    module, units, policy = model.module, model.units, model.dtypes.build_policy()
    check_wire(module, units, settings.sharding, policy)
    parameters = dict(module.named_parameters())
    tape = _read_model(model, settings, micro_batch, device_type)
    own = sum(count_shard_bytes(module, unit, shards) for unit in units)
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())
    state, temporary = _measure_optimizer(module, model.optimizer, shards, is_scaled=model.dtypes.needs_loss_scaling)
    on_device = settings.cpu_offload is None
    whole = list_whole(module, ranks.world_size, not on_device, policy.param_dtype, settings.sharding)
    sharded = {name: parameter for name, parameter in parameters.items() if parameter not in whole}
    walk = Walk(
        tape=tape,
        units=_measure_units(sharded, units, settings, policy, shards),
        owners={name: i for i, unit in enumerate(units) for name in unit.parameters if name in sharded},
        settings=_describe_walk(model, settings, (replicas, shards), num_micro_batches),
        fixed={
            "parameters": buffers + own * on_device,
            "optimizer_state": state * on_device,
            "activations": sum(tape.tables.values()),
            "communication": count_staged_bytes(
                module, units, settings.cpu_offload, num_shards=shards, device_type=device_type
            ),
            "rest": tape.batch_bytes,
        },
    )
    walk.run()
    walk.add_temporary("rest", temporary * on_device)
    moments = walk.finish()
    more, more_gradients = count_pinned_rounding(
        module, settings.cpu_offload, num_shards=shards, device_type=device_type
    )
    gradients = sum(unit.gradient for unit in walk.units)
    host: dict[Kind, int] = {"parameters": own + more, "gradients": gradients + more_gradients}
    twice = _list_run_twice(tape, settings.activation_checkpointing)
    return StepEstimate(
        peak=max(moments, key=lambda moment: moment.num_bytes),
        moments=moments,
        host_by_kind={} if on_device else {**host, "optimizer_state": state},
        flops=_count_flops(tape, twice) * num_micro_batches,
        moved_bytes=_count_moved(tape, twice) * num_micro_batches,
    )


def _read_model(model: ModelToTrain, settings: Settings, micro_batch: MicroBatch, device_type: str) -> Tape:
    module, recompute = model.module, settings.activation_checkpointing
    tape = Tape(itemsize=model.compute_dtype.itemsize, is_gpu=device_type != "cpu")
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    reader = Reader(tape=tape, names=names, **vars(micro_batch))
    recomputed = [] if recompute.mode == "none" else list(iterate_blocks(model.units))[:: recompute.every_n_blocks]
    try:
        return ModelReader(model=module, plan=model.units, recomputed=recomputed, reader=reader).read()
    except (AttributeError, KeyError, IndexError, TypeError, StopIteration, OSError) as error:
        # Parts by the names that rules know, but made otherwise, or of code that is in no file.
        raise UnreadableModuleError(type(module).__name__, f"{type(error).__name__}: {error}") from error


def _describe_walk(
    model: ModelToTrain, settings: Settings, mesh: tuple[int, int], num_micro_batches: int
) -> WalkSettings:
    reduce = model.dtypes.build_policy().reduce_dtype
    trained = next((p.dtype for p in model.module.parameters() if p.requires_grad), reduce)
    return WalkSettings(
        num_shards=mesh[1],
        is_replicated=mesh[0] > 1,
        num_micro_batches=num_micro_batches,
        sharding=settings.sharding,
        reduce_itemsize=(reduce or model.compute_dtype).itemsize,
        casts_shards=reduce is not None and trained != reduce,
        saved_ops=frozenset(_list_kept(settings.activation_checkpointing)),
        keeps_shards=settings.cpu_offload is None,
    )


def _measure_units(
    parameters: Mapping[str, nn.Parameter],
    plan: Sequence[Unit],
    settings: Settings,
    policy: MixedPrecisionPolicy,
    num_shards: int,
) -> list[UnitSizes]:
    compute = policy.param_dtype
    reshard, gather_bits, reduce_bits = (
        getattr(settings.sharding, name) for name in ("reshard_after_forward", "gather_bits", "reduce_bits")
    )
    first = next((i for i, unit in enumerate(plan) if unit.num_trainable), len(plan))
    sizes = []
    for i, unit in enumerate(plan):
        names = [name for name in unit.parameters if name in parameters]
        own = [parameters[name] for name in names]
        gathered = count_gathered_bytes(own, compute, num_shards)
        cast = count_gathered_bytes((p for p in own if get_gather_dtype(p, compute) != p.dtype), compute, num_shards)
        trained = [p for p in own if p.requires_grad]
        numel = sum(pad_numel(p, num_shards) for p in trained)
        reduced = count_gathered_bytes(trained, policy.reduce_dtype, num_shards)
        num_gathered = sum(pad_numel(p, num_shards) for p in own) // num_shards
        packs = num_shards > 1
        last = _find_last([name for name in names if parameters[name].requires_grad], unit.names[-1])
        last_gradient = parameters[last].numel() * (compute or parameters[last].dtype).itemsize if last else 0
        reshards = unit.kind in ("block", "embedding") and reshard is not False
        kept = gathered // reshard if reshards and not isinstance(reshard, bool) else 0
        sizes.append(
            UnitSizes(
                label=OUTSIDE if unit.kind == "root" else label_unit(unit),  # as an exact trace has it
                gathered=gathered,
                cast=cast // num_shards,
                reduce=reduced,
                reduced=reduced // num_shards,
                gradient=count_gathered_bytes(trained, None, num_shards) // num_shards,
                kept=kept,
                last_gradient=last_gradient if num_shards > 1 and KEEPS_LAST_GRADIENT else 0,
                reshards=reshards,
                is_gathered_again=not reshards or is_gathered_again(unit, settings.sharding),
                trains=bool(numel),
                is_root=unit.kind == "root",
                is_embedding=unit.kind == "embedding",
                is_idle=unit.kind == "idle",
                is_reached=i >= first,
                num_parameters=len(own),
                gather_scratch=count_gather_scratch(num_gathered, num_shards) if packs and gather_bits else 0,
                reduce_scratch=(
                    count_reduce_scratch(numel // num_shards, num_shards, reduce_bits) if packs and reduce_bits else 0
                ),
            )
        )
    return sizes


def _find_last(names: Sequence[str], module: str) -> str:
    """Return which of the parameters of a unit FSDP2 has last, as it lists those of children first; "" if none."""
    prefix = f"{module}." if module else ""
    inner = [name.removeprefix(prefix).partition(".") for name in names if name.startswith(prefix)]
    own = [key for key, dot, _ in inner if not dot]
    if own or not inner:
        return f"{prefix}{own[-1]}" if own else ""
    return _find_last(names, f"{prefix}{inner[-1][0]}")


def _measure_optimizer(module: nn.Module, optimizer: Optimizer, num_shards: int, *, is_scaled: bool) -> tuple[int, int]:
    """Return the bytes of the state of one rank, and what a step needs besides."""
    state, largest, casts, of_matrices = 0, 0, 0, 0
    hidden = list_hidden_matrices(module) if optimizer.name == "muon" else set()
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        local, size = pad_numel(parameter, num_shards) // num_shards, parameter.element_size()
        if parameter in hidden:
            state += FLOAT32 + local * size
            of_matrices = max(of_matrices, _measure_matrix(parameter, local, num_shards))
            continue
        state += FLOAT32 + _count_state(parameter, local, optimizer)
        largest = max(largest, local * FLOAT32)
        casts += local * FLOAT32 if size != FLOAT32 else 0
    if optimizer.name == "adafactor":
        return state, casts + 2 * largest
    if optimizer.name == "muon":
        return state, max(2 * largest, of_matrices)
    if optimizer.name != "adamw" or choose_fused(optimizer.fused, is_scaled=is_scaled):
        return state, 0
    return state, 2 * largest  # the square root of a second mean, and what is made of it, one parameter after another


def _count_state(parameter: torch.Tensor, local: int, optimizer: Optimizer) -> int:
    rows = local // max(prod(parameter.shape[1:]), 1)
    if optimizer.name in ("adamw", "muon"):
        return 2 * local * parameter.element_size()
    if optimizer.name != "adafactor":
        if not is_8bit(parameter.shape):
            return 2 * local * FLOAT32
        blocks = ceil(prod(parameter.shape[1:]) / BLOCK_SIZE)
        return 2 * local + 2 * rows * blocks * FLOAT32
    if parameter.dim() < 2:
        return local * FLOAT32
    columns = parameter.shape[-1]
    matrices = 1 if parameter.dim() == 2 else local // (parameter.shape[-2] * columns)
    return (local // columns + matrices * columns) * FLOAT32


def _measure_matrix(parameter: torch.Tensor, local: int, num_shards: int) -> int:
    """Return what Muon makes for a matrix, or this rank's part of a stack: bfloat16 but for the mean of gradients."""
    is_stack, short = parameter.dim() > 2, min(parameter.shape[-2:])
    whole = local if is_stack or num_shards == 1 else parameter.numel()
    at_once = min(whole, max(MAX_STACK, parameter.shape[-2:].numel())) if is_stack else whole
    grams = 2 * 2 * short * short * at_once // parameter.shape[-2:].numel()
    kept = 2 * whole if is_stack else 0
    return max(local * (parameter.element_size() + 2), kept + 2 * 2 * at_once + grams)


def _count_flops(tape: Tape, twice: Sequence[Op]) -> Flops:
    ops = [step for step in tape.steps if isinstance(step, Op)]
    return Flops(
        forward=sum(op.flops for op in ops),
        backward=sum(op.backward_flops for op in ops),
        recomputed=sum(op.again_flops for op in ops) + sum(op.flops for op in twice),
    )


def _count_moved(tape: Tape, twice: Sequence[Op]) -> int:
    total = 0
    for op in (step for step in tape.steps if isinstance(step, Op)):
        size = tape.sizes[op.output]
        total += op.backward_moved + _count_forward_moved(tape, op)
        if not op.flops and (op.gets_grad or op.weights) and not (op.shares_grad or op.splits_grad):
            gradients = sum(tape.sizes[value] for value in (*op.saves, *op.gets_grad))
            total += size + gradients + 2 * op.backward_temp
    return total + sum(_count_forward_moved(tape, op) for op in twice)


def _count_forward_moved(tape: Tape, op: Op) -> int:
    if op.flops or op.name == RELEASE:
        return op.forward_moved
    return sum(tape.sizes[value] for value in (*op.inputs, op.output)) + 2 * op.forward_temp


def _list_run_twice(tape: Tape, recompute: ActivationCheckpointing) -> list[Op]:
    """Return the operators that run once more in backward: up to the last one of a block that keeps something."""
    kept, found = _list_kept(recompute), []
    block: list[Op] | None = None
    for step in tape.steps:
        if isinstance(step, Op):
            if block is not None:
                block.append(step)
        elif step.what == "enter_block":
            block = []
        elif step.what == "leave_block" and block is not None:
            # torch stops there, before that one.
            last = max((i for i, op in enumerate(block) if op.saves or op.flops), default=0)
            if tape.needs_grad[step.value]:
                found += [op for op in block[:last] if op.name not in kept]
            block = None
    return found


def _list_kept(recompute: ActivationCheckpointing) -> set[str]:
    """Return the operators that blocks which are computed again do not compute again."""
    saved = recompute.saved_ops or DEFAULT_SAVED_OPS
    names = {name.removeprefix("aten.") for name in saved} if recompute.mode == "selective" else set()
    return names | {name for name in QUANTIZED if name.removeprefix("int8.") in names}
