"""The same training on other machines: more nodes, one card, copies in place of shards, other GPUs; and its cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from lit_fsdp.errors import ConfigError
from lit_fsdp.planning.estimate import Hardware
from lit_fsdp.planning.step_parts import Ranks
from lit_fsdp.planning.timing.hardware import GPUS, Gpu, find_gpu, suggest_gpus
from lit_fsdp.planning.timing.links import choose_links
from lit_fsdp.planning.timing.step_time import StepTime
from lit_fsdp.planning.trials import MODEL_ERROR, Trial, Trials
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
from lit_fsdp.sharding.mesh import Mesh
from lit_fsdp.sharding.settings import Settings

_NODE_SIZES = (1, 2, 4, 8)
_HOUR_S, _MILLION = 3600, 10**6


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A step on some GPUs.

    Args:
        gpu: Of every rank.
        trial: With the settings that suit them best.
        time: Of that step.
        fits: Whether it does.
        cost: Of a million tokens, in the currency of the prices; ``None`` without a price.
    """

    gpu: Gpu
    trial: Trial
    time: StepTime
    fits: bool
    cost: float | None

    @property
    def gpu_hours(self) -> float:
        """Of a million tokens, all GPUs together."""
        return count_gpu_hours(self.time)


def count_gpu_hours(time: StepTime) -> float:
    """Return the hours that all GPUs together take for a million tokens."""
    return _MILLION / time.tokens_per_s_per_gpu / _HOUR_S


def read_prices(path: Path) -> dict[Gpu, float]:
    """Return the price of an hour of each GPU, from a YAML file such as ``{RTX 4090: 0.35, H100 SXM: 2.5}``.

    Raises:
        ConfigError: It is no such file; with the line that is wrong, as far as that is known.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"prices: got {path}: {error.strerror}: expected a YAML file, see docs/planning.md") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"prices: {path}: not valid YAML: {' '.join(str(error).split())[:150]}") from None
    if not isinstance(content, Mapping) or not content:
        raise ConfigError(f"prices: {path}: expected names of GPUs with the price of an hour, such as RTX 4090: 0.35")
    prices: dict[Gpu, float] = {}
    for name, price in content.items():
        gpu = find_gpu(str(name))
        if gpu is None:
            raise ConfigError(f"prices: {path}: {name!r}: no such GPU is known: nearest: {_join_near(str(name))}")
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price < float("inf"):
            raise ConfigError(f"prices: {path}: {name}: got {price!r}: expected the price of an hour, such as 0.35")
        if gpu in prices:
            raise ConfigError(f"prices: {path}: {name!r}: {gpu.name} has a price already; leave one of them out")
        prices[gpu] = float(price)
    return prices


def scale(
    trials: Trials, all_ranks: Sequence[Ranks], hardware: Hardware, device_bytes: int, prices: Mapping[Gpu, float]
) -> list[Machine]:
    """Return the step on several numbers of ranks, each with the rows that are configured for one.

    Each has the mesh that is fastest there of those that fit: the configured one, shards over all, copies of shards in
    each node, or a copy for each rank. Numbers that do not divide among ranks of the same rows, or a global batch, are
    left out, and those of which no mesh can have ``sharding``.

    Args:
        trials: Of the step.
        all_ranks: How many.
        hardware: What connects them must reach as far as they do.
        device_bytes: Memory of a GPU.
        prices: Of an hour of a GPU, where they are known.
    """
    found = []
    for ranks in all_ranks:
        if not trials.can_share(ranks):
            continue
        if tried := [trials.estimate(settings, ranks=ranks) for settings in list_meshes(trials, ranks)]:
            found.append(choose_machine(tried, hardware, device_bytes, prices))
    return found


def choose_machine(
    trials: Sequence[Trial], hardware: Hardware, device_bytes: int, prices: Mapping[Gpu, float]
) -> Machine:
    """Return the step that is fastest of those that fit, the first one unless another is 2 % faster.

    Of steps that do not fit it is the smallest.
    """
    fitting = [trial for trial in trials if trial.needed_bytes <= device_bytes]
    chosen = min(trials, key=lambda trial: trial.needed_bytes)
    times = {id(trial): trial.estimate_time(hardware) for trial in fitting or [chosen]}
    if fitting:
        chosen = fitting[0]
        for trial in fitting[1:]:
            if times[id(chosen)].step_s > MODEL_ERROR * times[id(trial)].step_s:
                chosen = trial
    time, price = times[id(chosen)], prices.get(hardware.gpu)
    return Machine(
        gpu=hardware.gpu,
        trial=chosen,
        time=time,
        fits=bool(fitting),
        cost=None if price is None else price * count_gpu_hours(time),
    )


def list_meshes(trials: Trials, ranks: Ranks) -> Iterator[Settings]:
    """Yield the settings with each mesh that these ranks can have; ``mesh.tensor`` and ``mesh.sequence`` stay."""
    given = trials.settings
    seen = set()
    own = {"tensor": given.mesh.tensor, "sequence": given.mesh.sequence}
    others = (Mesh(**own), Mesh(replicate=-1, shard="node", **own), Mesh(replicate=-1, shard=1, **own))
    for mesh in (given.mesh, *others):
        try:
            sizes = ranks.resolve(mesh)
            given.sharding.check(sizes.num_shards)
        except ValueError:  # a mesh with numbers is of one number of ranks
            continue
        if sizes not in seen:
            seen.add(sizes)
            yield replace(given, mesh=mesh)


def find_machines(trials: Trials, prices: Mapping[Gpu, float]) -> list[Machine]:
    """Return, for one node of each GPU, the smallest number of cards that the step fits on, and the cheapest number.

    The cheapest first, by the cost of a million tokens; without prices the least memory in all first, and of equals
    the fastest. The training stays the same: mesh, recomputation and the chunks of the loss may change.

    Args:
        trials: Of the step.
        prices: Of an hour of a GPU; without any, all GPUs are tried.
    """
    sizes = [size for size in _NODE_SIZES if trials.can_share(Ranks(num_nodes=1, per_node=size))]
    by_size = {size: list(_list_settings(trials, Ranks(num_nodes=1, per_node=size))) for size in sizes}
    found: list[Machine] = []
    float8 = trials.settings.float8
    needs_float8 = float8 is not None and not float8.emulate
    for gpu in prices or GPUS:
        if needs_float8 and not gpu.has_float8:
            continue
        own = []
        device_bytes = round(gpu.usable_gib * 2**30)
        for size, steps in by_size.items():
            hardware = Hardware(gpu=gpu, links=choose_links(gpu, size))
            try:
                machine = choose_machine(steps, hardware, device_bytes, prices)
            except ValueError:  # it has no bfloat16
                continue
            if machine.fits:
                own.append(machine)
        if own:
            cheapest = min(own, key=lambda machine: machine.gpu_hours)
            found += [own[0], *([cheapest] if cheapest is not own[0] else [])]
    if prices:
        return sorted(found, key=lambda machine: machine.cost or 0.0)
    return sorted(found, key=lambda m: (m.trial.ranks.world_size * m.gpu.memory_gib, m.time.step_s))


def _list_settings(trials: Trials, ranks: Ranks) -> Iterator[Trial]:
    """Yield steps that train the same on these ranks, as configured first."""
    number = trials.find_chunked_loss()
    for settings in list_meshes(trials, ranks):
        own = settings.activation_checkpointing
        recomputes = [own]
        if own == ActivationCheckpointing(mode=own.mode):
            recomputes += [ActivationCheckpointing(mode=mode) for mode in ("none", "full") if mode != own.mode]
        for recompute in recomputes:
            tried = replace(settings, activation_checkpointing=recompute)
            for variant in (0, *([] if number is None else [number])):
                yield trials.estimate(tried, number=variant, ranks=ranks)


def _join_near(name: str) -> str:
    return ", ".join(suggest_gpus(name))
