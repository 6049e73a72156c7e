"""The timeline of a step on streams whose work takes as long as it is told: compute waits only where nothing helps."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from models import Block
from stand_in_gpu import Event, Stream, find_place, run_as_gpus
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from lit_fsdp import ActivationCheckpointing, Mesh, MixedPrecision, Sharding, Wrap
from lit_fsdp.sharding.mesh import build_mesh
from lit_fsdp.sharding.parallelize import shard_module
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.torch_internals import settle_root
from lit_fsdp.weights.load import materialize

NUM_BLOCKS, WIDTH, ROWS = 6, 16, 4
PRODUCTS_OF_A_BLOCK = 2  # in forward; backward has two for each, but for the first of the step one
# In the time that a block takes in forward; its backward takes twice that.
GATHER, REDUCE, COPY_OF_INPUT = 0.75, 0.75, 0.5
NUM_PARAMETERS = 4 * WIDTH * (WIDTH + 1)  # of a block


class UnequalBlock(Block):
    """Has as much to compute as any, and more to send: as a layer of experts, of which a token uses few."""

    def __init__(self, extra: int) -> None:
        super().__init__(WIDTH)
        self.extra = nn.Parameter(torch.zeros(extra))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out + self.extra.sum()


class Model(nn.Module):
    def __init__(self, extras: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(UnequalBlock(extra) if extra else Block(WIDTH) for extra in extras)
        self.change: Callable[[nn.Module], object] = lambda _: None

    def forward(self, x: Tensor) -> Tensor:
        self.change(self.blocks[0])
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


@dataclass
class Wait:
    """Of compute, from the start of the step."""

    begin_s: float
    took_s: float


class Timeline(TorchDispatchMode):
    """Gives work the times that it would have if streams were all there is: the host is never late.

    Collectives run one at a time, in the order in which they were begun, as those of one communicator do.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.compute: Any = torch.cuda.current_stream()
        self.begin_s = self.link_s = self.compute.clock_s
        self.computed_s = 0.0
        self.num_copies = 0
        self.waits: list[Wait] = []

    def note_wait(self, until_s: float) -> None:
        self.waits.append(Wait(self.compute.clock_s - self.begin_s, until_s - self.compute.clock_s))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name, stream = func.overloadpacket.__name__, cast(Any, torch.cuda.current_stream())
        if name in ("mm", "addmm"):
            assert stream is self.compute
            self.computed_s += 1 / PRODUCTS_OF_A_BLOCK
            stream.clock_s += 1 / PRODUCTS_OF_A_BLOCK
        elif "allgather" in name or "reduce_scatter" in name:
            assert stream is not self.compute
            gathers = "allgather" in name
            num_parameters = args[0].numel() if gathers else args[1].numel()
            took_s = (GATHER if gathers else REDUCE) * num_parameters / NUM_PARAMETERS
            stream.clock_s = self.link_s = max(self.link_s, stream.clock_s) + took_s
        elif name == "copy_" and {find_place(args[0]), find_place(args[1])} == {"host", "device"} and is_async(args):
            assert stream is not self.compute
            self.num_copies += 1
            stream.clock_s += COPY_OF_INPUT
        return out


def is_async(args: Any) -> bool:
    return len(args) > 2 and bool(args[2])


@contextmanager
def keep_time() -> Iterator[Timeline]:
    record, wait_event, wait_stream = Event.record, Stream.wait_event, Stream.wait_stream

    def record_time(event: Any, stream: Any = None) -> Any:
        event.clock_s = (stream or torch.cuda.current_stream()).clock_s
        return record(event, stream)

    def wait_for_event(stream: Any, event: Any) -> None:
        wait_event(stream, event)
        wait_until(stream, getattr(event, "clock_s", 0.0))

    def wait_for_stream(stream: Any, other: Any) -> None:
        wait_stream(stream, other)
        wait_until(stream, other.clock_s)

    def wait_until(stream: Any, clock_s: float) -> None:
        if clock_s > stream.clock_s:
            if stream is timeline.compute:
                timeline.note_wait(clock_s)
            stream.clock_s = clock_s

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "clock_s", 0.0, raising=False)
        patch.setattr(Event, "record", record_time)
        patch.setattr(Stream, "wait_event", wait_for_event)
        patch.setattr(Stream, "wait_stream", wait_for_stream)
        timeline = Timeline()
        with timeline:
            yield timeline


def run_step(
    *,
    prefetches: bool = True,
    extras: Sequence[int] = (0,) * NUM_BLOCKS,
    change: Callable[[nn.Module], object] = lambda _: None,
    **settings: Any,
) -> Timeline:
    """Return the timeline of the second step, which begins with a change of the first block.

    ``extras`` are parameters that blocks have beside others.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    chosen = Settings(wrap=Wrap(module_classes=["Block", "UnequalBlock"]), **settings)
    with torch.device("meta"):
        model = Model(extras)
    mesh = build_mesh(Mesh(), device_type="cuda", world_size=2, ranks_per_node=2)
    shard_module(model, chosen, dtypes=MixedPrecision(), mesh=mesh, device=device)
    if not prefetches:
        for block in cast(list[FSDPModule], list(model.blocks)):
            block.set_modules_to_backward_prefetch([block])
    materialize(model, device)
    settle_root(cast(FSDPModule, model))
    x = torch.zeros(ROWS, WIDTH, device=device)
    model(x).backward()
    model.change = change
    with keep_time() as timeline:
        model(x).backward()
    return timeline


def assign(block: nn.Module) -> None:
    cast(Any, torch.cuda.current_stream()).clock_s += 1.0
    for parameter in block.parameters():
        parameter.data = parameter.data * 2


def load(block: nn.Module) -> None:
    cast(Any, torch.cuda.current_stream()).clock_s += 1.0
    block.load_state_dict(block.state_dict())


def compare() -> None:
    offload = ActivationCheckpointing(mode="full", offload=True)
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 0),
        ({"activation_checkpointing": ActivationCheckpointing(mode="full")}, 0),
        ({"activation_checkpointing": offload}, 2 * (NUM_BLOCKS - 1)),
    ]
    for settings, num_copies in cases:
        timeline = run_step(**settings)
        assert timeline.num_copies == num_copies
        # Nothing can be computed before the first gather, and nothing is left to do beside the last reduction.
        first, last = timeline.waits
        assert (first.begin_s, first.took_s) == pytest.approx((0, GATHER))
        assert last.begin_s == pytest.approx(GATHER + timeline.computed_s)
        assert last.took_s == pytest.approx(REDUCE)
    # What a step writes into shards is gathered after it, though gathers run ahead of compute.
    for change in (assign, load):
        first = run_step(change=change).waits[0]
        assert (first.begin_s, first.took_s) == pytest.approx((1, GATHER))
    # Gathered behind the reduction of the unit before instead of ahead of it: compute waits for both, block by block.
    late = run_step(prefetches=False).waits
    assert [wait.took_s for wait in late[1:-1]] == pytest.approx([GATHER + REDUCE] * (NUM_BLOCKS - 1))
    # The reduction of a large block is longer than the backward of the small one behind it: with one buffer compute
    # waits for its end there, with two only for the last one of the step.
    num_large = NUM_BLOCKS // 2
    extras, backward_s = (0, 2 * NUM_PARAMETERS) * num_large, 4 / PRODUCTS_OF_A_BLOCK
    one, two = (
        run_step(extras=extras, sharding=Sharding(reshard_after_forward=False, reduce_scatter_max_input_buffers=n))
        for n in (1, 2)
    )
    too_long_s = 3 * REDUCE - backward_s
    assert one.computed_s == two.computed_s
    assert [wait.took_s for wait in one.waits[-num_large - 1 :]] == pytest.approx([too_long_s] * num_large + [REDUCE])
    assert len(two.waits) == len(one.waits) - num_large
    assert end_step(one) - end_step(two) == pytest.approx((num_large - 1) * too_long_s)


def end_step(timeline: Timeline) -> float:
    return timeline.waits[-1].begin_s + timeline.waits[-1].took_s


@pytest.mark.full(after=1)
def test_compute_waits_for_the_first_gather_and_the_last_reduction_only() -> None:
    run_as_gpus(compare, world_size=2)
