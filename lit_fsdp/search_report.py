"""The result of a search: a table for people, numbers for programs, and a configuration to train with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lit_fsdp.callbacks.sections import Table, print_table
from lit_fsdp.plan import describe_time
from lit_fsdp.search import Candidate, format_changes
from lit_fsdp.settings import PRESETS

_GIB = 2**30
_MAX_ROWS = 12
_CLASS, _AUTO_ONLY = "lit_fsdp.FSDP2Strategy", ("device_memory", "link")


def print_search(candidates: Sequence[Candidate], chosen: Candidate | None, device_bytes: int) -> None:
    """Print what is configured, what would be faster or smaller, and which to take.

    Args:
        candidates: From ``search``.
        chosen: Of them.
        device_bytes: Memory of one GPU.
    """
    configured, *others = candidates
    for keeps_result, title in (
        (True, "The same training, other settings: fastest first"),
        (False, "Another training: adapters, 4-bit weights or 8-bit optimizer state"),
    ):
        some = [candidate for candidate in others if candidate.keeps_result is keeps_result]
        shown = _pick(some)
        if keeps_result:
            shown.insert(0, configured)
        if shown:
            print_table(_make_table(title, shown, configured, chosen, device_bytes))
    if chosen is None:
        nearest = min(candidates, key=lambda candidate: candidate.needed_bytes)
        missing = (nearest.needed_bytes - device_bytes) / _GIB
        print(
            f"nothing fits: the smallest needs {nearest.needed_bytes / _GIB:.2f} GiB, {missing:.2f} GiB more than a "
            f"GPU has ({format_changes(nearest.changes)}); take more GPUs, shorter rows or a smaller model"
        )
    elif chosen is configured:
        print("chosen: what is configured fits, and nothing that computes the same is faster by 2 %")
    else:
        share = 100 * (chosen.time.step_s / configured.time.step_s - 1)
        print(f"chosen: {format_changes(chosen.changes)}: {share:+.0f} % of time for a step")


def describe_search(candidates: Sequence[Candidate], chosen: Candidate | None) -> dict[str, Any]:
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
    }


def apply_changes(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with other settings.

    Args:
        config: As YAML has it: ``trainer``, ``model`` and ``data``, the latter two with ``class_path``.
        changes: Of a candidate.
    """
    found = _copy(config)
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
    return {"class_path": _CLASS, "init_args": {name: asdict(value) for name, value in settings.items()}}


def _copy(node: Any) -> Any:
    return {key: _copy(value) for key, value in node.items()} if isinstance(node, Mapping) else node


def _pick(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the fastest that fit, and where few do, those that miss by least."""
    fitting = [candidate for candidate in candidates if candidate.fits][:_MAX_ROWS]
    others = sorted((c for c in candidates if not c.fits), key=lambda c: c.needed_bytes)
    return fitting + others[: max(0, 3 - len(fitting))]


def _make_table(
    title: str,
    shown: Sequence[Candidate],
    configured: Candidate,
    chosen: Candidate | None,
    device_bytes: int,
) -> Table:
    rows = []
    has_host = any(candidate.host_bytes for candidate in shown)
    has_compiled = any(candidate.compiled_s is not None for candidate in shown)
    for candidate in shown:
        left = (device_bytes - candidate.needed_bytes) / _GIB
        ratio = candidate.time.step_s / configured.time.step_s
        cells = [
            f"{'* ' if candidate is chosen else ''}{format_changes(candidate.changes)}",
            f"{candidate.peak_bytes / _GIB:.2f}",
            f"{left:.2f}" if candidate.fits else f"NO: {left:.2f}",
            *([f"{candidate.host_bytes / _GIB:.1f}"] if has_host else []),
            f"{candidate.time.step_s:.2f}",
            *([_show_seconds(candidate.compiled_s)] if has_compiled else []),
            f"{ratio:.2f}",
            f"{candidate.time.tokens_per_s:,.0f}",
            f"{candidate.time.mfu_pct:.0f}",
        ]
        rows.append(cells)
    columns = ["settings", "peak GiB", "GiB left", *(["host GiB"] if has_host else []), "step s"]
    columns += ["compiled s"] if has_compiled else []
    return Table(title=title, columns=[*columns, "of now", "tokens/s", "MFU %"], rows=rows)


def _show_seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
