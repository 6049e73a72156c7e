"""No sharding setting changes the loss or a gradient; what a setting promises is seen in the collectives."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from models import Parent, Stack, build_language_model, compute_loss, make_tokens, to_full
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.utils.parametrize import register_parametrization

from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing, apply_activation_checkpointing
from lit_fsdp.sharding.mesh import gather_objects
from lit_fsdp.sharding.mixed_precision import MixedPrecision
from lit_fsdp.sharding.roots import split_by_child
from lit_fsdp.sharding.shard import (
    Compile,
    Sharding,
    broadcast_parameters,
    compile_blocks,
    find_roots,
    no_sync,
    shard_model,
)
from lit_fsdp.sharding.torch_internals import iterate_sharded, list_unreduced_gradients
from lit_fsdp.sharding.wrap import Unit, Wrap, iterate_blocks, plan_units
from lit_fsdp.strategy.precision_plugin import FSDP2Precision
from ranks import run_ranks


def build(tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Parent(build_language_model("llama", "cpu", tie_word_embeddings=tied))


def shard(
    model: nn.Module,
    sharding: Sharding | None = None,
    plan: list[Unit] | None = None,
    offload: OffloadPolicy | None = None,
    replicate: int = 1,
    mp_policy: MixedPrecisionPolicy | None = None,
) -> list[Unit]:
    plan = plan or plan_units(model, Wrap())
    world_size = dist.get_world_size()
    if replicate > 1:
        mesh = init_device_mesh("cpu", (replicate, world_size // replicate), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    shard_model(
        model,
        plan,
        mesh=mesh,
        sharding=sharding or Sharding(),
        mp_policy=mp_policy or MixedPrecisionPolicy(),
        offload_policy=offload or OffloadPolicy(),
    )
    return plan


def rows_of_rank(rank: int) -> Tensor:
    return make_tokens(num_rows=8)[2 * rank : 2 * rank + 2]


def compute_truth(model: nn.Module, num_rounds: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    """Return every rank's loss and the mean gradient, on one device."""
    losses = []
    for _ in range(num_rounds):
        for rank in range(dist.get_world_size()):
            loss = compute_loss(model, rows_of_rank(rank))
            (loss / dist.get_world_size()).backward()
            losses.append(loss.item())
    return losses[: dist.get_world_size()], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def check_equal(model: nn.Module, truth: tuple[list[float], dict[str, Tensor]], loss: Tensor) -> None:
    assert loss.item() == pytest.approx(truth[0][dist.get_rank()], abs=1e-6)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == truth[1].keys()
    for name, grad in gradients.items():
        assert isinstance(grad, DTensor)
        torch.testing.assert_close(grad.full_tensor(), truth[1][name], rtol=1e-5, atol=1e-7)


SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "default": (2, {}),
    "kept gathered": (2, {"sharding": Sharding(reshard_after_forward=False)}),
    "split over 2 of 4": (4, {"sharding": Sharding(reshard_after_forward=2)}),
    "prefetch": (2, {"sharding": Sharding(forward_prefetch=2, backward_prefetch=3)}),
    "more reductions at once": (2, {"sharding": Sharding(reduce_scatter_max_input_buffers=3)}),
    "prefetch past the ends": (2, {"sharding": Sharding(forward_prefetch=99, backward_prefetch=99)}),
    "offload": (2, {"offload": CPUOffloadPolicy(pin_memory=False)}),
    "hybrid": (4, {"replicate": 2}),
    "hybrid with prefetch": (4, {"replicate": 2, "sharding": Sharding(forward_prefetch=1, backward_prefetch=2)}),
}


@pytest.mark.full(after=3)
@pytest.mark.parametrize("name", SETTINGS)
def test_no_setting_changes_loss_or_gradients(name: str) -> None:
    world_size, options = SETTINGS[name]

    def body() -> None:
        for tied in (False, True)[: 2 if name in ("default", "offload", "hybrid") else 1]:
            truth = compute_truth(build(tied))
            model = build(tied)
            shard(model, **options)
            for _ in range(2):  # prefetch follows another order from the second step on
                model.zero_grad()
                loss = compute_loss(model, rows_of_rank(dist.get_rank()))
                loss.backward()
                check_equal(model, truth, loss)

    run_ranks(body, world_size=world_size)


PLANS = {
    "nested": Wrap(module_classes=["*DecoderLayer", "*MLP"]),
    "small": Wrap(policy="min_size", min_num_params=1500),
    "large": Wrap(policy="min_size", min_num_params=5000),
    "in root": Wrap(policy="repeated_blocks", own_embeddings=False),
}


@pytest.mark.full(after=3)
@pytest.mark.parametrize(
    ("plan_name", "mode"),
    [*((name, mode) for name in PLANS for mode in ("none", "full")), ("in root", "selective")],
)
def test_no_plan_changes_loss_or_gradients_with_or_without_recompute(plan_name: str, mode: Any) -> None:
    def body() -> None:
        truth = compute_truth(build())
        model = build()
        plan = plan_units(model, PLANS[plan_name])
        apply_activation_checkpointing(model, ActivationCheckpointing(mode=mode), list(iterate_blocks(plan)))
        shard(model, plan=plan)
        loss = compute_loss(model, rows_of_rank(dist.get_rank()))
        loss.backward()
        check_equal(model, truth, loss)

    run_ranks(body)


HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
# On one rank: settings, and what of a model with a frozen head and a block in bfloat16 is not FSDP2's.
ONE_RANK: dict[str, tuple[dict[str, Any], Callable[[nn.Parameter], bool]]] = {
    "as stored": ({}, lambda _: True),
    "cast": ({"mp_policy": HALF}, lambda p: p.dtype == torch.bfloat16),
    "gradients held": ({"sharding": Sharding(no_sync=True)}, lambda _: False),
    "offload": ({"offload": CPUOffloadPolicy(pin_memory=False)}, lambda _: False),
}


@pytest.mark.parametrize("name", ONE_RANK)
def test_one_rank_has_no_copies_of_what_it_would_not_change_and_trains_as_fsdp2_does(name: str) -> None:
    options, is_whole = ONE_RANK[name]

    def train(model: nn.Module) -> list[Tensor]:
        tokens = make_tokens(num_rows=4)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses = []
        for _ in range(3):
            with no_sync(*(find_roots(model) if name == "gradients held" else [])):
                compute_loss(model, tokens[:2]).backward()
            losses.append(compute_loss(model, tokens[2:]))
            losses[-1].backward()
            # Not by the norm: squares of plain gradients and of shards add up in another order.
            FSDP2Precision("32-true", device_type="cpu").clip_grad_by_value(optimizer, 1e-3)
            optimizer.step()
            optimizer.zero_grad()
        return [*losses, *map(to_full, model.parameters())]

    def make() -> nn.Module:
        model = build()
        model.model.lm_head.requires_grad_(False)
        if name == "cast":
            model.model.model.layers[1].bfloat16()
        return model

    def body() -> None:
        expected, model = make(), make()
        policies = {"mp_policy": MixedPrecisionPolicy(), "offload_policy": options.get("offload", OffloadPolicy())}
        for unit in (*expected.model.model.layers, expected):
            fully_shard(unit, **{**policies, **{k: v for k, v in options.items() if k == "mp_policy"}})
        before = dict(model.named_parameters())
        shard(model, **options)
        after = dict(model.named_parameters())
        assert {n for n, p in before.items() if after[n] is p} == {n for n, p in before.items() if is_whole(p)}
        for tensor, truth in zip(train(model), train(expected), strict=True):
            assert torch.equal(tensor, truth)

    run_ranks(body, world_size=1)


def count_collectives(model: nn.Module, holds: bool = False) -> tuple[int, int]:
    """Return the gathers and reductions of one forward and backward."""
    with CommDebugMode() as mode, no_sync(*(find_roots(model) if holds else [])):
        compute_loss(model, rows_of_rank(dist.get_rank())).backward()
    counts = {str(op).split(".")[-1]: n for op, n in mode.get_comm_counts().items()}
    gathers = sum(n for op, n in counts.items() if "gather" in op)
    return gathers, sum(n for op, n in counts.items() if "reduce_scatter" in op)


def test_keeping_gathered_saves_the_gathers_of_backward() -> None:
    def body() -> None:
        for reshard, expected in ((True, 8), (False, 5)):  # 5 units; head and embedding are never gathered twice
            model = build()
            shard(model, Sharding(reshard_after_forward=reshard))
            compute_loss(model, rows_of_rank(0)).backward()  # the first step sets up
            assert count_collectives(model) == (expected, 5), reshard

    run_ranks(body)


@pytest.mark.full
@pytest.mark.parametrize(("forward", "backward"), [(0, 1), (2, 1), (0, 3), (9, 9)])
def test_as_many_units_are_gathered_ahead_as_asked_for(forward: int, backward: int) -> None:
    num_blocks = 5

    def body() -> None:
        model = Stack(num_blocks=num_blocks)
        shard(model, Sharding(forward_prefetch=forward, backward_prefetch=backward))
        model(torch.ones(2, 5)).sum().backward()  # the first step sets up
        begun: list[int] = []
        with CommDebugMode() as mode:

            def look(*_: Any) -> None:
                begun.append(sum(n for op, n in mode.get_comm_counts().items() if "gather" in str(op)))

            for block in model.blocks:
                block.norm.register_forward_pre_hook(look)
                block.down.register_full_backward_pre_hook(look)
            model(torch.ones(2, 5)).sum().backward()
        ahead = [[min(i + 1 + depth, num_blocks) for i in range(num_blocks)] for depth in (forward, backward)]
        # The root is gathered first, and once.
        assert begun == [1 + n for n in ahead[0]] + [1 + num_blocks + n for n in ahead[1]]

    run_ranks(body)


def test_held_gradients_are_reduced_once_and_equal_the_sum() -> None:
    def body() -> None:
        truth = compute_truth(build(), num_rounds=2)
        model = build()
        shard(model)
        assert count_collectives(model, holds=True)[1] == 0
        assert all(p.grad is None for p in model.parameters())
        with CommDebugMode() as mode:
            loss = compute_loss(model, rows_of_rank(dist.get_rank()))
            loss.backward()
        assert sum(n for op, n in mode.get_comm_counts().items() if "reduce_scatter" in str(op)) == 5
        check_equal(model, truth, loss)

    run_ranks(body)


@pytest.mark.parametrize(("reduce_dtype", "held"), [(None, torch.bfloat16), ("float32", torch.float32)])
def test_held_gradients_are_known_once_each_in_the_dtype_of_reduction(reduce_dtype: Any, held: torch.dtype) -> None:
    def body() -> None:
        model = build()
        shard(model, mp_policy=MixedPrecision(param_dtype="bfloat16", reduce_dtype=reduce_dtype).build_policy())
        for _ in range(2):  # what is held already is added to otherwise
            count_collectives(model, holds=True)
            gradients = [list_unreduced_gradients(parameter) for _, parameter in iterate_sharded(model)]
            assert [[g.dtype for g in known] for known in gradients] == [[held]] * len(list(model.parameters()))

    run_ranks(body)


def test_gradients_are_held_beside_a_unit_that_no_step_gathers() -> None:
    def body() -> None:
        model = build()
        model.listener = nn.Linear(8, 8).requires_grad_(False)
        plan = plan_units(model, Wrap(), idle=["listener"])
        shard(model, plan=plan, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        assert count_collectives(model, holds=True)[1] == 0
        assert count_collectives(model)[1] == 5
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)

    run_ranks(body)


def test_parameters_of_no_dimension_are_reduced_together_once_per_backward_that_is_not_held() -> None:
    def body() -> None:
        model = nn.Linear(2, 2)
        model.first, model.second = (nn.Parameter(torch.tensor(value)) for value in (2.0, 3.0))
        shard(model, plan=[Unit(names=("",), kind="root")])
        counts = []
        for is_held in (True, True, False, False):
            with CommDebugMode() as mode, no_sync(*(find_roots(model) if is_held else [])):
                made = model(torch.ones(1, 2)) * 0 + (1.0 + dist.get_rank())
                (made * model.first * model.second * model.first).sum().backward()
            counts.append(sum(count for name, count in mode.get_comm_counts().items() if "allreduce" in str(name)))
        assert counts == [0, 0, 1, 1]
        # 2 elements of 1.5 on average, 4 times: d/df = 2 * f * s, d/ds = f * f.
        gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
        assert gradients["first"] == 4 * 2 * 1.5 * 12
        assert gradients["second"] == 4 * 2 * 1.5 * 4

    run_ranks(body)


def test_gradients_are_held_in_a_model_with_units_that_no_forward_has_used() -> None:
    def body() -> None:
        model = Stack()
        model.spare = nn.Linear(7, 7)
        plan = [*plan_units(model, Wrap(module_classes=["Block"]))]
        plan = [*plan[:-1], Unit(names=("spare",), kind="block"), plan[-1]]
        shard(model, plan=plan, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
        for is_held in (True, False):
            with no_sync(*(find_roots(model) if is_held else [])):
                model(torch.ones(2, 5)).sum().backward()
        without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
        assert without == {"spare.weight", "spare.bias"}

    run_ranks(body)


def test_units_that_stay_split_over_some_ranks_share_two_groups() -> None:
    def body() -> None:
        groups = dist.distributed_c10d._world.pg_map
        num_before = len(groups)
        shard(Stack(), sharding=Sharding(reshard_after_forward=2))
        assert len(groups) == num_before + 2

    run_ranks(body, world_size=4)


def test_an_error_inside_no_sync_turns_reduction_back_on() -> None:
    def body() -> None:
        model = build()
        shard(model)
        with pytest.raises(RuntimeError, match="a bad batch"), no_sync(*find_roots(model)):
            raise RuntimeError("a bad batch")
        assert count_collectives(model)[1] == 5
        assert all(p.grad is not None for p in model.parameters())

    run_ranks(body)


def test_ranks_begin_with_the_tensors_of_rank_0_whatever_their_layout_and_dtype() -> None:
    def body() -> None:
        memory = torch.arange(64.0) + 100 * dist.get_rank()
        made = {"expanded": memory[:1].expand(8), "part": memory.view(8, 8)[:, :2], "turned": memory.view(8, 8).t()}
        made |= {f"{dtype}": (memory[:4] % 7).to(dtype) for dtype in (torch.bool, torch.int16, torch.float8_e4m3fn)}
        expected = gather_objects({name: tensor.float().clone() for name, tensor in made.items()})[0]
        before = memory.clone()
        model = nn.Module()
        model.weight = nn.Parameter(made["part"])
        for name, tensor in made.items():
            model.register_buffer(name.removeprefix("torch."), tensor)
        broadcast_parameters(model)
        for name, value in expected.items():
            assert torch.equal(model.get_buffer(name.removeprefix("torch.")).float(), value), name
        assert torch.equal(model.weight, expected["part"])
        assert torch.equal(memory, before)  # nothing is written beside them

    run_ranks(body)


@contextmanager
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.full
@pytest.mark.parametrize("mode", ["none", pytest.param("full", marks=pytest.mark.slow), "selective"])
def test_compiled_blocks_give_the_same_loss_and_gradients(mode: Any) -> None:
    def body() -> None:
        truth = compute_truth(build())
        model = build()
        plan = plan_units(model, Wrap())
        blocks = list(iterate_blocks(plan))
        apply_activation_checkpointing(model, ActivationCheckpointing(mode=mode), blocks)
        with fresh_compiler():
            compile_blocks(model, Compile(backend="aot_eager"), blocks)
            shard(model, plan=plan)
            torch._dynamo.utils.counters.clear()
            loss = compute_loss(model, rows_of_rank(dist.get_rank()))
            loss.backward()
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
            assert torch._dynamo.utils.counters["graph_break"] == {}
        check_equal(model, truth, loss)

    run_ranks(body)


def test_compile_refuses_what_torch_does_not_know_and_a_model_without_blocks() -> None:
    with pytest.raises(ValueError, match=r"compile.backend: got 'inducter': expected .*inductor"):
        Compile(backend="inducter").check()
    with pytest.raises(ValueError, match=r"compile.mode: got 'fastest': torch says: .*fastest"):
        Compile(mode="fastest").check()
    with pytest.raises(ValueError, match=r"compile.recompile_limit: got 0: expected 1 or more"):
        Compile(recompile_limit=0).check()
    with pytest.raises(ValueError, match="compile: no blocks were found"):
        compile_blocks(Stack(), Compile(), [])


def test_broadcast_makes_ranks_equal_and_leaves_meta_tensors_alone() -> None:
    def body() -> None:
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        model[2].weight = model[0].weight
        model[1].running_mean += dist.get_rank()
        model[1].weight.requires_grad_(False)
        with torch.device("meta"):
            model.append(nn.Linear(2, 2))
        torch.manual_seed(0)
        expected = nn.Linear(3, 3).weight
        broadcast_parameters(model)
        assert torch.equal(model[0].weight, expected)
        assert model[2].weight is model[0].weight
        assert model[1].running_mean.tolist() == [0, 0, 0]
        assert model[3].weight.is_meta
        assert [p.requires_grad for p in model[1].parameters()] == [False, True]

    run_ranks(body)
    broadcast_parameters(nn.Linear(2, 2))  # and nothing happens without ranks


def test_each_child_becomes_a_root_of_its_own() -> None:
    def body() -> None:
        torch.manual_seed(0)
        parent = nn.Module()
        parent.generator, parent.judge, parent.loss = build_language_model("llama", "cpu"), Stack(), nn.MSELoss()
        expected = [parent.judge(torch.ones(2, 5)), compute_loss(parent.generator, make_tokens())]
        plan = plan_units(parent, Wrap())
        parts = split_by_child(parent, plan)
        assert [child for child, _ in parts] == [parent.generator, parent.judge]
        for child, units in parts:
            shard(child, plan=units)
        assert not isinstance(parent, FSDPModule)
        assert find_roots(parent) == [parent.generator, parent.judge]
        actual = [parent.judge(torch.ones(2, 5)), compute_loss(parent.generator, make_tokens())]
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)

    run_ranks(body)


def test_the_parts_hold_the_units_of_the_plan_under_shorter_names() -> None:
    parent = nn.Module()
    parent.model, parent.head = build_language_model("llama"), nn.Linear(2, 2)
    parts = split_by_child(parent, plan_units(parent, Wrap()))
    alone = plan_units(parent.model, Wrap())
    assert [(u.kind, u.names) for u in parts[0][1]] == [(u.kind, u.names) for u in alone]
    assert [(u.kind, u.names) for u in parts[1][1]] == [("root", ("",))]
    assert parts[1][1][0].parameters == ("weight", "bias")
    with pytest.raises(ValueError, match=r"^scale: under manual optimization"):
        split_by_child(Stack(), plan_units(Stack(), Wrap()))


def test_what_only_holds_networks_is_no_root_unless_units_cover_it() -> None:
    parent = nn.Module()
    parent.networks = nn.ModuleDict({"one": Stack(), "deeper": nn.ModuleList([nn.Linear(2, 2)])})
    parent.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
    parent.other_name = parent.networks["one"]
    roots = [root for root, _ in split_by_child(parent, plan_units(parent, Wrap()))]
    assert roots == [parent.networks["one"], parent.networks["deeper"][0], parent.layers]


def test_roots_that_share_a_parameter_are_refused_where_each_would_train_a_copy() -> None:
    parent = nn.Module()
    parent.one, parent.two = nn.Linear(2, 2), nn.Linear(2, 2)
    parent.two.weight = parent.one.weight
    plan = plan_units(parent, Wrap())
    with pytest.raises(ValueError, match=r"^two\.weight is one\.weight too: .* a child of its own"):
        split_by_child(parent, plan)
    assert len(split_by_child(parent, plan, whole=set(parent.parameters()))) == 2


def test_parameters_of_any_layout_train() -> None:
    def body() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(5, 4)).to(memory_format=torch.channels_last)
        model[2].weight = nn.Parameter(torch.randn(5, 4).t())
        x = torch.randn(2, 3, 3, 3)
        expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
        shard(model, plan=plan_units(model, Wrap()))
        model(x).square().sum().backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(to_full(parameter.grad), gradient)

    run_ranks(body)


def test_roots_are_the_outermost_sharded_modules() -> None:
    def body() -> None:
        model = build()
        assert find_roots(model) == []
        shard(model)
        assert find_roots(model) == [model]
        assert find_roots(nn.ModuleList([model, nn.Linear(2, 2)])) == [model]

    run_ranks(body, world_size=1)


@pytest.mark.parametrize(
    ("sharding", "num_shards", "message"),
    [
        (Sharding(reshard_after_forward=3), 4, r"got 3: it must divide the 4 shards.*one of \[2\]"),
        (Sharding(reshard_after_forward=1), 6, r"got 1: .*one of \[2, 3\]"),
        (Sharding(reshard_after_forward=4), 4, "got 4"),
        (Sharding(reshard_after_forward=8), 4, "got 8"),
        (Sharding(reshard_after_forward=0), 4, "got 0"),
        (Sharding(reshard_after_forward=-2), 4, "got -2"),
        (Sharding(reshard_after_forward=2), 2, "got 2: .*expected true or false"),
        (Sharding(forward_prefetch=-1), 2, "sharding.forward_prefetch: got -1: expected 0 or more"),
        (Sharding(backward_prefetch=0), 2, "sharding.backward_prefetch: got 0: .*expected 1 or more"),
        (Sharding(reduce_scatter_max_input_buffers=0), 2, "max_input_buffers: got 0: expected 1 or more, such as 2"),
    ],
)
def test_what_the_ranks_cannot_do_is_refused(sharding: Sharding, num_shards: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sharding.check(num_shards)


def test_what_the_ranks_can_do_is_accepted() -> None:
    for num_shards in (1, 2, 3, 4):
        Sharding(reshard_after_forward=True).check(num_shards)
        Sharding(reshard_after_forward=False, forward_prefetch=3, backward_prefetch=3).check(num_shards)
    Sharding(reshard_after_forward=2).check(4)


@pytest.mark.full(after=1)
@pytest.mark.parametrize("lengths", [(5, 7, 8), (7, 5, 8)])  # 7 is the width of the blocks, too
def test_rows_of_changing_lengths_are_compiled_once(lengths: tuple[int, ...]) -> None:
    def body() -> None:
        model = Stack()
        plan = plan_units(model, Wrap())
        expected = [model(torch.ones(2, length, 5)) for length in lengths]
        with fresh_compiler():
            compile_blocks(model, Compile(backend="aot_eager"), list(iterate_blocks(plan)), has_changing_lengths=True)
            shard(model, plan=plan)
            torch._dynamo.utils.counters.clear()
            found = [model(torch.ones(2, length, 5)) for length in lengths]
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(expected, found, strict=True))

    run_ranks(body, world_size=1)


def own_forward(embedding: nn.Module) -> None:
    def forward(ids: Tensor) -> Tensor:
        table = cast(Tensor, embedding.weight)
        return nn.functional.one_hot(ids, len(table)).float() @ table.sin()

    embedding.forward = forward


def scale_output(embedding: nn.Module) -> None:
    embedding.register_forward_hook(lambda module, _, out: out * module.weight.square().mean())


class Sine(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.sin()


def reparametrize(embedding: nn.Module) -> None:
    register_parametrization(embedding, "weight", Sine())


@pytest.mark.full
@pytest.mark.parametrize("change", [own_forward, scale_output, reparametrize])
def test_an_embedding_whose_backward_reads_its_weights_is_gathered_for_it(change: Callable[[nn.Module], Any]) -> None:
    def body() -> None:
        def make() -> nn.Module:
            model = build()
            change(model.get_submodule("model.model.embed_tokens"))
            return model

        truth, model = compute_truth(make()), make()
        assert [unit.is_read_in_backward for unit in shard(model) if unit.kind == "embedding"] == [True]
        loss = compute_loss(model, rows_of_rank(dist.get_rank()))
        loss.backward()
        check_equal(model, truth, loss)

    run_ranks(body)
