"""How long a step of a run should take by the model of time that ``plan`` uses, to compare it with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lit_fsdp.planning.closed_form.engine import estimate_step
from lit_fsdp.planning.estimate import (
    Hardware,
    describe_model,
    estimate_beside_training,
    estimate_step_time,
    measure_batch,
)
from lit_fsdp.planning.step_parts import MicroBatch, NoEstimateError, Ranks
from lit_fsdp.planning.timing.hardware import Gpu, find_gpu
from lit_fsdp.planning.timing.links import Interconnect, choose_links
from lit_fsdp.planning.timing.step_time import StepTime
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy
from lit_fsdp.strategy.precision_plugin import get_compute_dtype
from lit_fsdp.strategy.trainer_settings import count_micro_batches


@dataclass(kw_only=True)
class StepTimeEstimator:
    """Looks at some micro-batches of a run, and estimates its step at the end.

    Args:
        gpu: Of every rank.
        dtype: That is computed in, as of ``get_matmul_dtype``.
        links: Between ranks; ``None`` for those of ``fsdp2_auto``, or what is usual for the GPU.
    """

    gpu: Gpu
    dtype: str
    links: Interconnect | None
    _shapes: list[MicroBatch] = field(default_factory=list)
    _missing: str = "no micro-batch was looked at"

    def add(self, module: LightningModule, batch: Any) -> None:
        """Look at a micro-batch; on a GPU this may wait for it, so not at every one."""
        try:
            with estimate_beside_training():
                self._shapes.append(measure_batch(module, batch))
        except NoEstimateError as error:
            self._shapes.clear()
            self._missing = str(error)

    def estimate(self, trainer: Trainer, module: LightningModule) -> StepTime:
        """Estimate a step of micro-batches that all are as the median of those looked at.

        Raises:
            NoEstimateError: There is no closed form of it, or nothing is known of the links.
        """
        strategy = trainer.strategy
        if not isinstance(strategy, FSDP2Strategy):
            raise NoEstimateError(f"the strategy is {type(strategy).__name__}")
        if not self._shapes:
            raise NoEstimateError(self._missing)
        shape = sorted(self._shapes, key=lambda shape: shape.num_tokens)[len(self._shapes) // 2]
        if (num_micro_batches := count_micro_batches(trainer)) is None:
            raise NoEstimateError("the number of accumulated micro-batches changes")
        ranks = Ranks(num_nodes=trainer.num_nodes, per_node=trainer.world_size // trainer.num_nodes)
        links = self.links or getattr(strategy, "links", None) or choose_links(self.gpu, ranks.per_node)
        settings = strategy.settings
        common: dict[str, Any] = {"ranks": ranks, "num_micro_batches": num_micro_batches}
        hardware = Hardware(gpu=self.gpu, links=links)
        with estimate_beside_training():
            model = describe_model(module, strategy)
            cost = estimate_step(model, settings, shape, device_type=strategy.root_device.type, **common)
            return estimate_step_time(model, settings, hardware, cost, micro_batch=shape, dtype=self.dtype, **common)


def compare_times(estimated: StepTime, step_s: float) -> tuple[dict[str, Any], list[str]]:
    """Return the numbers of an estimate beside what was measured, and sentences."""
    difference_pct = 100 * (step_s / estimated.step_s - 1)
    numbers = {
        "step_s": estimated.step_s,
        "compute_s": estimated.compute_s,
        "exposed_communication_s": estimated.exposed_s,
        "optimizer_s": estimated.optimizer_s,
        "mfu_pct": estimated.mfu_pct,
        "difference_pct": difference_pct,
    }
    sentence = (
        f"step predicted {estimated.step_s:.4f} s (compute {estimated.compute_s:.4f}, exposed communication "
        f"{estimated.exposed_s:.4f}, optimizer {estimated.optimizer_s:.4f}), measured {step_s:.4f} s "
        f"({difference_pct:+.1f} %)"
    )
    return numbers, [sentence, *(note for note in estimated.notes if note.startswith("link:"))]


def read_gpu(device: torch.device) -> tuple[Gpu | None, str]:
    """Return what is known of a GPU, and its name."""
    properties = torch.cuda.get_device_properties(device)
    return find_gpu(properties.name, properties.total_memory / 2**30), properties.name


def get_matmul_dtype(trainer: Trainer, module: LightningModule) -> str:
    """Return what matrices are multiplied in: the dtype of compute, or ``tf32``."""
    dtype = get_compute_dtype(trainer, module)
    is_tf32 = dtype == "float32" and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if is_tf32 else dtype
