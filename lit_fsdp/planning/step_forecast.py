"""How long a step of a run should take by the model of time that ``plan`` uses, to compare it with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from lit_fsdp.planning.estimate import Hardware, estimate_time
from lit_fsdp.planning.forecast import NoForecastError, describe_model, forecast_step, measure_batch
from lit_fsdp.planning.hardware import Gpu, find_gpu
from lit_fsdp.planning.links import Interconnect, choose_links
from lit_fsdp.planning.plan import Ranks
from lit_fsdp.planning.step_parts import MicroBatch
from lit_fsdp.planning.step_time import StepTime
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy
from lit_fsdp.strategy.precision_plugin import FSDP2Precision
from lit_fsdp.strategy.trainer_settings import count_micro_batches


@dataclass(kw_only=True)
class StepForecast:
    """Looks at some micro-batches of a run, and predicts its step at the end.

    Args:
        gpu: Of every rank.
        dtype: That is computed in, as of ``find_compute_dtype``.
        links: Between ranks; ``None`` for those of ``fsdp2_auto``, or what is usual for the GPU.
    """

    gpu: Gpu
    dtype: str
    links: Interconnect | None
    _shapes: list[MicroBatch] = field(default_factory=list)

    def add(self, module: LightningModule, batch: Any) -> None:
        """Look at a micro-batch; on a GPU this may wait for it, so not at every one."""
        try:
            self._shapes.append(measure_batch(module, batch))
        except NoForecastError:
            self._shapes.clear()  # predict says so

    def predict(self, trainer: Trainer, module: LightningModule) -> StepTime:
        """Predict a step of micro-batches that all are as the median of those looked at.

        Raises:
            NoForecastError: There is no closed form of it, or nothing is known of the links.
        """
        strategy = trainer.strategy
        if not isinstance(strategy, FSDP2Strategy):
            raise NoForecastError(f"the strategy is {type(strategy).__name__}")
        if not self._shapes:
            raise NoForecastError("the task does not say what shape its batches have (measure_batch)")
        shape = sorted(self._shapes, key=lambda shape: shape.rows * shape.length)[len(self._shapes) // 2]
        if (num_micro_batches := count_micro_batches(trainer)) is None:
            raise NoForecastError("the number of accumulated micro-batches changes")
        per_node = trainer.world_size // trainer.num_nodes
        links = self.links or getattr(strategy, "links", None) or choose_links(self.gpu, per_node)
        step = forecast_step(
            module,
            strategy,
            shape,
            world_size=trainer.world_size,
            ranks_per_node=per_node,
            num_micro_batches=num_micro_batches,
            device_type=strategy.root_device.type,
        )
        try:
            return estimate_time(
                describe_model(module, strategy),
                strategy.settings,
                Hardware(gpu=self.gpu, links=links),
                ranks=Ranks(
                    num_nodes=trainer.num_nodes, per_node=per_node, num_replicas=1, num_shards=trainer.world_size
                ),
                flops=step.flops,
                moved_bytes=step.moved_bytes,
                tokens=shape.rows * shape.length,
                num_micro_batches=num_micro_batches,
                dtype=self.dtype,
            )
        except ValueError as error:  # several nodes, and a link inside a node only
            raise NoForecastError(str(error)) from error


def compare_times(predicted: StepTime, step_s: float) -> tuple[dict[str, Any], list[str]]:
    """Return the numbers of a prediction beside what was measured, and sentences."""
    difference_pct = 100 * (step_s / predicted.step_s - 1)
    numbers = {
        "step_s": predicted.step_s,
        "compute_s": predicted.compute_s,
        "exposed_communication_s": predicted.exposed_s,
        "optimizer_s": predicted.optimizer_s,
        "mfu_pct": predicted.mfu_pct,
        "difference_pct": difference_pct,
    }
    sentence = (
        f"step predicted {predicted.step_s:.4f} s (compute {predicted.compute_s:.4f}, exposed communication "
        f"{predicted.exposed_s:.4f}, optimizer {predicted.optimizer_s:.4f}), measured {step_s:.4f} s "
        f"({difference_pct:+.1f} %)"
    )
    assumed: Sequence[str] = [note for note in predicted.notes if note.startswith("link:")]
    return numbers, [sentence, *assumed]


def read_gpu(device: torch.device) -> tuple[Gpu | None, str]:
    """Return what is known of a GPU, and its name."""
    properties = torch.cuda.get_device_properties(device)
    return find_gpu(properties.name, properties.total_memory / 2**30), properties.name


def find_compute_dtype(trainer: Trainer, module: LightningModule) -> str:
    """Return the dtype that matrices are multiplied in: ``bfloat16``, ``float16``, ``float32``, ``tf32`` or another."""
    plugin: Any = trainer.precision_plugin
    dtype: str | None = None
    if isinstance(plugin, FSDP2Precision):
        dtype = plugin.mixed_precision.param_dtype or plugin.mixed_precision.storage_dtype
    elif str(plugin.precision).startswith(("bf16", "16")):
        dtype = "bfloat16" if str(plugin.precision).startswith("bf16") else "float16"
    if dtype is None:
        parameters = (p for p in module.parameters() if p.is_floating_point() and p.dim() > 1)
        dtype = str(getattr(next(parameters, None), "dtype", torch.float32)).removeprefix("torch.")
    is_tf32 = dtype == "float32" and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if is_tf32 else dtype
