"""Collectives between CPUs give what gloo's own give, and a run uses them where they send less."""

import math
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from training import EVEN, fit, save_model

from lit_fsdp import FSDP2Strategy, Mesh, Sharding
from lit_fsdp.sharding import gloo_collectives
from lit_fsdp.sharding.gloo_collectives import GlooAllGather, GlooReduceScatter
from lit_fsdp.sharding.low_bit import LowBitAllGather
from ranks import run_ranks

NUM_VALUES = 501  # of a part


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("large_bytes", [0, 2**19], ids=["in turn", "at once"])
def test_they_give_what_those_of_gloo_give(world_size: int, large_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_collectives, "_LARGE_BYTES", large_bytes)  # ranks are forks

    def body() -> None:
        # The last of them, so that ranks have other numbers in the group.
        group, rank = dist.new_group(list(range(1, world_size + 1))), dist.get_rank()
        if rank == 0:
            return
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            generator = torch.Generator().manual_seed(rank)
            full = torch.randn(world_size * NUM_VALUES, generator=generator).to(dtype)
            full.view(world_size, -1)[:, :3] = torch.tensor([-0.0, math.inf, math.nan], dtype=dtype)
            own, stock = torch.empty(2, NUM_VALUES, dtype=dtype).unbind()
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
                dist.reduce_scatter_single(stock, full, op=op, group=group)
                GlooReduceScatter()(own, full, group, op)
                # Of three ranks, which of the sums is rounded is another.
                rtol = 0.0 if world_size == 2 else 2 * torch.finfo(dtype).eps
                torch.testing.assert_close(own, stock, rtol=rtol, atol=2 * rtol, equal_nan=True)
                if world_size == 2:  # zeros have their sign, too
                    assert torch.equal(own.nan_to_num().signbit(), stock.nan_to_num().signbit())
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            own = (torch.arange(NUM_VALUES) % 200 + rank).to(dtype)
            found, stock = torch.zeros(2, world_size * NUM_VALUES, dtype=dtype).unbind()
            dist.all_gather_single(stock, own, group=group)
            GlooAllGather()(found, own, group)
            assert torch.equal(found, stock)
            found.zero_()
            place = found.view(world_size, -1)[group.rank()]
            GlooAllGather()(found, place.copy_(own), group)  # as FSDP2 does
            assert torch.equal(found, stock)

    run_ranks(body, world_size=world_size + 1)


class Nodes(pl.Callback):
    """Makes a run believe that its ranks are spread over nodes, once it has started; sees what it uses then."""

    reads_weights = False

    def __init__(self, num_nodes: int, per_node: int) -> None:
        self._nodes = num_nodes, per_node
        self.found: list[set[str]] = []

    def setup(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        strategy = cast(FSDP2Strategy, trainer.strategy)
        strategy.num_nodes, type(strategy).num_processes = self._nodes  # type: ignore[assignment, method-assign]

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        groups = [group for m in module.modules() if isinstance(m, FSDPModule) for group in list_groups(m)]
        names = ("_all_gather_comm", "_reduce_scatter_comm")
        self.found = [{type(getattr(group, name)).__name__ for group in groups} for name in names]


def list_groups(module: FSDPModule) -> list[Any]:
    return list(module._get_fsdp_state()._fsdp_param_groups)


OURS, STOCK = ("GlooAllGather", "GlooReduceScatter"), ("DefaultAllGather", "DefaultReduceScatter")


@pytest.mark.full(after=2)
@pytest.mark.parametrize(
    ("nodes", "strategy", "expected"),
    [
        pytest.param((1, 2), {}, OURS, id="one node"),
        pytest.param((2, 1), {}, (STOCK[0], OURS[1]), id="a node for each rank"),
        pytest.param((1, 1), {}, STOCK, id="nodes are not known"),
        pytest.param((1, 2), {"mesh": Mesh(replicate=2)}, STOCK, id="copies"),
        pytest.param((1, 2), {"sharding": Sharding(gather_bits=8)}, (LowBitAllGather.__name__, OURS[1]), id="bits"),
    ],
)
def test_a_run_uses_them_where_they_send_less(
    nodes: tuple[int, int], strategy: dict[str, Any], expected: tuple[str, str], tmp_path: Path
) -> None:
    folder = save_model(tmp_path, **EVEN)

    def body() -> None:
        seen = Nodes(*nodes)
        fit(folder, tmp_path / "result.pt", strategy, {"max_steps": 1, "callbacks": [seen]})
        assert seen.found == [{expected[0]}, {expected[1]}]

    run_ranks(body, world_size=2)
