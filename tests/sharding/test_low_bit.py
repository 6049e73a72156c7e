"""What is sent in fewer bits: the error that is promised, and a step that equals the same arithmetic on one device."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from models import build_language_model, compute_loss, make_tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from training import EVEN, fit, save_model, train_sharded

from lit_fsdp import Mesh, Sharding
from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.quantization.layers import quantize_model
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.sharding.low_bit import (
    LowBitReduceScatter,
    compare_crossing,
    count_packed_bytes,
    dequantize_blocks,
    quantize_blocks,
)
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.shard import check_wire, shard_model
from lit_fsdp.sharding.torch_internals import get_gathered, get_shard, iterate_sharded
from lit_fsdp.sharding.wrap import Wrap, plan_units
from lit_fsdp.strategy import fsdp2
from ranks import run_ranks

TOLERANCE = 1e-6


def round_trip(values: Tensor) -> Tensor:
    """Return pieces of numbers as who receives them reads them."""
    found = torch.empty_like(values)
    dequantize_blocks(quantize_blocks(values), found)
    return found


def round_by_hand(values: Tensor, bits: int | None) -> Tensor:
    """Return what is read of one piece in float32, as the documentation says, block by block."""
    if bits is None:
        return values
    if bits == 16:
        return values.bfloat16().float()
    blocks = []
    for block in values.split(256):
        largest = block.abs().max()
        codes = torch.round(block / largest * 127) if largest else torch.zeros_like(block)
        blocks.append(codes * (largest / 127))
    return torch.cat(blocks)


@pytest.mark.parametrize("shape", [(3, 700), (2, 256), (1, 1), (5, 0), (1, 4 * 2**20 + 300), (700, 7000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_number_is_off_by_more_than_its_block_allows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-9, 9, (shape[0], 1), generator=generator)
    values[:, :300:7] = 0
    values = values.to(dtype)
    packed = quantize_blocks(values)
    assert packed.numel() == len(values) * count_packed_bytes(shape[1], 8)
    padded = torch.nn.functional.pad(values.float(), (0, -shape[1] % 256)).unflatten(1, (-1, 256))
    bounds = (padded.abs().amax(-1, keepdim=True) / 254).expand_as(padded).flatten(1)[:, : shape[1]]
    found = torch.empty(shape)
    dequantize_blocks(packed, found)
    assert ((found - values.float()).abs() <= bounds * (1 + 1e-4)).all()
    assert (found[values == 0] == 0).all()


def test_what_is_not_finite_stays_so_in_its_block_and_no_other() -> None:
    values = torch.ones(3, 700)
    values[0, 3], values[1, 300], values[2, 699] = float("inf"), float("nan"), -float("inf")
    expected = torch.ones(3, 700, dtype=torch.bool)
    expected[0, :256] = expected[1, 256:512] = expected[2, 512:] = False
    assert torch.equal(round_trip(values).isfinite(), expected)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_reduction_in_16_bits_is_the_float32_sum_of_what_was_rounded(world_size: int) -> None:
    def body() -> None:
        rank = dist.get_rank()
        inputs = [torch.randn(world_size, 501, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
        found, group = torch.empty(501), dist.group.WORLD
        assert group is not None
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            LowBitReduceScatter(16)(found, inputs[rank].flatten(), group, op)
            expected = torch.zeros(501)
            for x in inputs:
                expected += x[rank].bfloat16().float()
            assert torch.equal(found, expected / (world_size if op == dist.ReduceOp.AVG else 1))
        if world_size == 2:  # FSDP2's own reduction in bfloat16 rounds that sum
            stock = torch.empty(501, dtype=torch.bfloat16)
            dist.reduce_scatter_single(stock, inputs[rank].flatten().bfloat16())
            LowBitReduceScatter(16)(found, inputs[rank].flatten(), group, dist.ReduceOp.SUM)
            assert torch.equal(found.bfloat16(), stock)
            assert not torch.equal(found, stock.float())
        with pytest.raises(ValueError, match=r"sharding\.reduce_bits: got 16 with .*: expected a sum or a mean"):
            LowBitReduceScatter(16)(found, inputs[rank].flatten(), group, dist.ReduceOp.MAX)

    run_ranks(body, world_size=world_size)


@pytest.mark.parametrize(
    ("num_nodes", "per_node", "times"),
    [
        (2, 1, (0.50, 0.25)),
        (2, 2, (0.67, 0.34)),
        (2, 4, (1.14, 0.58)),
        (4, 4, (1.60, 0.81)),
        (2, 8, (2.13, 1.08)),
        (4, 8, (3.10, 1.57)),
        (1, 8, (0.0, 0.0)),
    ],
)
def test_what_a_node_of_several_ranks_sends_is_as_documented(
    num_nodes: int, per_node: int, times: tuple[float, float]
) -> None:
    found = [compare_crossing(bits, num_nodes * per_node, per_node) for bits in (16, 8)]  # type: ignore[arg-type]
    assert tuple(round(number, 2) for number in found) == times


@pytest.mark.full
def test_a_reduction_that_sends_more_between_nodes_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp2, "compare_crossing", lambda *_: 1.14)  # as of 8 ranks on two nodes
    folder = save_model(tmp_path / "model", **EVEN)
    line = (
        r"sharding\.reduce_bits: got 16: with 2 ranks on a node it sends 1\.14 times as much .*: set 8, or mixed_prec"
    )

    def body() -> None:
        with nullcontext() if dist.get_rank() else pytest.warns(UserWarning, match=line):
            fit(folder, tmp_path / "out.pt", {"sharding": Sharding(reduce_bits=16)}, {"max_steps": 1})

    run_ranks(body)


# A whole step


def build(*, has_adapters: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = build_language_model("llama", "cpu")  # 67 rows and a width of 32: uneven over the ranks
    if has_adapters:
        add_adapters(model, LoRA(r=3))
    return model


def rows_of_rank(rank: int) -> Tensor:
    return make_tokens(num_rows=8)[2 * rank : 2 * rank + 2]


def shard(
    model: nn.Module,
    sharding: Sharding,
    *,
    replicate: int = 1,
    offload: OffloadPolicy | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
) -> None:
    shape, names = (dist.get_world_size(),), ("shard",)
    if replicate > 1:
        shape, names = (replicate, dist.get_world_size() // replicate), ("replicate", "shard")  # type: ignore[assignment]
    shard_model(
        model,
        plan_units(model, Wrap()),
        mesh=init_device_mesh("cpu", shape, mesh_dim_names=names),
        sharding=sharding,
        mp_policy=mp_policy or MixedPrecisionPolicy(),
        offload_policy=offload or OffloadPolicy(),
    )


def list_buffers(model: nn.Module) -> list[list[str]]:
    """Return the parameters of each unit, in the order of its buffer."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    units: dict[str, list[str]] = {}
    for unit, parameter in iterate_sharded(model):
        units.setdefault(unit, []).append(names[id(get_shard(parameter))])
    return list(units.values())


def cut(values: Tensor, num_shards: int) -> Tensor:
    """Return the rows of a parameter as equal shards, [shards, numbers], filled up with zeros."""
    rows = -(-len(values) // num_shards)
    filled = values.new_zeros(num_shards * rows, *values.shape[1:])
    filled[: len(values)] = values
    return filled.view(num_shards, -1)


def round_units(
    values: dict[str, Tensor], units: list[list[str]], num_shards: int, change: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """Return values of parameters after their unit's buffer, [shards, numbers], was changed."""
    found = {}
    for unit in units:
        if not (names := [name for name in unit if name in values]):
            continue
        shards = [cut(values[name], num_shards) for name in names]
        buffer = change(torch.cat(shards, dim=1))
        for name, part in zip(names, buffer.split([s.shape[1] for s in shards], dim=1), strict=True):
            numel = values[name].numel()
            found[name] = part.flatten()[:numel].view(values[name].shape)
    return found


def simulate_step(model: nn.Module, units: list[list[str]], bits: tuple[int | None, int | None], shards: int) -> float:
    """Leave the gradient of a step in ``model`` as sharded ranks would have it; return the loss of this rank."""
    exact = {name: p.detach().clone() for name, p in model.named_parameters()}
    world_size = dist.get_world_size()
    rounded = round_units(exact, units, shards, lambda b: torch.stack([round_by_hand(row, bits[0]) for row in b]))
    model.load_state_dict(rounded, strict=False)
    losses, gradients = [], []
    for rank in range(world_size):
        model.zero_grad()
        loss = compute_loss(model, rows_of_rank(rank))
        loss.backward()
        losses.append(float(loss.detach()))
        own = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        # Each of its pieces is rounded by itself.
        gradients.append(
            round_units(own, units, shards, lambda b: torch.stack([round_by_hand(row, bits[1]) for row in b]))
        )
    model.load_state_dict(exact, strict=False)
    for name in gradients[0]:
        # In the order of the ranks: other sums differ in the last bit, which may be rounded to another code in the end.
        of_replicas = [gradients[i : i + shards] for i in range(0, world_size, shards)]
        means = [torch.stack([g[name] for g in own]).sum(0) / shards for own in of_replicas]
        model.get_parameter(name).grad = torch.stack(means).sum(0) / len(means)
    return losses[dist.get_rank()]


def check_gathered_alike(model: nn.Module) -> None:
    """Check that all ranks hold the same bits of every gathered parameter, and not those of the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    is_rounded = False
    for _, parameter in iterate_sharded(model):
        own = get_gathered(parameter)
        assert own is not None
        everybody = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, own.detach())
        assert all(torch.equal(other, own) for other in everybody)
        is_rounded = is_rounded or not torch.equal(get_shard(parameter).full_tensor(), own)  # type: ignore[operator]
    assert is_rounded
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


STEPS: dict[str, tuple[int, int, Sharding, dict[str, Any]]] = {
    "8 and 8": (2, 1, Sharding(gather_bits=8, reduce_bits=8), {}),
    "8 and 16 on 4": (4, 1, Sharding(gather_bits=8, reduce_bits=16), {}),
    "8 and 8 on 4": (4, 1, Sharding(gather_bits=8, reduce_bits=8), {}),
    "hybrid": (4, 2, Sharding(gather_bits=8, reduce_bits=8), {}),
    "kept gathered": (2, 1, Sharding(gather_bits=8, reduce_bits=8, reshard_after_forward=False), {}),
    "prefetch": (2, 1, Sharding(gather_bits=8, reduce_bits=8, forward_prefetch=2, backward_prefetch=2), {}),
    "offload": (2, 1, Sharding(gather_bits=8, reduce_bits=8), {"offload": CPUOffloadPolicy(pin_memory=False)}),
    "only reduced": (2, 1, Sharding(reduce_bits=16), {}),
    "adapters": (2, 1, Sharding(gather_bits=8, reduce_bits=8), {"has_adapters": True}),
}


@pytest.mark.full(after=1)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_equals_the_same_arithmetic_on_one_device(name: str) -> None:
    world_size, replicate, sharding, options = STEPS[name]

    def body() -> None:
        has_adapters = options.get("has_adapters", False)
        model, plain = build(has_adapters=has_adapters), build(has_adapters=has_adapters)
        shard(model, sharding, replicate=replicate, offload=options.get("offload"))
        units = list_buffers(model)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (model, plain)]
        for _ in range(3):
            loss = compute_loss(model, rows_of_rank(dist.get_rank()))
            loss.backward()
            bits = (sharding.gather_bits, sharding.reduce_bits)
            expected = simulate_step(plain, units, bits, world_size // replicate)
            assert loss.item() == pytest.approx(expected, abs=TOLERANCE)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for (key, parameter), truth in zip(model.named_parameters(), plain.parameters(), strict=True):
                whole: Tensor = parameter.full_tensor()  # type: ignore[operator]
                torch.testing.assert_close(whole, truth.detach(), rtol=0, atol=TOLERANCE, msg=key)
        if sharding.gather_bits and "offload" not in options:
            check_gathered_alike(model)

    run_ranks(body, world_size=world_size)


# What does not go together


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other bits of gathers": (
        {"sharding": Sharding(gather_bits=16)},  # type: ignore[arg-type]
        r"sharding\.gather_bits: got 16: expected 8, or null",
    ),
    "other bits of reductions": (
        {"sharding": Sharding(reduce_bits=4)},  # type: ignore[arg-type]
        r"sharding\.reduce_bits: got 4: expected 16 \(bfloat16\), 8, or null",
    ),
    "rounded twice": (
        {"sharding": Sharding(gather_bits=8, reshard_after_forward=2)},
        r"sharding\.gather_bits: got 8 with reshard_after_forward 2: .* set reshard_after_forward to true or false",
    ),
    "split layers, gathers": (
        {"sharding": Sharding(gather_bits=8), "mesh": Mesh(tensor=2)},
        r"sharding\.gather_bits: got 8 with mesh\.tensor 2: .*; leave it out",
    ),
    "split layers, reductions": (
        {"sharding": Sharding(reduce_bits=8), "mesh": Mesh(tensor=2)},
        r"sharding\.reduce_bits: got 8 with mesh\.tensor 2: .*; set 16, or leave it out",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_do_not_go_together_are_refused_before_ranks_start(case: str) -> None:
    settings, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as caught:
        Settings(**settings).check(world_size=4, ranks_per_node=4, device=torch.device("cpu"))
    assert "\n" not in str(caught.value)
    Settings(sharding=Sharding(reduce_bits=16), mesh=Mesh(tensor=2)).check(
        world_size=4, ranks_per_node=4, device=torch.device("cpu")
    )


def test_what_would_change_frozen_bytes_or_round_sums_is_refused() -> None:
    low, half = Sharding(gather_bits=8, reduce_bits=8), MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    def check(model: nn.Module, sharding: Sharding, mp_policy: MixedPrecisionPolicy | None = None) -> None:
        check_wire(model, plan_units(model, Wrap()), sharding, mp_policy or MixedPrecisionPolicy())

    model = build_language_model("llama", hidden_size=64, intermediate_size=64)
    check(model, low)
    with pytest.raises(ValueError, match=r"reduce_bits: got 8, .*embed_tokens.* bfloat16.*reduce_dtype to float32$"):
        check(model, low, half)
    model.model.layers[1].mlp.up_proj.bfloat16()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"gather_bits: got 8, and one unit gathers .*set mixed_precision.param_dtype"):
        check(model, low)
    check(model, low, half)
    quantize_model(model, Quantization())
    with pytest.raises(ValueError, match=r"gather_bits: got 8 with .*q_proj.weight, which holds .*\(uint8\)"):
        check(model, low, half)
    check(model, Sharding(reduce_bits=8), half)


# Under the Trainer


@pytest.mark.full
@pytest.mark.parametrize("checkpoint_format", ["sharded", "single_file"])
def test_a_resumed_run_has_the_same_bits_and_one_rank_says_that_there_is_no_effect(
    checkpoint_format: str, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "model", **EVEN)
    sharding = Sharding(gather_bits=8, reduce_bits=8)
    strategy = {"sharding": sharding, "checkpoint_format": checkpoint_format}

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 4:
                trainer.save_checkpoint(tmp_path / "a.ckpt")

    whole = train_sharded(folder, tmp_path, world_size=2, strategy=strategy, callbacks=[Save()])
    plain = train_sharded(folder, tmp_path, world_size=2, strategy={})
    resumed = train_sharded(folder, tmp_path, world_size=2, strategy=strategy, ckpt_path=tmp_path / "a.ckpt")
    assert resumed.losses == whole.losses[4:]
    assert all(torch.equal(weight, resumed.weights[name]) for name, weight in whole.weights.items())
    gaps = [abs(a - b) for a, b in zip(whole.losses, plain.losses, strict=True)]
    assert 0 < max(gaps) < 0.01

    def warn() -> None:
        with pytest.warns(UserWarning, match=r"sharding\.gather_bits and reduce_bits: no effect: each copy is on one"):
            fit(folder, tmp_path / "one.pt", strategy, {"max_steps": 1})

    run_ranks(warn, world_size=1)
