"""The Lightning side of precision and clipping: loss scaling and gradient norms over shards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, Precision
from lightning.pytorch.plugins.precision import MixedPrecision as AutocastPrecision
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lit_fsdp.optim.overlapped_steps import OverlappedSteps
from lit_fsdp.sharding.grad_clipping import clip_grad_norm, clip_grad_value
from lit_fsdp.sharding.mixed_precision import MixedPrecision, ShardedGradScaler, read_precision


class FSDP2Precision(Precision):
    """Replaces Lightning's precision plugins under ``FSDP2Strategy``: no autocast, units cast by themselves.

    Args:
        precision: As in ``Trainer(precision=...)``.
        override: Dtypes that win over those of ``precision``.
        device_type: Where the model computes.

    Raises:
        ValueError: The precision has no meaning under FSDP2.
    """

    def __init__(
        self, precision: str = "32-true", override: MixedPrecision | None = None, device_type: str = "cuda"
    ) -> None:
        self.precision = precision  # type: ignore[assignment]  # Lightning allows a fixed set of names
        self.mixed_precision = read_precision(precision).override(override)
        self.scaler = ShardedGradScaler(device_type) if self.mixed_precision.needs_loss_scaling else None
        self._is_unscaled = False  # whether the step that is made has taken the scale out of its gradients
        self.overlapped_steps: OverlappedSteps | None = None  # of the run, if it shall defer them

    @override
    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        if self.scaler is not None:
            tensor = self.scaler.scale(tensor)
        return super().pre_backward(tensor, module)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Steppable, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if self.scaler is None and self.overlapped_steps is not None:
            # Before the step and not inside it, where it would begin without gradients.
            result = self._wrap_closure(model, optimizer, closure)
            with self.overlapped_steps.defer(optimizer):  # type: ignore[arg-type]
                optimizer.step(**kwargs)
            return result
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        result = closure()
        if result is None and model.automatic_optimization:  # training_step skipped this batch
            return result
        # Before the hooks and clipping, which shall see the true gradients.
        self.scaler.unscale_(optimizer)  # type: ignore[arg-type]
        self._is_unscaled = True
        try:
            self._after_closure(model, optimizer)
        finally:
            self._is_unscaled = False
        steps = self.overlapped_steps
        with nullcontext() if steps is None else steps.defer(optimizer):  # type: ignore[arg-type]
            step_output = self.scaler.step(optimizer, **kwargs)  # type: ignore[arg-type]
        self.scaler.update()
        return step_output

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        scale = None if self.overlapped_steps is None else self.overlapped_steps.scale_before_step
        clip_grad_norm(self.main_params(optimizer), self._scale_limit(clip_val), scale=scale)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_grad_value(self.main_params(optimizer), self._scale_limit(clip_val))

    def _scale_limit(self, limit: float) -> float:
        """Return a limit for gradients as they are, which before a step, as under manual optimization, are scaled."""
        return float(limit) if self.scaler is None or self._is_unscaled else limit * self.scaler.get_scale()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is not None and state_dict:
            self.scaler.load_state_dict(state_dict)


def translate_precision(plugin: Precision, override: MixedPrecision | None, device_type: str) -> FSDP2Precision:
    """Return ours for the plugin that Lightning chose by ``Trainer(precision=...)``; one of ours stays as it is.

    Raises:
        ValueError: The user has set a plugin that cannot work under FSDP2.
    """
    if isinstance(plugin, FSDP2Precision):
        return plugin
    if type(plugin) not in (Precision, HalfPrecision, AutocastPrecision, DoublePrecision):
        raise ValueError(f"FSDP2Strategy cannot work with {type(plugin).__name__}; leave out trainer.plugins")
    return FSDP2Precision(str(plugin.precision), override, device_type)


def get_compute_dtype(trainer: pl.Trainer, module: pl.LightningModule) -> str:
    """Return the dtype that a run computes with, of any strategy, such as ``bfloat16``."""
    plugin: Any = trainer.precision_plugin
    dtype: str | None = None
    if isinstance(plugin, FSDP2Precision):
        dtype = plugin.mixed_precision.param_dtype or plugin.mixed_precision.storage_dtype
    elif str(plugin.precision).startswith(("bf16", "16")):
        dtype = "bfloat16" if str(plugin.precision).startswith("bf16") else "float16"
    if dtype is None:
        parameters = (p for p in module.parameters() if p.is_floating_point() and p.dim() > 1)
        dtype = str(getattr(next(parameters, None), "dtype", torch.float32)).removeprefix("torch.")
    return dtype
