"""Runs out of memory where a test says so: on one rank or all, in one unit, in one phase of a step."""

import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import product
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

PHASES = ("start", "forward", "unshard", "copy out", "backward", "gather again", "recompute", "reduce", "end")

Place = tuple[str, int, int, int]  # phase, unit, step and micro-batch of a fault


@dataclass(frozen=True, kw_only=True)
class Fault:
    """An error that a rank gets, the first ``times`` times its micro-batch is computed.

    Args:
        rank: Which; ``None`` for all, or those that are not stopped before.
        phase: Where in a micro-batch. ``unshard`` and ``reduce`` are before the collective, ``copy out`` after it.
        unit: The place of the FSDP unit among those of the module; of ``start`` and ``end`` none.
        step: Of the optimizer, from 0.
        micro_batch: Of the step, from 0.
        times: How often.
        is_plain: A RuntimeError of that text, as CPUs and libraries raise.
    """

    rank: int | None
    phase: str
    unit: int = 0
    step: int = 1
    micro_batch: int = 0
    times: int = 1
    is_plain: bool = False


@dataclass
class Faults(pl.Callback):
    """Raises the errors of a run, and counts them.

    Args:
        faults: All that there shall be. With ``None``, ``reached`` is filled with the places where one could be.
        phases: Of these places. Hooks inside of a compiled block would have it compiled in pieces.
    """

    faults: list[Fault] | None
    phases: Sequence[str] = PHASES
    raised: list[Fault] = field(default_factory=list)
    reached: set[Place] = field(default_factory=set)
    reads_weights = False  # no field

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the errors where they belong, once units are there."""
        self._trainer, self._num_batches = trainer, 0
        self._undo: list[Callable[[], Any]] = []
        sharded = [module for module in pl_module.modules() if isinstance(module, FSDPModule)]
        # Those that are gathered; on one rank there may be none.
        units = [module for module in sharded if module._get_fsdp_state()._fsdp_param_group is not None] or sharded
        for fault in self.faults or ():
            if fault.rank in (trainer.global_rank, None):
                self._set(fault.phase, pl_module, units[fault.unit], partial(self._check, fault))
        for phase, unit in product(self.phases, range(len(units))) if self.faults is None else ():
            if unit == 0 or phase not in ("start", "end"):
                self._set(phase, pl_module, units[unit], partial(self._note, phase, unit))

    def _set(self, phase: str, module: nn.Module, unit: nn.Module, check: Any) -> None:
        getattr(self, f"_set_{phase.replace(' ', '_')}")(module, unit, check)

    def on_train_batch_start(self, *_: Any) -> None:
        """Count, as retries do not come here."""
        self._num_batches += 1
        self._num_redone = self._count_redone()

    def on_train_end(self, *_: Any) -> None:
        """Leave the module as it was."""
        for undo in reversed(self._undo):
            undo()

    def _locate(self) -> tuple[int, int]:
        """Return the step and the micro-batch that run."""
        return self._trainer.global_step, (self._num_batches - 1) % self._trainer.accumulate_grad_batches

    def _count_redone(self) -> int:
        strategy: Any = self._trainer.strategy
        return len(strategy.redone_steps)

    def _note(self, phase: str, unit: int) -> None:
        self.reached.add((phase, unit, *self._locate()))

    def _check(self, fault: Fault) -> None:
        num_tries = self._count_redone() - self._num_redone
        if self._locate() == (fault.step, fault.micro_batch) and num_tries < fault.times:
            self.raised.append(fault)
            if fault.is_plain:
                raise RuntimeError("CUDA error: out of memory")
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def _replace(self, owner: Any, name: str, before: Any = None, after: Any = None) -> None:
        original, had_own = getattr(owner, name), name in vars(owner)

        def run(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before()
            result = original(*args, **kwargs)
            if after is not None:
                after()
            return result

        setattr(owner, name, run)
        self._undo.append(lambda: setattr(owner, name, original) if had_own else delattr(owner, name))

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

        for child in unit.children():  # a block itself is not called again, only what is inside of it
            self._undo.append(child.register_forward_pre_hook(run).remove)

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


def draw_faults(reached: Sequence[set[Place]], seed: str) -> Iterator[Fault]:
    """Yield errors for one run each: one phase after the other, in each another rank and unit as long as there are any.

    Half of them come twice. Ranks, units, steps and micro-batches are drawn anew for each seed.

    Args:
        reached: Where each rank comes by.
        seed: Of what is drawn.
    """
    draw = random.Random(seed)
    places: dict[str, dict[tuple[int | None, int], list[tuple[int, int]]]] = {}
    for rank, own in (*enumerate(reached), (None, set.intersection(*reached))):
        for phase, unit, *when in sorted(own):
            places.setdefault(phase, defaultdict(list))[rank, unit].append(tuple(when))  # type: ignore[arg-type]
    phases = draw.sample(list(places), len(places))
    left = {phase: draw.sample(list(places[phase]), len(places[phase])) for phase in phases}
    while left:
        for phase in list(left):
            rank, unit = left[phase].pop()
            step, micro_batch = draw.choice(places[phase][rank, unit])
            yield Fault(
                rank=rank,
                phase=phase,
                unit=unit,
                step=step,
                micro_batch=micro_batch,
                times=draw.choice((1, 2)),
                is_plain=draw.random() < 0.3,
            )
            if not left[phase]:
                del left[phase]


def describe_faults(survived: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return a page on runs with one fault each, by setting and by phase.

    Args:
        survived: Of each setting its faults, with how often they were ``raised`` on all ranks together, how often the
            step was ``redone``, and the largest ``differences`` to the run without.
    """
    runs = [run for found in survived.values() for run in found]
    places = {name: {(run["rank"], run["phase"], run["unit"]) for run in found} for name, found in survived.items()}
    head = ("setting", "runs", "errors", "places", "as it was", "equal to the bit", "split", *_KINDS)
    rows: list[Sequence[str]] = [head]
    for name, found in survived.items():
        whole, split = ([run for run in found if (run["redone"] > 1) == is_split] for is_split in (False, True))
        num_equal = sum(not any(_list_differences(run)) for run in whole)
        counts = (len(found), _count_errors(found), len(places[name]), len(whole), num_equal, len(split))
        largest = (max(values) for values in zip(*map(_list_differences, split), strict=True))
        rows.append((name, *map(str, counts), *(f"{value:.1e}" for value in largest)))
    num_places, num_apart = len(set.union(*places.values())), sum(map(len, places.values()))
    num_errors = _count_errors(runs)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning"))
    by_phase = {phase: [run for run in runs if run["phase"] == phase] for phase in PHASES}
    phases = [(phase, str(len(found)), str(_count_errors(found))) for phase, found in by_phase.items()]
    return f"""# Steps that run out of memory, redone

{datetime.now(UTC):%Y-%m-%d}, {versions}, gloo, CPU, {os.cpu_count()} cores.
Written by `pytest -m slow tests/strategy/test_retried_step.py`, which has passed.

{len(runs)} runs of three steps, with errors at one place of one step each: none that was drawn has failed to come, and
{num_errors} were raised. A place is a phase, a unit, and a rank or all of them: {num_places} different ones,
{num_apart} with those of each setting apart.
Each run is compared with one of its setting without errors: loss and gradient norm of all steps, relative for the norm,
and weights after the last. Where the step was split, the largest difference of any run is shown; a split step draws
other random numbers for dropout.

{_make_table(rows)}

{_make_table([("phase", "runs", "errors"), *phases])}
"""


_KINDS = ("loss", "grad_norm", "weight")


def _count_errors(runs: Sequence[Mapping[str, Any]]) -> int:
    return sum(run["raised"] for run in runs)


def _list_differences(run: Mapping[str, Any]) -> list[float]:
    return [run["differences"][kind] for kind in _KINDS]


def _make_table(rows: Sequence[Sequence[str]]) -> str:
    head, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *others])
