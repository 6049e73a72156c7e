"""Collectives on copies give the same; that nothing is held after them is tested in ``test_memory_trace.py``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import fake_pg  # noqa: F401  makes its backend known
from torch.utils._python_dispatch import TorchDispatchMode

from lit_fsdp.profiling.gloo import is_collective_of_gloo, run_on_copies
from ranks import run_ranks


class OnCopies(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_collective_of_gloo(func, args):
            return func(*args, **(kwargs or {}))
        self.num_collectives += 1
        return run_on_copies(func, args, kwargs or {})


def make(num: int = 4) -> Tensor:
    return torch.arange(float(num)) * 10 ** dist.get_rank()


def gather() -> list[Tensor]:
    whole = torch.full((10,), -1.0)
    work = dist.all_gather_single(whole[1:9], make(), async_op=True)  # part of a storage
    assert work is not None
    work.wait()
    assert work.is_completed()
    return [whole]


def gather_into_itself() -> list[Tensor]:
    whole = torch.zeros(8)
    own = whole[4 * dist.get_rank() :][:4]
    own.copy_(make())
    dist.all_gather_single(whole, own)
    return [whole]


def scatter_within_itself() -> list[Tensor]:
    whole = make(8)
    dist.reduce_scatter_single(whole[4 * dist.get_rank() :][:4], whole)
    return [whole]


def reduce() -> list[Tensor]:
    whole = make().to(torch.bfloat16)
    dist.all_reduce(whole, op=dist.ReduceOp.MAX)
    return [whole]


def gather_lists() -> list[Tensor]:
    parts = [torch.zeros(4) for _ in range(2)]
    dist.all_gather(parts, make())
    return parts


def send_around() -> list[Tensor]:
    mine, theirs, told = make(), torch.zeros(4), make()
    dist.all_to_all_single(theirs, mine)
    dist.broadcast(told, src=1)
    dist.barrier()
    return [mine, theirs, told]


CASES = [gather, gather_into_itself, scatter_within_itself, reduce, gather_lists, send_around]


def compare(body: Callable[[], list[Tensor]]) -> None:
    truth = body()
    with OnCopies() as mode:
        found = body()
    assert mode.num_collectives > 0
    assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True)), (found, truth)


@pytest.mark.full
@pytest.mark.parametrize("body", CASES)
def test_every_collective_gives_the_same(body: Callable[[], list[Tensor]]) -> None:
    run_ranks(compare, body)


def send_apart() -> None:
    fake = dist.new_group(backend="fake")
    with OnCopies() as mode:
        dist.all_reduce(torch.ones(1), group=fake)
        assert mode.num_collectives == 0
        dist.all_reduce(torch.ones(1))
        assert mode.num_collectives == 1


def test_collectives_of_other_backends_are_left_alone() -> None:
    run_ranks(send_apart)
