"""What all rules for reading modules onto a tape share."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from lit_fsdp.planning.closed_form.tape import Tape
from lit_fsdp.planning.step_parts import MicroBatch, NoEstimateError

# Activation functions whose backward needs what they got.
SAVES_INPUT = {"SiLU", "SiLUActivation", "GELU", "GELUActivation", "GELUTanh", "PytorchGELUTanh"}


class UnreadableModuleError(NoEstimateError):
    """A module whose memory has no rule here; the exact trace runs it instead.

    Args:
        name: Of the module.
        reason: What was not expected.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")


@dataclass(frozen=True, kw_only=True)
class Context:
    """What attention looks at: a value on the tape, the tokens of a row, and whether some must not be seen."""

    value: int
    length: int
    is_masked: bool


@dataclass(frozen=True, kw_only=True)
class Reader(MicroBatch):
    """What every rule needs: the shape of what it reads, and what it adds to.

    Args:
        tape: Grows.
        names: Of the parameters, by ``id``.
        context: What every block attends to besides its own tokens, such as the states of an encoder.
    """

    tape: Tape
    names: Mapping[int, str]
    context: Context | None = None

    def count_bytes(self, width: int) -> int:
        """Return the bytes of ``width`` numbers for every token."""
        return self.num_tokens * width * self.tape.itemsize

    def list_trained(self, *parameters: Any) -> list[tuple[str, int]]:
        """Return the names of those that train, with the bytes of their gradients."""
        size = self.tape.itemsize
        return [(self.names[id(p)], p.numel() * size) for p in parameters if p is not None and p.requires_grad]


def get_dropout(module: Any, *names: str) -> float:
    """Return with what probability a module drops: of the first attribute that it has, a layer or a number."""
    found = next((value for name in names if (value := getattr(module, name, None)) is not None), 0.0)
    return float(_get_probability(found))


def check_dropouts(name: str, module: nn.Module, known: Collection[str]) -> None:
    """Refuse a module that drops something, where no rule looks.

    Raises:
        UnreadableModuleError: It has another dropout than those of the names.
    """
    for key, value in {**vars(module), **dict(module.named_children())}.items():
        probability = _get_probability(value)
        if "drop" in key and key not in known and isinstance(probability, float) and probability > 0:
            raise UnreadableModuleError(name, f"a dropout {key} of {probability:g}")


def _get_probability(value: Any) -> Any:
    """Return that of a layer that drops numbers or whole rows; what is no such layer comes back."""
    return getattr(value, "p", getattr(value, "drop_prob", value))


def get_source(module: Any, name: str) -> str:
    """Return the code of a function in the file of a module's class; of one that is not there, nothing."""
    function = getattr(sys.modules[type(module).__module__], name, None)
    return "" if function is None else inspect.getsource(function)


def get_forward(module: Any) -> str:
    """Return the code of a module's ``forward``, which alone says what it does with its numbers."""
    return _get_source(type(module).forward)


@cache
def _get_source(function: Any) -> str:
    return inspect.getsource(function)


def list_filled(module: nn.Module) -> list[str]:
    """Return the children that may do something besides dropping."""
    return [key for key, child in module.named_children() if not isinstance(child, nn.Dropout | nn.Identity)]


def list_children(module: nn.Module) -> str:
    """Return what is directly inside a module, for messages."""
    return ", ".join(f"{key} ({type(child).__name__})" for key, child in module.named_children())
