"""Steps that run out of memory are undone on all ranks and redone, in smaller parts if need be.

Note [A step redone]: Lightning makes a closure for each micro-batch: forward and backward. Ours keeps the batches of
the step until it is over. At the end of each closure, before hooks and optimizer see the gradients, ranks agree whether
all of them have come through. If one has not, all drop the gradients of the step, set back what it has changed, and
compute its micro-batches again, from the random numbers that they had. A loss is a sum over parts, and gradients add
up, so the result is the same up to rounding.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from torch import Tensor
from torch.distributed import DistError
from torch.optim import Optimizer

from lit_fsdp.optim.overlapped_steps import OverlappedSteps
from lit_fsdp.profiling.device_memory import is_out_of_memory
from lit_fsdp.sharding.buffers import has_batch_statistics
from lit_fsdp.sharding.random_state import remember_generators
from lit_fsdp.sharding.scalars import drop_scalar_gradients
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.shard import find_roots
from lit_fsdp.sharding.torch_internals import end_step
from lit_fsdp.strategy.batch_split import BatchPart
from lit_fsdp.strategy.lightning_internals import is_last_micro_batch, replace_closures, run_training_step
from lit_fsdp.strategy.step_agreement import StepAgreement
from lit_fsdp.strategy.step_memory import StepMemory


def check_retries(num_retries: int, settings: Settings) -> None:
    """Refuse ``oom_retries`` that cannot work.

    Raises:
        ValueError: With what to set instead.
    """
    if num_retries < 0:
        raise ValueError(f"oom_retries: got {num_retries}: expected 0 or more")
    mesh = settings.mesh
    if num_retries and mesh.tensor != 1:
        raise ValueError(
            f"oom_retries: got {num_retries} with mesh.tensor {mesh.tensor}: what split layers send is not seen, so a "
            "rank that fails alone would leave others waiting; set one of them to its default"
        )
    if num_retries and mesh.sequence != 1 and settings.compile is not None:
        raise ValueError(
            f"oom_retries: got {num_retries} with mesh.sequence {mesh.sequence} and compile: what compiled blocks send "
            "is not seen, so a rank that fails alone would leave others waiting; leave one of them out"
        )


class _Strategy(Protocol):
    timeout_s: float
    overlapped_steps: OverlappedSteps | None

    @property
    def root_device(self) -> torch.device: ...
    def begin_backward(self, loss: Tensor, optimizer: Optimizer) -> Tensor: ...
    def end_backward(self, loss: Tensor) -> Tensor: ...
    def block_backward_sync(self) -> Any: ...
    def forget_path(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class _MicroBatch:
    """What is needed to compute a micro-batch again."""

    kwargs: dict[str, Any]  # of training_step
    closure: Closure
    optimizer: Optimizer
    restore_random: Callable[[], None]


class RetriedSteps:
    """Computes the micro-batches of a run, again where a rank runs out of memory.

    Args:
        strategy: Of the run.
        trainer: Likewise.
        module: Sharded, in its final form.
        num_retries: How often in the run.
        report: Says a line, on one rank.
    """

    def __init__(
        self,
        strategy: _Strategy,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        num_retries: int,
        report: Callable[[str], None],
    ) -> None:
        self._strategy, self._trainer, self._module = strategy, trainer, module
        self._num_retries, self._report = num_retries, report
        self.num_parts = 1  # of each micro-batch
        self.events: list[str] = []  # the lines that were said
        self._micro_batches: list[_MicroBatch] = []  # of the step, up to the one that runs
        self._phase = ""
        self._has_zeroed = False
        self._memory, self._part_memory = StepMemory(module), StepMemory(module)
        self._agreement = StepAgreement(strategy.root_device, strategy.timeout_s, self._read_failure, self._clean_up)
        self._agreement.start()
        self._give_back = replace_closures(trainer, partial(_RetriedClosure, self))

    def stop(self) -> None:
        """Leave the rest of the run alone. May be called twice."""
        self._give_back()
        self._agreement.stop()
        self._micro_batches.clear()

    def run(self, closure: Closure, kwargs: dict[str, Any], optimizer: Optimizer) -> ClosureResult:
        """Compute a micro-batch, with what was computed of its step before if it has to be."""
        self._micro_batches.append(
            _MicroBatch(kwargs=dict(kwargs), closure=closure, optimizer=optimizer, restore_random=remember_generators())
        )
        self._has_zeroed &= len(self._micro_batches) > 1
        is_redone = False
        while True:
            self._memory.begin()
            found, failures = self._agreement.run(partial(self._compute, is_redone=is_redone))
            if not failures:
                break
            self._memory.undo()
            for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
                if hasattr(callback, "on_step_undone"):  # ours, or the user's
                    callback.on_step_undone(self._trainer, self._module)
            self._drop_gradients()
            self._answer(failures)
            is_redone = True
        assert found is not None
        result, loss = found
        self._memory.end()
        if is_last_micro_batch(self._trainer):
            self._micro_batches.clear()
            self._memory.forget()
        if loss is not None:
            self._strategy.end_backward(loss)
        return result

    # Work

    def _compute(self, *, is_redone: bool) -> tuple[ClosureResult, Tensor | None]:
        *earlier, last = self._micro_batches
        if is_redone:
            for micro_batch in earlier:
                with self._hold_gradients():
                    self._compute_parts(micro_batch, is_redone=True)
        return self._compute_parts(last, is_redone=is_redone)

    @contextmanager
    def _hold_gradients(self) -> Iterator[None]:
        # Lightning does so around all micro-batches but the last; inside its context another one would end it.
        is_last = is_last_micro_batch(self._trainer)
        with self._strategy.block_backward_sync() if is_last else nullcontext(), self._expect_more():
            yield

    def _expect_more(self) -> AbstractContextManager[None]:
        """Return the context of backwards that another one of the step follows, of which Lightning does not know."""
        steps = self._strategy.overlapped_steps
        return nullcontext() if steps is None else steps.hold()

    def _compute_parts(self, micro_batch: _MicroBatch, *, is_redone: bool) -> tuple[ClosureResult, Tensor | None]:
        """Return the result of a micro-batch, and the loss of its last backward, if there was one."""
        if is_redone:
            micro_batch.restore_random()
        if self.num_parts == 1:
            return self._compute_part(micro_batch, micro_batch.kwargs, 1.0)
        *others, last = self._split(micro_batch.kwargs["batch"], self.num_parts)
        results = []
        with self._expect_more():
            for _ in range(self.num_parts - 1 - len(others)):
                # Other ranks have more rows: they need this one for their collectives. Before the last backward, in
                # which the step may be summed up and gradients be scaled.
                self._part_memory.begin()
                self._compute_part(micro_batch, {**micro_batch.kwargs, "batch": last[0]}, 0.0)
                self._part_memory.undo_part()
                self._part_memory.forget()
            for batch, weight in others:
                result, _ = self._compute_part(micro_batch, {**micro_batch.kwargs, "batch": batch}, weight)
                results.append(result.loss)
        batch, weight = last
        result, loss = self._compute_part(micro_batch, {**micro_batch.kwargs, "batch": batch}, weight)
        results.append(result.loss)
        losses = [part for part in results if part is not None]
        whole = torch.stack(losses).sum() if losses else None
        return ClosureResult(whole, extra=result.extra), loss

    def _compute_part(
        self, micro_batch: _MicroBatch, kwargs: dict[str, Any], weight: float
    ) -> tuple[ClosureResult, Tensor | None]:
        self._phase = "forward"
        result = run_training_step(self._trainer, kwargs)
        if result.closure_loss is not None and weight != 1.0:
            result = ClosureResult(result.closure_loss * weight, extra=result.extra)
        closure = micro_batch.closure
        if closure._zero_grad_fn is not None and not self._has_zeroed:
            closure._zero_grad_fn()
            self._has_zeroed = True
        if result.closure_loss is None:
            return result, None
        self._phase = "backward"
        loss = self._strategy.begin_backward(result.closure_loss, micro_batch.optimizer)
        return ClosureResult(result.loss, extra=result.extra), loss.detach()

    def _split(self, batch: Any, num_parts: int) -> Sequence[BatchPart]:
        split: Any = getattr(self._module, "split_batch", None)
        if split is None:
            raise ValueError(f"{type(self._module).__name__} has no method split_batch, see docs/out_of_memory.md")
        return list(split(batch, num_parts))

    # Failures

    def _read_failure(self, error: Exception) -> str | None:
        """Return what other ranks shall know of an error that a step can be redone after."""
        if not is_out_of_memory(error) or isinstance(error, DistError):
            return None
        where = f"rank {self._trainer.global_rank} ran out of memory in {self._phase} of step {self._step}"
        if (reason := self._find_hindrance()) is not None:
            error.add_note(f"the step is not redone: {reason}")
            print(f"{where}, which is not redone: {reason}", flush=True)
            return None
        return f"{where}: {next(iter(str(error).splitlines()), '')}"

    @property
    def _step(self) -> int:
        return self._trainer.global_step + 1

    def _find_hindrance(self) -> str | None:
        """Return why this rank cannot compute the step again in less memory."""
        if len(self.events) >= self._num_retries:
            return f"oom_retries {self._num_retries} were used up"
        if "batch" not in self._micro_batches[-1].kwargs:
            return "training_step takes batches from an iterator"
        if not self.events:
            return None  # as it was
        if has_batch_statistics(self._module):
            return "BatchNorm would take its statistics of fewer rows"
        for micro_batch in self._micro_batches:
            try:
                parts = self._split(micro_batch.kwargs["batch"], 2 * self.num_parts)
            except ValueError as error:
                return str(error)
        if len(parts) <= self.num_parts:
            return f"its micro-batch of {len(parts)} row{'s' * (len(parts) != 1)} cannot be split further"
        return None

    def _clean_up(self) -> None:
        """Let go of all that the step has computed."""
        self._strategy.forget_path()
        if (steps := self._strategy.overlapped_steps) is not None:
            steps.drop_step()
        for root in find_roots(self._module):
            end_step(root)
        self._drop_gradients()
        gc.collect()  # graphs with hooks are cycles
        if self._strategy.root_device.type == "cuda":
            torch.cuda.empty_cache()

    def _drop_gradients(self) -> None:
        for parameter in self._module.parameters():
            parameter.grad = None
        drop_scalar_gradients(self._module)

    def _answer(self, failures: dict[int, str]) -> None:
        """Choose how all ranks go on, the same on each."""
        first = next(iter(failures.values()))
        others = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        if self.events:  # it was no accident
            self.num_parts *= 2
            how = f"redone, like all later steps, with each micro-batch in {self.num_parts} parts"
        else:
            how = "redone as it was"
        line = f"{first}{others}; {how}"
        self.events.append(line)
        self._report(line)


class _RetriedClosure(Closure):
    """A closure of Lightning that may be computed more than once."""

    def __init__(self, steps: RetriedSteps, closure: Closure, kwargs: dict[str, Any], optimizer: Optimizer) -> None:
        super().__init__(closure._step_fn, closure._backward_fn, closure._zero_grad_fn)
        self._steps, self._closure, self._kwargs, self._optimizer = steps, closure, kwargs, optimizer

    @torch.enable_grad()
    def closure(self, *_: Any, **__: Any) -> ClosureResult:
        """Run forward and backward."""
        return self._steps.run(self._closure, self._kwargs, self._optimizer)
