"""The timeline of training with shards in host memory, on streams and threads whose work takes as long as it is told.

Times are those of a block of an 8B model on one card, by its numbers: see ``Costs``. Nothing else takes any time.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from models import Block
from stand_in_gpu import Event, Stream, find_place, run_as_gpus
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lit_fsdp import ActivationCheckpointing, CPUOffload, Mesh, MixedPrecision, Wrap
from lit_fsdp.optim import overlapped_steps
from lit_fsdp.optim.overlapped_steps import OverlappedSteps
from lit_fsdp.sharding.grad_clipping import clip_grad_norm, compute_grad_norm, scale_gradients
from lit_fsdp.sharding.mesh import build_mesh
from lit_fsdp.sharding.parallelize import shard_module
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.weights.load import materialize

NUM_BLOCKS, WIDTH = 8, 16
NUM_STEPS, WARM_UP = 2, 1
CLIPPED_TO = 1e-3  # less than the norm is
PHASES = ("between steps", "forward", "backward")


@dataclass(frozen=True)
class Costs:
    """Of a block with 218 M parameters in float32.

    Args:
        tokens: Of a micro-batch. Products reach 400 TFLOPs a second.
        link_gb_s: Between GPU and host, in each direction.
        host_gb_s: Of memory of the host, for what the optimizer reads and writes.
    """

    tokens: int
    link_gb_s: float = 50.0
    host_gb_s: float = 150.0
    num_params: float = 218e6

    @property
    def forward_s(self) -> float:
        return 2 * self.num_params * self.tokens / 400e12

    @property
    def copy_s(self) -> float:
        return 4 * self.num_params / self.link_gb_s / 1e9

    def pass_s(self, bytes_of_a_parameter: int) -> float:
        return bytes_of_a_parameter * self.num_params / self.host_gb_s / 1e9


# What they read and write of each float32 element.
HOST_BYTES = {"_foreach_mul_": 8, "_foreach_add_": 12, "add_": 12, "_foreach_norm": 4, "_fused_adamw_": 28}


class Host(threading.local):
    """What a thread of the host has come to."""

    clock_s = 0.0


HOST = Host()


@dataclass
class Clocks:
    """What has been reached, beside the clocks of streams and threads."""

    links: dict[str, float] = field(default_factory=lambda: {"host": 0.0, "device": 0.0})  # by where a copy begins
    computed_until_s: float = 0.0
    phase: str = PHASES[0]
    waited_s: Counter[str] = field(default_factory=Counter)
    computed_s: float = 0.0


class Timeline(TorchDispatchMode):
    """Gives work its time; the shares of a unit's copies and passes are those of its elements."""

    def __init__(self, costs: Costs, num_elements: int, clocks: Clocks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.costs, self.num_elements, self.clocks = costs, num_elements, clocks

    def compute(self, stream: Any) -> None:
        clocks = self.clocks
        begin_s, took_s = max(stream.clock_s, HOST.clock_s), self.costs.forward_s / 2
        clocks.waited_s[clocks.phase] += begin_s - clocks.computed_until_s
        clocks.computed_s += took_s
        stream.clock_s = clocks.computed_until_s = begin_s + took_s
        clocks.phase = PHASES[1] if clocks.phase == PHASES[0] else clocks.phase

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name, stream = func.overloadpacket.__name__, cast(Any, torch.cuda.current_stream())
        if name in ("mm", "addmm"):
            self.compute(stream)
        elif name in ("copy_", "_to_copy"):
            source, target = (args[1], args[0]) if name == "copy_" else (args[0], out)
            self.copy(stream, source, target, is_async=_is_async(args, kwargs or {}))
        elif name in HOST_BYTES:
            tensors = args[0] if isinstance(args[0], list) else [args[0]]
            if tensors and find_place(tensors[0]) == "host":
                share = sum(tensor.numel() for tensor in tensors) / self.num_elements
                HOST.clock_s += share * self.costs.pass_s(HOST_BYTES[name])
        return out

    def copy(self, stream: Any, source: Tensor, target: Tensor, *, is_async: bool) -> None:
        places = find_place(source), find_place(target)
        if set(places) != {"host", "device"}:
            return
        begin_s = max(stream.clock_s, HOST.clock_s)
        if source.numel() > 1:
            took_s = self.costs.copy_s * source.numel() / self.num_elements
            begin_s = self.clocks.links[places[0]] = max(begin_s, self.clocks.links[places[0]]) + took_s
        stream.clock_s = begin_s
        if not is_async:
            HOST.clock_s = max(HOST.clock_s, stream.clock_s)


def _is_async(args: Any, kwargs: Any) -> bool:
    return bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))


@contextmanager
def keep_time(costs: Costs, num_elements: int) -> Iterator[Clocks]:
    record, wait_event, wait_stream = Event.record, Stream.wait_event, Stream.wait_stream
    end_event, end_stream = Event.synchronize, Stream.synchronize
    clocks = Clocks()

    def record_time(event: Any, stream: Any = None) -> Any:
        event.clock_s = (stream or torch.cuda.current_stream()).clock_s
        return record(event, stream)

    def wait_for_event(stream: Any, event: Any) -> None:
        wait_event(stream, event)
        stream.clock_s = max(stream.clock_s, getattr(event, "clock_s", 0.0))

    def wait_for_stream(stream: Any, other: Any) -> None:
        wait_stream(stream, other)
        stream.clock_s = max(stream.clock_s, other.clock_s)

    def let_host_wait(wait: Callable[[Any], None], what: Any) -> None:
        wait(what)
        HOST.clock_s = max(HOST.clock_s, getattr(what, "clock_s", 0.0))

    class Pool(ThreadPoolExecutor):
        def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            begin_s, ended = HOST.clock_s, []

            def work() -> Any:
                HOST.clock_s = max(HOST.clock_s, begin_s)
                with Timeline(costs, num_elements, clocks):
                    result = function(*args, **kwargs)
                ended.append(HOST.clock_s)
                return result

            future = super().submit(work)
            wait = future.result

            def wait_for_result(timeout: float | None = None) -> Any:
                result = wait(timeout)
                HOST.clock_s = max(HOST.clock_s, ended[0])
                return result

            future.result = wait_for_result  # type: ignore[method-assign]
            return future

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "clock_s", 0.0, raising=False)
        patch.setattr(Event, "record", record_time)
        patch.setattr(Stream, "wait_event", wait_for_event)
        patch.setattr(Stream, "wait_stream", wait_for_stream)
        patch.setattr(Event, "synchronize", lambda event: let_host_wait(end_event, event))
        patch.setattr(Stream, "synchronize", lambda stream: let_host_wait(end_stream, stream))
        patch.setattr(overlapped_steps, "ThreadPoolExecutor", Pool)
        with Timeline(costs, num_elements, clocks):
            yield clocks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def build_model(offload: CPUOffload | None) -> Model:
    device = torch.device("cuda", torch.cuda.current_device())
    recompute = ActivationCheckpointing(mode="full")
    settings = Settings(wrap=Wrap(module_classes=["Block"]), cpu_offload=offload, activation_checkpointing=recompute)
    with torch.device("meta"):
        model = Model()
    mesh = build_mesh(Mesh(), device_type="cuda", world_size=1, ranks_per_node=1)
    shard_module(model, settings, dtypes=MixedPrecision(), mesh=mesh, device=device)
    materialize(model, device, parameter_device=None if offload is None else torch.device("cpu"))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.01)
    return model


class Training:
    """What a task and its strategy do in a step."""

    def __init__(self, clocks: Clocks, model: Model, offload: CPUOffload | None, num_micro_batches: int) -> None:
        self.clocks, self.model, self.num_micro_batches = clocks, model, num_micro_batches
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, fused=True)
        overlaps = offload is not None and offload.overlap_optimizer
        self.steps = OverlappedSteps([model]) if overlaps else None
        self.x, self.factor = torch.ones(2, WIDTH, device="cuda"), torch.ones((), device="cuda")

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        self.clocks.phase = PHASES[2]
        if self.steps is not None:
            self.steps.begin_backward()
            if is_last:
                self.steps.scale_arriving(self.factor, takes_norms=True)
        loss.backward()
        self.clocks.phase = PHASES[1]

    def step(self) -> None:
        self.clocks.phase = PHASES[0]
        for number in range(self.num_micro_batches):
            self.backward(self.model(self.x), is_last=number == self.num_micro_batches - 1)
        if self.steps is None:
            scale_gradients(self.parameters, self.factor)
            clip_grad_norm(self.parameters, CLIPPED_TO)
            self.optimizer.step()
        else:
            norm = compute_grad_norm(self.parameters, self.steps.norms)
            clip_grad_norm(self.parameters, CLIPPED_TO, norm=norm, scale=self.steps.scale_before_step)
            with self.steps.defer(self.optimizer):
                self.optimizer.step()
        self.optimizer.zero_grad()


def measure(costs: Costs, offload: CPUOffload | None, num_micro_batches: int) -> dict[str, float]:
    """Return for how long compute works and waits in a step, the latter by phase, in seconds for each block."""
    model = build_model(offload)
    num_elements = sum(p.numel() for p in model.blocks[0].parameters())
    with keep_time(costs, num_elements) as clocks:
        training = Training(clocks, model, offload, num_micro_batches)
        for step in range(WARM_UP + NUM_STEPS):
            if step == WARM_UP:
                clocks.waited_s.clear()
                clocks.computed_s = 0.0
            training.step()
        if training.steps is not None:
            training.steps.close()
    seconds = {"compute": clocks.computed_s} | {phase: clocks.waited_s[phase] for phase in PHASES}
    return {name: value / NUM_STEPS / NUM_BLOCKS for name, value in seconds.items()}


def get_speed(seconds: dict[str, float]) -> float:
    return seconds["compute"] / sum(seconds.values())


def compare() -> None:
    kinds = {"GPU": None, "host": CPUOffload(), "host, overlapped": CPUOffload(overlap_optimizer=True)}
    for tokens, num_micro_batches, least in ((32768, 1, 0.8), (16384, 4, 0.75), (8192, 1, 0.35)):
        costs = Costs(tokens=tokens)
        found = {name: measure(costs, offload, num_micro_batches) for name, offload in kinds.items()}
        for name, seconds in found.items():  # shown by pytest -s
            parts = ", ".join(f"{part} {1e3 * value:.1f} ms" for part, value in seconds.items())
            print(f"{num_micro_batches} x {tokens} tokens, {name}: {parts}: {get_speed(seconds):.2f}")
        on_gpu, plain, overlapped = found.values()
        passes_s = costs.pass_s(8 + 4 + 8 + 28)  # scaled, measured, clipped, stepped
        assert get_speed(on_gpu) == 1
        assert plain["between steps"] > passes_s
        assert get_speed(overlapped) > max(1.5 * get_speed(plain), least)
        # What is left is of one unit: gradients go down, weights are stepped and go up before compute begins.
        assert overlapped["between steps"] <= (2 * passes_s + 2 * costs.copy_s) / NUM_BLOCKS
        if tokens > 8192:  # else the links take longer than compute
            assert overlapped["backward"] == 0
        if num_micro_batches == 1:
            assert plain["forward"] == pytest.approx(costs.copy_s * (1 - 1 / NUM_BLOCKS))
            # Forward is as fast as the host clips and steps.
            assert overlapped["forward"] <= costs.pass_s(8 + 28) - costs.forward_s + 1e-9


@pytest.mark.full
def test_the_host_works_beside_backward_and_the_next_forward() -> None:
    run_as_gpus(compare)
