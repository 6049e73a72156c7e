"""What the meter of ``test_communication_meter.py`` finds between two GPUs, without the host waiting in a step."""

import pytest
import torch
import torch.distributed as dist
from models import Stack
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lit_fsdp.profiling.communication_meter import CommunicationMeter
from ranks import count_gpus, run_ranks

pytestmark = pytest.mark.gpu


def measure_steps() -> None:
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    mesh = init_device_mesh("cuda", (2,))
    model = Stack(width=512, num_blocks=4).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    meter = CommunicationMeter(model, device)
    meter.attach()
    x = torch.ones(64, 5, device=device)
    for step in range(6):
        if step == 2:  # the first ones initialize
            torch.cuda.set_sync_debug_mode("error")
        meter.resume()
        model(x).sum().backward()
        meter.end_step(step)
    torch.cuda.set_sync_debug_mode("default")
    steps = meter.take(wait=True)
    assert [step.tag for step in steps] == list(range(6))
    for step in steps[2:]:
        assert step.add_up("all_gather").calls == 9
        assert step.add_up("reduce_scatter").calls == 5
        for unit in step.units:
            assert 0 <= unit.exposed_s <= unit.seconds < 1
            assert unit.seconds > 0
        assert step.add_up().exposed_s <= step.step_s


@pytest.mark.skipif(count_gpus() < 2, reason="needs two GPUs")
def test_collectives_are_timed_by_events_and_exposed_time_fits_into_the_step() -> None:
    run_ranks(measure_steps, backend="nccl")
