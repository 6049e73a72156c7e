"""How the learning rate moves, and what of an optimizer's settings a resumed run takes from its configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from typing_extensions import override

from lit_fsdp.errors import check_choices
from lit_fsdp.optim.factory import Optimizer as OptimizerSettings
from lit_fsdp.strategy.run_settings import is_same, warn_of_changes

_HYPERPARAMETERS = [field.name for field in fields(OptimizerSettings)]  # of any of our optimizers, which have some


@dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """How the learning rate moves over the steps of the run.

    Args:
        type: After the warm-up: ``linear`` or ``cosine`` down to the end of the run, or ``constant``.
        warmup_steps: Steps from 0 up to the peak.
        warmup_ratio: The same as a share of all steps.
        min_lr_rate: For ``cosine``: where it ends, as a share of the peak.
    """

    type: Literal["linear", "cosine", "constant"] = "linear"
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    min_lr_rate: float = 0.0

    def check(self) -> None:
        """Refuse what contradicts itself or would be ignored."""
        check_choices(self, "lr_scheduler")
        if self.warmup_steps < 0 or not 0 <= self.warmup_ratio < 1:
            raise ValueError(
                f"lr_scheduler: got warmup_steps {self.warmup_steps}, warmup_ratio {self.warmup_ratio}: expected "
                "0 steps or more, a fraction from 0 to below 1"
            )
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("lr_scheduler: warmup_steps and warmup_ratio are both set; leave one out")
        if self.min_lr_rate and self.type != "cosine":
            raise ValueError(f"lr_scheduler.min_lr_rate: not used by type {self.type!r}; set type to 'cosine'")
        if not 0 <= self.min_lr_rate <= 1:
            raise ValueError(f"lr_scheduler.min_lr_rate: got {self.min_lr_rate}: expected 0 to 1")

    def compute_factor(self, step: int, *, num_warmup_steps: int, num_steps: int) -> float:
        """Return the learning rate of a step as a share of the peak."""
        # As Transformers' get_scheduler, whose import brings peft and bitsandbytes along: more than a second.
        if step < num_warmup_steps:
            return step / num_warmup_steps
        if self.type == "constant":
            return 1.0
        num_left, num_falling = max(num_steps - step, 0), max(num_steps - num_warmup_steps, 1)
        if self.type == "linear":
            return num_left / num_falling
        progress = min((step - num_warmup_steps) / num_falling, 1.0)
        return 0.5 * (1.0 + math.cos(math.pi * progress)) * (1 - self.min_lr_rate) + self.min_lr_rate


class ConfiguredLR(LambdaLR):
    """A schedule that takes only its place from a checkpoint: rates and other settings stay those of the configuration.

    Torch takes them from the checkpoint, so that a resumed run would not see what was changed for it. What differs is
    warned of; where nothing does, a resumed run goes on to the bit.

    Args:
        optimizer: Whose groups have the configured settings.
        factor: What the learning rates are multiplied with, by step.
        shape: What makes the factor, to be compared with that of the checkpoint by ``follow``.
        keeps_saved_rate: Whether the rates of the checkpoint count, as none was configured.
    """

    keeps_configuration = True

    def __init__(
        self,
        optimizer: Optimizer,
        factor: Callable[[int], float],
        shape: Mapping[str, Any] | None = None,
        *,
        keeps_saved_rate: bool = False,
    ) -> None:
        self.shape, self._saved_shape = dict(shape or {}), dict[str, Any]()
        self._keeps_saved_rate = keeps_saved_rate
        self._configured = [{n: group[n] for n in _HYPERPARAMETERS if n in group} for group in optimizer.param_groups]
        super().__init__(optimizer, factor)

    @override
    def get_lr(self) -> list[Any]:
        """Return the rates of all groups; those that a callback has added, to unfreeze some, keep what it sets."""
        added = self.optimizer.param_groups[len(self.base_lrs) :]
        return [*super().get_lr(), *(group["lr"] for group in added)]

    @override
    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = super().state_dict()
        return {
            name: value
            for name, value in state.items()
            if name not in ("_configured", "_keeps_saved_rate", "_saved_shape")
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the step of a checkpoint. The optimizer has to be loaded before."""
        configured, shape = self.base_lrs, self.shape
        super().load_state_dict(state_dict)
        if self._keeps_saved_rate:
            configured = self.base_lrs
        self.shape, self._saved_shape = shape, dict(state_dict.get("shape", {}))
        saved: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for before, rate in zip(self.base_lrs, configured, strict=True):
            if before != rate:
                saved.setdefault("optimizer.learning_rate", before)
                own.setdefault("optimizer.learning_rate", rate)
        self.base_lrs = configured
        groups = self.optimizer.param_groups[: len(configured)]
        for group, settings in zip(groups, self._configured, strict=True):
            for name, value in settings.items():
                if not is_same(group[name], value):
                    saved.setdefault(f"optimizer.{name}", group[name])
                    own.setdefault(f"optimizer.{name}", value)
            is_moved = group.get("fused") != settings.get("fused")
            group.update(settings)
            if is_moved:
                _place_counters(self.optimizer, group)
        self._set_rates()
        warn_of_changes(saved, own)

    def follow(self, factor: Callable[[int], float], shape: Mapping[str, Any]) -> None:
        """Take another factor from this step on, as only a resumed run knows how many steps are left.

        Args:
            factor: What the learning rates are multiplied with, by step.
            shape: What makes it; what the checkpoint had otherwise is warned of.
        """
        self.lr_lambdas = [factor] * len(self.base_lrs)
        self.shape = dict(shape)
        self._set_rates()
        warn_of_changes(self._saved_shape, self.shape)

    def _set_rates(self) -> None:
        """Give the groups that are configured the rates of this step."""
        self._last_lr = [
            base * factor(self.last_epoch) for base, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)
        ]
        for group, base, rate in zip(self.optimizer.param_groups, self.base_lrs, self._last_lr, strict=False):
            group.update(initial_lr=base, lr=rate)


def _place_counters(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """AdamW counts steps on the device of a parameter if it is fused, else on the CPU, as its state was loaded for."""
    for parameter in group["params"]:
        state = optimizer.state.get(parameter, {})
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(parameter.device if group["fused"] else "cpu")
