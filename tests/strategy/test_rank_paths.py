"""Ranks that take other paths through a module are refused, with what each of them did; all others train as before."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from differences import find_largest
from lightning.pytorch.strategies import DDPStrategy
from models import to_full
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from training import build_trainer

from lit_fsdp import FSDP2Strategy, Mesh, Sharding
from lit_fsdp.strategy.rank_paths import RankPaths, Use, describe_difference, watch_paths
from ranks import RankError, run_ranks

SIZE = 8


class Block(nn.Module):
    """One of several that are as large."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(SIZE, 16), nn.Linear(16, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class Net(nn.Module):
    """Has blocks, and layers in one unit, of which ranks may use other ones; or all of the blocks, with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.left, self.right, self.unused = (nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(self, x: Tensor, fork: str) -> Tensor:
        place = dist.get_rank() % 2
        if fork == "blocks":
            x = self.blocks[place](x)
        elif fork == "weights":
            x = sum((int(i == place) * block(x) for i, block in enumerate(self.blocks)), torch.zeros(()))
        else:
            x = self.blocks[1](self.blocks[0](x))
        last = self.right if fork == "layers" and place else self.left
        return last(x)  # type: ignore[no-any-return]


class Forked(pl.LightningModule):
    """Trains them."""

    def __init__(self, fork: str, *, first_step: int = 0, is_manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.fork, self.first_step, self.automatic_optimization = fork, first_step, not is_manual
        self.net = Net()

    def compute_loss(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x, self.fork if self.global_step >= self.first_step else "")
        return out.square().mean()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor | None:
        loss = self.compute_loss(batch[0])
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.compute_loss(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        rows = torch.randn(48, SIZE, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(rows), batch_size=4)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.train_dataloader()


class Steps(pl.Callback):
    """Says after which step an error came."""

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        exception.args = (f"{exception.args[0]} (after step {trainer.global_step})",)


def train(
    out: Path, fork: str, *, is_sharded: bool = True, module: Any = None, trainer: Any = None, **settings: Any
) -> None:
    task = Forked(fork, **(module or {}))
    strategy: Any = FSDP2Strategy(**settings) if is_sharded else DDPStrategy(find_unused_parameters=True)
    options = {"gradient_clip_val": None, "use_distributed_sampler": True, "max_steps": 3, **(trainer or {})}
    build_trainer(strategy, callbacks=[Steps()], **options).fit(task)
    weights = {name: to_full(value).detach() for name, value in task.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(weights, out)


OTHER_LAYERS = (
    r"rank 0 reduced gradients of net.left.weight, net.left.bias; "
    r"rank 1 reduced gradients of net.right.weight, net.right.bias: "
)
NO_SYNC = {"sharding": Sharding(no_sync=True)}


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, {}),
        ({"trainer": {"accumulate_grad_batches": 2}}, NO_SYNC),
        pytest.param({"trainer": {"accumulate_grad_batches": 2}}, {}, marks=pytest.mark.full),
        pytest.param({"module": {"is_manual": True}}, {}, marks=pytest.mark.full),
        pytest.param({}, {"oom_retries": 2}, marks=pytest.mark.full),
        pytest.param({"trainer": {"precision": "16-mixed"}}, {}, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize(
    ("fork", "refusal"),
    [
        ("blocks", r"rank 0 gathered net.blocks.0; rank 1 gathered net.blocks.1: "),
        ("layers", OTHER_LAYERS),
    ],
)
def test_ranks_that_use_other_modules_are_refused_before_the_step(
    fork: str, refusal: str, options: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    line = rf"optimizer step 1, or an evaluation before it, {refusal}expected the same modules .* \(after step 0\)"
    with pytest.raises(RankError, match=line):
        run_ranks(partial(train, tmp_path / "out", fork, **options, **settings), timeout_s=60)


def test_a_later_step_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"in optimizer step 3, .* \(after step 2\)"):
        run_ranks(partial(train, tmp_path / "out", "blocks", module={"first_step": 2}), timeout_s=60)


@pytest.mark.parametrize(
    ("settings", "world_size"),
    [
        ({}, 2),
        pytest.param({"mesh": Mesh(replicate=2, shard=1)}, 2, marks=pytest.mark.full),
        pytest.param({"mesh": Mesh(replicate=2, shard=2)}, 4, marks=pytest.mark.full),
        pytest.param({"oom_retries": 2}, 2, marks=pytest.mark.full),
    ],
)
def test_modules_that_all_ranks_use_with_weights_train_as_without_sharding(
    settings: dict[str, Any], world_size: int, tmp_path: Path
) -> None:
    run_ranks(partial(train, tmp_path / "sharded", "weights", **settings), world_size=world_size)
    run_ranks(partial(train, tmp_path / "ddp", "weights", is_sharded=False), world_size=world_size)
    weights, expected = torch.load(tmp_path / "sharded"), torch.load(tmp_path / "ddp")
    assert find_largest(float((weights[name] - value).abs().max()) for name, value in expected.items()) < 1e-5


def test_copies_of_the_model_are_compared_by_what_they_reduce(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=OTHER_LAYERS):
        run_ranks(partial(train, tmp_path / "out", "layers", mesh=Mesh(replicate=2, shard=1)), timeout_s=60)


# The comparison itself


def watch(*, is_deferred: bool) -> tuple[nn.Module, RankPaths]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    model = nn.Sequential(Block(), Block())
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    paths = watch_paths(model, mesh, timeout_s=60, is_deferred=is_deferred)
    assert paths is not None
    return model, paths


def defer() -> None:
    model, paths = watch(is_deferred=True)
    model(torch.ones(2, SIZE)).sum().backward()
    paths.compare(1)
    paths.finish()
    model[dist.get_rank()](torch.ones(2, SIZE)).sum().backward()
    paths.compare(2)  # says nothing yet
    with pytest.raises(
        ValueError, match=r"in optimizer step 2, .*, rank 0 gathered 0; rank 1 gathered 1: .* step 2 was made: resume"
    ):
        paths.compare(3)


def test_a_deferred_comparison_is_read_with_the_next_one() -> None:
    run_ranks(defer)


def undo() -> None:
    model, paths = watch(is_deferred=False)
    units = [part._get_fsdp_state()._fsdp_param_groups[0] for part in model]
    assert all({"unshard", "post_backward"} <= vars(unit).keys() for unit in units)
    model[dist.get_rank()](torch.ones(2, SIZE)).sum().backward()
    paths.forget()
    paths.compare(1)
    paths.detach()
    paths.detach()
    assert not any({"unshard", "post_backward"} & vars(unit).keys() for unit in units)


def test_a_step_that_is_undone_is_not_compared_and_torch_gets_back_what_it_had() -> None:
    run_ranks(undo)


def leave_alone() -> None:
    whole = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Block(), mesh=whole)
    mine = init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "tensor"))
    assert watch_paths(nn.Sequential(model), whole, timeout_s=60, is_deferred=False) is not None
    assert watch_paths(nn.Sequential(model), mine, timeout_s=60, is_deferred=False) is None, "another mesh"
    split = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor"))
    assert watch_paths(nn.Sequential(model), split, timeout_s=60, is_deferred=False) is None, "one shard"


def test_ranks_that_share_no_units_compare_nothing() -> None:
    run_ranks(leave_alone)


def test_the_first_difference_is_described() -> None:
    first, second = Use(unit="a"), Use(unit="b")
    both = Use(unit="a", reduced=("a.x", "a.y"))
    one, other = Use(unit="a", reduced=("a.x",)), Use(unit="b", reduced=("b.x",))
    assert describe_difference({0: [first], 1: [first, second]}) == "rank 0 did nothing more; rank 1 gathered b"
    paths = {0: [first, both], 1: [first, one], 2: [first, one]}
    assert describe_difference(paths) == "rank 0 reduced gradients of a.y; ranks 1-2 did not"
    assert describe_difference({0: [one], 1: [other]}) == "rank 0 reduced gradients of a; rank 1 reduced gradients of b"
    assert describe_difference({0: [one], 1: [second]}) == "rank 0 reduced gradients of a; rank 1 gathered b"
    assert "after the first 1 times" in describe_difference({0: [one], 1: [one]})
