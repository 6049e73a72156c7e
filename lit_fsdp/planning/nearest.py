"""What comes nearest to a step that does not fit, and does; and what each setting alone would save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from lit_fsdp.errors import ConfigError
from lit_fsdp.planning.estimate import Hardware
from lit_fsdp.planning.limits import find_limits
from lit_fsdp.planning.search.search import Candidate
from lit_fsdp.planning.step_parts import NoEstimateError, Ranks
from lit_fsdp.planning.timing.step_time import StepTime
from lit_fsdp.planning.trials import Trial, Trials
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
from lit_fsdp.sharding.cpu_offload import CPUOffload
from lit_fsdp.sharding.settings import Settings

NUM_NEAREST = 3
_MOST_DEVICES, _MOST_NODES = 8, 64


@dataclass(frozen=True, kw_only=True)
class Near:
    """Settings with which a step fits.

    Args:
        changes: As in YAML.
        needed_bytes: The memory that a GPU must have.
        host_bytes: Of host memory of a rank, with offload.
        time: Of a step.
        cost: What it takes in return, in words.
    """

    changes: Mapping[str, Any]
    needed_bytes: int
    host_bytes: int
    time: StepTime
    cost: str


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One setting, changed alone.

    Args:
        changes: As in YAML.
        trial: The step with it.
        time: Of that step, where a GPU was named.
        keeps_result: Whether the run computes the same, up to rounding.
    """

    changes: Mapping[str, Any]
    trial: Trial
    time: StepTime | None
    keeps_result: bool


def find_nearest(candidates: Sequence[Candidate], trials: Trials, hardware: Hardware, device_bytes: int) -> list[Near]:
    """Return up to three settings with which a step fits, the nearest first.

    First what computes the same on the same GPUs, fewest changes first; then more GPUs; then another training; then
    shorter rows. What has all changes of a nearer one, and more, is left out.

    Args:
        candidates: Of a search, the configured one first: that is no answer, though it may fit by the closed form where
            a trace says that it does not.
        trials: Of the same step.
        hardware: To estimate times for.
        device_bytes: Memory of a GPU.
    """
    fitting = [candidate for candidate in candidates if candidate.fits and candidate.changes]
    fitting.sort(key=lambda candidate: (len(candidate.changes), candidate.time.step_s))

    def list_all() -> Iterator[Near]:
        yield from (_describe(c, c.changes, c.time, "trains the same") for c in fitting if c.keeps_result)
        yield from _try_more_ranks(trials, hardware, device_bytes)
        yield from (_describe(c, c.changes, c.time, "another training") for c in fitting if not c.keeps_result)
        yield from _try_shorter_rows(trials, hardware, device_bytes)

    return list(islice(_drop_longer(list_all()), NUM_NEAREST))


def list_knobs(trials: Trials, hardware: Hardware | None) -> list[Knob]:
    """Return what each setting alone would change, the one that takes least memory first.

    Args:
        trials: Of the configured step, and of variants with other models.
        hardware: To estimate times for; ``None`` leaves them out.
    """
    found = []
    for number, settings in _list_single(trials):
        try:
            trial = trials.estimate(settings, number=number)
        except (ConfigError, ValueError):  # what cannot be traced, or not set together, is no knob
            continue
        found.append(
            Knob(
                changes=trial.changes,
                trial=trial,
                time=None if hardware is None else trial.estimate_time(hardware),
                keeps_result=not {"model.lora", "model.quantization"} & trial.changes.keys(),
            )
        )
    return sorted(found, key=lambda knob: knob.trial.peak_bytes)


def _drop_longer(found: Iterator[Near]) -> Iterator[Near]:
    kept: list[Near] = []
    for near in found:
        if not any(before.changes.items() <= near.changes.items() for before in kept):
            kept.append(near)
            yield near


def _describe(found: Candidate | Trial, changes: Mapping[str, Any], time: StepTime, cost: str) -> Near:
    return Near(changes=changes, needed_bytes=found.needed_bytes, host_bytes=found.host_bytes, time=time, cost=cost)


def _try_more_ranks(trials: Trials, hardware: Hardware, device_bytes: int) -> Iterator[Near]:
    """Yield the smallest number of GPUs that is enough, doubling those of a node, or else the nodes."""
    nodes, per_node = trials.ranks.num_nodes, trials.ranks.per_node
    changes: dict[str, int] = {}
    while 2 * per_node <= _MOST_DEVICES or (per_node >= _MOST_DEVICES and 2 * nodes <= _MOST_NODES):
        if 2 * per_node <= _MOST_DEVICES:
            changes["devices"] = per_node = 2 * per_node
        else:
            changes["nodes"] = nodes = 2 * nodes
        try:
            trial = trials.estimate(ranks=Ranks(num_nodes=nodes, per_node=per_node))
            time = trial.estimate_time(hardware)
        except ValueError:  # a mesh with numbers, a global batch that they cannot share, or no link between nodes
            return
        if trial.needed_bytes <= device_bytes:
            cost = "trains the same" if trials.global_batch_size else "trains the same, in larger steps"
            yield _describe(trial, changes, time, cost)
            return


def _try_shorter_rows(trials: Trials, hardware: Hardware, device_bytes: int) -> Iterator[Near]:
    try:
        limit = find_limits(trials, "seq_length", device_bytes, hardware)[0]
    except NoEstimateError:
        return
    if limit.value is not None and limit.time is not None:
        yield _describe(limit.trial, {"data.seq_length": limit.value}, limit.time, "rows are cut or split")


def _list_single(trials: Trials) -> Iterator[tuple[int, Settings]]:
    given = trials.settings
    recompute = given.activation_checkpointing
    if any(unit.kind == "block" for unit in trials.estimate().model.units):
        for mode in ("none", "selective", "full"):
            other = ActivationCheckpointing(mode=mode)
            if other != recompute:
                yield 0, replace(given, activation_checkpointing=other)
    if trials.ranks.resolve(given.mesh).num_shards > 1:
        value = given.sharding.reshard_after_forward is not True
        sharding = replace(given.sharding, reshard_after_forward=value, reshard_after_backward=True)
        yield 0, replace(given, sharding=sharding)
    if trials.can_offload:
        yield 0, replace(given, cpu_offload=CPUOffload())
    for number, (_, changes) in enumerate(trials.steps):
        if changes and ("model.loss_chunks" not in changes or len(changes) == 1):  # one thing at a time
            yield number, given
