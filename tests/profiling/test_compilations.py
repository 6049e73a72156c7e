"""What was compiled is counted by function, with the steps in which that happened again."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lit_fsdp.profiling.compilations import CompilationMeter


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


class Leaving(Block):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break(msg="a look at Python")
        return self.layer(x)


def test_compilations_are_counted_and_the_last_one_that_is_allowed_is_told_once() -> None:
    blocks = nn.Sequential(Block(), Block())
    for block in blocks:
        block.compile(backend="eager", dynamic=False, recompile_limit=3)
    meter = CompilationMeter()
    meter.start()
    warnings = []
    for step, num_rows in enumerate((2, 2, 3, 4, 5), start=1):  # with and without a gradient: two each
        blocks(torch.ones(num_rows, 4))
        warnings.append(meter.end_step(step))
    meter.stop()
    blocks(torch.ones(6, 4))
    numbers, notes = meter.describe()
    assert [warning is not None for warning in warnings] == [False, False, True, False, False]
    assert "step 3: a function was compiled as often as compile.recompile_limit allows" in str(warnings[2])
    assert (numbers["functions"], numbers["recompilations"], numbers["recompiled_in_steps"]) == (1, 2, [1, 3])
    assert numbers["is_over_limit"]
    assert numbers["total_s"] > 0
    assert numbers["graph_breaks"] == {}
    assert len(notes) == 1
    assert notes[0].startswith("rank 0 compiled 1 functions, 2 times more for other inputs (in steps 1, 3), in ")


def test_what_leaves_compiled_code_is_told() -> None:
    block = Leaving()
    block(torch.ones(2, 4))  # not compiled yet
    block.compile(backend="eager")
    meter = CompilationMeter()
    meter.start()
    block(torch.ones(2, 4))
    meter.stop()
    numbers, notes = meter.describe()
    assert len(numbers["graph_breaks"]) == 1
    assert any("compiled code was left, 1 x when it was compiled" in note for note in notes)
