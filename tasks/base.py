"""What every task shares: the loss of a whole step, optimizer and schedule, and what is logged.

Note [Loss of a step]: the loss is a mean over all targets (tokens, images) of an optimizer step, over all ranks
and all accumulated micro-batches. A micro-batch cannot know their number, so it returns its *sum* divided by
the constant ``LOSS_UNIT``. The gradients are multiplied once per step by what is still missing: the number of ranks
times the number of micro-batches times ``LOSS_UNIT``, divided by the number of targets. By the ranks, as the strategy
takes the mean of their gradients (of all ranks, but one of each group of ``mesh.tensor``); by the micro-batches, as
Lightning divides each loss by them. ``LOSS_UNIT`` is a power of two, so dividing by it and undoing that is exact; it
keeps sums in the range of float16.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from typing_extensions import override

from lit_fsdp.adapters.inject import add_adapters, find_misreading, list_left_out
from lit_fsdp.adapters.layers import ADAPTER, iterate_adapters
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.checkpoint.untrusted import refuse_other_forms
from lit_fsdp.optim.factory import Optimizer, build_optimizer
from lit_fsdp.optim.muon import list_hidden_matrices
from lit_fsdp.parsing.mappings import TakesMappings
from lit_fsdp.planning.step_parts import MicroBatch
from lit_fsdp.quantization.layers import quantize_model
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.reporting.metrics import count_planned_steps
from lit_fsdp.sharding.grad_clipping import clip_grad_norm, clip_grad_value, compute_grad_norm, scale_gradients
from lit_fsdp.strategy.batch_split import BatchPart, split_rows
from lit_fsdp.strategy.data_module import get_data_module
from lit_fsdp.strategy.fsdp2 import FSDP2Strategy
from lit_fsdp.strategy.lightning_internals import forget_train_loader, is_last_micro_batch, log_again
from lit_fsdp.strategy.lightning_strategies import (
    check_lightning_strategy,
    holds_gradients,
    keep_parameters_whole,
    list_matrices,
    read_grad_norm,
    shard_like_fsdp2,
)
from lit_fsdp.strategy.overlapped_optimizer import get_overlapped_steps
from lit_fsdp.strategy.trainer_settings import (
    check_learning_rate_finder,
    derive_accumulation,
    get_data_ranks,
    settle_accumulation,
)
from lit_fsdp.tasks.lr_schedule import ConfiguredLR, LRSchedule
from lit_fsdp.weights.load import init_weights, materialize

LOSS_UNIT = 1024


def refuse_quantized_training(quantization: Quantization | None, lora: LoRA | None) -> None:
    """Refuse to train quantized weights without adapters.

    Raises:
        ValueError: With both ways out.
    """
    if quantization is not None and lora is None:
        raise ValueError(
            "quantization: quantized weights cannot be trained; set lora, such as {r: 16}, or leave it out"
        )


class Task(TakesMappings, LightningModule):
    """A LightningModule whose loss, metrics and optimizer are right under sharding.

    A subclass builds its model in ``configure_model`` with :meth:`build_on_meta`, and returns
    :meth:`weigh_loss` from ``training_step``; see Note [Loss of a step].

    Args:
        optimizer: Which one, and its settings.
        lr_scheduler: How the learning rate moves.
    """

    target_name = "tokens"  # what is counted in train/<target_name>_seen
    has_perplexity = True  # whether the loss is one cross-entropy of tokens
    # What summary and report begin with: the metric logged as val/<headline_metric>, and whether min or max is good.
    headline_metric: str = "loss"
    headline_mode: Literal["min", "max"] = "min"
    releases_gradients = True  # after the optimizer step, for plans: in optimizer_step

    def __init__(self, optimizer: Optimizer | None = None, lr_scheduler: LRSchedule | None = None) -> None:
        super().__init__()
        self.optimizer_settings = optimizer or Optimizer()
        self.lr_scheduler = lr_scheduler or LRSchedule()
        self.lr_scheduler.check()
        self.optimizer_settings.check()
        # Left alone, it leaves out what is not a number: the mean would be that of all other targets.
        self.val_loss, self.test_loss = (MeanMetric(nan_strategy=math.nan) for _ in range(2))
        for metric in (self.val_loss, self.test_loss):
            metric.set_dtype(torch.float64)
        self.targets_seen: float | Tensor = 0.0
        self._step_sums: Tensor | None = None  # [2] of this step on this rank: sum of losses, number of targets
        # Of the last step whose backward has ended, over all ranks, and over the targets of this rank alone.
        self.step_loss: Tensor | None = None
        self.rank_loss: Tensor | None = None
        self._grad_norm: Tensor | None = None
        self._factor: Tensor | None = None  # of the gradients of this step, if some have it already
        self._scaled: set[Tensor] = set()  # these
        self._matrices: set[nn.Parameter] | None = None  # of parameters that may be flat pieces by now

    # Model

    def check_strategy(self, trainer: Trainer) -> None:
        """Refuse what the strategy of a run cannot do with this task.

        Raises:
            ValueError: With the setting, the reason and the nearest one that works.
        """
        has_adapters, is_quantized = (getattr(self, name, None) is not None for name in ("lora", "quantization"))
        check_lightning_strategy(trainer, optimizer=self.optimizer_settings.name, is_quantized=is_quantized)
        if isinstance(trainer.strategy, FSDP2Strategy):
            settings = trainer.strategy.settings
            settings.check_adapted(has_adapters=has_adapters, is_quantized=is_quantized)
            self.optimizer_settings.check_tensor(settings.mesh.tensor)

    @override
    def setup(self, stage: str) -> None:
        """Get ready for the strategy; a subclass that has a ``setup`` of its own calls this."""
        if stage == "fit":
            if not isinstance(self.trainer.strategy, FSDP2Strategy):  # which does so itself, before ranks start
                derive_accumulation(self.trainer, get_data_module(self.trainer), is_resumed=None)
            self.check_strategy(self.trainer)
            self._step_sums, self._factor, self._scaled = None, None, set()  # a run that failed may have left some
        keep_parameters_whole(self.trainer.strategy)
        if stage == "fit":  # here too, as an evaluation may have built the model before
            refuse_quantized_training(getattr(self, "quantization", None), getattr(self, "lora", None))

    def adapt_model(
        self, model: nn.Module, *, lora: LoRA | None, quantization: Quantization | None, keep: Sequence[str] = ()
    ) -> None:
        """Quantize the frozen parameters of a model on the meta device, in place, and add adapters.

        Args:
            model: On the meta device.
            lora: The adapters, if there shall be any.
            quantization: Of the frozen parameters, if they shall be quantized.
            keep: Modules that are never quantized, by name.
        """
        if self.trainer.state.fn == TrainerFn.FITTING:
            refuse_quantized_training(quantization, lora)
        if lora is not None:
            self._check_adapter_precision(lora)
        if quantization is not None:
            saved = lora.modules_to_save if lora is not None else ()
            left = quantize_model(model, quantization, keep=(*saved, *keep))
            if left:
                rank_zero_warn(f"quantization: not quantized: {', '.join(left[:3])}, {len(left)} in all")
        if lora is not None:
            if left := list_left_out(model, lora):
                rank_zero_warn(
                    f"lora: no adapter for {', '.join(left[:3])}, {len(left)} in all: they may not be plain linear "
                    "layers, or the model reads their weights itself; name them in target_modules if it does not"
                )
            add_adapters(model, lora)
            is_trained = self.trainer.state.fn == TrainerFn.FITTING
            config: Any = getattr(model, "peft_config", {}).get(ADAPTER)
            if is_trained and config is not None and (reason := find_misreading(model, config)):
                rank_zero_warn(f"lora.target_modules: {reason}: they can be exported only with merge: true")

    def _check_adapter_precision(self, lora: LoRA) -> None:
        precision, is_ours = str(self.trainer.precision), isinstance(self.trainer.strategy, FSDP2Strategy)
        if precision.endswith("-mixed"):
            rank_zero_warn(
                f"trainer.precision: {precision} keeps frozen weights in float32; bf16-true needs half of it"
            )
        if precision == "bf16-true" and lora.dtype == "float32" and not is_ours:
            raise ValueError(
                "lora.dtype: got 'float32' with trainer.precision bf16-true: only FSDP2Strategy keeps adapters in a "
                "dtype of their own; set trainer.strategy to fsdp2, or lora.dtype to bfloat16"
            )

    def check_data(self, data: Any, stage: str) -> None:
        """Refuse data that the model cannot be trained or evaluated on, before the processes of a run are started.

        Args:
            data: The data module, not set up.
            stage: Of a Trainer, such as ``fit``.
        """

    def prepare_plan(self, data: Any) -> list[str]:  # noqa: ARG002
        """Get ready for a plan, which calls this instead of ``prepare_data`` and ``setup``: fetch no weights.

        Args:
            data: The data module, not set up.

        Returns:
            Notes for the user, printed beside the plan.
        """
        self.check_strategy(self.trainer)
        if self.optimizer_settings.name != "adamw_8bit_paged":
            return []
        return ["adamw_8bit_paged: its state is counted in full, though the driver may move it to host memory"]

    def measure_batch(self, batch: Mapping[str, Any]) -> MicroBatch | None:  # noqa: ARG002
        """Return the shape of a micro-batch, for the closed form of a plan; ``None`` where it has none."""
        return None

    def enter_dry_run(self, batch: Mapping[str, Any]) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return the context in which tensors without values, made like ``batch``, can run ``training_step``."""
        return nullcontext()

    def take_model(self, model: nn.Module) -> None:
        """Keep a model that was built on the meta device as ``self.model``, and finish it.

        Not where that fails: a second run would take it as it is, in memory without values.
        """
        self.model: Any = model
        try:
            self.finish_model()
        except BaseException:  # Ctrl-C, too
            self.model = None
            raise

    def finish_model(self) -> None:
        """Give a model that was built on the meta device its weights, unless the strategy will do it sharded.

        To be called at the end of ``configure_model``. Refuses here what would only fail after the weights were read.
        """
        strategy = self.trainer.strategy
        if self.trainer.state.fn == TrainerFn.FITTING:
            is_offloaded = isinstance(strategy, FSDP2Strategy) and strategy.settings.cpu_offload is not None
            self.optimizer_settings.check_device(torch.device("cpu") if is_offloaded else strategy.root_device)
            check_learning_rate_finder(self)
        if not isinstance(strategy, FSDP2Strategy):
            shard_like_fsdp2(self, self.trainer)
            materialize(
                self, strategy.root_device if isinstance(strategy, ModelParallelStrategy) else torch.device("cpu")
            )
            self.configure_weights()
            self._matrices = list_matrices(self)

    @property
    def restores_frozen(self) -> bool:
        """Whether ``configure_weights`` gives frozen parameters the same values in every run."""
        return False

    @property
    def leaves_out_frozen(self) -> bool:
        """Whether checkpoints leave out frozen parameters that are restored, if ``save_frozen`` says nothing."""
        return True

    def configure_weights(self) -> None:
        """Fill the parameters, which have memory by now but no values. Random weights, unless overridden."""
        init_weights(self, self.get_seed())

    def get_seed(self) -> int:
        """Return the seed of the run, the same on all ranks."""
        seed = os.environ.get("PL_GLOBAL_SEED")
        return int(self.trainer.strategy.broadcast(int(seed) if seed else torch.initial_seed()))

    # Loss and gradients

    def weigh_loss(self, loss_sum: Tensor, num_targets: Tensor) -> Tensor:
        """Return what ``training_step`` shall return for a micro-batch; see Note [Loss of a step].

        Args:
            loss_sum: Sum of the losses of all targets, a scalar with a gradient.
            num_targets: Number of targets, a scalar.
        """
        sums = torch.stack([loss_sum.detach().double(), num_targets.detach().double()])
        self._step_sums = sums if self._step_sums is None else self._step_sums + sums
        if holds_gradients(self.trainer.strategy):
            return loss_sum / LOSS_UNIT
        total = num_targets.detach().double().reshape(())  # of a step with one micro-batch; its gradients are not ours
        if dist.is_initialized():
            dist.all_reduce(total)
        return loss_sum * (self.trainer.world_size / total.clamp(min=1)).to(loss_sum.dtype)

    @property
    def is_sum_of_rows(self) -> bool:
        """Whether the loss of a step is the same however its rows are dealt to micro-batches."""
        return True

    def split_batch(self, batch: Any, num_parts: int) -> Sequence[BatchPart]:
        """Return a micro-batch in parts of fewer rows, for a step that ran out of memory; see ``oom_retries``.

        Losses are sums over targets, so those of the parts add up to that of the whole: each weighs 1.

        Args:
            batch: As ``training_step`` is given it.
            num_parts: How many, or fewer where there are fewer rows.

        Raises:
            ValueError: It cannot be split with the same result.
        """
        return [(part, 1.0) for part, _ in split_rows(batch, num_parts)]

    def get_grad_norm(self) -> Tensor:
        """Return the norm of all gradients before clipping, computed once a step. All ranks must call it."""
        if self._grad_norm is None:
            known = read_grad_norm(self.trainer.strategy)
            if known is None:
                steps = get_overlapped_steps(self.trainer.strategy)
                norm = compute_grad_norm(self._list_parameters(), None if steps is None else steps.norms)
            else:
                norm = torch.as_tensor(known)
            self._grad_norm = norm.float()
        return self._grad_norm

    def _list_parameters(self) -> list[nn.Parameter]:
        # Not those of the module: walking through it takes longer than scaling their gradients.
        groups = (group for optimizer in self.trainer.optimizers for group in optimizer.param_groups)
        return [parameter for group in groups for parameter in group["params"]]

    @override
    def on_before_backward(self, loss: Tensor) -> None:
        """Let gradients be scaled as they arrive, where they are received beside backward."""
        super().on_before_backward(loss)
        steps = get_overlapped_steps(self.trainer.strategy)
        if steps is not None and steps.is_deferred and self._ends_step():
            is_scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None  # they change once more
            self._factor = self._compute_factor()
            self._scaled = set(steps.scale_arriving(self._factor, takes_norms=not is_scaled))

    @override
    def on_after_backward(self) -> None:
        self._grad_norm = None  # of other gradients
        factor, scaled = self._factor, self._scaled
        self._factor, self._scaled = None, set()
        if factor is None and self._ends_step():
            factor = self._compute_factor()
        if factor is not None and holds_gradients(self.trainer.strategy):
            scale_gradients([p for p in self._list_parameters() if p not in scaled], factor)

    def _ends_step(self) -> bool:
        return self._step_sums is not None and is_last_micro_batch(self.trainer)

    def _compute_factor(self) -> Tensor:
        """Return what the gradients of the step still lack, and note its loss. All ranks must call it."""
        assert self._step_sums is not None
        sums, self._step_sums = self._step_sums, None
        self.rank_loss = sums[0] / sums[1].clamp(min=1)
        copies = get_data_ranks(self.trainer).copies
        if dist.is_initialized():
            dist.all_reduce(sums)
            sums = sums / copies
        num_targets = sums[1].clamp(min=1)
        self.step_loss = sums[0] / num_targets
        self.targets_seen = self.targets_seen + sums[1]
        num_ranks = self.trainer.world_size // copies  # over whose gradients the strategy takes the mean
        return num_ranks * self.trainer.accumulate_grad_batches * LOSS_UNIT / num_targets

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log what is known of the step; the norm is that before clipping."""
        rate = max(group["lr"] for group in optimizer.param_groups)
        values = {
            # On the CPU: to put a number on a GPU waits for what that still has to do.
            "train/learning_rate": torch.tensor(rate, dtype=torch.float32, device="cpu"),
        }
        if holds_gradients(self.trainer.strategy):  # else it is not known yet
            values["train/grad_norm"] = self.get_grad_norm()
        if self.step_loss is not None:
            values["train/loss"] = self.step_loss.float()
            values[f"train/{self.target_name}_seen"] = torch.as_tensor(self.targets_seen)
            if self.target_name == "tokens" and self.has_perplexity:
                values["train/perplexity"] = self.step_loss.float().exp()
        self.log_step(values)

    def log_step(self, values: Mapping[str, Tensor]) -> None:
        """Log scalars that are the same on all ranks, as ``log_dict`` does, in less time. For hooks of each step."""
        if not log_again(self, values):
            self.log_dict(values)

    @override
    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if not gradient_clip_val or not holds_gradients(self.trainer.strategy):  # DeepSpeed clips by the same setting
            return
        if gradient_clip_algorithm == "value":
            clip_grad_value(self._list_parameters(), float(gradient_clip_val))
        else:
            steps = get_overlapped_steps(self.trainer.strategy)
            scale = None if steps is None else steps.scale_before_step
            clip_grad_norm(self._list_parameters(), float(gradient_clip_val), norm=self.get_grad_norm(), scale=scale)

    @override
    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: torch.optim.Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Make the step, and let go of the gradients, which Lightning would keep through the next forward."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        optimizer.zero_grad()

    # Evaluation

    def update_eval_loss(self, stage: Literal["val", "test"], loss_sum: Tensor, num_targets: Tensor) -> None:
        """Add an evaluation batch to the mean over all targets of the data; a batch without any counts nothing."""
        metric = self.val_loss if stage == "val" else self.test_loss
        metric.update(loss_sum.double() / num_targets.clamp(min=1), weight=num_targets.double())

    @override
    def on_validation_epoch_start(self) -> None:
        """Begin anew, whatever an evaluation that failed has left.

        Count in float64, whatever Lightning's strategies have cast metrics to with the model: even bfloat16.
        """
        for loss in (self.val_loss, self.test_loss):
            loss.reset()
        for metric in self.modules():
            if isinstance(metric, Metric):
                states = [state for state in metric.metric_state.values() if isinstance(state, Tensor)]
                if any(state.is_floating_point() and state.dtype != torch.float64 for state in states):
                    metric.set_dtype(torch.float64)

    on_test_epoch_start = on_validation_epoch_start

    @override
    def on_validation_epoch_end(self) -> None:
        self.log_evaluation("val")

    @override
    def on_test_epoch_end(self) -> None:
        self.log_evaluation("test")

    def log_evaluation(self, stage: Literal["val", "test"]) -> None:
        """Log what an evaluation that ends has measured; all ranks call it."""
        metric = self.val_loss if stage == "val" else self.test_loss
        if metric.update_called:
            loss = metric.compute().float()  # over all ranks
            self.log(f"{stage}/loss", loss, sync_dist=True)  # equal on all ranks already
            if self.target_name == "tokens" and self.has_perplexity:
                self.log(f"{stage}/perplexity", loss.exp(), sync_dist=True)
        metric.reset()

    # Optimizer

    @property
    def has_adapters(self) -> bool:
        """Whether adapters are trained, for which another learning rate is the default."""
        return next(iterate_adapters(self), None) is not None

    @override
    def on_train_start(self) -> None:
        """Say which learning rate adapters got, where none was set."""
        super().on_train_start()
        if not isinstance(self.trainer.strategy, FSDP2Strategy):
            settle_accumulation(self.trainer, get_data_module(self.trainer))
        found = (config.scheduler for config in self.trainer.lr_scheduler_configs)
        schedules = [schedule for schedule in found if isinstance(schedule, ConfiguredLR)]
        if self.trainer.global_step:  # resumed: only now it is known how many steps are left
            for schedule in schedules:
                schedule.follow(*self._shape_schedule())
        if self.optimizer_settings.learning_rate is not None or not self.has_adapters:
            return
        rates = {float(rate) for schedule in schedules for rate in schedule.base_lrs}
        if not rates:  # a subclass builds its own optimizer
            return
        rate = self.optimizer_settings.resolve_rate(has_adapters=True)
        why = "ten times that of whole models, as adapters are trained"
        if rate not in rates:
            rate, why = max(rates), "as in the checkpoint"
        rank_zero_info(f"optimizer.learning_rate: not set: {rate:g}, {why}")

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        is_scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        factors = self.get_lr_factors()
        optimizer = build_optimizer(
            self.parameters(),
            self.optimizer_settings,
            is_scaled=is_scaled,
            rate_factors=factors,
            matrices=self._matrices,
            hidden=list_hidden_matrices(self) if self.optimizer_settings.name == "muon" else (),
            has_adapters=self.has_adapters,
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self._build_schedule(optimizer), "interval": "step"},
        }

    def get_lr_factors(self) -> Mapping[nn.Parameter, float]:
        """Return what the learning rate of a parameter is multiplied with, where that is not 1."""
        return {}

    def _build_schedule(self, optimizer: torch.optim.Optimizer) -> ConfiguredLR:
        factor, shape = self._shape_schedule()
        if self.trainer.ckpt_path is not None:  # restored already
            forget_train_loader(self.trainer)
        warmup, num_steps = shape["warm-up steps"], shape.get("steps of the run", 0)
        if num_steps and warmup > num_steps:
            rank_zero_warn(f"lr_scheduler: {warmup} warm-up steps in a run of {num_steps}: it ends before the peak")
        is_rate_open = self.optimizer_settings.learning_rate is None
        return ConfiguredLR(optimizer, factor, shape, keeps_saved_rate=is_rate_open)

    def _shape_schedule(self) -> tuple[Callable[[int], float], dict[str, Any]]:
        """Return what the learning rate of a step is multiplied with, and what that is made of."""
        settings = self.lr_scheduler
        num_steps = count_planned_steps(self.trainer)  # infinite too where epochs end by data of unknown length
        if num_steps == float("inf"):
            if settings.type != "constant" or settings.warmup_ratio:
                raise ValueError(
                    "lr_scheduler: the run has no end that it could lead to; set trainer.max_steps, max_epochs where "
                    "the data has a length, or type=constant with warmup_steps"
                )
            num_steps = 0
        warmup = settings.warmup_steps or round(settings.warmup_ratio * num_steps)
        factor = partial(settings.compute_factor, num_warmup_steps=warmup, num_steps=int(num_steps))
        shape: dict[str, Any] = {"lr_scheduler.type": settings.type, "warm-up steps": warmup}
        if settings.type != "constant":
            shape |= {"steps of the run": int(num_steps), "lr_scheduler.min_lr_rate": settings.min_lr_rate}
        return factor, shape

    # Checkpoints

    def describe_misfit(self, checkpoint: Mapping[str, Any]) -> str | None:  # noqa: ARG002  for subclasses
        """Return why a run of this task could not go on from a checkpoint, ``None`` where nothing is known.

        Asked before anything is loaded or started, to choose among the checkpoints of a run.

        Args:
            checkpoint: What it holds beside tensors.
        """
        return None

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["targets_seen"] = float(self.targets_seen)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        with refuse_other_forms():
            self.targets_seen = checkpoint["targets_seen"]
        forget_train_loader(self.trainer)
