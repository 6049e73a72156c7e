"""What a training step changes beside gradients, so that it can be undone: buffers, metrics, the module's attributes.

Note [What is set back]: persistent buffers, such as running means; torchmetrics of the module; what ``log`` adds up
over an epoch; the attributes of the LightningModule itself that were set anew, and its own lists, sets and dicts. What
lies deeper is not, such as a tensor that is changed in place without being a buffer. Only changes in training_step and
backward count: what other hooks do between two micro-batches stays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torchmetrics import Metric

from lit_fsdp.sharding.buffers import iterate_saved_buffers

Undo = dict[Any, Callable[[], None]]  # of one change each
Changes = Callable[[], Undo]  # asked after a micro-batch

_CONTAINERS = (dict, list, set)
_NOTHING = object()


class StepMemory:
    """Remembers, over the micro-batches of a step, what each of them has changed first.

    Args:
        module: Whose steps they are, in its final form.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        saved = iterate_saved_buffers(module)
        self._buffers = [(part, name) for part, name in saved if not isinstance(part, Metric)]
        self._copies: list[tuple[Tensor | None, int, Tensor | None]] = [(None, 0, None) for _ in self._buffers]
        self._metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
        self._undo: Undo = {}  # of earlier micro-batches of the step
        self._find_changes: Changes = dict

    def begin(self) -> None:
        """Remember how things are before a micro-batch."""
        finders = [self._watch_buffers(), self._watch_metrics(), self._watch_attributes(), self._watch_logged()]
        self._find_changes = lambda: {key: undo for find in finders for key, undo in find().items()}

    def end(self) -> None:
        """Keep what the micro-batch has changed."""
        self._undo = self._find_changes() | self._undo
        self._find_changes = dict

    def undo_part(self) -> None:
        """Set back what has changed since ``begin``."""
        for undo in self._find_changes().values():
            undo()

    def undo(self) -> None:
        """Set back all that the micro-batches of the step have changed, and forget them."""
        self.end()
        for undo in self._undo.values():
            undo()
        self.forget()

    def forget(self) -> None:
        """Go on with another step."""
        self._undo, self._find_changes = {}, dict

    def _watch_buffers(self) -> Changes:
        for i, (part, name) in enumerate(self._buffers):
            buffer = part._buffers.get(name)
            if not _is_unchanged(part, buffer, *self._copies[i][:2]):
                version, copy = (0, None) if buffer is None else (buffer._version, buffer.detach().clone())
                self._copies[i] = buffer, version, copy
        copies = list(self._copies)

        def find() -> Undo:
            return {
                ("buffer", i): partial(_restore_buffer, part, name, buffer, copy)
                for i, ((part, name), (buffer, version, copy)) in enumerate(zip(self._buffers, copies, strict=True))
                if not _is_unchanged(part, part._buffers.get(name), buffer, version)
            }

        return find

    def _watch_metrics(self) -> Changes:
        # Private, seen in torchmetrics 1.9: a copy of the state of a metric.
        before = [(m, m.update_count, m._copy_state_dict() if m.update_called else None) for m in self._metrics]

        def find() -> Undo:
            return {
                ("metric", i): partial(_restore_metric, metric, count, state)
                for i, (metric, count, state) in enumerate(before)
                if metric.update_count != count
            }

        return find

    def _watch_attributes(self) -> Changes:
        own = self._module.__dict__
        before = {name: (value, _copy(value)) for name, value in own.items() if name not in _OF_LIBRARIES}

        def find() -> Undo:
            names = (name for name in dict.fromkeys([*before, *own]) if name not in _OF_LIBRARIES)
            pairs = ((name, *before.get(name, (_NOTHING, None))) for name in names)
            return {
                ("attribute", name): partial(_restore_attribute, own, name, value, content)
                for name, value, content in pairs
                if own.get(name, _NOTHING) is not value or not _is_same(value, content)
            }

        return find

    def _watch_logged(self) -> Changes:
        # Private, seen in lightning 2.6.6: what is added up over an epoch; an update makes new tensors of it.
        results: Any = self._module.trainer.fit_loop.epoch_loop._results
        before = {key: metric.metric_state for key, metric in results.items()}

        def find() -> Undo:
            added = ((key, metric) for key, metric in results.items() if metric.is_tensor and metric.meta.on_epoch)
            return {("logged", key): partial(_restore_logged, metric, before.get(key)) for key, metric in added}

        return find


# Of torch and Lightning. Not the hook that runs, which Lightning leaves as it was at an error.
_OF_LIBRARIES = frozenset(nn.Module().__dict__) | {"_trainer", "_device_mesh"}


def _is_unchanged(part: nn.Module, buffer: Tensor | None, before: Tensor | None, version: int) -> bool:
    """Whether a buffer is the one that was there before, and was not written to."""
    # Kernels of norms write into running statistics without a new version, seen in torch 2.13.
    return buffer is before and (buffer is None or (buffer._version == version and not isinstance(part, _NormBase)))


def _restore_buffer(part: nn.Module, name: str, buffer: Tensor | None, copy: Tensor | None) -> None:
    part._buffers[name] = buffer
    if buffer is not None and copy is not None:
        with torch.no_grad():
            buffer.copy_(copy)


def _restore_metric(metric: Metric, count: int, state: dict[str, Any] | None) -> None:
    _restore_logged(metric, state)
    metric._update_count, metric._computed = count, None  # private, seen in torchmetrics 1.9


def _restore_attribute(own: dict[str, Any], name: str, value: Any, content: Any) -> None:
    if value is _NOTHING:
        own.pop(name, None)
        return
    own[name] = value
    if content is None:
        return
    value.clear()
    if isinstance(value, list):
        value.extend(content)
    else:
        value.update(content)


def _restore_logged(metric: Metric, state: dict[str, Any] | None) -> None:
    if state is None:
        metric.reset()
        return
    for name, value in state.items():
        setattr(metric, name, value)


def _copy(value: Any) -> Any:
    return value.copy() if type(value) in _CONTAINERS else None


def _is_same(value: Any, content: Any) -> bool:
    """Whether a container has what it had: the same objects, as tensors cannot be compared."""
    if content is None:
        return True
    if isinstance(value, dict):
        return value.keys() == content.keys() and all(value[name] is content[name] for name in value)
    if isinstance(value, set):
        return bool(value == content)
    return len(value) == len(content) and all(a is b for a, b in zip(value, content, strict=True))
