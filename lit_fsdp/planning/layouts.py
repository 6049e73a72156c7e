"""Whether more cards help: one training on one card, as copies, as shards and between, by what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lit_fsdp.planning.estimate import Hardware
from lit_fsdp.planning.machines import list_meshes
from lit_fsdp.planning.plan_report import describe_time
from lit_fsdp.planning.search.search import format_changes
from lit_fsdp.planning.step_parts import Ranks
from lit_fsdp.planning.timing.step_time import MeasuredSpeed, StepTime, count_update_bytes
from lit_fsdp.planning.trials import MODEL_ERROR, Trial, Trials
from lit_fsdp.reporting.sections import Section, Table
from lit_fsdp.sharding.low_bit import GatherBits, ReduceBits
from lit_fsdp.sharding.mesh import Mesh
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.shard import check_wire

_GIB = 2**30
_BITS: tuple[tuple[GatherBits | None, ReduceBits | None], ...] = ((None, 16), (None, 8), (8, None), (8, 16), (8, 8))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to train on the cards that there are, estimated.

    Args:
        trial: The step, with the settings that make it of the configured one.
        time: Of an optimizer step.
        fits: Whether a card has the memory for it.
        rounds: Whether it sends fewer bits than configured: what is sent is rounded.
    """

    trial: Trial
    time: StepTime
    fits: bool
    rounds: bool = False

    @property
    def name(self) -> str:
        """The mesh in words."""
        sizes = self.trial.ranks.resolve(self.trial.settings.mesh)
        if self.trial.ranks.world_size == 1:
            return "one card"
        if sizes.num_shards == 1:
            return f"{sizes.replicate} copies"
        if sizes.replicate == 1:
            return f"{sizes.num_shards} shards"
        return f"{sizes.replicate} copies of {sizes.num_shards} shards"


def derive_speed(trial: Trial, *, compute_s: float, optimizer_s: float, other_s: float = 0.0) -> MeasuredSpeed:
    """Return what a rank does, from the seconds of a step that was measured.

    Args:
        trial: That step.
        compute_s: Of forward and backward, without waiting for other ranks.
        optimizer_s: Of the optimizer and clipping.
        other_s: Of the rest.
    """
    model, sizes = trial.model, trial.ranks.resolve(trial.settings.mesh)
    itemsize = max((p.element_size() for p in model.module.parameters() if p.requires_grad), default=4)
    num_parts = sizes.num_shards * sizes.tensor
    num_bytes = count_update_bytes(model.units, model.optimizer, num_shards=num_parts, itemsize=itemsize)
    return MeasuredSpeed(
        flops_per_s=trial.cost.flops.hardware / compute_s,
        update_bytes_per_s=num_bytes / optimizer_s,
        other_s=other_s,
    )


def compare_layouts(trials: Trials, ranks: Ranks, hardware: Hardware, device_bytes: int | None) -> list[Layout]:
    """Return the step on one card, and in each way on all of them; the simplest of each mesh first.

    Every rank keeps its rows, so the global batch grows with the ranks unless it is a setting. Of each mesh that
    shards, fewer bits are tried with what is fastest there. What a model cannot do is left out.

    Args:
        trials: Of the configured step.
        ranks: All cards.
        hardware: What was measured of them, and of what connects them.
        device_bytes: Memory of a card; ``None`` where that is no limit.

    Raises:
        ValueError: There is no link between nodes.
    """

    def estimate(settings: Settings, own: Ranks, *, rounds: bool = False) -> Layout:
        trial = trials.estimate(settings, ranks=own)
        fits = device_bytes is None or trial.needed_bytes <= device_bytes
        return Layout(trial=trial, time=trial.estimate_time(hardware), fits=fits, rounds=rounds)

    given = trials.settings
    accumulates = trials.estimate().num_micro_batches > 1
    one = replace(given, mesh=Mesh(), sharding=given.sharding.keep_least())
    alone = Ranks(num_nodes=1, per_node=1)
    found = [estimate(one, alone)]
    for settings in list_meshes(trials, ranks) if ranks.world_size > 1 else ():
        is_split = ranks.resolve(settings.mesh).num_shards > 1
        kept = [estimate(tried, ranks) for tried in _list_kept(settings, is_split=is_split, accumulates=accumulates)]
        found += kept
        fastest = min(kept, key=lambda layout: (not layout.fits, layout.time.step_s)).trial
        for tried in _list_rounded(fastest, given) if is_split else ():
            found.append(estimate(tried, ranks, rounds=True))
    return found


def choose_layout(layouts: Sequence[Layout], *, rounds: bool) -> Layout | None:
    """Return the layout that trains most tokens a second of those that fit; ``None`` if none does.

    Of those that the error of the estimates does not tell from it, the first: one that keeps all bits, if there is one.
    Of its mesh, the fastest as planned: it mostly sends least, and there is memory for it.

    Args:
        layouts: From :func:`compare_layouts`.
        rounds: Whether fewer bits than configured may be sent.
    """
    fitting = [layout for layout in layouts if layout.fits and (rounds or not layout.rounds)]
    best = max((layout.time.tokens_per_s for layout in fitting), default=0.0)
    near = [layout for layout in fitting if MODEL_ERROR * layout.time.tokens_per_s >= best]
    first = min(near, key=lambda layout: layout.rounds, default=None)
    if first is None or first.rounds:
        return first
    alike = [layout for layout in near if layout.name == first.name and not layout.rounds]
    return max(alike, key=lambda layout: layout.time.tokens_per_s)


def make_layout_section(layouts: Sequence[Layout], device_bytes: int | None) -> Section:
    """Return the comparison: all that keep all bits, and the fastest of each mesh with fewer."""
    first = layouts[0].time
    shown = [layout for layout in layouts if not layout.rounds]
    for name in dict.fromkeys(layout.name for layout in layouts if layout.rounds):
        fewer = [layout for layout in layouts if layout.rounds and layout.name == name]
        shown.append(max(fewer, key=lambda layout: (layout.fits, layout.time.tokens_per_s)))
    rows = []
    for number, layout in enumerate(shown, start=1):
        time = layout.time
        rows.append(
            [
                f"{number}  {layout.name}",
                f"{layout.trial.needed_bytes / _GIB:.2f}",
                *([] if device_bytes is None else ["yes" if layout.fits else "NO"]),
                f"{time.step_s:.3g}",
                f"{time.exposed_s:.3g}",
                f"{1e6 * time.step_s / (time.tokens * time.num_ranks):.3g}",
                f"{time.tokens_per_s / first.tokens_per_s:.2f}",
            ]
        )
    columns = ["", "needs GiB", *["fits"] * (device_bytes is not None), "step s", "waits s", "us/token", "speed-up"]
    table = Table(title="Each card keeps its rows; speed-up in tokens a second", columns=columns, rows=rows)
    notes = [f"{i:>4}  {format_changes(layout.trial.changes)}" for i, layout in enumerate(shown, start=1)]
    numbers = {"layouts": [describe_layout(layout) for layout in layouts]}
    return Section(title="Will more cards help?", name="layouts", tables=[table], notes=notes, numbers=numbers)


def describe_layout(layout: Layout) -> dict[str, Any]:
    """Return the numbers for programs."""
    trial = layout.trial
    return {
        "name": layout.name,
        "nodes": trial.ranks.num_nodes,
        "devices": trial.ranks.per_node,
        "changes": dict(trial.changes),
        "rounds": layout.rounds,
        "fits": layout.fits,
        "peak_bytes": trial.peak_bytes,
        "needed_bytes": trial.needed_bytes,
        "time": {name: value for name, value in describe_time(layout.time).items() if name != "mfu_pct"},
    }


def _list_kept(settings: Settings, *, is_split: bool, accumulates: bool) -> Iterator[Settings]:
    """Yield settings by what is kept between uses: gathered parameters, and gradients over micro-batches."""
    given = settings.sharding
    freed = replace(given, reshard_after_forward=True, reshard_after_backward=True)
    kept = replace(given, reshard_after_forward=False, reshard_after_backward=not accumulates)
    shardings = dict.fromkeys([given, *([freed, kept] if is_split else [])])
    for holds in dict.fromkeys([given.no_sync, False, True]) if accumulates else [False]:
        for sharding in shardings:
            yield replace(settings, sharding=replace(sharding, no_sync=holds))


def _list_rounded(fastest: Trial, given: Settings) -> Iterator[Settings]:
    """Yield settings that send fewer bits than configured, where the model can."""
    configured = (given.sharding.gather_bits or 32, given.sharding.reduce_bits or 32)
    model = fastest.model
    for gather_bits, reduce_bits in _BITS:
        own = (gather_bits or 32, reduce_bits or 32)
        if own == configured or any(bits > before for bits, before in zip(own, configured, strict=True)):
            continue
        sharding = replace(fastest.settings.sharding, gather_bits=gather_bits, reduce_bits=reduce_bits)
        try:
            sharding.check(fastest.ranks.resolve(fastest.settings.mesh).num_shards)
            check_wire(model.module, model.units, sharding, model.dtypes.build_policy())
        except ValueError:  # such as of 4-bit weights, which cannot be rounded
            continue
        yield replace(fastest.settings, sharding=sharding)
