"""8-bit AdamW is that of bitsandbytes, at any number of ranks, and its checkpoints can be read at any other."""

import sys
from functools import partial
from pathlib import Path

import bitsandbytes
import pytest
import torch
import torch.distributed as dist
from fixed_gradients import (
    MESHES,
    build_weights,
    build_with,
    list_unequal,
    read_all,
    run_steps,
    save_run,
    set_gradients,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from lit_fsdp.checkpoint.sharded import join_states, load_checkpoint, save_checkpoint
from lit_fsdp.checkpoint.single_file import (
    gather_model_state,
    gather_optimizer_state,
    load_single_file,
    save_single_file,
)
from lit_fsdp.optim import adamw_8bit
from lit_fsdp.optim.adamw_8bit import AdamW8bit, is_8bit
from ranks import run_ranks

OPTIONS = {"lr": 1e-3, "weight_decay": 0.1}
build = partial(build_with, AdamW8bit, OPTIONS)
IN_8BIT = ["aligned", "experts", "unaligned", "few_rows", "conv"]
SAME_BLOCKS = ["aligned", "experts", "norm"]  # rows of whole blocks, or float32 in both


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["3", "2x2", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("1", "2"))])
def test_the_same_gradients_make_the_same_bytes_on_any_mesh_without_collectives(mesh: str) -> None:
    world_size, num_copies = MESHES[mesh]
    module, optimizer = build()
    run_steps(module, optimizer, range(5))
    truth = read_all(module, optimizer)

    def body() -> None:
        module, optimizer = build(num_copies)
        run_steps(module, optimizer, range(4))
        set_gradients(module, 4)
        with CommDebugMode() as counted:
            optimizer.step()
        assert counted.get_total_counts() == 0
        assert list_unequal(read_all(module, optimizer), truth) == []
        if mesh == "3" and dist.get_rank() == 2:
            assert module.few_rows.to_local().numel() == 0

    run_ranks(body, world_size=world_size)


def test_rows_of_whole_blocks_equal_bitsandbytes_to_the_bit() -> None:
    module, optimizer = build()
    stock_module = build_weights()
    stock = bitsandbytes.optim.AdamW8bit(stock_module.parameters(), **OPTIONS)
    run_steps(module, optimizer, range(5))
    run_steps(stock_module, stock, range(5))
    for name in SAME_BLOCKS:
        own, its = module.get_parameter(name), stock_module.get_parameter(name)
        assert torch.equal(own, its), name
        if is_8bit(own.shape):
            assert torch.equal(optimizer.state[own]["codes1"], stock.state[its]["state1"])
            assert torch.equal(optimizer.state[own]["codes2"], stock.state[its]["state2"])
    assert stock.state[stock_module.aligned]["state1"].dtype == torch.uint8


def test_other_rows_are_as_exact_as_bitsandbytes() -> None:
    modules = [build_weights() for _ in range(3)]
    optimizers = [AdamW8bit(modules[0].parameters(), **OPTIONS)]
    optimizers += [bitsandbytes.optim.AdamW8bit(modules[1].parameters(), **OPTIONS)]
    optimizers += [torch.optim.AdamW(modules[2].parameters(), **OPTIONS)]
    for module, optimizer in zip(modules, optimizers, strict=True):
        run_steps(module, optimizer, range(10))
    for name in ("unaligned", "few_rows", "conv"):
        own, stock, truth = (module.get_parameter(name) for module in modules)
        error, stock_error = ((p - truth).abs().mean() for p in (own, stock))
        assert 0 < error <= 1.1 * stock_error, name
        # A tenth of what ten steps may move a weight.
        assert error <= 0.1 * 10 * OPTIONS["lr"]
    for name in ("short_rows", "norm"):  # float32 state
        assert torch.allclose(modules[0].get_parameter(name), modules[2].get_parameter(name), atol=1e-6)


def test_padding_has_no_part_in_the_scale_of_a_block() -> None:
    module, optimizer = build()
    set_gradients(module, 0)
    optimizer.step()
    before = optimizer.state[module.unaligned]["absmax1"].clone()
    module.unaligned.grad *= -0.9  # the running mean is 0.9 * 0.1 of the first and 0.1 of the second: about zero
    optimizer.step()
    assert (optimizer.state[module.unaligned]["absmax1"] <= 0.1 * before).all()


def test_which_parameters_are_in_8_bits_depends_on_their_whole_shape() -> None:
    large = [shape for shape in ((32, 128), (31, 132), (33, 127), (4096,), (32, 4, 32)) if is_8bit(torch.Size(shape))]
    assert large == [(32, 128), (32, 4, 32)]  # 4096 elements and rows of 128 are enough

    def body() -> None:
        module, optimizer = build(1)
        run_steps(module, optimizer, range(1))
        assert [n for n, p in module.named_parameters() if "codes1" in optimizer.state[p]] == IN_8BIT

    run_ranks(body, world_size=3)  # where shards have fewer than 4096 elements


def test_a_rank_holds_about_two_bytes_of_state_for_each_element_of_its_shard() -> None:
    def count(module: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        state = [t.to_local() for t in optimizer.state[module.aligned].values() if isinstance(t, DTensor)]
        return sum(t.numel() * t.element_size() for t in state) / module.aligned.to_local().numel()

    def body() -> None:
        module, optimizer = build(1)
        run_steps(module, optimizer, range(1))
        assert count(module, optimizer) == 2 + 2 * 4 / 256
        stock = torch.optim.AdamW(module.parameters())
        run_steps(module, stock, range(1))
        assert count(module, stock) == 8

    run_ranks(body)


def test_a_parameter_of_no_dimension_is_stepped_as_by_adamw() -> None:
    scales = [nn.Parameter(torch.tensor(2.0)) for _ in range(2)]
    optimizers = [AdamW8bit(scales[:1], **OPTIONS), torch.optim.AdamW(scales[1:], **OPTIONS)]
    for gradient in (0.5, -2.0, 0.1):
        for scale, optimizer in zip(scales, optimizers, strict=True):
            scale.grad = torch.tensor(gradient)
            optimizer.step()
    assert scales[0] != 2
    assert torch.allclose(scales[0], scales[1], atol=1e-6)


def test_parameters_in_bfloat16_keep_the_state_of_float32_ones() -> None:
    module = build_weights(torch.bfloat16)
    optimizer = AdamW8bit(module.parameters(), **OPTIONS)
    run_steps(module, optimizer, range(3))
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert optimizer.state[module.aligned]["absmax1"].dtype == torch.float32
    assert optimizer.state[module.norm]["exp_avg"].dtype == torch.float32
    loaded = AdamW8bit(module.parameters(), **OPTIONS)
    loaded.load_state_dict(optimizer.state_dict())
    assert list_unequal(read_all(module, loaded), read_all(module, optimizer)) == []


def test_pieces_and_memory_layouts_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    module, optimizer = build()
    run_steps(module, optimizer, range(3))
    truth = read_all(module, optimizer)
    monkeypatch.setattr(adamw_8bit, "CHUNK_SIZE", 1000)
    module, optimizer = build()
    module.conv.data = module.conv.data.to(memory_format=torch.channels_last)
    run_steps(module, optimizer, range(3))
    assert not module.conv.is_contiguous()
    assert list_unequal(read_all(module, optimizer), truth) == []


def test_a_file_goes_on_unsharded(tmp_path: Path) -> None:
    run_ranks(lambda: save_run(tmp_path, *build(1)))
    module, optimizer = build()
    checkpoint = torch.load(tmp_path / "file", weights_only=True)
    module.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    run_steps(module, optimizer, range(3, 5))
    assert list_unequal(read_all(module, optimizer), torch.load(tmp_path / "truth")[1]) == []


def test_the_scales_of_a_new_optimizer_are_zero() -> None:
    def body() -> None:
        module, optimizer = build(1)
        state = get_optimizer_state_dict(module, optimizer)["state"]
        assert all(not state[n][f"absmax{i}"].to_local().any() for n in IN_8BIT for i in (1, 2))

    run_ranks(body)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["folder", "file"])
@pytest.mark.parametrize("saved_in_8bit", [True, False])
def test_the_state_of_another_optimizer_is_refused_on_every_rank(
    kind: str, saved_in_8bit: bool, tmp_path: Path
) -> None:
    def body() -> None:
        module, eight = build(1)
        other = torch.optim.AdamW(module.parameters())
        first, second = (eight, other) if saved_in_8bit else (other, eight)
        run_steps(module, first, range(1))
        path = tmp_path / kind
        if kind == "folder":
            save_checkpoint(path, join_states({}, [get_optimizer_state_dict(module, first)]), meta={})
        else:
            state = {"state_dict": gather_model_state(module)}
            save_single_file(path, state | {"optimizer_states": [gather_optimizer_state(module, first)]})
        load = load_checkpoint if kind == "folder" else load_single_file
        with pytest.raises(ValueError, match=r"saved with another optimizer; resume it with the same optimizer\.name"):
            load(path, module, [second], strict=False)

    run_ranks(body)


def test_what_it_cannot_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = nn.Parameter(torch.zeros(64, 256))
    with pytest.raises(ValueError, match=r"parameter of torch.float64.* use AdamW"):
        AdamW8bit([nn.Parameter(matrix.double())])
    with pytest.raises(ValueError, match="host memory anyway; leave is_paged out"):
        AdamW8bit([matrix], is_paged=True)
    optimizer = AdamW8bit([matrix])
    stock = torch.optim.AdamW([matrix])
    matrix.grad = torch.ones_like(matrix)
    stock.step()
    with pytest.raises(ValueError, match="saved by another optimizer"):
        optimizer.load_state_dict(stock.state_dict())
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ModuleNotFoundError, match="pip install bitsandbytes"):
        AdamW8bit([matrix])
