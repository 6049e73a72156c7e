"""What goes wrong in a step: spikes, numbers that are not finite, and which unit, rank and samples they come from."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from lit_fsdp.sharding.torch_internals import to_local
from lit_fsdp.sharding.wrap import Wrap, plan_module

NO_TARGETS = "no_targets"
KINDS = {
    "nonfinite_loss": "the loss is not finite",
    "nonfinite_grad": "the gradient is not finite",
    NO_TARGETS: "loss and gradient are 0: no row has a target to learn",
    "loss_spike": "a spike of the loss",
    "grad_norm_spike": "a spike of the gradient norm",
}
_MAX_SAMPLES = 32  # named in a message
_MAD_TO_SIGMA = 1.4826  # of a normal distribution
_UPPER, _UPPER_TO_SIGMA = 0.95, 1 / 1.6449  # of a normal distribution, this percentile less the median
_MAX_SKEW = 3.0  # more, and a few spikes, which are the 95th percentile then, would hide the next
_MIN_RELATIVE_SIGMA = 0.01


class SpikeDetector:
    """Judges each number by the ones before it: a spike lies a number of standard deviations above their median.

    The deviation is estimated by the median absolute deviation, so that one spike does not hide the next. It is taken
    to be at least 1 % of the median: a run that hardly varies shall not stop at noise. Where numbers above the median
    spread wider than those below, as norms of small batches do, it is the deviation of the normal distribution that has
    their 95th percentile, up to three times the other. All finite numbers are kept, spikes too, so a lasting change is
    taken as normal after half a window.

    Args:
        sigmas: How far above the median a spike begins; ``None`` finds none.
        window: How many numbers are looked back at. Before half of them are there, nothing is a spike.
    """

    def __init__(self, sigmas: float | None, window: int) -> None:
        self.sigmas = sigmas
        self._values: deque[float] = deque(maxlen=window)
        self._num_needed = max(2, window // 2)

    def compute_limit(self) -> float:
        """Return above which the next number is a spike."""
        if self.sigmas is None or len(self._values) < self._num_needed:
            return math.inf
        values = sorted(self._values)
        median = statistics.median(values)
        deviation = _MAD_TO_SIGMA * statistics.median(abs(value - median) for value in values)
        deviation = max(deviation, _MIN_RELATIVE_SIGMA * abs(median))
        upper = _UPPER_TO_SIGMA * (values[int(_UPPER * (len(values) - 1))] - median)
        return median + self.sigmas * max(deviation, min(upper, _MAX_SKEW * deviation))

    def add(self, value: float) -> None:
        """Look back at this number from now on."""
        if math.isfinite(value):
            self._values.append(value)

    def state_dict(self) -> list[float]:
        """Return the numbers that it looks back at."""
        return list(self._values)

    def load_state_dict(self, values: list[float]) -> None:
        """Look back at these instead; of more than fit, at the last."""
        self._values.clear()
        self._values.extend(values)


class UnitWatch:
    """Keeps the sum of what each FSDP unit puts out while ``is_on``: finite only if all of it is.

    Costs one pass over the output of each unit and a number of memory; nothing waits for the device. Of a model that is
    not sharded, the units are those that it would have.
    """

    def __init__(self, model: nn.Module) -> None:
        self.units = _list_units(model)
        self.is_on = False
        self._sums: dict[str, Tensor] = {}
        self._handles: list[Any] = []

    def open(self) -> None:
        """Begin to see outputs. Not of compiled units, which would be compiled once more."""
        self._handles = [module.register_forward_hook(self._make_hook(name)) for name, module in self.units.items()]

    def close(self) -> None:
        """See no outputs any more."""
        while self._handles:
            self._handles.pop().remove()

    def take_sums(self) -> dict[str, Tensor]:
        """Return the sums since the last call by unit, in the order in which the units ran first."""
        sums, self._sums = self._sums, {}
        return sums

    def list_bad_gradients(self) -> list[str]:
        """Return the units of which some gradient is not finite, as far as this rank has it. Waits for the device."""
        return [name for name, module in self.units.items() if _has_bad_gradient(module)]

    def _make_hook(self, name: str) -> Callable[..., None]:
        def add(_module: nn.Module, _args: Any, output: Any) -> None:
            if not self.is_on:
                return
            found = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point())
            if (tensor := next(found, None)) is not None:
                total = to_local(tensor.detach()).sum(dtype=torch.float32)  # in float16 it could overflow
                self._sums[name] = self._sums[name] + total if name in self._sums else total

        return add


def classify(loss: float, norm: float, limits: dict[str, float], *, is_scaled: bool) -> str | None:
    """Return the key of ``KINDS`` for a step, ``None`` if it is good. Spikes begin above ``limits``.

    Where gradients are scaled (``is_scaled``), infinite ones are part of finding the scale.
    """
    if not math.isfinite(loss):
        return "nonfinite_loss"
    if not math.isfinite(norm):
        return None if is_scaled else "nonfinite_grad"
    if loss == norm == 0:
        return NO_TARGETS
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
    kind, ranks = event["kind"], event["ranks"]
    found = "; "
    if kind != NO_TARGETS:  # for which no rank stands out
        value = event["grad_norm" if kind in ("nonfinite_grad", "grad_norm_spike") else "loss"]
        above = "" if event["limit"] is None else f", above {event['limit']:.4g}"
        named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        found = f" ({value:.4g}{above}); {named if ranks else 'no rank stands out by its own loss'}, "
    done = {"warn": "", "skip": "; skipped", "stop": "; the run ends before the weights change"}[event["action"]]
    return (
        f"step {event['step']}: {KINDS[kind]}{found}{_describe_samples(event['samples'])}{_describe_unit(event)}{done}"
    )


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


def _list_units(model: nn.Module) -> dict[str, nn.Module]:
    """Return the FSDP units of a model but the root, or what ``Wrap()`` would make units."""
    modules = dict(model.named_modules())
    if sharded := [name for name, module in modules.items() if name and isinstance(module, FSDPModule)]:
        return {name: modules[name] for name in sharded}
    return {name: modules[name] for unit in plan_module(model, Wrap()) for name in unit.names if name}


def _has_bad_gradient(module: nn.Module) -> bool:
    gradients = (to_local(p.grad) for p in module.parameters() if p.grad is not None)
    return not all(bool(gradient.isfinite().all()) for gradient in gradients)
