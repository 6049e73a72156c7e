"""A plan for people, tables in the terminal and a picture; and the same numbers for programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_fsdp.planning.plan import Plan
from lit_fsdp.planning.step_parts import Replay
from lit_fsdp.planning.timing.step_time import StepTime
from lit_fsdp.profiling.memory import KINDS
from lit_fsdp.reporting.memory_section import make_unit_table, plot_step
from lit_fsdp.reporting.plots import write_png
from lit_fsdp.reporting.sections import Plot, Section, Table, print_table

_GIB = 2**30
_MEANINGS = {
    "parameters": "this rank's shards, and buffers",
    "optimizer_state": "of these shards",
    "gradients": "of these shards, and unreduced ones",
    "gathered": "parameters of the units in use",
    "communication": "buffers of collectives",
    "activations": "made in forward, also when it is computed again",
    "rest": "temporaries of backward, optimizer and kernels; the batch",
}


def print_report(plan: Plan, device_bytes: int | None, *, other_gpus: Sequence[str] = ()) -> None:
    """Print what a step takes, and whether it fits.

    ``other_gpus`` could have been meant as well as the one whose time is shown.
    """
    print(f"parameters: {plan.num_weights:,}, of which {plan.num_trained:,} train")
    print_table(_make_memory_table(plan))
    if plan.memory.host_by_kind or plan.staged_bytes:
        print_table(_make_host_table(plan))
    if plan.activations:
        print_table(_make_activation_table(plan))
    print_table(_make_communication_table(plan))
    if plan.time is not None:
        print_table(_make_time_table(plan.time, other_gpus))
        print(describe_speed(plan.time))
    if plan.closed_form_bytes is not None and plan.engine != "closed form":
        difference = 100 * (plan.closed_form_bytes / plan.memory.peak.num_bytes - 1)
        size, name = choose_unit(plan.memory.peak.num_bytes)
        print(f"closed form: {plan.closed_form_bytes / size:.2f} {name}, {difference:+.1f} %")
    for note in plan.notes:
        print(f"note: {note}")
    if plan.replay is not None:
        print(describe_replay(plan.replay))
    if device_bytes is None:
        print(
            f"not counted: CUDA context, cuBLAS and NCCL, about {plan.outside_bytes / _GIB:.2f} GiB of each GPU; what "
            f"the allocator takes beside tensors, {100 * (plan.headroom - 1):.0f} %"
        )
    else:
        print(describe_fit(plan, device_bytes))


def describe_fit(plan: Plan, device_bytes: int) -> str:
    """Return the line that says whether a step fits a device."""
    left_bytes = device_bytes - plan.needed_bytes
    fits, sign = ("yes", "left") if left_bytes >= 0 else ("NO", "missing")
    replayed = "" if plan.replay is None else " (replayed)"
    return (
        f"fits: {fits}: {abs(left_bytes) / _GIB:.2f} GiB {sign}: "
        f"{plan.memory.peak.num_bytes / _GIB:.2f} GiB x {plan.headroom:.2f} for the allocator{replayed} + "
        f"{plan.outside_bytes / _GIB:.2f} GiB for CUDA and NCCL = {plan.needed_bytes / _GIB:.2f} GiB of "
        f"{device_bytes / _GIB:.2f} GiB"
    )


def describe_replay(replay: Replay) -> str:
    """Return the line that says what the allocator takes where it has more than it needs."""
    size, name = choose_unit(replay.reserved_bytes)
    least, steady, reserved, expandable = (
        f"{num_bytes / size:.2f} {name}"
        for num_bytes in (replay.least_bytes, replay.steady_bytes, replay.reserved_bytes, replay.expandable_bytes)
    )
    slow = f", {replay.num_retries} times a step waiting until free memory is given back; without that from {steady}"
    return (
        f"allocator, replayed: works from {least}{slow if replay.num_retries else ''}; where there is room it takes "
        f"{reserved}, with expandable_segments {expandable}"
    )


def describe_speed(time: StepTime) -> str:
    """Return the line that says how fast a step is, and where anything is sent, when that takes longest."""
    said = (
        f"speed: {time.tokens_per_s:,.0f} tokens/s, {time.tokens_per_s_per_gpu:,.0f} of each GPU, MFU "
        f"{time.mfu_pct:.1f} %, bound by {time.bound}"
    )
    if not time.communication_s:
        return said
    return (
        f"{said}; with fewer than {time.crossover_tokens:,.0f} tokens in a micro-batch of a rank, communication takes "
        "longer than compute"
    )


def describe_plan(plan: Plan, device_bytes: int | None) -> dict[str, Any]:
    """Return the numbers for programs, as documented in docs/planning.md."""
    peak, ranks = plan.memory.peak, plan.ranks
    described: dict[str, Any] = {
        "version": 1,
        "engine": plan.engine,
        "ranks": {
            "world_size": ranks.world_size,
            "nodes": ranks.num_nodes,
            "devices": ranks.per_node,
            "replicas": plan.num_replicas,
            "shards": plan.num_shards,
            "tensor": plan.num_split,
        },
        "micro_batches": plan.num_micro_batches,
        "model": {"weights": plan.num_weights, "trained": plan.num_trained},
        "memory": {
            "peak_bytes": peak.num_bytes,
            "peak_phase": peak.phase,
            "peak_unit": peak.unit,
            "peak_bytes_by_kind": {kind: peak.by_kind.get(kind, 0) for kind in KINDS},
            "peak_bytes_by_unit": {unit: dict(kinds) for unit, kinds in peak.by_unit.items()},
            "largest_bytes_by_kind": {kind: max(values) for kind, values in plan.memory.by_kind.items()},
            "quantized_bytes": plan.quantized_bytes,
            "replay": None if plan.replay is None else vars(plan.replay),
            "peak_activation_bytes_by_part": dict(plan.activations),
        },
        "host": {
            "bytes_by_kind": dict(plan.memory.host_by_kind),
            "staged_bytes": plan.staged_bytes,
            "bytes": _count_host_bytes(plan),
        },
        "communication": {
            "bytes_per_step": plan.sum_communication(),
            "collectives_per_step": {
                "gather": plan.collectives.gathers,
                "reduce_scatter": plan.collectives.reduce_scatters,
                "all_reduce": plan.collectives.all_reduces,
                **{name: len(sizes) for name, sizes in plan.sizes_of_exchanges.items()},
            },
            "units": [vars(unit) for unit in plan.communication],
        },
        "closed_form_peak_bytes": plan.closed_form_bytes,
        "flops": {"model": plan.flops.model, "hardware": plan.flops.hardware},
        "time": None if plan.time is None else describe_time(plan.time),
        "device": None,
        "notes": list(plan.notes),
    }
    if device_bytes is not None:
        described["device"] = {
            "memory_bytes": device_bytes,
            "needed_bytes": plan.needed_bytes,
            "left_bytes": device_bytes - plan.needed_bytes,
            "fits": plan.needed_bytes <= device_bytes,
            "headroom_factor": plan.headroom,
            "outside_bytes": plan.outside_bytes,
        }
    return described


def describe_time(time: StepTime) -> dict[str, Any]:
    """Return the numbers for programs."""
    return {
        "step_s": time.step_s,
        "compute_s": time.compute_s,
        "communication_s": time.communication_s,
        "exposed_communication_s": time.exposed_s,
        "optimizer_s": time.optimizer_s,
        "communication_s_by_collective": dict(time.by_collective),
        "tokens_per_s": time.tokens_per_s,
        "tokens_per_s_per_gpu": time.tokens_per_s_per_gpu,
        "mfu_pct": time.mfu_pct,
        "bound": time.bound,
        "crossover_tokens": time.crossover_tokens,
    }


def draw_plan(plan: Plan, device_bytes: int | None, path: Path) -> None:
    """Write the memory over the step as a picture, with what tensors may take of a device, where that is known."""
    write_png(plot_plan(plan, device_bytes), path)


def plot_plan(plan: Plan, device_bytes: int | None) -> Plot:
    """Return the memory over the step by kind."""
    title = f"Planned step, rank 0 of {plan.ranks.world_size}"
    limit = None if device_bytes is None else max(int((device_bytes - plan.outside_bytes) / plan.headroom), 0)
    x_label = "unit after unit" if plan.engine == "closed form" else "operator"
    return plot_step(plan.memory, title=title, x_label=x_label, limit_bytes=limit)


def make_memory_section(plan: Plan, device_bytes: int | None) -> Section:
    """Return the memory of a rank: over the step, by kind, by unit, and where activations are from."""
    tables = [_make_memory_table(plan)]
    peak = plan.memory.peak
    if peak.by_unit:
        size, name = choose_unit(peak.num_bytes)
        tables.append(make_unit_table(peak, f"FSDP units at the peak, {name}", size))
    if plan.activations:
        tables.append(_make_activation_table(plan))
    if plan.memory.host_by_kind or plan.staged_bytes:
        tables.append(_make_host_table(plan))
    return Section(title="Memory", name="memory", tables=tables, plots=[plot_plan(plan, device_bytes)])


def make_speed_section(plan: Plan) -> Section:
    """Return what is sent, in all and by each unit, and the time of a step where a GPU was named."""
    tables = [_make_communication_table(plan)]
    if plan.time is not None:
        tables.insert(0, _make_time_table(plan.time, ()))
    sent = [unit for unit in plan.communication if unit.gather_step]
    if sent:
        size, name = choose_unit(max(unit.gather for unit in sent))
        rows = [
            [
                unit.unit,
                *(f"{number / size:.3f}" for number in (unit.gather, unit.gather_step, unit.reduce_scatter_step)),
            ]
            for unit in sent
        ]
        columns = ["unit", "one gather", "gathers of a step", "reduce-scatters of a step"]
        tables.append(Table(title=f"FSDP units, {name} at full size", columns=columns, rows=rows))
    notes = [] if plan.time is None else [describe_speed(plan.time)]
    return Section(title="Speed and communication", name="speed", tables=tables, notes=notes)


def choose_unit(num_bytes: int) -> tuple[int, str]:
    """Return the bytes of the unit that shows a number and all below it best, and its name."""
    return (2**30, "GiB") if num_bytes >= 2**28 else (2**20, "MiB")


def _make_memory_table(plan: Plan) -> Table:
    peak, ranks = plan.memory.peak, plan.ranks
    size, name = choose_unit(peak.num_bytes)
    rows = []
    for kind in KINDS:
        numbers = (peak.by_kind.get(kind, 0), max(plan.memory.by_kind[kind]))
        rows.append([kind.replace("_", " "), *(f"{number / size:.2f}" for number in numbers), _MEANINGS[kind]])
    if plan.quantized_bytes and not plan.is_offloaded:
        stored = f"{plan.quantized_bytes / size:.2f}"
        rows.insert(1, ["  of these quantized", stored, stored, "codes of 4 or 8 bits and their scales"])
    rows.append(["peak", f"{peak.num_bytes / size:.2f}", "", f"in {peak.phase}, {peak.unit}"])
    arrangement = f"{ranks.num_nodes} x {ranks.per_node} ranks, replicate {plan.num_replicas} x shard"
    arrangement += f" {plan.num_shards}" + (f" x tensor {plan.num_split}" if plan.num_split > 1 else "")
    title = f"GPU memory of a rank, {name}: {arrangement}, {plan.engine}"
    return Table(title=title, columns=["kind", "at the peak", "at its largest", "what it is"], rows=rows)


def _make_activation_table(plan: Plan) -> Table:
    total = sum(plan.activations.values())
    size, name = choose_unit(total)
    parts = sorted(plan.activations.items(), key=lambda item: -item[1])
    rows = [[part, f"{value / size:.2f}", f"{100 * value / max(total, 1):.0f}"] for part, value in parts]
    where = "" if plan.engine == "closed form" else ", by the closed form"
    return Table(title=f"Activations at the peak by part{where}", columns=["part", name, "%"], rows=rows)


def _count_host_bytes(plan: Plan) -> int:
    return sum(plan.memory.host_by_kind.values()) + plan.staged_bytes


def _make_host_table(plan: Plan) -> Table:
    total = _count_host_bytes(plan)
    size, name = choose_unit(total)
    rows = [[kind.replace("_", " "), f"{value / size:.2f}"] for kind, value in plan.memory.host_by_kind.items()]
    if plan.quantized_bytes and plan.is_offloaded:
        rows.insert(1, ["  of these quantized", f"{plan.quantized_bytes / size:.2f}"])
    if plan.staged_bytes:
        rows.append(["the copy that async_save writes", f"{plan.staged_bytes / size:.2f}"])
    rows += [["a rank", f"{total / size:.2f}"], ["a node", f"{total * plan.ranks.per_node / size:.2f}"]]
    return Table(title=f"Host memory of a rank, {name}", columns=["kind", "at its largest"], rows=rows)


def _make_communication_table(plan: Plan) -> Table:
    counts: Sequence[tuple[str, str, int]] = (
        ("all-gather of parameters", "gather", plan.collectives.gathers),
        ("reduce-scatter of gradients", "reduce_scatter", plan.collectives.reduce_scatters),
        ("all-reduce between replicas", "all_reduce", plan.collectives.all_reduces),
    )
    sums = plan.sum_communication()
    size, name = choose_unit(sum(sums.values()))
    rows = []
    for label, key, count in counts:
        largest = max((getattr(unit, key) for unit in plan.communication), default=0)
        rows.append([label, str(count), f"{sums[key] / size:.2f}", f"{largest / size:.2f}"])
    labels = {"all_to_all": "all-to-all of tokens and heads", "tensor": "sums and gathers of split layers"}
    for kind, exchanged in plan.sizes_of_exchanges.items():
        cells = [f"{num_bytes / size:.2f}" for num_bytes in (sum(exchanged), max(exchanged))]
        rows.append([labels[kind], str(len(exchanged)), *cells])
    num_calls = sum(count for *_, count in counts) + len(plan.exchanges)
    rows.append(["all", str(num_calls), f"{sum(sums.values()) / size:.2f}", ""])
    batches = f" of {plan.num_micro_batches} micro-batches" if plan.num_micro_batches > 1 else ""
    title = f"Collectives of a step{batches}, {name}"
    return Table(title=title, columns=["collective", "calls", "in a step", "largest call"], rows=rows)


def _make_time_table(time: StepTime, other_gpus: Sequence[str]) -> Table:
    factor, unit = (1, "seconds") if time.step_s >= 1 else (1000, "milliseconds")
    also = f"; also known: {', '.join(other_gpus)}" if other_gpus else ""
    parts = [
        ("step", time.step_s),
        ("  compute", time.compute_s),
        ("  communication that compute does not hide", time.exposed_s),
        ("  optimizer", time.optimizer_s),
        ("all communication", time.communication_s),
        *((f"  {kind.replace('_', ' ')}", s) for kind, s in time.by_collective.items() if s),
    ]
    rows = [[name, f"{factor * seconds:.3f}"] for name, seconds in parts]
    return Table(title=f"Time of a step on {time.gpu_name}{also}", columns=["part", unit], rows=rows)
