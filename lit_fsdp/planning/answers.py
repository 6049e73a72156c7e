"""Answers about a plan as tables: for the terminal, the page and ``plan.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lit_fsdp.planning.limits import Limit, Size
from lit_fsdp.planning.machines import Machine
from lit_fsdp.planning.nearest import Knob, Near
from lit_fsdp.planning.plan_report import choose_unit, describe_time
from lit_fsdp.planning.search.search import format_changes
from lit_fsdp.planning.timing.step_time import StepTime
from lit_fsdp.planning.trials import Trial
from lit_fsdp.reporting.sections import Section, Table, print_table

_GIB = 2**30
_TITLES: Mapping[Size, tuple[str, str]] = {
    "seq_length": ("Longest rows that fit", "the model has no more positions, or more were not tried"),
    "batch_size": ("Largest micro-batch of a rank that fits", "more were not tried"),
}
_MOST_MACHINES = 12


def print_section(section: Section) -> None:
    """Print tables, and below them what their numbers stand for."""
    for table in section.tables:
        print_table(table)
    for note in section.notes:
        print(note)
    print()


def make_limit_section(size: Size, limits: Sequence[Limit], device_bytes: int) -> Section:
    """Return how large rows or micro-batches may be."""
    title, bound = _TITLES[size]
    has_time = any(limit.time is not None for limit in limits)
    has_host = any(limit.trial.host_bytes for limit in limits)
    rows, numbers = [], []
    for number, limit in enumerate(limits, start=1):
        value = "none" if limit.value is None else f"{limit.value:,}" + " (all)" * limit.is_bound
        rows.append(
            [
                str(number),
                value,
                f"{limit.trial.needed_bytes / _GIB:.2f}",
                *([_format_gib(limit.trial.host_bytes)] if has_host else []),
                *(_format_speed(limit.time) if has_time else []),
            ]
        )
        described = {"value": limit.value, "is_bound": limit.is_bound, **_describe(limit.trial, limit.time)}
        numbers.append(described)
    columns = ["#", f"data.{size}", "needs GiB", *(["host GiB/rank"] if has_host else [])]
    columns += ["step s", "tokens/s"] if has_time else []
    notes = _number([limit.changes for limit in limits])
    if any(limit.is_bound for limit in limits):
        notes.append(f"(all): {bound}; memory would allow more")
    if any(limit.value is None for limit in limits):
        notes.append("none: not even the smallest fits, whose memory is shown")
    table = Table(title=f"{title} {device_bytes / _GIB:.2f} GiB, to 1 %", columns=columns, rows=rows)
    name = "longest" if size == "seq_length" else "largest"
    return Section(title=title, name=name, tables=[table], notes=notes, numbers={"limits": numbers})


def make_scale_section(machines: Sequence[Machine]) -> Section:
    """Return what more nodes or GPUs bring, relative to the first row."""
    first = machines[0]
    columns = ["nodes x GPUs", "#", "needs GiB", "fits", "step s", "tokens/s", "speed-up", "GPU-h/M tokens"]
    has_cost = first.cost is not None
    kinds = list(dict.fromkeys(format_changes(m.trial.changes) for m in machines))
    rows = []
    for machine in machines:
        ranks, speed = machine.trial.ranks, machine.time.tokens_per_s / first.time.tokens_per_s
        rows.append(
            [
                f"{ranks.num_nodes} x {ranks.per_node}",
                str(1 + kinds.index(format_changes(machine.trial.changes))),
                f"{machine.trial.needed_bytes / _GIB:.2f}",
                "yes" if machine.fits else "NO",
                *_format_speed(machine.time),
                f"{speed:.2f}",
                *_format_cost(machine),
            ]
        )
    title = f"More {first.gpu.name}, each with the rows that are configured for one"
    table = Table(title=title, columns=[*columns, *["cost/M tokens"] * has_cost], rows=rows)
    numbers = {"machines": [_describe_machine(machine) for machine in machines]}
    notes = [f"{number:>4}  {kind}" for number, kind in enumerate(kinds, start=1)]
    return Section(title="More GPUs", name="scaling", tables=[table], notes=notes, numbers=numbers)


def make_machine_section(machines: Sequence[Machine], *, has_prices: bool) -> Section:
    """Return which GPUs would do: the smallest number of each in one node, and the cheapest."""
    title = "Cheapest GPUs that fit" if has_prices else "Smallest GPUs that fit, by memory of all"
    if not machines:
        note = "No GPU in one node of up to 8 fits as configured; fewer bits, adapters or offload may"
        return Section(title=title, name="machines", notes=[note], numbers={"machines": []})
    shown = machines[:_MOST_MACHINES]
    rows = []
    for number, machine in enumerate(shown, start=1):
        size = machine.trial.ranks.per_node
        needed = f"{machine.trial.needed_bytes / _GIB:.2f} of {machine.gpu.usable_gib:g}"
        cells = [str(number), f"{size} x {machine.gpu.name}", needed, *_format_speed(machine.time)]
        rows.append([*cells, *_format_cost(machine)])
    columns = ["#", "GPUs", "needs GiB", "step s", "tokens/s", "GPU-h/M tokens", *["cost/M tokens"] * has_prices]
    notes = _number([machine.trial.changes for machine in shown])
    if rest := len(machines) - len(shown):
        notes.append(f"{rest} more are in plan.json, with --out")
    if not has_prices:
        notes.append("No prices: --prices FILE sorts by the cost of a million tokens")
    table = Table(title=title, columns=columns, rows=rows)
    numbers = {"machines": [_describe_machine(machine) for machine in machines]}
    return Section(title=title, name="machines", tables=[table], notes=notes, numbers=numbers)


def make_nearest_section(found: Sequence[Near], device_bytes: int) -> Section:
    """Return with which settings a step fits that does not."""
    title = "Nearest settings that fit"
    if not found:
        note = f"Nothing that was tried fits {device_bytes / _GIB:.2f} GiB: take a smaller model, or larger GPUs"
        return Section(title=title, name="nearest", notes=[note], numbers={"settings": []})
    rows = [
        [str(i), f"{near.needed_bytes / _GIB:.2f}", _format_gib(near.host_bytes), *_format_speed(near.time), near.cost]
        for i, near in enumerate(found, start=1)
    ]
    columns = ["#", "needs GiB", "host GiB/rank", "step s", "tokens/s", "in return"]
    numbers = {
        "settings": [
            {
                "changes": dict(near.changes),
                "needed_bytes": near.needed_bytes,
                "host_bytes": near.host_bytes,
                "time": describe_time(near.time),
            }
            for near in found
        ]
    }
    notes = _number([near.changes for near in found])
    return Section(
        title=title,
        name="nearest",
        tables=[Table(title=title, columns=columns, rows=rows)],
        notes=notes,
        numbers=numbers,
    )


def make_knob_section(configured: Trial, knobs: Sequence[Knob], time: StepTime | None) -> Section:
    """Return what each setting alone saves."""
    size, unit = choose_unit(configured.peak_bytes)
    rows = []
    for knob in knobs:
        saved = (configured.peak_bytes - knob.trial.peak_bytes) / size
        cells = [format_changes(knob.changes), f"{knob.trial.peak_bytes / size:.2f}", f"{saved:+.2f}"]
        if time is not None and knob.time is not None:
            cells.append(f"{knob.time.step_s / time.step_s:.2f}")
        rows.append([*cells, "yes" if knob.keeps_result else "no"])
    columns = [
        "setting, alone",
        f"peak {unit}",
        f"saves {unit}",
        *["time of now"] * (time is not None),
        "trains the same",
    ]
    table = Table(title="", columns=columns, rows=rows)
    numbers = {
        "knobs": [
            {**_describe(knob.trial, knob.time), "saved_bytes": configured.peak_bytes - knob.trial.peak_bytes}
            for knob in knobs
        ]
    }
    return Section(title="What each setting saves", name="knobs", tables=[table], numbers=numbers)


def describe_what_if(configured: StepTime, others: Sequence[Machine]) -> list[str]:
    """Return lines that say how one card, and copies in place of shards, would do."""
    lines = []
    for machine in others:
        ranks = machine.trial.ranks
        what = "one card" if ranks.world_size == 1 else f"{ranks.world_size} copies, one on each card"
        needed = f"needs {machine.trial.needed_bytes / _GIB:.2f} GiB"
        if not machine.fits:
            lines.append(f"what if: {what}: does not fit, {needed}")
            continue
        share = machine.time.tokens_per_s / configured.tokens_per_s
        lines.append(
            f"what if: {what}: {machine.time.tokens_per_s:,.0f} tokens/s, {share:.2f} of the {configured.num_ranks} "
            f"cards as configured, {needed}"
        )
    return lines


def _number(changes: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{number:>4}  {format_changes(own)}" for number, own in enumerate(changes, start=1)]


def _describe(trial: Trial, time: StepTime | None) -> dict[str, Any]:
    return {
        "changes": dict(trial.changes),
        "peak_bytes": trial.peak_bytes,
        "needed_bytes": trial.needed_bytes,
        "host_bytes": trial.host_bytes,
        "time": None if time is None else describe_time(time),
    }


def _describe_machine(machine: Machine) -> dict[str, Any]:
    ranks = machine.trial.ranks
    return {
        "gpu": machine.gpu.name,
        "nodes": ranks.num_nodes,
        "devices": ranks.per_node,
        "fits": machine.fits,
        "gpu_hours_per_million_tokens": machine.gpu_hours,
        "cost_per_million_tokens": machine.cost,
        **_describe(machine.trial, machine.time),
    }


def _format_cost(machine: Machine) -> list[str]:
    return [f"{machine.gpu_hours:.3g}", *([] if machine.cost is None else [f"{machine.cost:.3g}"])]


def _format_speed(time: StepTime | None) -> list[str]:
    return ["-", "-"] if time is None else [f"{time.step_s:.3g}", f"{time.tokens_per_s:,.0f}"]


def _format_gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f}" if num_bytes else "-"
