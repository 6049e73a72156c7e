"""A checkpoint is whole or not there, and is the same model and optimizer at any number of ranks."""

import enum
import gc
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from models import Parent, Stack, build_language_model, compute_loss, make_tokens, to_full
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from lit_fsdp.checkpoint import sharded
from lit_fsdp.checkpoint.manifest import MANIFEST
from lit_fsdp.checkpoint.optimizer_state import collect_state
from lit_fsdp.checkpoint.sharded import META, join_states, load_checkpoint, save_checkpoint, to_plain
from lit_fsdp.sharding.shard import Sharding, shard_model
from lit_fsdp.sharding.wrap import Wrap, plan_units
from ranks import run_ranks


def build(seed: int, tied: bool = False, frozen: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    model = Parent(build_language_model("llama", "cpu", num_hidden_layers=2, tie_word_embeddings=tied))
    if frozen:
        model.model.model.embed_tokens.requires_grad_(False)
        model.model.model.layers[0].requires_grad_(False)
    return model


def prepare(model: nn.Module, units: Wrap | None = None, replicate: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    size = dist.get_world_size()
    if replicate > 1:
        mesh = init_device_mesh("cpu", (replicate, size // replicate), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    options = {"mp_policy": MixedPrecisionPolicy(), "offload_policy": OffloadPolicy()}
    shard_model(model, plan_units(model, units or Wrap()), mesh=mesh, sharding=Sharding(), **options)
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = compute_loss(model, make_tokens())
    loss.backward()
    optimizer.step()
    return loss.item()


def save(path: Path, model: nn.Module, *optimizers: torch.optim.Optimizer, meta: Any = None) -> None:
    states = [get_optimizer_state_dict(model, optimizer) for optimizer in optimizers]
    save_checkpoint(path, join_states(get_model_state_dict(model), states), meta=meta or {"epoch": 3})


def read_all(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return every weight and every number of the optimizer in full."""
    names = {id(p): n for n, p in model.named_parameters()}
    tensors = {n: p.detach() for n, p in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        tensors |= {f"{names[id(parameter)]}/{key}": value for key, value in state.items()}
    return {n: to_full(t).clone() for n, t in tensors.items()}


VARIANTS: dict[str, dict[str, bool]] = {"plain": {}, "tied": {"tied": True}, "frozen": {"frozen": True}}


@pytest.fixture(scope="module", params=VARIANTS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A checkpoint of 2 ranks after 2 steps, and what all numbers are then and after one more step."""
    folder = tmp_path_factory.mktemp(request.param)

    def body() -> None:
        model, optimizer = prepare(build(0, **VARIANTS[request.param]))
        for _ in range(2):
            step(model, optimizer)
        save(folder / "ckpt", model, optimizer)
        truth = [read_all(model, optimizer)]
        loss = step(model, optimizer)
        truth.append(read_all(model, optimizer))
        if dist.get_rank() == 0:
            torch.save((loss, truth), folder / "truth.pt")

    run_ranks(body)
    return request.param, folder


@pytest.mark.full(after=2)
@pytest.mark.parametrize(
    ("world_size", "replicate", "units"),
    [
        (1, 1, Wrap()),
        (2, 1, Wrap(policy="min_size", min_num_params=3000)),
        (3, 1, Wrap(own_embeddings=False)),
        (4, 2, Wrap()),
    ],
    ids=["1", "2 in other units", "3", "2x2"],
)
def test_weights_and_optimizer_come_back_at_any_number_of_ranks(
    saved: tuple[str, Path], world_size: int, replicate: int, units: Wrap
) -> None:
    name, folder = saved

    def body() -> None:
        loss, (now, later) = torch.load(folder / "truth.pt")
        model, optimizer = prepare(build(1, **VARIANTS[name]), units, replicate)
        assert load_checkpoint(folder / "ckpt", model, [optimizer]) == {"epoch": 3}
        actual = read_all(model, optimizer)
        assert actual.keys() == now.keys()
        assert [n for n in now if not torch.equal(actual[n], now[n])] == []
        assert [p.requires_grad for p in model.parameters()] == [
            p.requires_grad for p in build(1, **VARIANTS[name]).parameters()
        ]
        assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
        assert step(model, optimizer) == pytest.approx(loss, abs=1e-6)
        actual = read_all(model, optimizer)
        for key, tensor in later.items():
            # Adam turns a rounding difference of a gradient near 0 into a visible step.
            torch.testing.assert_close(actual[key], tensor, rtol=1e-4, atol=1e-5, msg=key)

    run_ranks(body, world_size=world_size)


def test_the_model_loads_without_its_optimizer_and_on_one_device(saved: tuple[str, Path]) -> None:
    name, folder = saved
    _, (now, _) = torch.load(folder / "truth.pt")
    model = build(1, **VARIANTS[name])
    load_checkpoint(folder / "ckpt", model)
    assert [n for n, p in model.named_parameters() if not torch.equal(p, now[n])] == []


def test_torch_reads_the_folder_by_itself(saved: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = saved
    dcp_to_torch_save(folder / "ckpt", tmp_path / "plain.pt")
    state = torch.load(tmp_path / "plain.pt", weights_only=True)
    _, (now, _) = torch.load(folder / "truth.pt")
    weights = {n: t for n, t in now.items() if "/" not in n}
    assert weights.keys() <= state["state_dict"].keys()
    assert [n for n, t in weights.items() if not torch.equal(state["state_dict"][n], t)] == []


def save_stack(path: Path, *, num_optimizers: int = 1, width: int = 7, meta: Any = None) -> None:
    model = Stack(width)
    optimizers = [torch.optim.AdamW(model.parameters()) for _ in range(num_optimizers)]
    model(torch.ones(1, 5)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    save(path, model, *optimizers, meta=meta)


@pytest.mark.parametrize("what", ["read_metadata", "read_meta"])
def test_what_one_rank_cannot_read_fails_all(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save_stack(tmp_path / "last")

    def fail(_: Path) -> None:
        raise ConnectionError("the store is gone")

    def body() -> None:
        if dist.get_rank() == 1:
            monkeypatch.setattr(sharded, what, fail)
        with pytest.raises(RuntimeError, match="rank 1: the store is gone"):
            load_checkpoint(tmp_path / "last", Stack())

    run_ranks(body)


def test_an_older_checkpoint_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "last"
    path.mkdir()
    (path / "left_over").touch()
    (tmp_path / ".last.incomplete").mkdir()
    (tmp_path / ".last.incomplete" / "from_a_crash").touch()
    save_stack(path, meta={"epoch": 4})
    assert sorted(p.name for p in path.iterdir()) == [".metadata", "__0_0.distcp", MANIFEST, META, "random_0.pt"]
    assert list(tmp_path.iterdir()) == [path]
    assert load_checkpoint(path, Stack()) == {"epoch": 4}


def test_a_save_that_fails_keeps_the_older_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last"
    save_stack(path, meta={"epoch": 1})
    monkeypatch.setattr("lit_fsdp.checkpoint.sharded.describe_files", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_stack(path, meta={"epoch": 2})
    monkeypatch.undo()
    assert load_checkpoint(path, Stack()) == {"epoch": 1}
    save_stack(path, meta={"epoch": 3})  # what the failure left is no obstacle
    assert load_checkpoint(path, Stack()) == {"epoch": 3}


@pytest.mark.parametrize("is_beside", [False, True])
@pytest.mark.parametrize("work", ["save", "load_state"])
def test_garbage_is_not_searched_for_in_saves_and_loads_and_is_beside_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str, is_beside: bool
) -> None:
    path, searches = tmp_path / "a.ckpt", list[bool]()
    save_stack(path, meta={})

    def fail(*_: Any, **__: Any) -> None:
        searches.append(gc.isenabled())
        raise OSError("disk broken")

    monkeypatch.setattr(f"lit_fsdp.checkpoint.sharded.{work}", fail)

    def run() -> None:
        with pytest.raises(OSError, match="disk broken"):
            if work == "save":
                save_stack(path, meta={})
            else:
                load_checkpoint(path, Stack())

    if is_beside:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    else:
        run()
    assert searches == [is_beside]
    assert gc.isenabled()


def test_what_a_newer_torch_wrote_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    get_state = TensorProperties.__getstate__
    with monkeypatch.context() as patch:  # as torch 2.15 did, of which 2.13 and 2.14 themselves expect five
        patch.setattr(TensorProperties, "__getstate__", lambda properties: (*get_state(properties), None))
        save_stack(tmp_path / "newer", meta={"epoch": 1})
    assert load_checkpoint(tmp_path / "newer", Stack()) == {"epoch": 1}


def test_a_link_is_replaced_and_its_target_kept(tmp_path: Path) -> None:
    save_stack(tmp_path / "first", meta={"epoch": 1})
    (tmp_path / "last").symlink_to("first")
    save_stack(tmp_path / "last", meta={"epoch": 2})
    assert not (tmp_path / "last").is_symlink()
    assert load_checkpoint(tmp_path / "first", Stack()) == {"epoch": 1}
    assert load_checkpoint(tmp_path / "last", Stack()) == {"epoch": 2}


def test_what_is_no_checkpoint_of_this_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    with pytest.raises(ValueError, match=f"ckpt is no complete checkpoint: {MANIFEST} is missing"):
        load_checkpoint(path, Stack())
    save_stack(path, num_optimizers=2)
    model = Stack()
    optimizers = [torch.optim.AdamW(model.parameters()) for _ in range(3)]
    with pytest.raises(ValueError, match="holds 2 optimizers, the run has 1"):
        load_checkpoint(path, model, optimizers[:1])
    with pytest.raises(ValueError, match="holds 2 optimizers, the run has 3"):
        load_checkpoint(path, model, optimizers)
    load_checkpoint(path, model, optimizers[:2])
    with pytest.raises(ValueError, match=r"lacks 0\.weight, 0\.bias: it was saved from another model"):
        load_checkpoint(path, nn.Sequential(nn.Linear(2, 2)))
    (path / META).unlink()
    with pytest.raises(ValueError, match=f"{META} is missing; choose another checkpoint"):
        load_checkpoint(path, Stack())


def test_a_state_that_another_optimizer_left_of_one_parameter_is_refused(tmp_path: Path) -> None:
    def body() -> None:
        model, optimizer = prepare(build(0))
        step(model, optimizer)
        name, parameter = next(iter(model.named_parameters()))
        optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
        save(tmp_path / "ckpt", model, optimizer)
        model, optimizer = prepare(build(0))
        with pytest.raises(ValueError, match=f"has no {name}.step for AdamW: it was saved with another optimizer"):
            load_checkpoint(tmp_path / "ckpt", model, [optimizer])

    run_ranks(body)


class Around(torch.optim.Optimizer):
    """Keeps its state in the optimizer that it wraps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()


def test_the_state_of_an_optimizer_inside_another_is_saved() -> None:
    def body() -> None:
        model, optimizer = prepare(build(0))
        step(model, optimizer)
        saved = collect_state(model, Around(optimizer))["state"]
        assert saved.keys() == {name for name, parameter in model.named_parameters() if parameter in optimizer.state}
        assert all(values.keys() == {"step", "exp_avg", "exp_avg_sq"} for values in saved.values())

    run_ranks(body)


def test_a_model_of_other_shapes_is_refused_by_name(tmp_path: Path) -> None:
    save_stack(tmp_path / "ckpt", width=7)
    model = Stack(8)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(ValueError, match=r"first\.weight has shape \(7, 5\), the model's \(8, 5\)"):
        load_checkpoint(tmp_path / "ckpt", model)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_a_model_with_fewer_parameters_is_refused_and_one_with_more_is_loaded_if_not_strict(tmp_path: Path) -> None:
    save_stack(tmp_path / "ckpt")
    smaller = Stack()
    del smaller.last
    with pytest.raises(ValueError, match=r"holds last\.weight, last\.bias: it was saved from another model"):
        load_checkpoint(tmp_path / "ckpt", smaller)
    larger = Stack()
    larger.extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"lacks extra\.weight, extra\.bias"):
        load_checkpoint(tmp_path / "ckpt", larger)
    weight = larger.extra.weight.detach().clone()
    before = larger.first.weight.detach().clone()
    load_checkpoint(tmp_path / "ckpt", larger, strict=False)
    assert torch.equal(larger.extra.weight, weight)
    assert not torch.equal(larger.first.weight, before)


class Shape(enum.Enum):
    LINEAR = "linear"


@dataclass
class Settings:
    shape: Shape
    where: Path


def test_meta_of_any_kind_loads_with_weights_only(tmp_path: Path) -> None:
    meta = {
        "settings": Settings(Shape.LINEAR, Path("a/b")),
        "tuple": (1, 2.5, None, True),
        "set": {3},
        "numbers": [np.int64(3), np.float32(0.5), deque([1, 2])],
        "array": np.arange(3),
        "tensor": torch.ones(2),
        "of torch": [torch.bfloat16, torch.device("cuda:1"), 1j],
        7: [b"x", {"deep": [Shape.LINEAR]}],
    }
    save_stack(tmp_path / "ckpt", meta=meta)
    loaded = load_checkpoint(tmp_path / "ckpt", Stack())
    assert loaded.pop("tensor").tolist() == [1, 1]
    assert loaded.pop("array").tolist() == [0, 1, 2]
    assert loaded == {
        "settings": {"shape": "linear", "where": "a/b"},
        "tuple": (1, 2.5, None, True),
        "set": [3],
        "numbers": [3, 0.5, [1, 2]],
        "of torch": [torch.bfloat16, torch.device("cuda:1"), 1j],
        7: [b"x", {"deep": ["linear"]}],
    }
    assert to_plain(loaded) == loaded


def test_what_a_checkpoint_cannot_hold_is_named_instead_of_stored_as_text() -> None:
    with pytest.raises(TypeError, match=r"checkpoint\.callbacks\.mine\[1\] is a Stack"):
        to_plain({"callbacks": {"mine": [1, Stack()]}})


def test_a_plain_copy_does_not_follow_what_it_was_made_of() -> None:
    score, paths = torch.ones(1), ["a"]
    copy = to_plain({"score": score, "paths": paths})
    score.add_(1)
    paths.append("b")
    assert copy == {"score": torch.ones(1), "paths": ["a"]}


class NestedState(torch.optim.Optimizer):
    """Keeps its state, and a setting, in mappings, as Shampoo does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "options": {"rank": 1}})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                sums = self.state[parameter].setdefault("sums", {"left": torch.zeros_like(parameter)})
                sums["left"] += parameter.grad


def test_nested_state_is_loaded_and_that_of_other_parameters_is_refused(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})

    def save(path: Path, parameters: Any) -> None:
        optimizer = NestedState(parameters)
        model["a"](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        save_checkpoint(path, join_states(model.state_dict(), [collect_state(model, optimizer)]), meta={})

    save(tmp_path / "all", model.parameters())
    loaded = NestedState(model.parameters())
    load_checkpoint(tmp_path / "all", model, [loaded])
    assert [p in loaded.state for p in model.parameters()] == [True, True, False, False]  # b had no step
    assert loaded.state[model["a"].bias]["sums"]["left"].tolist() == [1, 1]
    save(tmp_path / "part", model["a"].parameters())
    with pytest.raises(ValueError, match=r"has no b\.weight\.sums for NestedState: it was saved with another"):
        load_checkpoint(tmp_path / "part", model, [NestedState(model.parameters())])
