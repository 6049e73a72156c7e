"""Which optimizer trains the parameters, chosen by name."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import nn

from lit_fsdp.errors import check_choices
from lit_fsdp.optim.adafactor import Adafactor
from lit_fsdp.optim.adamw import AdamW
from lit_fsdp.optim.adamw_8bit import AdamW8bit
from lit_fsdp.optim.muon import Muon

OptimizerName = Literal["adamw", "adamw_8bit", "adamw_8bit_paged", "adafactor", "muon"]

_RATES, _ADAPTER_FACTOR = {"adafactor": 1e-2}, 10  # where none is set; 1e-4 for all others
# Settings that some do not use.
_USED_BY: dict[str, tuple[OptimizerName, ...]] = {
    "betas": ("adamw", "adamw_8bit", "adamw_8bit_paged", "muon"),
    "eps": ("adamw", "adamw_8bit", "adamw_8bit_paged", "muon"),
    "momentum": ("muon",),
    "fused": ("adamw",),
}


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Which optimizer steps, and how.

    Args:
        name: ``adamw`` keeps two running means of the gradient in the dtype of the parameters, 8 bytes for each of
            float32. ``adamw_8bit`` keeps them in 8 bits each, about 2 bytes; ``adamw_8bit_paged`` also lets the
            GPU's driver move them to host memory when the GPU runs out. ``adafactor`` keeps only sums over rows and
            columns, and takes other learning rates. ``muon`` keeps one running mean for matrices of blocks, which it
            steps by Muon at AdamW's learning rates, and is ``adamw`` for the rest. See docs/optimizers.md.
        learning_rate: At the peak of the schedule. ``null`` is 1e-4, or 1e-3 where adapters are trained; a resumed run
            keeps the rate it began with. For ``adafactor``, which takes it relative to the root mean square of each
            parameter, ``null`` is 1e-2, or 0.1 for adapters.
        weight_decay: Of matrices. Norms and biases are not decayed.
        betas: Decay of the running means of gradient and squared gradient. Not used by ``adafactor``.
        eps: Keeps steps of tiny gradients finite. Not used by ``adafactor``.
        momentum: For ``muon``: decay of the running mean of the gradients of matrices.
        fused: For ``adamw``: one kernel for all parameters. ``null`` uses it, except with float16 gradients, which it
            cannot skip when they overflow. Without it one parameter is stepped after the other, in little memory.
    """

    name: OptimizerName = "adamw"
    learning_rate: float | None = None
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.95
    fused: bool | None = None

    def check(self) -> None:
        """Refuse values with which the optimizer would not train, and those that it would not use."""
        check_choices(self, "optimizer")
        rules = {
            "learning_rate": (0 < self.resolve_rate() < math.inf, "above 0, and finite"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "0 or more, and finite"),
            "betas": (all(0 <= beta < 1 for beta in self.betas), "two numbers from 0 to below 1"),
            "eps": (0 < self.eps < math.inf, "above 0, and finite"),
            "momentum": (0 <= self.momentum < 1, "a number from 0 to below 1"),
        }
        for name, (is_right, expected) in rules.items():
            if not is_right:
                raise ValueError(f"optimizer.{name}: got {getattr(self, name)}: expected {expected}")
        for field in fields(self):
            users = _USED_BY.get(field.name, (self.name,))
            value = getattr(self, field.name)
            if value != field.default and self.name not in users:
                raise ValueError(
                    f"optimizer.{field.name}: got {value}: not used by {self.name}; leave it out, or set "
                    f"optimizer.name to {' or '.join(users)}"
                )

    def resolve_rate(self, *, has_adapters: bool = False) -> float:
        """Return the learning rate: adapters start from nothing, and take ten times that of whole models."""
        if self.learning_rate is not None:
            return self.learning_rate
        return _RATES.get(self.name, 1e-4) * (_ADAPTER_FACTOR if has_adapters else 1)

    def check_device(self, device: torch.device) -> None:
        """Refuse an optimizer that cannot step parameters on this device."""
        if self.name == "adamw_8bit_paged" and device.type != "cuda":
            raise ValueError(
                f"optimizer.name: got adamw_8bit_paged with parameters on {device.type}: pages move between GPU and "
                "host memory, and here all state is in host memory anyway; set adamw_8bit"
            )

    def check_tensor(self, num_ranks: int) -> None:
        """Refuse an optimizer of whole rows where this many ranks split layers, some of them by columns."""
        if num_ranks > 1 and self.name != "adamw":
            raise ValueError(
                f"optimizer.name: got {self.name} with mesh.tensor: {num_ranks}: it works on whole rows, and some "
                "layers are split by columns; set optimizer.name: adamw, or mesh.tensor: 1"
            )


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    settings: Optimizer,
    *,
    is_scaled: bool = False,
    rate_factors: Mapping[nn.Parameter, float] | None = None,
    matrices: Collection[nn.Parameter] | None = None,
    hidden: Collection[nn.Parameter] = (),
    has_adapters: bool = False,
) -> torch.optim.Optimizer:
    """Return the optimizer of the trainable parameters; without collectives.

    Args:
        parameters: As they will be trained, sharded or whole.
        settings: Which optimizer.
        is_scaled: Whether float16 losses are scaled, so that steps are skipped when gradients overflow.
        rate_factors: What the learning rate of a parameter is multiplied with, where that is not 1.
        matrices: Those that decay, where parameters are flat pieces by now; else those with two dimensions or more.
        hidden: Those that ``muon`` steps by Muon: what ``list_hidden_matrices`` returns.
        has_adapters: Whether the trainable parameters are adapters, for which another learning rate is the default.

    Raises:
        ValueError: The settings cannot work with these parameters.
        ModuleNotFoundError: The optimizer needs a package that is not installed.
    """
    settings.check()
    trainable = [p for p in parameters if p.requires_grad]
    for parameter in trainable:
        settings.check_device(parameter.device)
    rate = settings.resolve_rate(has_adapters=has_adapters)
    groups: list[dict[str, Any]] = []
    factors = rate_factors or {}
    orthogonalized = set(hidden).intersection(trainable) if settings.name == "muon" else set()
    decayed = {p for p in trainable if (p.ndim >= 2 if matrices is None else p in matrices)} | orthogonalized
    kinds: dict[tuple[float, bool, bool], list[nn.Parameter]] = {}
    for parameter in trainable:
        kind = (factors.get(parameter, 1.0), parameter in decayed, parameter in orthogonalized)
        kinds.setdefault(kind, []).append(parameter)
    for (factor, is_decayed, is_hidden), members in sorted(kinds.items(), key=lambda item: item[0], reverse=True):
        decay = settings.weight_decay if is_decayed else 0.0
        group = {"params": members, "weight_decay": decay, "lr": rate * factor}
        groups.append({**group, "is_hidden": True} if is_hidden else group)
    if settings.name == "adafactor":
        return Adafactor(groups, lr=rate)
    options: dict[str, Any] = {"lr": rate, "betas": settings.betas, "eps": settings.eps}
    if settings.name == "muon":
        if not orthogonalized:
            raise ValueError("optimizer.name: got muon: blocks have no matrices that train (hidden); set adamw")
        return Muon(groups, **options, momentum=settings.momentum)
    if settings.name == "adamw":
        return AdamW(groups, **options, fused=choose_fused(settings.fused, is_scaled=is_scaled))
    return AdamW8bit(groups, **options, is_paged=settings.name == "adamw_8bit_paged")


def choose_fused(fused: bool | None, *, is_scaled: bool) -> bool:
    """Return whether one kernel steps all parameters; a ``ValueError`` says that it cannot."""
    if is_scaled and fused:
        raise ValueError(
            "optimizer.fused: got true: it cannot skip a step whose float16 gradients overflow; leave it out"
        )
    return not is_scaled if fused is None else fused
