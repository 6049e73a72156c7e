"""Bytes of collectives, whoever starts them, against closed forms and FSDP2's own meter."""

import pytest
import torch
import torch.distributed as dist
from models import Stack
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lit_fsdp.profiling.communication_meter import CommunicationMeter
from lit_fsdp.profiling.flops import WorkCounter
from lit_fsdp.profiling.sent_bytes import SentBytes
from lit_fsdp.sharding.gloo_collectives import replace_collectives
from ranks import run_ranks


def run_step(model: torch.nn.Module) -> None:
    model(torch.ones(2, 5) * (1 + dist.get_rank())).square().sum().backward()


def test_each_collective_counts_what_a_rank_sends() -> None:
    def body() -> None:
        own, full = torch.zeros(6), torch.zeros(18)
        parts = list(full.chunk(3))
        group = dist.new_group([0, 1])
        with SentBytes() as sent:
            dist.all_gather_single(full, own)
            dist.all_gather(parts, own)
            dist.reduce_scatter_single(own, full)
            dist.all_reduce(own)
            dist.barrier()
            if dist.get_rank() < 2:
                dist.all_reduce(own, group=group)
        is_inside = dist.get_rank() < 2
        assert sent.wire_bytes["all_gather"] == 2 * 4 * 18 * 2 / 3
        assert sent.wire_bytes["reduce_scatter"] == 4 * 18 * 2 / 3
        assert sent.wire_bytes["all_reduce"] == pytest.approx(4 * 6 * (2 * 2 / 3 + is_inside))
        assert sent.calls == {"all_gather": 2, "reduce_scatter": 1, "all_reduce": 1 + is_inside}
        assert not sent.unknown

    run_ranks(body, world_size=3)


def test_what_cannot_be_counted_is_named() -> None:
    def body() -> None:
        with SentBytes() as sent:
            dist.all_to_all_single(torch.zeros(4), torch.ones(4))
            dist.gather(torch.ones(4), [torch.ones(4)] * 2 if dist.get_rank() == 0 else None)
        assert sent.unknown == {"c10d::gather_"}
        assert sent.wire_bytes == {"all_to_all": 4 * 4 / 2}

    run_ranks(body)


def test_the_reducer_of_ddp_is_seen_in_backward() -> None:
    def body() -> None:
        model = DistributedDataParallel(Stack(num_blocks=2))
        run_step(model)
        with SentBytes() as sent:
            run_step(model)
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        assert sent.wire_bytes["all_reduce"] == num_bytes  # 2 (n-1)/n of it with 2 ranks

    run_ranks(body)


@pytest.mark.parametrize("replaces", [False, True])
def test_collectives_of_fsdp2_are_those_of_its_meter(replaces: bool) -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = Stack(num_blocks=2)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        if replaces:
            replace_collectives(model, 1, gathers=True, reduces=True)
        run_step(model)
        meter = CommunicationMeter(model, torch.device("cpu"))
        meter.attach()
        meter.resume()
        with SentBytes() as sent, WorkCounter() as counter:
            run_step(model)
        assert counter.flops.uncounted == ()
        meter.end_step(1)
        (step,) = meter.take(wait=True)
        for kind in ("all_gather", "reduce_scatter"):
            found = step.add_up(kind)
            assert (sent.calls[kind], sent.wire_bytes[kind]) == (found.calls, found.wire_bytes)
            assert found.calls > 0

    run_ranks(body)
