"""Compares the closed form with the exact trace, and the trace with torch's allocator: the peak of a training step.

    python benchmarks/plan_accuracy.py --group matrix --out benchmarks/results/plan_matrix_DATE.md
    python benchmarks/plan_accuracy.py --group large --device cuda --jobs 8 --out benchmarks/results/plan_cuda_DATE.md

Some seconds a case. The families, shapes and settings marked as held out were not looked at while the rules of the
closed form were written. The allocator is torch's, under real kernels, with collectives that do nothing, as those of
gloo take memory of their own. The group large is for GPUs: its steps take some GiB. A case that fails is named, and
the others go on; the report is written anew after each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate, groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import bitsandbytes
import torch
import transformers
from plan_cases import GROUPS, TINY, Case, list_cases
from plan_steps import make_batch, make_micro_batch, make_model, make_optimizer, make_settings
from quick_draws import draw_quickly

from lit_fsdp.adapters.layers import list_adapter_parameters
from lit_fsdp.optim.factory import build_optimizer
from lit_fsdp.planning.closed_form.engine import StepEstimate, estimate_step
from lit_fsdp.planning.closed_form.reader import UnreadableModuleError
from lit_fsdp.planning.step_parts import ModelToTrain, Ranks
from lit_fsdp.planning.trace.dry_run import TracedStep, fake_ranks, trace_training_step
from lit_fsdp.profiling.memory import KINDS, measure_states
from lit_fsdp.sharding.mesh import build_mesh
from lit_fsdp.sharding.mixed_precision import cast_parameters, read_precision
from lit_fsdp.sharding.parallelize import shard_module
from lit_fsdp.sharding.shard import find_roots, no_sync, register_steps
from lit_fsdp.sharding.wrap import plan_module
from lit_fsdp.tasks.masks import keep_branches
from lit_fsdp.weights.load import init_weights, materialize

MIB = 2**20
# On CPUs these make copies, of rows that do not divide among ranks and of 8-bit state, which their GPU kernels do not.
KERNELS = ("aten::_chunk_cat", "bitsandbytes::optimizer_update_8bit_blockwise")
# What these take for themselves and give back depends on the CPU; on GPUs, their workspaces are kept small.
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")
torch.set_num_threads(1)  # a pool of threads would not survive the fork for each measurement


def trace(case: Case, device: torch.device) -> TracedStep:
    """Return the exact trace."""
    module, settings, batch = make_model(case), make_settings(case), make_batch(case)
    with fake_ranks(case.world_size), keep_branches(batch):
        return trace_training_step(
            module,
            settings,
            batch,
            dtypes=read_precision(case.precision),
            compute_loss=lambda batch: module.step(batch),  # noqa: PLW0108  looked up when it is sharded
            build_optimizer=lambda: build_optimizer(module.parameters(), make_optimizer(case)),
            step_name="step",
            ranks_per_node=case.world_size,
            num_micro_batches=case.num_micro_batches,
            device_type=device.type,
        )


@dataclass(frozen=True)
class Allocated:
    """What torch's allocator had at most over a step, in bytes; ``reserved`` is 0 on CPUs, which reserve nothing."""

    peak: int
    reserved: int = 0


def measure(case: Case, device: torch.device) -> Allocated | None:
    """Run a step with real kernels; ``None`` for what a CPU cannot compare: with offload it is one device."""
    module, settings = make_model(case), make_settings(case)
    batch = {key: tensor.to(device) for key, tensor in make_batch(case).items()}
    if device.type == "cpu" and (settings.cpu_offload is not None or case.on_gpu or not case.is_allocated):
        return None
    with fake_ranks(case.world_size):
        sizes = {"world_size": case.world_size, "ranks_per_node": case.world_size}
        mesh = build_mesh(settings.mesh, device_type=device.type, timeout_s=60.0, **sizes)
        shard_module(module, settings, dtypes=read_precision(case.precision), mesh=mesh, device=device)
        materialize(module, device, parameter_device=torch.device("cpu") if settings.cpu_offload else None)
        register_steps(module, ["step"])
        init_weights(module.model, 0)
        optimizer = build_optimizer(module.parameters(), make_optimizer(case))

        def step() -> None:
            for i in range(case.num_micro_batches):
                is_held = settings.sharding.no_sync and i + 1 < case.num_micro_batches
                loss = module.step(batch)
                with no_sync(*(find_roots(module) if is_held else [])):
                    loss.backward()
                del loss
            optimizer.step()
            optimizer.zero_grad()

        step()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            step()
            return Allocated(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        held = sum(measure_states(module, [optimizer]).values()) + sum(t.nbytes for t in batch.values())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
    assert profiler.profiler is not None
    return Allocated(held + _find_highest(profiler.profiler.kineto_results.events()))


def _find_highest(events: Sequence[Any]) -> int:
    """Return the most bytes that were allocated at once, without what kernels take for themselves."""
    spans = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name() in KERNELS)
        for event in events
        if event.name() in (*KERNELS, *PRODUCTS)
    )
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")

    def find_span(change: tuple[int, int]) -> int | None:
        place = bisect_right(spans, (change[0], change[0])) - 1
        return place if place >= 0 and spans[place][0] < change[0] < spans[place][1] else None

    settled: list[int] = []
    for place, inside in groupby(changes, find_span):
        sizes = [num_bytes for _, num_bytes in inside]
        if place is None:
            settled += sizes
        elif not spans[place][2]:  # all that is left of it is the output
            settled.append(sum(sizes))
    return max(accumulate(settled))


def measure_alone(case: Case, device: torch.device) -> Allocated | None:
    """Run ``measure`` in a process of its own, as torch remembers layouts of fake ranks."""
    # Autograd of a CUDA build has set up threads for devices in this process: a fork could not run backward.
    with get_context("fork" if torch.version.cuda is None else "spawn").Pool(1, draw_quickly) as pool:
        return pool.apply(measure, (case, device))


def estimate(case: Case, device: torch.device) -> StepEstimate | None:
    """Return the closed form; ``None`` where it has no rules."""
    module, settings, dtypes = make_model(case), make_settings(case), read_precision(case.precision)
    cast_parameters(module, dtypes, keep=list_adapter_parameters(module))
    try:
        return estimate_step(
            ModelToTrain(
                module=module,
                units=plan_module(module, settings.wrap),
                dtypes=dtypes,
                optimizer=make_optimizer(case),
            ),
            settings,
            make_micro_batch(case),
            ranks=Ranks(num_nodes=1, per_node=case.world_size),
            num_micro_batches=case.num_micro_batches,
            device_type=device.type,
        )
    except UnreadableModuleError:
        return None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case, with all three answers."""

    case: Case
    traced: TracedStep
    estimated: StepEstimate | None
    allocated: Allocated | None
    seconds: tuple[float, float]  # of trace and closed form

    @property
    def peak(self) -> int:
        """By the trace."""
        return self.traced.memory.peak.num_bytes

    @property
    def error_pct(self) -> float | None:
        """Of the closed form against the trace."""
        return None if self.estimated is None else 100 * (self.estimated.peak.num_bytes / self.peak - 1)

    @property
    def allocator_pct(self) -> float | None:
        """Of the allocator over the trace."""
        return None if self.allocated is None else 100 * (self.allocated.peak / self.peak - 1)

    @property
    def real_pct(self) -> float | None:
        """Of the closed form over the allocator."""
        if self.estimated is None or self.allocated is None:
            return None
        return 100 * (self.estimated.peak.num_bytes / self.allocated.peak - 1)

    @property
    def reserved_ratio(self) -> float | None:
        """What the allocator reserved over what was allocated; ``None`` on CPUs."""
        found = self.allocated
        return found.reserved / found.peak if found is not None and found.reserved else None

    @property
    def moved_ratio(self) -> float | None:
        """The moved bytes of the closed form over those of the trace."""
        return None if self.estimated is None else self.estimated.moved_bytes / self.traced.moved_bytes

    def __str__(self) -> str:
        case, estimated = self.case, self.estimated
        cells = [str(case), "yes" if case.is_held_out and estimated else "", f"{self.peak / MIB:.1f}"]
        cells += (
            ["", ""] if estimated is None else [f"{estimated.peak.num_bytes / MIB:.1f}", f"{self.error_pct:+.2f} %"]
        )
        allocated = self.allocated
        cells += ["", ""] if allocated is None else [f"{allocated.peak / MIB:.1f}", f"{self.allocator_pct:+.2f} %"]
        cells += ["" if ratio is None else f"{ratio:.2f}" for ratio in (self.reserved_ratio, self.moved_ratio)]
        return f"| {' | '.join(cells)} |"


def run(case: Case, device: torch.device) -> Row:
    """Ask all three for the peak of a case."""
    if device.type == "cuda":  # tens of MiB for each of cuBLAS and cuBLASLt, which belong to no step
        os.environ.update(CUBLAS_WORKSPACE_CONFIG=":16:8", CUBLASLT_WORKSPACE_SIZE="128")
    begin = time.perf_counter()
    kernels = torch.device("cuda") if case.on_gpu else device
    estimated = estimate(case, kernels)
    middle = time.perf_counter()
    traced = trace(case, kernels)
    seconds = time.perf_counter() - middle, middle - begin
    allocated = measure_alone(case, device)
    return Row(case=case, traced=traced, estimated=estimated, allocated=allocated, seconds=seconds)


def write_report(rows: Sequence[Row], failures: Sequence[str], group: str, device: torch.device) -> str:
    """Return the results as Markdown."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    missing = [
        "Not measured: any GPU; the allocator with offload, as both sides would be one device, and in half precision",
        "for larger models, as it is slow on CPUs; copies that two kernels make on CPUs only:",
        f"{' and '.join(KERNELS)}; what products ({', '.join(PRODUCTS)}) take for themselves and give back.",
    ]
    trace_s, estimate_s = (sum(row.seconds[i] for row in rows) for i in range(2))
    lines = [
        "# Closed form, exact trace and allocator",
        "",
        f"`--group {group}`, {datetime.now(UTC):%Y-%m-%d} UTC, torch {torch.__version__}, transformers",
        f"{transformers.__version__}, bitsandbytes {bitsandbytes.__version__}, {name}. Peak of one training",
        f"step on the first rank, AdamW where nothing else is named. All {len(rows)} cases took {trace_s:.0f} s to",
        f"trace and {estimate_s:.1f} s to predict, building the models included.",
        "",
        "Error: closed form over trace, minus 1; over trace: torch's allocator under real kernels, over trace, minus",
        "1. Reserved: by that allocator, over what it had allocated. Held out: first run when the rules of the closed",
        "form were finished. Moved: what operators other than products and attention read and write, by the closed",
        "form over what the trace sees.",
        "",
        *(missing if device.type == "cpu" else []),
        f"A tiny model has {', '.join(f'{key}={value}' for key, value in TINY.items())}.",
        "",
        "| | number | median | worst |",
        "|---|---|---|---|",
    ]
    for name, wanted in (("error of the closed form, tuned on", False), ("error of the closed form, held out", True)):
        lines += _summarize(name, [row.error_pct for row in rows if row.case.is_held_out == wanted])
    lines += _summarize("allocator over trace", [row.allocator_pct for row in rows])
    lines += _summarize("closed form over allocator", [row.real_pct for row in rows])
    if ratios := [row.reserved_ratio for row in rows if row.reserved_ratio is not None]:
        lines.append(
            f"| reserved over allocated | {len(ratios)} | {statistics.median(ratios):.2f} | {max(ratios):.2f} |"
        )
    if estimated := [row for row in rows if row.estimated is not None]:
        lines += _compare_moved(estimated)
        lines += _compare_kinds(estimated)
    columns = ["case", "held out", "trace, MiB", "closed form, MiB", "error", "allocator, MiB", "over trace"]
    columns += ["reserved", "moved"]
    lines += ["", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *map(str, rows)]
    lines += ["", "Failed:", "", *(f"- {failure}" for failure in failures)] if failures else []
    return "\n".join([*lines, ""])


def _summarize(name: str, errors: Sequence[float | None]) -> list[str]:
    found = [abs(error) for error in errors if error is not None]
    return [f"| {name} | {len(found)} | {statistics.median(found):.2f} % | {max(found):.2f} % |"] if found else []


def _compare_moved(rows: Sequence[Row]) -> list[str]:
    lines = [
        "",
        "Moved, with 300 tokens or more; on one rank the trace also sees how FSDP2 copies what others gather:",
        "",
    ]
    lines += ["| what trains | ranks | number | median | least | most |", "|---|---|---|---|---|---|"]
    long = [row for row in rows if row.moved_ratio is not None and row.case.rows * row.case.num_tokens >= 300]
    for mode, is_alone in sorted({(row.case.mode, row.case.world_size == 1) for row in long}):
        ratios: list[Any] = [
            row.moved_ratio for row in long if row.case.mode == mode and (row.case.world_size == 1) == is_alone
        ]
        cells = [mode, "1" if is_alone else "2 or more", str(len(ratios))]
        cells += [f"{find(ratios):.2f}" for find in (statistics.median, min, max)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _compare_kinds(rows: Sequence[Row]) -> list[str]:
    lines = ["", "Closed form and trace by kind, at each one's peak, as a share of the traced peak:", ""]
    lines += ["| kind | median difference | worst difference |", "|---|---|---|"]
    joined = ("gradients", "activations", "rest")  # gradients count as rest until autograd hands them over
    for kinds in [(kind,) for kind in KINDS if kind not in joined] + [joined]:
        shares: list[Any] = []
        for row in rows:
            if row.estimated is not None:
                ours, theirs = row.estimated.peak.by_kind, row.traced.memory.peak.by_kind
                shares.append(100 * abs(sum(ours.get(k, 0) - theirs.get(k, 0) for k in kinds)) / row.peak)
        lines.append(f"| {' + '.join(kinds)} | {statistics.median(shares):.2f} % | {max(shares):.2f} % |")
    return lines


def main() -> None:
    """Run all cases of a group, print them, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--group", choices=GROUPS, default="families", help="Which cases to run")
    parser.add_argument("--only", default="", help="Only cases whose name has this in it")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="Whose allocator is asked")
    parser.add_argument("--jobs", type=int, default=1, help="How many cases at a time")
    args = parser.parse_args()
    device = torch.device(args.device)
    cases = [case for case in list_cases(args.group) if args.only in str(case)]
    rows: list[Row] = []
    failures: list[str] = []
    report = ""
    spawned = get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=spawned, initializer=draw_quickly) as pool:
        for case, future in [(case, pool.submit(run, case, device)) for case in cases]:
            if (error := future.exception()) is None:
                rows.append(future.result())
            else:
                failures.append(f"{case}: {type(error).__name__}: {str(error).strip()[-300:]}".replace("\n", " "))
            print(failures[-1] if error else rows[-1], flush=True)
            if rows:
                report = write_report(rows, failures, args.group, device)
            if args.out and rows:
                args.out.write_text(report)
    print(report)
    if failures or not rows:
        sys.exit(f"{len(failures)} of {len(cases)} cases failed")


if __name__ == "__main__":
    main()
