from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from lit_fsdp.reporting.rank_stats import AsyncRankStats, Spread
from ranks import run_ranks


class FakeTrainer(SimpleNamespace):
    __hash__ = object.__hash__


def make_trainer(world_size: int) -> Any:
    return FakeTrainer(world_size=world_size, strategy=SimpleNamespace())


def exchange_two_things_at_once() -> None:
    rank, trainer = dist.get_rank(), make_trainer(dist.get_world_size())
    times, sizes = AsyncRankStats(trainer, ["step_s", "wait_s"]), AsyncRankStats(trainer, ["num_bytes"])
    assert times.finish() is None
    for step in range(3):
        times.start({"wait_s": 10.0 * rank, "step_s": step + rank}, tag=step)
        sizes.start({"num_bytes": 2.0**50 + rank})
        found = times.finish()
        assert found is not None
        spreads, tag = found
        assert (tag, spreads["step_s"].values) == (step, (step, step + 1.0, step + 2.0))
        assert (spreads["wait_s"].high_rank, spreads["wait_s"].low_rank, spreads["wait_s"].mean) == (2, 0, 10.0)
        found = sizes.finish()
        assert found is not None
        assert found[0]["num_bytes"].high == 2.0**50 + 2
        assert sizes.finish() is None


def test_every_rank_gets_the_numbers_of_all_ranks() -> None:
    run_ranks(exchange_two_things_at_once, world_size=3)


def test_one_process_needs_no_group() -> None:
    exchange = AsyncRankStats(make_trainer(1), ["a"])
    exchange.start({"a": 1.5}, tag="step")
    assert exchange.finish() == ({"a": Spread(values=(1.5,))}, "step")
