"""The result of a search: a table for people, numbers for programs, and a configuration to train with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from typing import Any

from lit_fsdp.planning.plan_report import choose_unit, describe_time
from lit_fsdp.planning.search.search import Candidate, format_changes
from lit_fsdp.reporting.sections import Table, get_width, print_table
from lit_fsdp.sharding.settings import PRESETS

_GIB = 2**30
_USUAL_WIDTH, _MAX_WIDTH = 80, 120  # of lists of settings; the first where nobody knows the reader's
_CLASS, _AUTO_ONLY = "lit_fsdp.FSDP2Strategy", ("device_memory", "link")


def print_search(
    candidates: Sequence[Candidate],
    chosen: Candidate | None,
    device_bytes: int,
    *,
    ranks_per_node: int,
    speed_unit: str = "tokens/s",
    notes: Sequence[str] = (),
) -> None:
    """Print what is configured, what would be faster or smaller, and which to take.

    ``speed_unit`` is that of what the search took for tokens, ``notes`` are those of the chosen one.
    """
    configured, *others = candidates
    shown: list[Candidate] = []
    for keeps_result, title in (
        (True, "The same training, other settings: fastest first"),
        (False, "Another training: adapters, 4-bit weights or 8-bit optimizer state"),
    ):
        some = [candidate for candidate in others if candidate.keeps_result is keeps_result]
        if keeps_result:
            some.insert(0, configured)
        rows = dict(enumerate(some, start=len(shown) + 1))
        if rows:
            print_table(_make_table(title, rows, configured, chosen, device_bytes, speed_unit))
            print("\n".join(list_settings(rows, chosen)), end="\n\n")
        shown += some
    host_gib = 0.0 if chosen is None else chosen.host_bytes * ranks_per_node / _GIB
    host = f"; {host_gib:.2f} GiB of host memory on each node" if host_gib else ""
    if chosen is None:
        nearest = min(candidates, key=lambda candidate: candidate.needed_bytes)
        missing = (nearest.needed_bytes - device_bytes) / _GIB
        print(
            f"nothing fits: the smallest needs {nearest.needed_bytes / _GIB:.2f} GiB, {missing:.2f} GiB more than a "
            f"GPU has ({format_changes(nearest.changes)}); take more GPUs, shorter rows or a smaller model"
        )
    elif chosen is configured:
        print(f"chosen: what is configured fits, and nothing that computes the same is faster by 2 %{host}")
    else:
        share = 100 * (chosen.time.step_s / configured.time.step_s - 1)
        print(f"chosen: {format_changes(chosen.changes)}: {share:+.0f} % of time for a step{host}")
    for note in notes:
        print(f"note: chosen: {note}")


def list_settings(rows: Mapping[int, Candidate], chosen: Candidate | None) -> list[str]:
    """Return the lines that say what the numbers of a table stand for, one setting whole on a line."""
    width, lines = min(get_width() or _USUAL_WIDTH, _MAX_WIDTH), []
    for number, candidate in rows.items():
        lines.append(f"{_mark(number, candidate, chosen):>4} ")
        said = [format_changes({key: value}) for key, value in candidate.changes.items()] or [format_changes({})]
        said = [*(f"{setting}," for setting in said[:-1]), said[-1] + ("" if candidate.fits else " (does not fit)")]
        for setting in said:
            if len(lines[-1]) + 1 + len(setting) > width and lines[-1].strip("* 0123456789"):
                lines.append(" " * 5)
            lines[-1] += f" {setting}"
    return lines


def describe_search(
    candidates: Sequence[Candidate], chosen: Candidate | None, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the numbers for programs, as documented in docs/planning.md."""
    return {
        "candidates": [
            {
                "changes": dict(candidate.changes),
                "peak_bytes": candidate.peak_bytes,
                "needed_bytes": candidate.needed_bytes,
                "host_bytes": candidate.host_bytes,
                "fits": candidate.fits,
                "keeps_result": candidate.keeps_result,
                "time": describe_time(candidate.time),
                "compiled_s": candidate.compiled_s,
            }
            for candidate in candidates
        ],
        "chosen": None if chosen is None else candidates.index(chosen),
        "notes": list(notes),
    }


def apply_changes(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with other settings.

    The configuration is as in YAML: ``trainer``, ``model`` and ``data``, the latter two with ``class_path``.
    """
    found = deepcopy(dict(config))
    trainer = found.setdefault("trainer", {})
    if any(key.startswith("trainer.strategy.") for key in changes):
        trainer["strategy"] = _spell_out(trainer.get("strategy"))
    for key, value in changes.items():
        section, _, rest = key.partition(".")
        if section == "trainer":
            node, path = trainer, rest.replace("strategy.", "strategy.init_args.", 1)
        else:
            node, path = found[section].setdefault("init_args", {}), rest
        *parents, name = path.split(".")
        for parent in parents:
            node[parent] = node.get(parent) or {}  # it may be there as null
            node = node[parent]
        node[name] = value
    return found


def _spell_out(strategy: Any) -> dict[str, Any]:
    """Return the strategy as a class with its settings, where it was one of our names."""
    if isinstance(strategy, Mapping):
        options = dict(strategy.get("init_args") or {})
        if str(strategy.get("class_path", "")).endswith(".AutoFSDP2Strategy"):  # what it would choose is chosen
            return {"class_path": _CLASS, "init_args": {k: v for k, v in options.items() if k not in _AUTO_ONLY}}
        return {**strategy, "init_args": options}
    _, settings = PRESETS.get(str(strategy), ("", {}))
    given = {  # none at all, {}, is offload as well
        name: {field.name: found for field in fields(value) if (found := getattr(value, field.name)) != field.default}
        for name, value in settings.items()
    }
    return {"class_path": _CLASS, "init_args": given}


def _make_table(
    title: str,
    rows: Mapping[int, Candidate],
    configured: Candidate,
    chosen: Candidate | None,
    device_bytes: int,
    speed_unit: str,
) -> Table:
    """Return the figures, narrow enough for 80 columns."""
    shown = list(rows.values())
    peaks, peak_unit = _format_bytes([c.peak_bytes for c in shown])
    left, left_unit = _format_bytes([device_bytes - c.needed_bytes for c in shown])
    host, host_unit = _format_bytes([c.host_bytes for c in shown])
    slowest = max(max(c.time.step_s, c.compiled_s or 0.0) for c in shown)
    factor, time_unit = (1, "s") if slowest >= 1 else (1000, "ms")
    columns = {
        "#": [_mark(number, candidate, chosen) for number, candidate in rows.items()],
        f"peak\n{peak_unit}": peaks,
        f"left\n{left_unit}": left,
        f"host\n{host_unit}/rank": host if any(c.host_bytes for c in shown) else None,
        f"step\n{time_unit}": [_format(factor * c.time.step_s) for c in shown],
        f"compiled\n{time_unit}": ["-" if c.compiled_s is None else _format(factor * c.compiled_s) for c in shown]
        if any(c.compiled_s is not None for c in shown)
        else None,
        "of\nnow": [f"{c.time.step_s / configured.time.step_s:.2f}" for c in shown],
        speed_unit: [f"{c.time.tokens_per_s:,.0f}" for c in shown],
        "MFU\n%": [f"{c.time.mfu_pct:.0f}" for c in shown],
    }
    given = {name: cells for name, cells in columns.items() if cells is not None}
    return Table(title=title, columns=list(given), rows=list(zip(*given.values(), strict=True)))


def _mark(number: int, candidate: Candidate, chosen: Candidate | None) -> str:
    return f"{'*' * (candidate is chosen)}{number}".rjust(3)


def _format_bytes(numbers: Sequence[int]) -> tuple[list[str], str]:
    """Return numbers of one column in the unit that is best for the largest, and its name."""
    size, name = choose_unit(max(abs(number) for number in numbers))
    return [_format(number / size) for number in numbers], name


def _format(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.1f}"
