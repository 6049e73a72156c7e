"""Losses of preferences, from log-probabilities alone: DPO, IPO, ORPO, SimPO and KTO, as TRL has them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

LossType = Literal["sigmoid", "dpo", "hinge", "robust", "ipo", "orpo", "simpo", "kto"]
WITHOUT_REFERENCE = ("orpo", "simpo")
_SMOOTHED = ("sigmoid", "robust", "simpo")
# Which loss types read a setting.
_READERS = {"simpo_gamma": ("simpo",), "desirable_weight": ("kto",), "undesirable_weight": ("kto",)}
_LN_HALF = math.log(0.5)


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """A loss and its settings, by TRL's names.

    Args:
        loss_type: Which loss; ``dpo`` becomes ``sigmoid``, TRL's name of it.
        beta: How much the model is held to its reference; ORPO's weight, SimPO's scale.
        label_smoothing: The share of pairs that are taken to be the wrong way around.
        simpo_gamma: SimPO's margin; 0.5 if not given.
        desirable_weight: KTO's weight of good completions; 1 if not given.
        undesirable_weight: The same of bad ones.
    """

    loss_type: LossType = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float | None = None
    desirable_weight: float | None = None
    undesirable_weight: float | None = None

    def __post_init__(self) -> None:
        if self.loss_type == "dpo":
            object.__setattr__(self, "loss_type", "sigmoid")
        kind = self.loss_type
        if not 0 < self.beta < math.inf:
            raise ValueError(f"beta: got {self.beta}: expected above 0, such as 0.1")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing: got {self.label_smoothing}: expected 0 to below 0.5")
        if self.label_smoothing and kind not in _SMOOTHED:
            raise ValueError(
                f"label_smoothing: got {self.label_smoothing}: not used by loss_type {kind!r}, but by "
                f"{', '.join(_SMOOTHED)}; leave it out"
            )
        for name, readers in _READERS.items():
            if (value := getattr(self, name)) is None:
                continue
            if kind not in readers:
                raise ValueError(
                    f"{name}: got {value}: not used by loss_type {kind!r}, but by {readers[0]}; leave it out"
                )
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}: got {value}: expected 0 or more")

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a model that is not trained."""
        return self.loss_type not in WITHOUT_REFERENCE

    @property
    def is_unpaired(self) -> bool:
        """Whether the loss is one of single completions, good or bad, not of pairs."""
        return self.loss_type == "kto"


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Completions as a model sees them.

    Args:
        logps: Sum of the log-probabilities of the completion's tokens, [completions].
        lengths: Number of these tokens, of the same shape.
    """

    logps: Tensor
    lengths: Tensor

    @property
    def mean_logps(self) -> Tensor:
        """The same for each token, in the mean."""
        return self.logps / self.lengths.clamp(min=1)


def compute_pair_losses(
    settings: LossSettings, chosen: Scored, rejected: Scored, reference: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses of pairs and the rewards of their chosen and rejected completions, each [pairs].

    Of ORPO it is the part of the odds: the likelihood of what is chosen is a mean over tokens, not over pairs.

    Args:
        settings: Of a loss of pairs.
        chosen: By the model that is trained.
        rejected: The same.
        reference: Sums of log-probabilities by the reference, of the chosen and then the rejected ones, [2 * pairs].
    """
    beta = settings.beta
    if settings.loss_type in WITHOUT_REFERENCE:
        scores = chosen.mean_logps, rejected.mean_logps
    else:
        assert reference is not None
        of_chosen, of_rejected = reference.chunk(2)
        scores = chosen.logps - of_chosen, rejected.logps - of_rejected
    rewards = beta * scores[0].detach(), beta * scores[1].detach()
    margin = scores[0] - scores[1]
    if settings.loss_type == "ipo":
        mean = scores[0] / chosen.lengths.clamp(min=1) - scores[1] / rejected.lengths.clamp(min=1)
        return (mean - 1 / (2 * beta)).square(), *rewards
    if settings.loss_type == "hinge":
        return functional.relu(1 - beta * margin), *rewards
    if settings.loss_type == "orpo":
        log_odds = margin - (_log_of_rest(scores[0]) - _log_of_rest(scores[1]))
        return -beta * functional.logsigmoid(log_odds), *rewards
    logits = beta * margin
    if settings.loss_type == "simpo":
        logits = logits - (0.5 if settings.simpo_gamma is None else settings.simpo_gamma)
    right, wrong = -functional.logsigmoid(logits), -functional.logsigmoid(-logits)
    share = settings.label_smoothing
    if settings.loss_type == "robust":
        return (right * (1 - share) - wrong * share) / (1 - 2 * share), *rewards
    return right * (1 - share) + wrong * share, *rewards


def compute_kto_losses(
    settings: LossSettings, logps: Tensor, reference: Tensor, is_desirable: Tensor, kl: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the losses of single completions and their rewards, each [completions].

    Args:
        settings: Of KTO.
        logps: Sums of log-probabilities by the model that is trained, [completions].
        reference: The same by the reference.
        is_desirable: Whether each is a good one.
        kl: How far the model is from its reference, a scalar without a gradient, 0 or more.
    """
    ratios = logps - reference
    one = torch.ones_like(ratios)
    weights = [1.0 if w is None else w for w in (settings.desirable_weight, settings.undesirable_weight)]
    sign = torch.where(is_desirable, one, -one)
    losses = 1 - torch.sigmoid(settings.beta * sign * (ratios - kl))
    return losses * torch.where(is_desirable, one * weights[0], one * weights[1]), settings.beta * ratios.detach()


def _log_of_rest(logs: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x below 0, without losing the digits of either end."""
    # Each branch gets only what it can take: the gradient of the other would be NaN times 0.
    near = torch.log(-torch.expm1(logs.clamp(min=_LN_HALF)))
    far = torch.log1p(-torch.exp(logs.clamp(max=_LN_HALF)))
    return torch.where(logs > _LN_HALF, near, far)
