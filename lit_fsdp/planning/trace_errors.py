"""Why a step cannot be followed on tensors without values, told apart from what is wrong with the step itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from lit_fsdp.errors import ConfigError, is_debugging

# Where torch defines what fake tensors raise, and what it logs beside it; seen in torch 2.13.
_FAKE_TENSORS = "torch._subclasses.fake_tensor"
_SYMBOLS = "torch.fx.experimental.symbolic_shapes"
# Plain errors of torch that a real run on a GPU would not have.
_NO_VALUES = (
    "is not supported for tensor subclasses",  # numpy
    "Cannot access data pointer of Tensor",
    "its data is not allocated yet",
    "Could not run '",  # an operator without a rule
    "Expected inputs of BF16 type",  # the grouped product of experts has no rule for float32
)
_HELP = (
    "it asks for values, as .item(), float(), if on a tensor, boolean masks such as x[mask], nonzero and unique do; "
    "torch.where or a product with the mask needs none; see docs/planning.md"
)


@contextmanager
def explain_trace(name: str) -> Iterator[None]:
    """Raise what goes wrong in a traced step as one line.

    Args:
        name: Of the task.

    Raises:
        ConfigError: The step fails, or asks for what a tensor without values has not.
    """
    logger = logging.getLogger(_FAKE_TENSORS)
    level = logger.level
    if not is_debugging():
        logger.setLevel(logging.CRITICAL)  # it logs each failure with its traceback
    try:
        yield
    except RuntimeError as error:  # also of backward and the optimizer
        if is_debugging():
            raise
        raise _explain(name, error) from error
    finally:
        logger.setLevel(level)


def compute_loss(name: str, step: Callable[[Any, int], Any], batch: Any) -> Tensor:
    """Return the loss of a micro-batch, as ``training_step`` does.

    Args:
        name: Of the task.
        step: Its ``training_step``.
        batch: On tensors without values.

    Raises:
        ConfigError: It returns none, or fails for sizes and settings; other errors are raised as they are.
    """
    try:
        output = step(batch, 0)
    except (ValueError, IndexError) as error:  # a RuntimeError is explained with those of backward
        if is_debugging():
            raise
        raise _explain(name, error) from error
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        what = f"a {type(output).__name__} without loss" if isinstance(output, Mapping) else repr(loss)[:50]
        raise ConfigError(
            f"model: {name}.training_step returned {what}: a plan needs a step that trains: return the loss, or a "
            "dict with loss"
        )
    return loss


def _explain(name: str, error: Exception) -> ConfigError:
    reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    is_limit = type(error).__module__ in (_FAKE_TENSORS, _SYMBOLS) or any(text in str(error) for text in _NO_VALUES)
    if is_limit:
        return ConfigError(f"plan: the step of {name} cannot run on tensors without values ({reason}): {_HELP}")
    return ConfigError(f"plan: the step itself fails: {name}: {reason}; LIT_FSDP_DEBUG=1 shows where")
