"""What a task needs to do the same work under Lightning's other strategies: DDP, FSDP1, FSDP2 by hand, DeepSpeed.

Note [Lightning's other strategies]: a task builds its model on the meta device, and scales the gradients of a step.
All strategies but DDP are at odds with some of this. ``FSDPStrategy`` leaves flat pieces of parameters on each rank:
their norm is not that of the gradient, and a matrix cannot be told from a bias. ``ModelParallelStrategy`` shards
nothing and reduces nothing by itself. DeepSpeed keeps gradients to itself, and splits parameters while they are still
on the meta device. What a strategy cannot do at all is refused before ranks start.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import Optimizer

from lit_fsdp.sharding.mixed_precision import read_precision
from lit_fsdp.sharding.parallelize import shard_module
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.shard import STEPS, register_steps
from lit_fsdp.sharding.wrap import Wrap, iterate_blocks, plan_module
from lit_fsdp.strategy.lightning_internals import evaluate_without_inference_mode
from lit_fsdp.strategy.trainer_settings import count_micro_batches, is_accumulation_derived

Result = TypeVar("Result")


def check_lightning_strategy(trainer: pl.Trainer, *, optimizer: str, is_quantized: bool) -> None:
    """Refuse what a strategy of Lightning cannot do with one of our tasks; see Note [Lightning's other strategies].

    Args:
        trainer: Of a ``fit``.
        optimizer: Its name, as in ``Optimizer``.
        is_quantized: Whether frozen weights are quantized.

    Raises:
        ValueError: With the setting, the reason and the nearest one that works.
    """
    strategy = trainer.strategy
    if isinstance(strategy, ModelParallelStrategy):
        _check_model_parallel(strategy)
    if not isinstance(strategy, FSDPStrategy | DeepSpeedStrategy):
        return
    name = type(strategy).__name__
    if optimizer != "adamw":
        raise ValueError(
            f"optimizer.name: got {optimizer!r} under {name}, which gives an optimizer flat pieces without rows or "
            "blocks: set adamw, or trainer.strategy: fsdp2"
        )
    if is_quantized:
        raise ValueError(
            f"quantization: {name} cannot shard quantized weights: set trainer.strategy: fsdp2, or leave quantization "
            "out"
        )
    if isinstance(strategy, DeepSpeedStrategy) and count_micro_batches(trainer) != 1:
        given = count_micro_batches(trainer) or "a schedule"
        why = ", as data.global_batch_size asks for," if is_accumulation_derived(trainer) else ""
        raise ValueError(
            f"accumulate_grad_batches: got {given}{why} under {name}, which keeps gradients to itself, so that they "
            "cannot be divided by the targets of all micro-batches: set 1 and a larger data.batch_size, or "
            "trainer.strategy: fsdp2"
        )


def refuse_deepspeed_on_cpu(strategy: Strategy) -> None:
    """Refuse a CPU run of DeepSpeed, which Lightning refuses once ranks have started.

    Raises:
        ValueError: With the nearest strategy.
    """
    # A subclass may allow it, as that of `bench strategies` does.
    if type(strategy) is DeepSpeedStrategy and not isinstance(strategy.accelerator, CUDAAccelerator):
        raise ValueError(
            "strategy: DeepSpeedStrategy trains on CUDA GPUs only, and this run has none: set trainer.strategy: fsdp2; "
            "bench strategies compares DeepSpeed on CPUs too"
        )


def _check_model_parallel(strategy: ModelParallelStrategy) -> None:
    # Private, seen in lightning 2.6.6; "auto" is all ranks of a node.
    given = strategy._tensor_parallel_size
    size = strategy.num_processes if given == "auto" else given
    if size != 1:
        world_size = strategy.num_processes * strategy.num_nodes
        raise ValueError(
            f"tensor_parallel_size: got {given!r}, which is {size} ranks: a task is sharded over its data only: set "
            f"tensor_parallel_size: 1 and data_parallel_size: {world_size}"
        )


def keep_parameters_whole(strategy: Strategy) -> None:
    """Let DeepSpeed's stage 3 split parameters when they have their values; before ``configure_model``.

    Its ``zero.Init`` would split them as they are made: on the meta device, where they have none.
    """
    if isinstance(strategy, DeepSpeedStrategy):
        strategy.model_sharded_context = nullcontext  # type: ignore[method-assign, assignment]


def shard_like_fsdp2(module: pl.LightningModule, trainer: pl.Trainer) -> None:
    """Let a strategy of Lightning shard the units that ``FSDP2Strategy`` has by default; in ``configure_model``.

    ``ModelParallelStrategy`` leaves this to the module: it is sharded here, with its parameters on the meta device. To
    ``FSDPStrategy`` the blocks are given as its wrap policy, unless it has one.
    """
    strategy = trainer.strategy
    if isinstance(strategy, ModelParallelStrategy):
        precision = str(trainer.precision)
        plan = shard_module(
            module,
            Settings(),
            dtypes=read_precision(precision if precision.endswith("-true") else "32-true"),  # else by autocast
            mesh=strategy.device_mesh["data_parallel"],
            device=strategy.root_device,
            is_whole=module.automatic_optimization,
            leaves_whole=False,  # it reads checkpoints into DTensors only; seen in lightning 2.6.6
        )
        register_steps(module, STEPS)
        evaluate_without_inference_mode(trainer)
        rank_zero_info(f"ModelParallelStrategy: sharded in {len(plan)} units, as FSDP2Strategy does by default")
    elif isinstance(strategy, FSDPStrategy) and "auto_wrap_policy" not in strategy.kwargs:
        blocks = {type(module.get_submodule(name)) for name in iterate_blocks(plan_module(module, Wrap()))}
        if blocks:
            strategy.kwargs["auto_wrap_policy"] = ModuleWrapPolicy(blocks)
            names = ", ".join(sorted(block.__name__ for block in blocks))
            rank_zero_info(f"{type(strategy).__name__}: auto_wrap_policy: {names}, as FSDP2Strategy does by default")


def call_in_forward(module: pl.LightningModule, function: Callable[[], Result]) -> Result:
    """Call what runs a module's model outside of its steps, without gradients. All ranks must call it.

    FSDP1 gathers the parameters that are in no block, such as embeddings, only in the forward of the module that it
    wraps around a LightningModule. Lightning calls steps there, but no hooks.
    """
    strategy = module.trainer.strategy
    found: list[Result] = []
    with torch.no_grad():
        if not isinstance(strategy, FSDPStrategy):
            return function()
        forward = module.forward

        def call() -> None:
            module.forward = forward  # type: ignore[method-assign]  # the function may call it
            found.append(function())

        module.forward = call  # type: ignore[method-assign]
        assert strategy.model is not None
        strategy.model()
    return found[0]


def holds_gradients(strategy: Strategy) -> bool:
    """Whether gradients of a step are in ``parameter.grad``; DeepSpeed has them in buffers of its own."""
    return not isinstance(strategy, DeepSpeedStrategy)


def read_grad_norm(strategy: Strategy) -> Tensor | float | None:
    """Return the norm of all gradients where only the strategy can say it, else ``None``. All ranks must call it.

    DeepSpeed computes it in its step, so it is that of the step before, and 0 in the first.
    """
    model = strategy.model
    if isinstance(strategy, DeepSpeedStrategy):
        return model.get_global_grad_norm() or 0.0  # type: ignore[union-attr, operator]
    if isinstance(strategy, FSDPStrategy):
        return model.clip_grad_norm_(math.inf)  # type: ignore[union-attr, operator]
    return None


def get_own_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer that a task has built, which DeepSpeed wraps in one that has no hooks."""
    own: Optimizer = optimizer if isinstance(optimizer, Optimizer) else getattr(optimizer, "optimizer", optimizer)
    return own


def list_matrices(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters with two dimensions or more, before a strategy makes flat pieces of them."""
    return {parameter for parameter in module.parameters() if parameter.ndim >= 2}
