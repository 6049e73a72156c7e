"""A training step as a list of operators with sizes, without tensors: what each makes, keeps and gives back.

Note [Tape]: every rule stands for what PyTorch's autograd keeps for the operator of that name, in bytes. A value is a
storage, so that views have no operator. What is made in forward lives until its last use, or until the backward of all
that keep it; gradients of values live until they were used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

FLOAT32, INDEX = 4, 8  # bytes of a number, and of the number of a token or class
RELEASE = "release"  # name of an operator that runs nothing
# Products with quantized weights, of which autograd saves nothing, by what runs inside.
QUANTIZED = ("bitsandbytes.gemm_4bit", "int8.mm", "int8.addmm")


@dataclass(frozen=True)
class Op:
    """An operator, or a few that are always together.

    Args:
        name: Of the operator in ``torch.ops.aten``, where it is one.
        inputs: Values it reads.
        output: The value it makes.
        saves: Values it keeps for backward.
        gets_grad: Inputs whose gradients backward makes, each of the size of the value.
        weights: Names of parameters whose gradients backward makes, with their bytes.
        shares_grad: The gradient of the output is that of the inputs, without a copy.
        splits_grad: The gradients of the inputs are parts of that of the output, without a copy.
        forward_temp: Bytes that forward needs besides.
        backward_temp: Bytes that backward needs besides.
        flops: Of forward.
        backward_flops: Of backward.
        again_flops: Of what backward computes again by itself.
        forward_moved: Bytes that forward reads and writes, if this has FLOPs, besides those of products.
        backward_moved: The same of backward.
    """

    name: str
    inputs: tuple[int, ...]
    output: int
    saves: tuple[int, ...] = ()
    gets_grad: tuple[int, ...] = ()
    weights: tuple[tuple[str, int], ...] = ()
    shares_grad: bool = False
    splits_grad: bool = False
    forward_temp: int = 0
    backward_temp: int = 0
    flops: int = 0
    backward_flops: int = 0
    again_flops: int = 0
    forward_moved: int = 0
    backward_moved: int = 0

    @property
    def outputs(self) -> list[int]:
        """All that it makes and backward keeps, and its output."""
        return [self.output, *(value for value in self.saves if value not in self.inputs and value != self.output)]


@dataclass(frozen=True)
class Mark:
    """Where the forward of a unit, or of a block that is computed again, begins or ends."""

    what: Literal["enter_unit", "leave_unit", "enter_block", "leave_block"]
    index: int  # of the unit in the plan, or of the block
    value: int  # that goes in or comes out


@dataclass
class Tape:
    """Operators in the order of forward.

    Args:
        itemsize: Bytes of a number of the dtype that is computed in.
        is_gpu: Whether kernels are those of GPUs: masks of dropout, and what attention keeps, are others on CPUs.
        batch_bytes: Of the micro-batch, which stays for the whole step.
        tables: Bytes of what blocks share and keep: cosines and sines of positions.
        passed: Bytes of what blocks share and keep only to be computed again, such as masks of attention.
    """

    itemsize: int
    is_gpu: bool = True
    batch_bytes: int = 0
    tables: dict[str, int] = field(default_factory=dict)
    passed: dict[str, int] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    needs_grad: list[bool] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    steps: list[Op | Mark] = field(default_factory=list)
    _part: str = "embeddings"
    _has_graph: bool = True

    @contextmanager
    def without_graph(self) -> Iterator[None]:
        """Let what is added inside have no backward of its own, as in a function that has one for all."""
        self._has_graph = False
        yield
        self._has_graph = True

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Say which part of the model the values made inside belong to."""
        before, self._part = self._part, name
        yield
        self._part = before

    def add_value(self, num_bytes: int, *, needs_grad: bool = False) -> int:
        """Return a new value, which something else than an operator of the tape makes."""
        self.sizes.append(num_bytes)
        self.parts.append(self._part)
        self.needs_grad.append(needs_grad)
        return len(self.sizes) - 1

    def hold(self, *values: int) -> None:
        """Keep values until forward ends, as what a model returns is."""
        self.held.update(values)

    def release(self, *values: int) -> None:
        """Let go here of values that have a name in the code until then, whether they are used or not."""
        self.steps.append(Op(name=RELEASE, inputs=values, output=self.add_value(0)))

    def keep(self, value: int) -> None:
        """Keep a value until backward comes back here, as what blocks that are computed again are called with."""
        self.steps.append(Op(name="keep", inputs=(), output=self.add_value(0), saves=(value,)))

    def mark(self, what: Literal["enter_unit", "leave_unit", "enter_block", "leave_block"], index: int, v: int) -> None:
        """Say where something begins or ends."""
        self.steps.append(Mark(what, index, v))

    def add(
        self,
        name: str,
        inputs: Sequence[int],
        num_bytes: int,
        *,
        saves: Iterable[int] = (),
        extra: int = 0,
        saves_output: bool = False,
        weights: Sequence[tuple[str, int]] = (),
        shares_grad: bool = False,
        splits_grad: bool = False,
        forward_temp: int = 0,
        backward_temp: int = 0,
        **counts: int,
    ) -> int:
        """Add an operator, and return the value it makes; see ``Op``.

        If the output needs a gradient, it keeps ``saves`` of its inputs, ``extra`` bytes that it makes besides, and
        with ``saves_output`` its output.
        """
        wanted = tuple(dict.fromkeys(v for v in inputs if self.needs_grad[v]))
        if not self._has_graph:
            wanted, weights = (), ()
        is_trained = bool(wanted or weights)
        output = self.add_value(num_bytes, needs_grad=is_trained)
        kept = list(saves) if is_trained else []
        if is_trained and saves_output:
            kept.append(output)
        if is_trained and extra:
            made = self.add_value(extra)
            kept.append(made)
        self.steps.append(
            Op(
                name=name,
                inputs=tuple(inputs),
                output=output,
                saves=tuple(kept),
                gets_grad=wanted,
                weights=tuple(weights),
                shares_grad=shares_grad,
                splits_grad=splits_grad,
                forward_temp=forward_temp,
                backward_temp=backward_temp if is_trained else 0,
                **{key: count for key, count in counts.items() if is_trained or key in ("flops", "forward_moved")},
            )
        )
        return output

    def add_sum(self, a: int, b: int) -> int:
        """Add two values of one size."""
        return self.add("add", (a, b), max(self.sizes[a], self.sizes[b]), shares_grad=True)

    def add_product(self, a: int, b: int) -> int:
        """Multiply two values element by element; each is kept for the gradient of the other."""
        saves = [x for x, other in ((a, b), (b, a)) if self.needs_grad[other]]
        return self.add("mul", (a, b), self.sizes[a], saves=saves)

    def add_pointwise(
        self, name: str, x: int, *, saves_input: bool = False, saves_output: bool = False, temps: int = 0
    ) -> int:
        """Apply a function to every element.

        ``temps`` is how many tensors of its size backward needs besides.
        """
        size = self.sizes[x]
        saves = (x,) if saves_input else ()
        return self.add(name, (x,), size, saves=saves, saves_output=saves_output, backward_temp=temps * size)

    def add_cast(self, x: int, itemsize: int, into: int) -> int:
        """Cast from a number of ``itemsize`` bytes to one of ``into``; to the same dtype nothing happens."""
        return x if itemsize == into else self.add("to", (x,), self.sizes[x] // itemsize * into)

    def add_dropout(self, x: int, probability: float) -> int:
        """Drop some elements; without any nothing happens."""
        if not probability:
            return x
        size = self.sizes[x]
        return self.add("dropout", (x,), size, extra=size // self.itemsize if self.is_gpu else size)
