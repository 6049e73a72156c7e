"""What all rules for reading modules onto a tape share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lit_fsdp.tape import Tape

# Activation functions whose backward needs what they got.
SAVES_INPUT = {"SiLU", "SiLUActivation", "GELU", "GELUActivation", "GELUTanh", "PytorchGELUTanh"}


class UnreadableModuleError(ValueError):
    """A module whose memory has no rule here; the exact trace runs it instead.

    Args:
        name: Of the module.
        reason: What was not expected.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}: the closed form has no rule for it; use the exact trace")
        self.name, self.reason = name, reason


@dataclass(frozen=True, kw_only=True)
class Context:
    """What attention looks at.

    Args:
        value: On the tape.
        length: Tokens of a row.
        is_masked: Whether some of them must not be seen, besides those after a token.
    """

    value: int
    length: int
    is_masked: bool


@dataclass(frozen=True, kw_only=True)
class Reader:
    """What every rule needs.

    Args:
        tape: Grows.
        names: Of the parameters, by ``id``.
        rows: Of a micro-batch.
        length: Tokens of a row.
        is_masked: Whether some of the tokens must not see each other, besides those after them.
        shapes: As of ``MicroBatch``.
        num_bytes: As of ``MicroBatch``.
        context: What every block attends to besides its own tokens, such as the states of an encoder.
    """

    tape: Tape
    names: Mapping[int, str]
    rows: int
    length: int
    is_masked: bool = False
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    num_bytes: int = 0
    context: Context | None = None

    @property
    def num_tokens(self) -> int:
        """Of a micro-batch."""
        return self.rows * self.length

    def count_bytes(self, width: int) -> int:
        """Return the bytes of ``width`` numbers for every token."""
        return self.num_tokens * width * self.tape.itemsize

    def list_trained(self, *parameters: Any) -> list[tuple[str, int]]:
        """Return the names of those that train, with the bytes of their gradients."""
        size = self.tape.itemsize
        return [(self.names[id(p)], p.numel() * size) for p in parameters if p is not None and p.requires_grad]
