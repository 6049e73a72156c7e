"""Which settings let a step fit, and how fast each would be: every combination worth a look."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lit_fsdp.optim.factory import Optimizer
from lit_fsdp.planning.closed_form.engine import estimate_step
from lit_fsdp.planning.estimate import Hardware, StepCost, estimate_step_time
from lit_fsdp.planning.needed_memory import compute_needed_bytes, count_outside_bytes
from lit_fsdp.planning.step_parts import MicroBatch, ModelToTrain, Ranks
from lit_fsdp.planning.timing.step_time import StepTime
from lit_fsdp.quantization.layers import iterate_quantized
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
from lit_fsdp.sharding.cpu_offload import CPUOffload
from lit_fsdp.sharding.mesh import Mesh, MeshSizes
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.shard import Compile
from lit_fsdp.sharding.wrap import count_shard_bytes

_STRATEGY = "trainer.strategy"
_ADAPTERS = {"model.lora", "model.quantization"}
_CHANGES_RESULT = {*_ADAPTERS, "model.optimizer.name"}
_SMALLER, _MAX_ROWS = 0.95, 12  # a slower row is worth showing below so much of the peak of the one before it


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A model to search for.

    Args:
        model: As it would be trained.
        changes: What makes it of the configured one: settings as in YAML, with their values.
    """

    model: ModelToTrain
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is searched for.

    Args:
        variants: The configured model, and others in its place.
        settings: As configured.
        ranks: That take part.
        micro_batch: The shape of one, as configured.
        num_micro_batches: Accumulated in a step, as configured.
        splits_batch: Whether ``data.batch_size`` may change, with accumulation in return.
        hardware: What it would run on.
        device_bytes: Memory of one GPU.
        batch_size: ``data.batch_size``, where it is not the rows of a micro-batch: those of a pair are two.
        sets_accumulation: Whether the accumulation is a setting of its own: not with ``data.global_batch_size``.
        tries_optimizers: Whether the optimizer may change.
        device_type: ``cuda``, or ``cpu`` for a run that is tried out there.
        host_bytes: Memory of each node for what is offloaded, where it is known.
        measure: Returns the shape of a micro-batch by ``data.batch_size``; by default as configured, with those rows.
        trace: Where the closed form has no rules: follows a step of a model with these settings, size and number of
            micro-batches. That takes seconds, so smaller batches and other trainings are only tried where nothing fits.
        only_fastest: Leave out what can only be slower than what fits, or larger than what does not.
    """

    variants: Sequence[Variant]
    settings: Settings
    ranks: Ranks
    micro_batch: MicroBatch
    num_micro_batches: int
    splits_batch: bool
    hardware: Hardware
    device_bytes: int
    batch_size: int | None = None
    sets_accumulation: bool = True
    tries_optimizers: bool = True
    device_type: str = "cuda"
    host_bytes: int | None = None
    measure: Callable[[int], MicroBatch] | None = None
    trace: Callable[[ModelToTrain, Settings, int, int], StepCost] | None = None
    only_fastest: bool = False

    @property
    def given_size(self) -> int:
        """The configured ``data.batch_size``."""
        return self.micro_batch.rows if self.batch_size is None else self.batch_size


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One combination, estimated.

    Args:
        changes: What differs from the configuration: settings as in YAML, with their values.
        settings: Of the strategy, as a whole.
        peak_bytes: Of the tensors of a GPU.
        needed_bytes: The memory that a GPU must have: with headroom, and what lies outside of the allocator.
        host_bytes: Of a rank, with offload.
        time: Of an optimizer step.
        compiled_s: The same in seconds, were blocks compiled too. ``None`` if they are already, or cannot be.
        fits: Whether ``needed_bytes`` are there, and ``host_bytes`` where that is known.
        fits_host: Whether the latter are.
    """

    changes: Mapping[str, Any]
    settings: Settings
    peak_bytes: int
    needed_bytes: int
    host_bytes: int
    time: StepTime
    compiled_s: float | None
    fits: bool
    fits_host: bool = True

    @property
    def keeps_result(self) -> bool:
        """Whether the run computes the same, up to rounding."""
        return not _CHANGES_RESULT & self.changes.keys()


def search(problem: Problem) -> list[Candidate]:
    """Estimate every combination; return the configured one first, then what is worth a look, fastest first.

    Of what computes the same, that is the fastest that fits, and each that takes at least 5 % less than the one before
    it. Of every other training it is the fastest that fits and the smallest. Where none of a training fits, it is the
    nearest to it. The global batch stays as it is. Offload is only tried where nothing fits without.
    """
    configured = _estimate(problem, problem.variants[0], problem.settings, problem.given_size)
    found: list[Candidate] = []
    for variant in problem.variants if problem.trace is None else _spread_optimizers(problem):
        if problem.trace is not None and any(candidate.fits for candidate in found):
            break
        for offload in (None, problem.settings.cpu_offload or CPUOffload()):
            tried = list(_try_all(problem, variant, offload))
            found += tried
            # Of a variant that trains otherwise, anything that fits will do.
            if any(c.fits and (c.keeps_result or _CHANGES_RESULT & variant.changes.keys()) for c in tried):
                break
    kept = [candidate for candidate in _pick(found) if candidate.changes]
    return [configured, *sorted(kept, key=lambda c: (not c.keeps_result, not c.fits, c.time.step_s))]


def choose(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the fastest that fits and computes the same; else the fastest that fits; ``None`` if nothing does.

    What is configured wins over what is not 2 % faster.
    """
    configured, *others = candidates
    fitting = [candidate for candidate in others if candidate.fits]
    best = next((c for c in fitting if c.keeps_result), None)
    if configured.fits and (best is None or configured.time.step_s < 1.02 * best.time.step_s):
        return configured
    return best or next(iter(fitting), None)


def choose_smallest(candidates: Sequence[Candidate]) -> Candidate:
    """Return what comes nearest to fitting, where nothing does: of what the host has room for, the smallest."""
    return min(candidates, key=lambda candidate: (not candidate.fits_host, candidate.needed_bytes))


def list_changes(given: Settings, tried: Settings) -> dict[str, Any]:
    """Return the settings that make one of the other, as in YAML: each by itself, so that none is left as it was."""
    changes: dict[str, Any] = {}
    for section in ("mesh", "sharding", "activation_checkpointing"):
        before = vars(getattr(given, section))
        for name, value in vars(getattr(tried, section)).items():
            if value != before[name] or type(value) is not type(before[name]):  # true is not 1
                changes[f"{_STRATEGY}.{section}.{name}"] = list(value) if isinstance(value, tuple) else value
    if given.cpu_offload != tried.cpu_offload:
        changes[f"{_STRATEGY}.cpu_offload"] = None if tried.cpu_offload is None else {}
    return changes


def format_changes(changes: Mapping[str, Any]) -> str:
    """Return settings as on the command line, without what all have in front."""
    names = {key: key.removeprefix(f"{_STRATEGY}.").removeprefix("trainer.") for key in changes}
    return ", ".join(f"{names[key]}={_spell(value)}" for key, value in changes.items()) or "as configured"


def _try_all(problem: Problem, variant: Variant, offload: CPUOffload | None) -> Iterator[Candidate]:
    own = variant.model.optimizer
    if offload is not None and own.name == "adamw_8bit_paged":  # its pages are in host memory already
        return
    is_spread = problem.trace is not None or not problem.tries_optimizers
    optimizers = [own] if is_spread else _list_optimizers(problem, variant, offload)
    for size in _list_sizes(problem):
        known: list[Candidate] = []
        for settings in _list_settings(problem, variant, offload, size):
            if problem.only_fastest and any(_is_beaten(problem, settings, candidate) for candidate in known):
                continue
            for optimizer in optimizers:
                model = replace(variant.model, optimizer=optimizer)
                known.append(_estimate(problem, replace(variant, model=model), settings, size))
                yield known[-1]
        if problem.trace is not None and any(candidate.fits for candidate in known):
            return


def _is_beaten(problem: Problem, settings: Settings, known: Candidate) -> bool:
    """Whether settings, later in the list, only recompute more than what fits, or hold more than what does not.

    The latter by tensors alone: what the allocator takes beside them may be less where more are held.
    """
    own = known.settings
    if known.fits:
        return replace(settings, activation_checkpointing=own.activation_checkpointing) == own
    left_bytes = problem.device_bytes - count_outside_bytes(problem.ranks.resolve(own.mesh))
    if known.fits_host and known.peak_bytes <= left_bytes:
        return False
    return own.sharding.reshard_after_forward is True and replace(settings, sharding=own.sharding) == own


def count_tries(problem: Problem) -> int:
    """Return how many settings a search tries at most without offload, for the configured model and batch."""
    variant = problem.variants[0]
    return len({problem.settings, *_list_settings(problem, variant, None, problem.given_size)})


def _list_sizes(problem: Problem) -> list[int]:
    """Return sizes of a micro-batch to try; to trace, from the configured ones down."""
    given = problem.given_size
    if not problem.splits_batch:
        return [given]
    total = given * problem.num_micro_batches
    sizes = sorted({2**i for i in range(total.bit_length()) if total % 2**i == 0} | {given})
    return sizes if problem.trace is None else [size for size in reversed(sizes) if size <= given]


def _list_settings(problem: Problem, variant: Variant, offload: CPUOffload | None, size: int) -> Iterator[Settings]:
    ranks, given = problem.ranks, problem.settings
    meshes = [given.mesh]
    if ranks.num_nodes > 1:  # what crosses nodes: everything, or gradients only
        shared = {"sequence": given.mesh.sequence, "tensor": given.mesh.tensor}
        meshes += [Mesh(**shared), Mesh(replicate=-1, shard="node", **shared)]
    if problem.trace is None and offload is None and _fits_whole(problem, variant):
        meshes.append(Mesh(replicate=-1, shard=1))  # a copy on each GPU: nothing is gathered
    by_sizes: dict[MeshSizes, Mesh] = {}
    for mesh in meshes:
        by_sizes.setdefault(ranks.resolve(mesh), mesh)
    recomputes = [given.activation_checkpointing]
    is_plain = recomputes[0] == ActivationCheckpointing(mode=recomputes[0].mode)
    if is_plain and any(unit.kind == "block" for unit in variant.model.units):
        recomputes = [ActivationCheckpointing(mode=mode) for mode in ("none", "selective", "full")]
    accumulates = problem.given_size * problem.num_micro_batches > size
    for mesh_sizes, mesh in by_sizes.items():
        shards = mesh_sizes.num_shards
        moves = shards > 1 or offload is not None
        # What is kept after forward may as well be kept until the step: the peak is between forward and backward.
        kept = {"reshard_after_forward": False, "reshard_after_backward": not accumulates}
        keeps: list[dict[str, Any]] = [{}, *[kept] * moves]
        if accumulates and (moves or mesh_sizes.replicate > 1):
            keeps.append({**keeps[-1], "no_sync": True})
        # Second gathers among fewer ranks: as configured, and those of a node.
        own = given.sharding.reshard_after_forward
        sizes = dict.fromkeys([*([] if isinstance(own, bool) else [own]), ranks.per_node])
        if given.sharding.gather_bits is None and mesh.tensor == 1:  # what was rounded is not gathered again
            keeps += [{"reshard_after_forward": n} for n in sizes if 1 < n < shards and shards % n == 0]
        for changes in keeps:
            sharding = replace(given.sharding.keep_least(), **changes)
            for recompute in recomputes:
                yield replace(
                    given, mesh=mesh, sharding=sharding, activation_checkpointing=recompute, cpu_offload=offload
                )


def _fits_whole(problem: Problem, variant: Variant) -> bool:
    """Whether one GPU has room for the parameters of a copy, at least."""
    module, units = variant.model.module, variant.model.units
    return sum(count_shard_bytes(module, unit, 1) for unit in units) < problem.device_bytes


def _spread_optimizers(problem: Problem) -> list[Variant]:
    """Return the variants with each optimizer, those that compute the same first."""
    spread = []
    for variant in problem.variants:
        own = variant.model.optimizer
        for optimizer in _list_optimizers(problem, variant, None) if problem.tries_optimizers else [own]:
            changes = {} if optimizer is own else {"model.optimizer.name": optimizer.name}
            model = replace(variant.model, optimizer=optimizer)
            spread.append(replace(variant, model=model, changes={**variant.changes, **changes}))
    return sorted(spread, key=lambda variant: bool(_CHANGES_RESULT & variant.changes.keys()))


def _list_optimizers(problem: Problem, variant: Variant, offload: CPUOffload | None) -> list[Optimizer]:
    given, splits_columns = variant.model.optimizer, problem.settings.mesh.tensor > 1
    trained, total = (sum(getattr(u, name) for u in variant.model.units) for name in ("num_trainable", "num_params"))
    if given.name != "adamw" or splits_columns or offload is not None or trained < 0.1 * total:
        return [given]
    return [given, replace(given, name="adamw_8bit", fused=None)]


def _estimate(problem: Problem, variant: Variant, settings: Settings, size: int) -> Candidate:
    model, configured = variant.model, problem.variants[0].model
    micro_batch = problem.micro_batch
    if size != problem.given_size:
        micro_batch = problem.measure(size) if problem.measure else replace(micro_batch, rows=size)
    num = problem.given_size * problem.num_micro_batches // size
    common: dict[str, Any] = {"ranks": problem.ranks, "num_micro_batches": num}
    cost: StepCost
    if problem.trace is not None:
        cost = problem.trace(model, settings, size, num)
    else:
        cost = estimate_step(model, settings, micro_batch, device_type=problem.device_type, **common)

    def estimate_time(settings: Settings) -> StepTime:
        return estimate_step_time(model, settings, problem.hardware, cost, micro_batch=micro_batch, **common)

    can_compile = (
        settings.compile is None
        and problem.device_type == "cuda"
        and any(unit.kind == "block" for unit in model.units)
        and not any(iterate_quantized(model.module))
    )
    host_bytes = sum(cost.memory.host_by_kind.values())
    needed_bytes = compute_needed_bytes(cost, problem.ranks.resolve(settings.mesh))
    has_host = problem.host_bytes is None or host_bytes * problem.ranks.per_node <= problem.host_bytes
    own = dict(variant.changes)
    if size != problem.given_size:
        own["data.batch_size"] = size
        if problem.sets_accumulation:
            own["trainer.accumulate_grad_batches"] = num
    own |= list_changes(problem.settings, settings)
    if model.optimizer.name != configured.optimizer.name:
        own["model.optimizer.name"] = model.optimizer.name
        if configured.optimizer.fused is not None:
            own["model.optimizer.fused"] = None
    return Candidate(
        changes=own,
        settings=settings,
        peak_bytes=cost.memory.peak.num_bytes,
        needed_bytes=needed_bytes,
        host_bytes=host_bytes,
        time=estimate_time(settings),
        compiled_s=estimate_time(replace(settings, compile=Compile())).step_s if can_compile else None,
        fits=needed_bytes <= problem.device_bytes and has_host,
        fits_host=has_host,
    )


def _pick(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Keep of each training what :func:`search` says; of equals the one with the fewest changes."""
    trainings: dict[frozenset[str], list[Candidate]] = {}
    for candidate in sorted(candidates, key=lambda c: (c.time.step_s, c.needed_bytes, len(c.changes))):
        changed = frozenset(_CHANGES_RESULT & candidate.changes.keys())
        # With adapters there is little state of the optimizer.
        trainings.setdefault(changed & _ADAPTERS or changed, []).append(candidate)
    kept: list[Candidate] = []
    for changed, tried in trainings.items():
        fitting = [candidate for candidate in tried if candidate.fits]
        rows = fitting[:1] or [choose_smallest(tried)]
        for candidate in fitting[1:]:
            if candidate.peak_bytes <= _SMALLER * rows[-1].peak_bytes:
                rows.append(candidate)
        smallest = min(rows[:1] + fitting, key=lambda candidate: candidate.peak_bytes)
        is_smaller = smallest.peak_bytes <= _SMALLER * rows[0].peak_bytes
        kept += [rows[0], *([smallest] if is_smaller else [])] if changed else rows[:_MAX_ROWS]
    return kept


def _spell(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_spell(item)}" for key, item in value.items()) + "}"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
