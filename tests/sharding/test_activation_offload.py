"""Inputs of blocks on the host: what stays on the device, in what order copies run, and what is refused."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from models import Block
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lit_fsdp.sharding import activation_offload
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing, apply_activation_checkpointing
from lit_fsdp.sharding.activation_offload import InputOffload

NUM_BLOCKS, WIDTH = 5, 16
OFFLOAD = ActivationCheckpointing(mode="full", offload=True)


def build(settings: ActivationCheckpointing) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(WIDTH) for _ in range(NUM_BLOCKS)])
    apply_activation_checkpointing(model, settings, [str(i) for i in range(NUM_BLOCKS)])
    return model


def follow(model: nn.Sequential, look: Callable[[int, Tensor], None]) -> None:
    """Call ``look`` whenever a block computes, first or again, with its number and its input."""
    for i, block in enumerate(model):
        block.norm.register_forward_pre_hook(lambda _, args, i=i: look(i, args[0]))


def train(model: nn.Sequential) -> dict[str, Tensor]:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    model(x).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_a_device_has_two_inputs_at_a_time_and_after_forward_that_of_the_last_block() -> None:
    known: list[weakref.ref[torch.UntypedStorage]] = []
    alive: list[int] = []

    def look(_: int, tensor: Tensor) -> None:
        known.append(weakref.ref(tensor.untyped_storage()))
        alive.append(sum(storage() is not None for storage in known))

    def count(settings: ActivationCheckpointing) -> int:
        known.clear()
        alive.clear()
        model = build(settings)
        follow(model, look)
        x = torch.randn(8, WIDTH)
        loss = model(x).square().sum()
        del x
        left = sum(storage() is not None for storage in known)
        loss.backward()
        return left

    assert count(ActivationCheckpointing(mode="full")) == NUM_BLOCKS
    assert max(alive) >= NUM_BLOCKS
    assert count(OFFLOAD) == 1
    assert max(alive[:NUM_BLOCKS]) == 2  # it and the one before, which was its residual
    assert max(alive) <= 3  # in backward a copy comes back as well


# A link so slow that no copy ends before somebody waits for it.


class Stream:
    """Copies wait in it until another stream waits for them."""

    made: ClassVar[list["Stream"]] = []

    def __init__(self, *_: Any) -> None:
        self.name = ("out", "in")[len(Stream.made)]
        Stream.made.append(self)
        self.queue: list[Callable[[], None]] = []
        self.is_behind_compute = False

    def wait_stream(self, _: Any) -> None:
        self.is_behind_compute = True

    def record_event(self) -> tuple["Stream", int]:
        self.is_behind_compute = False
        return self, len(self.queue)


class Compute:
    """The stream that computes: at once."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def wait_event(self, event: tuple[Stream, int]) -> None:
        stream, number = event
        self.log.append(f"wait {stream.name}")
        for copy in stream.queue[:number]:
            copy()
        stream.queue[:] = [lambda: None] * len(stream.queue[:number]) + stream.queue[number:]


class Queue(TorchDispatchMode):
    """Puts copies into a stream instead of making them; both ends must be alive when they are made."""

    def __init__(self, stream: Stream, log: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stream, self.log = stream, log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        assert self.stream.is_behind_compute
        self.log.append(self.stream.name)
        ends = [(weakref.ref(t.untyped_storage()), t.storage_offset(), t.numel()) for t in args[:2]]

        def copy() -> None:
            storages = [storage() for storage, _, _ in ends]
            assert None not in storages, f"memory was freed while the copy {self.stream.name} ran"
            target, source = (
                torch.empty(0).set_(storage, offset, (numel,))
                for storage, (_, offset, numel) in zip(storages, ends, strict=True)
            )
            target.copy_(source)

        self.stream.queue.append(copy)
        return args[0]


@contextmanager
def pretend_streams(log: list[str]) -> Iterator[None]:
    compute, empty = Compute(log), torch.empty
    Stream.made.clear()

    def allocate(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        assert pin_memory or "device" in options or size == (0,)
        return empty(*size, **options)

    def make_streams(self: InputOffload, _: Any) -> Any:
        self._streams = self._streams or (Stream(), Stream())
        return self._streams

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", allocate)
        patch.setattr(torch.cuda, "current_stream", lambda *_: compute)
        patch.setattr(torch.cuda, "stream", partial(Queue, log=log))
        patch.setattr(InputOffload, "_get_streams", make_streams)
        yield


def test_copies_run_beside_the_block_before_and_nothing_is_used_before_it_is_there() -> None:
    log: list[str] = []
    expected = train(build(ActivationCheckpointing(mode="full")))
    with pretend_streams(log):
        model = build(OFFLOAD)
        follow(model, lambda i, _: log.append(str(i)))
        gradients = train(model)
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
    forward = "out 0 | wait out, out 1 | wait out, out 2 | wait out, out 3 | wait out 4"
    # The copy of an input begins before the block after it is computed again, and is waited for after that.
    backward = "in 4 | wait in, in 3 | wait in, in 2 | wait in, in 1 | wait in 0"
    assert " ".join(log) == f"{forward} {backward}".replace(",", "").replace(" |", "")


def test_a_backward_that_ends_early_waits_for_what_still_arrives() -> None:
    log: list[str] = []
    with pretend_streams(log):
        model = build(OFFLOAD)
        loss = model(torch.randn(8, WIDTH)).sum()
        follow(model, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        del loss
        assert log[-2:] == ["in", "wait in"]
        log.clear()
        model.zero_grad()
        for block in model:
            block.norm._forward_pre_hooks.clear()
        gradients = train(model)
    expected = train(build(ActivationCheckpointing(mode="full")))
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_two_forwards_may_come_before_their_backwards_and_a_graph_may_be_used_twice() -> None:
    found = []
    for settings in (ActivationCheckpointing(mode="full"), OFFLOAD):
        model, x = build(settings), torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)
        first, second = model(x).square().sum(), model(-x).sum()
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_inputs_in_pieces_of_any_layout_and_by_keyword_come_back_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "PIECE_BYTES", 40)  # ten numbers

    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.seen: list[tuple[Any, ...]] = []

        def forward(self, mask: Tensor, *, states: Tensor) -> Tensor:
            self.seen.append((states.shape, states.stride(), states.detach().clone(), mask.data_ptr()))
            return (self.linear(states) * mask).transpose(0, 1)

    model = nn.Sequential(Keyword(), Keyword(), Keyword())
    apply_activation_checkpointing(model, OFFLOAD, ["0", "1", "2"])
    states, mask = torch.randn(4, 3, 6, requires_grad=True), torch.ones(6, dtype=torch.bool)
    for block in model:
        states = block(mask, states=states)
    states.sum().backward()
    for block in model:
        (*first, before, mask_before), (*second, after, mask_after) = block.seen
        assert first == second
        assert mask_before == mask_after == mask.data_ptr()
        assert torch.equal(before, after)


def test_a_block_that_changes_its_input_is_refused() -> None:
    class InPlace(Block):
        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            return super().forward(x)

    model = nn.Sequential(Block(WIDTH), InPlace(WIDTH), Block(WIDTH))
    apply_activation_checkpointing(model, OFFLOAD, ["0", "1", "2"])
    with pytest.raises(RuntimeError, match=r"offload: 1 changes its input in place"):
        model(torch.randn(8, WIDTH))


def test_a_block_without_a_tensor_of_numbers_is_refused() -> None:
    class Words(nn.Module):
        def forward(self, words: dict[str, Tensor]) -> Tensor:
            return words["x"]

    model = nn.Sequential(Words())
    apply_activation_checkpointing(model, OFFLOAD, ["0"])
    with pytest.raises(RuntimeError, match=r"offload: the last block is called without .*; set offload to false"):
        model({"x": torch.ones(2)})
    with torch.no_grad():
        assert model({"x": torch.ones(2)}).sum() == 2
