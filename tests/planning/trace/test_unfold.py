from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from planned_steps import trace, trace_short
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.optim.factory import Optimizer
from lit_fsdp.planning.trace.short_model import choose_stacks, shorten_model
from lit_fsdp.planning.trace.unfold import UnevenBlocksError, unfold_trace
from lit_fsdp.quantization.layers import quantize_model
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
from lit_fsdp.sharding.cpu_offload import CPUOffload
from lit_fsdp.sharding.settings import Settings
from lit_fsdp.sharding.shard import Sharding
from lit_fsdp.sharding.wrap import Wrap, plan_module

SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "pad_token_id": 0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SLIDING = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
BATCH = {"input_ids": torch.zeros(2, 32, dtype=torch.long), "labels": torch.zeros(2, 32, dtype=torch.long)}


class Model(nn.Module):
    def __init__(self, model_type: str = "llama", *, is_adapted: bool = False, depth: int = 9, **more: Any) -> None:
        super().__init__()
        with torch.device("meta"):
            config = AutoConfig.for_model(model_type, **{**SIZES, "num_hidden_layers": depth, **more})
            self.model = AutoModelForCausalLM.from_config(config)
        if is_adapted:
            quantize_model(self.model, Quantization())
            add_adapters(self.model, LoRA(r=4))

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch, use_cache=False).loss


class Rows(nn.Module):
    """Blocks that differ in nothing but what they do with their number."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Row(i, depth) for i in range(depth))

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Row(nn.Module):
    def __init__(self, number: int, depth: int) -> None:
        super().__init__()
        self.layer_idx, self.linear = number, nn.Linear(8, 8, device="meta")
        self.depth = depth

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + self.layer_idx):  # each does more than the one before
            x = self.linear(x).relu()
        return x


def list_kept(numbers: Sequence[int], **attributes: Sequence[int]) -> list[int]:
    """Return which blocks of a stack are kept, whose kinds and attributes are given."""
    module = nn.Module()
    module.layers = nn.ModuleList(nn.Linear(8, 8 + number, device="meta") for number in numbers)
    for name, values in attributes.items():
        for layer, value in zip(module.layers, values, strict=True):
            setattr(layer, name, value)
    settings = Settings(wrap=Wrap(policy="module_classes", module_classes=("Linear",)))
    stacks = choose_stacks(module, plan_module(module, settings.wrap), settings, reach=1)
    return list(stacks[0].kept) if stacks else list(range(len(numbers)))


def test_every_block_with_other_neighbours_is_kept_once_and_the_most_frequent_twice() -> None:
    kept = list_kept([0] * 80)
    assert (kept[0], kept[-1], len(kept)) == (0, 79, 4)
    windows = list_kept([0, 0, 0, 0, 0, 1] * 8)  # as of Gemma 3: five kinds of neighbours inside
    assert len(windows) <= 12
    assert list_kept([1, *[0] * 45])[:2] == [0, 1]  # a dense block before those with experts
    assert list_kept(list(range(9))) == list(range(9))


def test_numbers_that_rise_evenly_from_block_to_block_do_not_tell_them_apart() -> None:
    assert len(list_kept([0] * 20, residual_idx=range(1, 41, 2), seed=range(20))) == 4
    assert len(list_kept([0] * 8, layer_idx=[0, 1, 2, 3, 5, 8, 13, 21])) == 8
    assert len(list_kept([0] * 8, window=range(8))) == 8  # a setting, whatever it is
    model = Model("llama4_text", depth=32)  # its configuration lists the blocks with experts: all of them
    stacks = choose_stacks(model, plan_module(model, Wrap()), Settings(), reach=1)
    assert [len(stack.kept) for stack in stacks] == [8]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all kept": ({}, {"world_size": 4, "precision": "bf16-mixed", "num_micro_batches": 2}),
    "recomputed": (
        {"model_type": "qwen3"},
        {
            "world_size": 2,
            "optimizer": Optimizer(name="adafactor"),
            "activation_checkpointing": ActivationCheckpointing(mode="full"),
            "sharding": Sharding(backward_prefetch=1, reshard_after_forward=False),
        },
    ),
    "muon": ({}, {"world_size": 4, "precision": "bf16-mixed", "optimizer": Optimizer(name="muon")}),
    "experts, adapters over NF4, selective": (
        {"model_type": "qwen3_moe", "is_adapted": True, **EXPERTS},
        {
            "world_size": 2,
            "precision": "bf16-true",
            "activation_checkpointing": ActivationCheckpointing(mode="selective"),
        },
    ),
    "windows, offload": (
        {"model_type": "olmo3", "depth": 20, "layer_types": SLIDING * 5, "sliding_window": 8},
        {"world_size": 2, "cpu_offload": CPUOffload()},
    ),
    "one rank": ({}, {"precision": "bf16-true", "world_size": 1}),
    "buffers in blocks": (
        {"model_type": "gptj", "rotary_dim": 16},
        {"world_size": 2, "activation_checkpointing": ActivationCheckpointing(mode="full")},
    ),
    "masks that recomputed blocks share": (
        {"model_type": "olmo3", "depth": 16, "layer_types": SLIDING * 4, "sliding_window": 8},
        {"world_size": 2, "activation_checkpointing": ActivationCheckpointing(mode="full")},
    ),
}


@pytest.mark.slow(after=5)
@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_a_step_unfolded_from_few_blocks_is_the_step_of_all_blocks(name: str) -> None:
    model, options = CASES[name]
    whole = trace(Model(**model), BATCH, **options)
    unfolded, stacks = trace_short(Model(**model), BATCH, **options)
    assert sum(len(stack.kept) for stack in stacks) < model.get("depth", 9)
    assert unfolded.flops == whole.flops
    assert unfolded.moved_bytes == whole.moved_bytes
    for log in (unfolded.log, whole.log):  # which are replayed one event after the other
        assert log is not None
        assert all(a.operator <= b.operator for a, b in pairwise(log.events[log.num_first :]))
    memory, expected = unfolded.memory, whole.memory
    assert memory.peak.num_bytes == expected.peak.num_bytes
    assert (memory.peak.phase, memory.peak.unit) == (expected.peak.phase, expected.peak.unit)
    assert memory.host_by_kind == expected.host_by_kind
    assert sum(sum(kinds.values()) for kinds in memory.peak.by_unit.values()) == memory.peak.num_bytes
    for own, other in list(zip(memory.phases, expected.phases, strict=True))[:2]:
        assert own[:2] == other[:2]
        pairs = ((memory, own), (expected, other))
        largest = [
            max(map(sum, zip(*(column[p[1] : p[2]] for column in m.by_kind.values()), strict=True))) for m, p in pairs
        ]
        assert largest[0] == largest[1]


def test_blocks_of_which_a_part_is_in_the_unit_of_the_root_are_not_left_out() -> None:
    for names, is_whole in ((("LlamaMLP",), False), (("LlamaDecoderLayer",), True)):
        model, settings = Model(), Settings(wrap=Wrap(policy="module_classes", module_classes=names))
        stacks = choose_stacks(model, plan_module(model, settings.wrap), settings, reach=1)
        assert bool(stacks) == is_whole


@pytest.mark.full
def test_blocks_that_look_alike_and_do_otherwise_are_not_unfolded() -> None:
    settings = Settings(wrap=Wrap(policy="module_classes", module_classes=("Row",)))
    model = Rows(8)
    stacks = choose_stacks(model, plan_module(model, settings.wrap), settings, reach=1)
    shorten_model(model, stacks)
    names = [name for stack in stacks for name in stack.blocks]
    traced = trace(model, {"x": torch.zeros(4, 8)}, world_size=2, marked=names, wrap=settings.wrap)
    with pytest.raises(UnevenBlocksError, match=r"blocks \(1, 2\) of layers are not alike"):
        unfold_trace(traced, stacks)
