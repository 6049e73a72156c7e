"""What a meter measures, and that it changes nothing; ``test_expected_communication.py`` compares calls and bytes."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_time import FakeTime
from models import Block, Stack
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard
from training import EVEN, Rows, build_task, build_trainer, gather_weights, save_model

import lit_fsdp.profiling.communication_meter
from lit_fsdp import Compile, CPUOffload, FSDP2Strategy, Mesh, Sharding
from lit_fsdp.profiling.communication_meter import CommunicationMeter, StepCommunication
from ranks import run_ranks

CPU = torch.device("cpu")


def shard_stack(mesh: Any = None, **options: Any) -> Stack:
    """Return a sharded stack with the same weights on all ranks."""
    torch.manual_seed(0)
    model = Stack(num_blocks=2)
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def run_step(model: nn.Module) -> Tensor:
    """Run forward and backward; return the loss."""
    loss = model(torch.ones(2, 5) * (1 + dist.get_rank())).square().sum()
    loss.backward()
    return loss.detach()


def measure_step(model: nn.Module) -> tuple[StepCommunication, CommunicationMeter]:
    meter = CommunicationMeter(model, CPU)
    meter.attach()
    meter.resume()
    run_step(model)
    meter.end_step("tag")
    (step,) = meter.take()
    return step, meter


# Nothing changes


def compare_runs(folder: Path, strategy: dict[str, Any], options: dict[str, Any]) -> None:
    weights = []
    for is_measured in (False, True):
        trainer = build_trainer(FSDP2Strategy(print_plan=False, **strategy), max_steps=3, **options)
        task = build_task(folder)
        if is_measured:
            start = task.on_train_start

            def attach(task: Any = task, start: Callable[[], None] = start) -> None:
                meter = CommunicationMeter(task, CPU)
                meter.attach()
                meter.resume()  # from the first step to the last
                start()

            task.on_train_start = attach
        trainer.fit(task, Rows(64, batch_size=1))
        weights.append(gather_weights(task))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.full(after=1)
@pytest.mark.parametrize(
    ("strategy", "options", "world_size"),
    [
        ({}, {"precision": "bf16-mixed"}, 2),
        ({"sharding": Sharding(no_sync=True), "cpu_offload": CPUOffload()}, {"accumulate_grad_batches": 2}, 2),
        ({"mesh": Mesh(replicate=2)}, {"accumulate_grad_batches": 2}, 4),
        ({"compile": Compile(backend="eager")}, {}, 2),
        ({}, {}, 1),
    ],
    ids=["full", "held and offloaded", "hybrid", "compiled", "one rank"],
)
def test_weights_are_equal_to_the_last_bit(
    strategy: dict[str, Any], options: dict[str, Any], world_size: int, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    run_ranks(compare_runs, folder, strategy, options, world_size=world_size)


class Scaled:
    """A user's own reduce-scatter, with a state, that does something else than torch's."""

    def __init__(self) -> None:
        self.num_calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self.num_calls += 1
        dist.reduce_scatter_single(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        output_tensor *= 3


def keep_the_users_communication() -> None:
    plain, model, scaled, hooked = shard_stack(), shard_stack(), Scaled(), []
    model.blocks[0].set_custom_reduce_scatter(scaled)
    model.blocks[0].set_all_reduce_hook(lambda output: hooked.append(output.numel()))
    model.blocks[1].set_allocate_memory_from_process_group_for_comm(True)
    step, meter = measure_step(model)
    run_step(plain)
    assert scaled.num_calls == 1
    assert len(hooked) == 1
    for block, factor in ((0, 3.0), (1, 1.0)):
        ours, theirs = model.blocks[block].up.weight.grad, plain.blocks[block].up.weight.grad
        assert torch.equal(ours.full_tensor(), theirs.full_tensor() * factor)
    assert step.add_up("reduce_scatter").calls == 3
    # Torch looks at the class before it replaces a communication; a replaced one stays replaced.
    model.blocks[1].set_allocate_memory_from_process_group_for_comm(False)
    meter.detach()
    run_step(model)
    assert scaled.num_calls == 2


def test_communication_of_the_user_goes_on_working() -> None:
    run_ranks(keep_the_users_communication)


def list_internals(model: nn.Module) -> list[Any]:
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for state in states for group in state._fsdp_param_groups]
    return [set(vars(state)) for state in states] + [
        value
        for group in groups
        for value in (group._all_gather_comm, group._reduce_scatter_comm, group._all_reduce_hook, set(vars(group)))
    ]


def detach_from_hybrid() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard_stack(mesh)
    hooked: list[int] = []
    model.blocks[0].set_all_reduce_hook(lambda output: hooked.append(output.numel()))
    run_step(model)  # groups are complete once they have run
    before = list_internals(model)
    step, meter = measure_step(model)
    assert step.add_up("all_reduce").calls == 3
    assert len(hooked) == 2
    assert list_internals(model) != before
    meter.detach()
    assert list_internals(model) == before
    meter.resume()
    run_step(model)
    meter.end_step()
    (after,) = meter.take()
    assert after.add_up().calls == 0
    pair = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(list(pair), mesh=mesh)  # one unit
    before = list_internals(pair)
    meter = CommunicationMeter(pair, CPU)
    meter.attach()
    meter.detach()
    assert list_internals(pair) == before


def test_detach_gives_everything_back() -> None:
    run_ranks(detach_from_hybrid, world_size=4)


# What is measured


class Ticks:
    """Time that only passes where the test says so. A GPU's collectives end later than the host has issued them."""

    now, ends_at = 0.0, None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> float:
        end, Ticks.ends_at = Ticks.ends_at, None
        return Ticks.now + 0.0 if end is None else end  # each mark an object of its own

    def is_past(self, mark: float) -> bool:
        return mark <= Ticks.now

    def measure_s(self, begin: float, end: float) -> float:
        return end - begin


class Late:
    """Lets a collective take some ticks in a stream of its own."""

    def __init__(self, comm: Any, ticks: float) -> None:
        self.comm, self.ticks, self.allocate = comm, ticks, comm.allocate

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.comm(*args, **kwargs)
        Ticks.ends_at = Ticks.now + self.ticks


class Work(torch.autograd.Function):
    """Takes 3 ticks in forward, and 3 in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Ticks.now += 3
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Ticks.now += 3
        return grad


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Work.apply(self.linear(x))


def time_overlapped_collectives(num_buffers: int, exposed_ticks: dict[str, float]) -> None:
    lit_fsdp.profiling.communication_meter.Clock = Ticks  # type: ignore[assignment,misc]
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(Layer(), Layer(), Layer())
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
        (group,) = block._get_fsdp_state()._fsdp_param_groups
        block.set_custom_all_gather(Late(group._all_gather_comm, 5))
        block.set_custom_reduce_scatter(Late(group._reduce_scatter_comm, 7))
    fully_shard(model, mesh=mesh)
    model.set_reduce_scatter_max_input_buffers(num_buffers)
    for block, after in pairwise(model):
        block.set_modules_to_forward_prefetch([after])
    meter = CommunicationMeter(model, torch.device("cuda"))
    meter.attach()
    meter.resume()
    model(torch.ones(1, 4)).sum().backward()
    meter.end_step()
    (step,) = meter.take()
    assert step.step_s == 18
    found = {(u.unit, u.collective): (u.seconds, u.exposed_s) for u in step.units}
    assert found == {
        ("0", "all_gather"): (5, 5),  # nothing to do before it
        ("1", "all_gather"): (5, 2),  # issued ahead, while the first block computed for 3
        ("2", "all_gather"): (5, 2),
        **{(unit, "reduce_scatter"): (7, ticks) for unit, ticks in exposed_ticks.items()},
    }


@pytest.mark.parametrize(
    ("num_buffers", "exposed_ticks"),
    [
        # Beside each there is the backward of the block before, of 3 ticks; beside the last one, nothing.
        (1, {"2": 4, "1": 4, "0": 7}),
        # The first is waited for one block later; the end waits for the others at once, and counts nothing twice.
        (2, {"2": 1, "1": 4, "0": 3}),
    ],
)
def test_what_compute_covers_is_not_exposed(num_buffers: int, exposed_ticks: dict[str, float]) -> None:
    run_ranks(time_overlapped_collectives, num_buffers, exposed_ticks)


def wait_at_the_end_of_backward() -> None:
    lit_fsdp.profiling.communication_meter.Clock = Ticks  # type: ignore[assignment,misc]
    ends: list[float] = []

    class Scatter(Late):
        def __call__(self, *args: Any, **kwargs: Any) -> None:
            super().__call__(*args, **kwargs)
            ends.append(Ticks.now + self.ticks)

    def wait(*_: Any) -> None:
        Ticks.now = max(Ticks.now, *ends)

    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(Layer(), Layer())
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
        (group,) = block._get_fsdp_state()._fsdp_param_groups
        block.set_custom_reduce_scatter(Scatter(group._reduce_scatter_comm, 7))
    fully_shard(model, mesh=mesh)  # of it, nothing is left to gather: it has no group
    model.set_reduce_scatter_max_input_buffers(3)  # before the end, nothing waits for a reduction
    meter = CommunicationMeter(model, torch.device("cuda"))
    meter.attach()
    meter.resume()
    loss = model(torch.ones(1, 4)).sum()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu.Stream, "wait_event", wait)
        loss.backward()
    meter.end_step()
    (step,) = meter.take()
    assert step.step_s == 6 + 6 + 7
    found = {u.unit: (u.seconds, u.exposed_s) for u in step.units if u.collective == "reduce_scatter"}
    assert found == {"1": (7, 4), "0": (7, 3)}


def test_what_the_end_of_backward_waits_for_is_exposed() -> None:
    run_ranks(wait_at_the_end_of_backward)


def fake_time() -> tuple[FakeTime, pytest.MonkeyPatch]:
    """Let the clock of this rank go by a time of its own; this process ends with the test."""
    time, patch = FakeTime(), pytest.MonkeyPatch()
    patch.setattr("lit_fsdp.profiling.clock.time", time)
    return time, patch


def wait_for_a_slow_rank() -> None:
    time, patch = fake_time()
    time.meet_in_collectives(patch, takes_s=1)
    model = shard_stack()
    if dist.get_rank() == 1:
        model.blocks[0].register_forward_pre_hook(lambda *_: time.sleep(20))
    step, _ = measure_step(model)
    total = step.add_up()
    assert total.calls == 8  # the root is not gathered again
    assert total.seconds == (8 if dist.get_rank() == 1 else 28)
    assert total.exposed_s == total.seconds  # gloo blocks
    assert step.step_s == 28
    assert step.tag == "tag"


def test_a_rank_spends_in_collectives_what_it_waits_for_slower_ones() -> None:
    run_ranks(wait_for_a_slow_rank)


class Awaited(dist.Work):
    """Takes some time to wait for."""

    def __init__(self, work: dist.Work, time: FakeTime) -> None:
        super().__init__()
        self.work, self.time = work, time

    def wait(self, *args: Any) -> bool:
        self.time.sleep(4)
        return self.work.wait(*args)


class AwaitedGather:
    def __init__(self, comm: Any, time: FakeTime) -> None:
        self.comm, self.time, self.allocate = comm, time, comm.allocate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        work = self.comm(*args, **kwargs)
        return work if work is None else Awaited(work, self.time)


def gather_asynchronously() -> None:
    time, _ = fake_time()
    model = shard_stack()
    (group,) = model.blocks[0]._get_fsdp_state()._fsdp_param_groups
    model.blocks[0].set_custom_all_gather(AwaitedGather(group._all_gather_comm, time))
    run_step(model)  # the root must have run once
    meter = CommunicationMeter(model, CPU)
    meter.attach()
    meter.resume()
    handle = model.blocks[0].unshard(async_op=True)
    time.sleep(2)
    handle.wait()
    model.blocks[0].reshard()
    meter.end_step()
    (step,) = meter.take()
    (unit,) = step.units
    assert (unit.unit, unit.calls) == ("blocks.0", 1)
    assert (unit.seconds, unit.exposed_s) == (6, 4)


def test_an_asynchronous_gather_is_exposed_where_it_is_waited_for() -> None:
    run_ranks(gather_asynchronously)


def shard_over_two_meshes() -> None:
    # As with experts: torch's own setters refuse such a module, since it has two groups.
    everyone = init_device_mesh("cpu", (4,))
    pairs = FSDPMeshInfo(
        mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "pair"))["pair"], shard_mesh_dim=0
    )

    def place(parameter: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(0), pairs) if parameter.shape == (14, 7) else None

    torch.manual_seed(0)
    block = fully_shard(Block(), mesh=everyone, shard_placement_fn=place)
    meter = CommunicationMeter(block, CPU)
    meter.attach()
    meter.resume()
    block(torch.ones(1, 7)).sum().backward()
    meter.end_step()
    (step,) = meter.take()
    wires = {u.unit: u.wire_bytes / u.num_bytes for u in step.units if u.collective == "all_gather"}
    assert wires == {"(root) [0]": 3 / 4, "(root) [1]": 1 / 2}
    assert step.add_up("reduce_scatter").calls == 2


def test_several_groups_of_one_module_are_measured_apart() -> None:
    run_ranks(shard_over_two_meshes, world_size=4)


def pause_and_forget() -> None:
    time, _ = fake_time()
    model = shard_stack()
    model.register_forward_pre_hook(lambda *_: time.sleep(1))
    meter = CommunicationMeter(model, CPU)
    meter.attach()
    for step in range(20):
        run_step(model)
        meter.resume()
        run_step(model)
        meter.pause()
        time.sleep(step)
        meter.resume()
        meter.end_step(step)
    taken = meter.take()
    assert [step.tag for step in taken] == list(range(12, 20))
    assert meter.num_dropped == 12
    assert {step.step_s for step in taken} == {1}
    assert {step.add_up("all_gather").calls for step in taken} == {5}  # two blocks twice, the root once


def test_only_what_lies_in_a_step_counts_and_only_so_many_steps_are_kept() -> None:
    run_ranks(pause_and_forget)


def test_a_model_that_is_not_sharded_has_no_units() -> None:
    assert CommunicationMeter(Stack(), CPU).num_units == 0
