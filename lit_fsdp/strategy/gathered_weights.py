"""Which weights a run has gathered, and when it lets go of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import lightning.pytorch as pl
import torch
from lightning_utilities.core import rank_zero
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lit_fsdp.errors import join_names
from lit_fsdp.sharding.replaced_method import ReplacedMethod
from lit_fsdp.sharding.shard import Sharding, find_roots, follow_toggles, reshard, reshard_when_toggled
from lit_fsdp.sharding.torch_internals import (
    UnitInternals,
    end_step,
    find_gradients,
    is_in_forward,
    list_edited,
    list_units,
)
from lit_fsdp.sharding.wrap import get_class

_WARNED: WeakSet[nn.Module] = WeakSet()
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
            *(u.call_before_backward(partial(_keep_for_inner, root, of)) for root, of in units.items() for u in of),
            *([] if self._is_automatic else (reshard_when_toggled(root) for root in roots)),
            *([] if self._is_automatic else (root.register_forward_hook(_warn_of_hidden) for root in roots)),
        ]

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
        for unit in self._gathers_late:
            if not unit.is_gathered:
                unit.begin_without_gather()

    def end_step(self) -> None:
        """Look what ``training_step`` has changed, and let go where no backward follows it."""
        self._num_steps += 1
        if self._num_steps == 1:
            self._warn_of_edited("training_step", _BETWEEN_STEPS)
        # At powers of two, as it takes time and finds what was changed since.
        elif self._num_steps.bit_count() == 1 and (self._has_seen_backward or not self._stays_gathered):
            self._warn_of_edited("training_step or a hook", _BETWEEN_STEPS)
        if not self._is_automatic:
            self.reshard()  # what was used last without a backward, for hooks that change weights

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


def _keep_for_inner(root: nn.Module, units: list[UnitInternals]) -> None:
    """Keep all weights of a root until the step, where a backward is inside of one.

    A backward through the graph of another one reads weights where they were gathered: without them it would end in an
    error or, on a CPU, in a segmentation fault. A forward that goes on after it has those of the root no more.
    """
    if torch.is_grad_enabled() or is_in_forward(root):  # of the backward: with ``create_graph``
        for unit in units:
            unit.keep()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _warn_of_hidden(root: nn.Module, _: Any, output: Any) -> None:
    """Say that FSDP2 finds no tensor in what a network returns, as in a distribution, and reduces no gradients."""
    if not torch.is_grad_enabled() or root in _WARNED or not any(p.requires_grad for p in root.parameters()):
        return
    known = Tensor | bool | int | float | str | None
    hiding = [leaf for leaf in tree_leaves(output) if not isinstance(leaf, known) and not is_dataclass(leaf)]
    if hiding and not find_gradients(output):
        _WARNED.add(root)
        name, kind = get_class(root).__name__, type(hiding[0]).__name__
        rank_zero.rank_zero_warn(
            f"{name} returns a {kind}, in which FSDP2 finds no tensors: a backward through it gives {name} no "
            f"gradients; return tensors and make the {kind} of them in training_step, see docs/limits.md"
        )


def list_limited(module: nn.Module) -> list[str]:
    """Return the embeddings that would change their own weights: those with a ``max_norm``."""
    return [n for n, m in module.named_modules() if getattr(m, "max_norm", None) and hasattr(m, "weight")]
