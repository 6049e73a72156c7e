"""A plan as one HTML page: memory over the step, what a search has found, what each setting saves, and the answers."""

from __future__ import annotations

from collections.abc import Sequence

from lit_fsdp.planning.plan import Plan
from lit_fsdp.planning.plan_report import choose_unit, describe_fit, make_memory_section, make_speed_section
from lit_fsdp.planning.search.report import list_settings
from lit_fsdp.planning.search.search import Candidate
from lit_fsdp.redaction import redact
from lit_fsdp.reporting.report_files import Report, draw_section, render_html
from lit_fsdp.reporting.sections import Curve, Plot, Section, Table

_GIB = 2**30


def render_plan(
    name: str,
    plan: Plan,
    device_bytes: int | None,
    sections: Sequence[Section],
    candidates: Sequence[Candidate],
    chosen: Candidate | None,
    speed_unit: str = "tokens/s",
) -> str:
    """Return the page: no script, no other file.

    Args:
        name: Its heading.
        plan: Of the configured step.
        device_bytes: Memory of a GPU, where it is known.
        sections: Answers, shown before the details.
        candidates: Of a search, the configured one first; none if there was no search.
        chosen: The one that it takes, if any fits.
        speed_unit: That of what the search took for tokens.
    """
    parts = [make_memory_section(plan, device_bytes)]
    if candidates and device_bytes is not None:
        parts.append(make_frontier_section(candidates, chosen, device_bytes, speed_unit))
    parts += [*sections, make_speed_section(plan), Section(title="Notes", name="notes", notes=list(plan.notes))]
    status, message = "planned", "no GPU was named, so nothing says whether it fits"
    if device_bytes is not None:
        status = "fits" if plan.needed_bytes <= device_bytes else "exceeds"
        message = describe_fit(plan, device_bytes).partition(": ")[2].partition(": ")[2]
    report = Report(
        name=redact(name),
        status=status,
        message=message,
        facts=_list_facts(plan, device_bytes),
        parts=[draw_section(part, None) for part in parts],
        kind="Plan of a training step",
        footer="All numbers are in plan.json.",
    )
    return render_html(report)


def make_frontier_section(
    candidates: Sequence[Candidate], chosen: Candidate | None, device_bytes: int, speed_unit: str
) -> Section:
    """Return speed against memory of all that a search shows, and the settings behind each point."""
    groups = [
        ("the same training", [c for c in candidates if c.keeps_result]),
        ("another training", [c for c in candidates if not c.keeps_result]),
        ("as configured", [candidates[0]]),
        ("chosen", [] if chosen is None else [chosen]),
    ]
    curves = []
    for label, some in groups:
        points = sorted((c.time.tokens_per_s, c.needed_bytes / _GIB) for c in some)
        if points:
            curves.append(Curve(label=label, x=[x for x, _ in points], y=[y for _, y in points]))
    plot = Plot(
        title="Memory against speed",
        x_label=speed_unit,
        y_label="GiB needed, with headroom",
        curves=curves,
        levels=[(f"{device_bytes / _GIB:.1f} GiB: the GPU", device_bytes / _GIB)],
    )
    rows = []
    for number, candidate in enumerate(candidates, start=1):
        (settings,) = [" ".join(" ".join(list_settings({number: candidate}, chosen)).split())]
        rows.append(
            [
                settings,
                f"{candidate.needed_bytes / _GIB:.2f}",
                f"{candidate.time.step_s:.3g}",
                f"{candidate.time.tokens_per_s:,.0f}",
                "yes" if candidate.keeps_result else "no",
            ]
        )
    columns = ["settings (* chosen)", "needs GiB", "step s", speed_unit, "trains the same"]
    table = Table(title="What the search shows", columns=columns, rows=rows)
    return Section(title="Search", name="search", tables=[table], plots=[plot])


def _list_facts(plan: Plan, device_bytes: int | None) -> dict[str, str]:
    size, unit = choose_unit(plan.memory.peak.num_bytes)
    ranks = plan.ranks
    facts = {
        "Peak of tensors": f"{plan.memory.peak.num_bytes / size:.2f} {unit}",
        "Peak is in": f"{plan.memory.peak.phase}, {plan.memory.peak.unit}",
        "Parameters": f"{plan.num_weights:,}",
        "Of these train": f"{plan.num_trained:,}",
        "Ranks": f"{ranks.num_nodes} x {ranks.per_node}, {plan.num_replicas} copies of {plan.num_shards} shards",
        "Counted by": plan.engine,
    }
    if device_bytes is not None:
        facts["A GPU needs"] = f"{plan.needed_bytes / _GIB:.2f} of {device_bytes / _GIB:.2f} GiB"
    if plan.time is not None:
        facts["Speed"] = f"{plan.time.tokens_per_s:,.0f} tokens/s on {plan.time.gpu_name}"
        facts["Step"] = f"{plan.time.step_s:.3g} s, bound by {plan.time.bound}"
    return facts
