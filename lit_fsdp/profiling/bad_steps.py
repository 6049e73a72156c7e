"""What was bad about a step: which kind it is, whose fault, and how to say it."""

from __future__ import annotations

import math
from typing import Any

KINDS = {
    "nonfinite_loss": "the loss is not finite",
    "nonfinite_grad": "the gradient is not finite",
    "loss_spike": "a spike of the loss",
    "grad_norm_spike": "a spike of the gradient norm",
}
_MAX_SAMPLES = 32  # named in a message


def classify(loss: float, norm: float, limits: dict[str, float], *, is_scaled: bool) -> str | None:
    """Return the key of ``KINDS`` for a step, ``None`` if it is good.

    Args:
        loss: Over all ranks.
        norm: Of the gradients.
        limits: Above which the kinds of spike begin.
        is_scaled: Gradients are scaled, and infinite ones are part of finding the scale.
    """
    if not math.isfinite(loss):
        return "nonfinite_loss"
    if not math.isfinite(norm):
        return None if is_scaled else "nonfinite_grad"
    if loss > limits["loss_spike"]:
        return "loss_spike"
    return "grad_norm_spike" if norm > limits["grad_norm_spike"] else None


def conclude(everyone: list[dict[str, Any]], kind: str, units: list[str]) -> dict[str, Any]:
    """Say who and what was wrong.

    Args:
        everyone: Of each rank ``loss``, ``samples``, ``order`` (units in the order of forward), ``forward`` and
            ``backward`` (units that were not finite there).
        kind: A key of ``KINDS``.
        units: All there are, for when ``order`` is empty.

    Returns:
        ``ranks`` whose own loss was bad, their ``samples`` (of all ranks if none stands out), ``unit`` and ``phase``.
    """
    losses = [one["loss"] for one in everyone]
    ranks = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    if kind == "loss_spike":
        ranks = [max(range(len(losses)), key=losses.__getitem__)]
    order = {name: place for place, name in enumerate(everyone[0]["order"] or units)}
    forward = {name for one in everyone for name in one["forward"]} & set(order)
    backward = {name for one in everyone for name in one["backward"]} & set(order)
    unit, phase = None, None
    if kind.startswith("nonfinite") and forward:
        unit, phase = min(forward, key=order.__getitem__), "forward"
    elif kind == "nonfinite_loss" and everyone[0]["order"]:
        phase = "loss"
    elif kind == "nonfinite_grad" and backward:
        unit, phase = max(backward, key=order.__getitem__), "backward"
    samples = {str(rank): everyone[rank]["samples"] for rank in ranks or range(len(everyone))}
    return {"ranks": ranks, "samples": samples, "unit": unit, "phase": phase}


def describe(event: dict[str, Any]) -> str:
    """Return one sentence for people."""
    loss, norm, limit = (event[name] for name in ("loss", "grad_norm", "limit"))
    value = norm if event["kind"].endswith("grad") or event["kind"] == "grad_norm_spike" else loss
    above = "" if limit is None else f", above {limit:.4g}"
    done = {"warn": "", "skip": "; skipped", "stop": "; the run ends before the weights change"}[event["action"]]
    return (
        f"step {event['step']}: {KINDS[event['kind']]} ({value:.4g}{above}); {_describe_ranks(event['ranks'])}, "
        f"{_describe_samples(event['samples'])}{_describe_unit(event)}{done}"
    )


def _describe_ranks(ranks: list[int]) -> str:
    if not ranks:
        return "no rank's own loss stands out"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _describe_samples(samples: dict[str, list[int] | None]) -> str:
    parts = []
    for rank, found in samples.items():
        shown = "unknown" if found is None else ", ".join(map(str, found[:_MAX_SAMPLES]))
        more = f" and {len(found) - _MAX_SAMPLES} more" if found is not None and len(found) > _MAX_SAMPLES else ""
        parts.append(f"{shown}{more}" + (f" (rank {rank})" if len(samples) > 1 else ""))
    return f"samples {'; '.join(parts)}"


def _describe_unit(event: dict[str, Any]) -> str:
    if event["phase"] == "loss":
        return "; all units put out numbers, so it arises in the loss"
    return "" if event["unit"] is None else f"; first in {event['unit']}, {event['phase']}"


def make_row(event: dict[str, Any]) -> tuple[str, ...]:
    """Return cells: step, what, loss, gradient norm, ranks, samples, unit, what was done."""
    values = (f"{event['loss']:.4g}", f"{event['grad_norm']:.4g}")
    ranks = ", ".join(map(str, event["ranks"])) or "all"
    samples = _describe_samples(event["samples"]).removeprefix("samples ")
    unit = "" if event["unit"] is None else f"{event['unit']} ({event['phase']})"
    return (str(event["step"]), KINDS[event["kind"]], *values, ranks, samples, unit, event["action"])
