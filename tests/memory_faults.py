"""Runs out of memory where a test says so: on one rank, in one unit, in one phase of a step."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

PHASES = ("start", "forward", "unshard", "copy out", "backward", "gather again", "recompute", "reduce", "end")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """An error that one rank gets, the first ``times`` times it comes there.

    Args:
        rank: Which.
        phase: Where in a micro-batch. ``unshard`` and ``reduce`` are before the collective, ``copy out`` after it.
        unit: The place of the FSDP unit among those of the module; of ``start`` and ``end`` none.
        step: Of the optimizer, from 0.
        micro_batch: Of the step, from 0.
        times: How often.
        is_plain: A RuntimeError of that text, as CPUs and libraries raise.
    """

    rank: int
    phase: str
    unit: int = 0
    step: int = 1
    micro_batch: int = 0
    times: int = 1
    is_plain: bool = False


@dataclass
class Faults(pl.Callback):
    """Raises the errors of a run, and counts them."""

    faults: list[Fault]
    raised: list[Fault] = field(default_factory=list)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the errors where they belong, once units are there."""
        self._trainer, self._num_batches, self._undo = trainer, 0, []
        sharded = [module for module in pl_module.modules() if isinstance(module, FSDPModule)]
        # Those that are gathered; on one rank there may be none.
        units = [module for module in sharded if module._get_fsdp_state()._fsdp_param_group is not None] or sharded
        for fault in self.faults:
            if fault.rank == trainer.global_rank:
                unit = units[fault.unit % len(units)]
                check = partial(self._check, fault)
                getattr(self, f"_set_{fault.phase.replace(' ', '_')}")(pl_module, unit, check)

    def on_train_batch_start(self, *_: Any) -> None:
        """Count, as retries do not come here."""
        self._num_batches += 1

    def on_train_end(self, *_: Any) -> None:
        """Leave the module as it was."""
        for undo in self._undo:
            undo()

    def _check(self, fault: Fault) -> None:
        place = (self._num_batches - 1) % self._trainer.accumulate_grad_batches
        is_there = (self._trainer.global_step, place) == (fault.step, fault.micro_batch)
        if is_there and self.raised.count(fault) < fault.times:
            self.raised.append(fault)
            if fault.is_plain:
                raise RuntimeError("CUDA error: out of memory")
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def _replace(self, owner: Any, name: str, before: Any = None, after: Any = None) -> None:
        original = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before()
            result = original(*args, **kwargs)
            if after is not None:
                after()
            return result

        setattr(owner, name, run)
        self._undo.append(lambda: delattr(owner, name))

    def _set_start(self, module: nn.Module, _: nn.Module, check: Any) -> None:
        self._replace(module, "training_step", before=check)

    def _set_end(self, module: Any, _: nn.Module, check: Any) -> None:
        self._replace(module, "backward", after=check)

    def _set_forward(self, _: nn.Module, unit: nn.Module, check: Any) -> None:
        def run(*__: Any) -> None:
            if not _is_in_backward():
                check()

        self._undo.append(unit.register_forward_hook(run).remove)

    def _set_recompute(self, _: nn.Module, unit: nn.Module, check: Any) -> None:
        def run(*__: Any) -> None:
            if _is_in_backward():
                check()

        self._undo.append(unit.register_forward_pre_hook(run).remove)

    def _set_backward(self, _: nn.Module, unit: nn.Module, check: Any) -> None:
        def fail(gradient: Any) -> None:
            check()

        def run(_: nn.Module, __: Any, output: Any) -> None:
            for tensor in output if isinstance(output, tuple) else (output,):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(fail)

        self._undo.append(unit.register_forward_hook(run).remove)

    def _group(self, unit: Any) -> Any:
        return unit._get_fsdp_state()._fsdp_param_group

    def _set_unshard(self, _: nn.Module, unit: nn.Module, check: Any) -> None:
        self._replace(self._group(unit), "unshard", before=lambda: None if _is_in_backward() else check())

    def _set_gather_again(self, _: nn.Module, unit: nn.Module, check: Any) -> None:
        self._replace(self._group(unit), "unshard", before=lambda: check() if _is_in_backward() else None)

    def _set_copy_out(self, _: nn.Module, unit: nn.Module, check: Any) -> None:
        self._replace(self._group(unit), "wait_for_unshard", before=check)

    def _set_reduce(self, _: nn.Module, unit: nn.Module, check: Any) -> None:
        self._replace(self._group(unit), "_wait_for_post_backward", before=check)


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
