"""Which weights a run has gathered, and when it lets go of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core import rank_zero
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lit_fsdp.errors import join_names
from lit_fsdp.sharding.hidden_tensors import list_tensors
from lit_fsdp.sharding.replaced_method import ReplacedMethod
from lit_fsdp.sharding.shard import Sharding, find_roots, follow_toggles, reshard, reshard_when_toggled
from lit_fsdp.sharding.torch_internals import (
    UnitInternals,
    end_step,
    is_in_forward,
    list_edited,
    list_units,
    retains_graph,
)

_BETWEEN_STEPS = (
    "do it first in training_step and under torch.no_grad(), or in on_train_batch_end before any forward there"
)


class GatheredWeights:
    """What forwards of a run leave gathered: let go where a hook, an optimizer or a save needs the shards.

    Args:
        module: The sharded module.
        sharding: Says whether weights stay so from one micro-batch of a step to the next.
    """

    def __init__(self, module: pl.LightningModule, sharding: Sharding) -> None:
        self._module = module
        self._is_automatic = module.automatic_optimization
        self._stays_gathered = not sharding.reshard_after_backward
        self._is_exact = sharding.gather_bits is None
        roots = find_roots(module)
        for root in roots:
            end_step(root)  # of an earlier run, if an error has ended it there
        units = {root: list_units(root) for root in roots}
        self._units = [unit for of_root in units.values() for unit in of_root]
        self._edited: set[str] = set()  # weights whose gathered copies were changed, as was said
        self._num_steps, self._has_seen_backward = 0, False
        self._toggles: list[Callable[[], None]] = []  # of an evaluation
        # Of the run, where gathered weights stay until the step.
        self._toggles_of_kept = [follow_toggles(r) for r in roots if self._stays_gathered and self._is_automatic]
        own = [unit for unit in self._units if unit.module is module and self._is_automatic and not unit.is_compiled]
        self._gathers_late = own  # of the module itself, in a step
        self._undo_late = [unit.gather_when_used(self._units) for unit in own]
        self._hooks: list[ReplacedMethod | RemovableHandle] = [
            *(
                u.call_before_backward(partial(self._keep_for_inner, root, of))
                for root, of in units.items()
                for u in of
            ),
        ]
        self._is_in_step = self._is_in_backward = False
        if not self._is_automatic:
            for root, of in units.items():
                self._hooks += [reshard_when_toggled(root), *self._let_go_without_backward(root, of)]

    def remove(self) -> None:
        """Take the hooks out of the module, and keep nothing of it."""
        while self._hooks:
            self._hooks.pop().remove()
        while self._undo_late:
            self._undo_late.pop()()
        for unit in self._units:
            unit.end()
        self._let_go_of_kept()

    def begin_training(self) -> None:
        """Say again which weights the first steps change in vain."""
        self._num_steps, self._has_seen_backward = 0, False
        self._edited.clear()

    def end_training(self) -> None:
        """Say which weights later steps have changed in vain."""
        self._warn_of_edited("training_step or a hook", _BETWEEN_STEPS)

    def keep_toggles(self) -> None:
        """Keep what hooks between micro-batches have frozen or unfrozen, which gathered weights would forget."""
        for find_toggled in self._toggles_of_kept:
            find_toggled()

    def begin_step(self) -> None:
        """Let ``training_step`` begin with shards, so that it can change weights until it uses some."""
        self._is_in_step = True
        for unit in self._gathers_late:
            if not unit.is_gathered:
                unit.begin_without_gather()

    def end_step(self) -> None:
        """Look what ``training_step`` has changed, and let go where no backward follows it."""
        self._is_in_step = False
        self._num_steps += 1
        if self._num_steps == 1:
            self._warn_of_edited("training_step", _BETWEEN_STEPS)
        # At powers of two, as it takes time and finds what was changed since.
        elif self._num_steps.bit_count() == 1 and (self._has_seen_backward or not self._stays_gathered):
            self._warn_of_edited("training_step or a hook", _BETWEEN_STEPS)
        if not self._is_automatic:
            self.reshard()  # what was used last without a backward, for hooks that change weights

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Take the backward that runs inside for one of Lightning's: others are inside of a step."""
        self._is_in_backward = True
        try:
            yield
        finally:
            self._is_in_backward = False

    def end_backward(self) -> None:
        """Let go of what the last backward of a step has left: hooks look for gradients, and shards have them.

        Under manual optimization only where there are some: other networks may have a backward to come.
        """
        units = self._units if self._stays_gathered else [unit for unit in self._units if unit.is_kept]
        if self._stays_gathered and not self._has_seen_backward:
            self._has_seen_backward = True
            self._warn_of_edited("a hook between micro-batches", "do it after the optimizer step")
        for unit in units:
            if unit.is_gathered and (self._is_automatic or any(shard.grad is not None for shard in unit.list_shards())):
                unit.reshard()

    def reshard(self, optimizer: Optimizer | None = None) -> None:
        """Let go of what a forward without backward has left gathered, of the parameters of an optimizer or of all."""
        if gathered := [unit for unit in self._units if unit.is_gathered]:
            groups = [] if optimizer is None else optimizer.param_groups
            stepped = {id(parameter) for group in groups for parameter in group["params"]}
            for unit in gathered:
                if optimizer is None or any(id(shard) in stepped for shard in unit.list_shards()):
                    unit.reshard()

    def begin_evaluation(self) -> None:
        """Remember which weights need a gradient."""
        self._toggles = [follow_toggles(root) for root in find_roots(self._module)]

    def end_evaluation(self) -> None:
        """Let go of the head, which no forward lets go of: else the next step has a gather less than others.

        What hooks have frozen or unfrozen meanwhile stays so.
        """
        for find_toggled in self._toggles:
            find_toggled()
        self._toggles = []
        self._let_go_of_kept()
        reshard(self._module)

    def _let_go_without_backward(self, root: nn.Module, units: list[UnitInternals]) -> list[RemovableHandle]:
        """Let a forward that leads to no gradients, in a step, keep nothing that it has gathered: no backward needs it.

        So a step that asks a target network can then move it. Not when it is moved: ranks must gather alike, whatever
        one of them reads.
        """
        gathered: list[UnitInternals] = []

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def begin(*_: Any) -> None:
            gathered[:] = [u for u in units if self._is_in_step and not (u.is_gathered or u.is_kept)]

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def end(_: nn.Module, __: Any, output: Any) -> None:
            if not any(tensor.requires_grad for tensor in list_tensors([output])):
                for unit in gathered:
                    unit.reshard()
            gathered.clear()

        return [root.register_forward_pre_hook(begin, prepend=True), root.register_forward_hook(end)]

    def _keep_for_inner(self, root: nn.Module, units: list[UnitInternals]) -> None:
        """Keep all weights of a root until the step, where a backward is inside of one.

        A backward through the graph of another one reads weights where they were gathered: without them it would end in
        an error or, on a CPU, in a segmentation fault. A forward that goes on after it has those of the root no more,
        nor has a step that differentiates by one of them again, as losses of VQGAN do.
        """
        is_inner = is_in_forward(root) or (retains_graph() and not self._is_in_backward)
        if is_inner or torch.is_grad_enabled():  # of the backward: with ``create_graph``
            for unit in units:
                unit.keep()

    def _let_go_of_kept(self) -> None:
        for unit in self._units:
            if unit.is_kept:
                unit.reshard()

    def _warn_of_edited(self, place: str, answer: str) -> None:
        known = {f"{name}.weight" for name in list_limited(self._module)} | self._edited  # warned of already
        if edited := [n for n in list_edited(self._module, is_exact=self._is_exact) if n not in known]:
            self._edited.update(edited)
            rank_zero.rank_zero_warn(
                f"{place} changes {join_names(edited)}: this changes gathered copies of the weights, not the weights; "
                f"{answer}, see docs/limits.md"
            )


def list_limited(module: nn.Module) -> list[str]:
    """Return the embeddings that would change their own weights: those with a ``max_norm``."""
    return [n for n, m in module.named_modules() if getattr(m, "max_norm", None) and hasattr(m, "weight")]
