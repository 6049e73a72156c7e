"""Counted operations equal the textbook formulas, however the step is computed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import build_language_model, compute_loss, make_tokens
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.profiling.flops import FlopCounter, Flops, is_compiled
from lit_fsdp.quantization.layers import quantize_model
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing, apply_activation_checkpointing
from lit_fsdp.sharding.wrap import Wrap, iterate_blocks, plan_units
from lit_fsdp.weights.load import init_weights, materialize
from ranks import run_ranks

LAYERS, HEADS, HEAD_SIZE = 3, 4, 8
ROWS, LENGTH = 4, 8


def count_step(model: nn.Module, num_rows: int = ROWS, first: int = 0) -> Flops:
    tokens = make_tokens(ROWS, LENGTH)[first : first + num_rows]
    with FlopCounter() as counter:
        compute_loss(model, tokens).backward()
    return counter.flops


def count_products(model: nn.Module) -> int:
    """Weights of linear layers: all that a token is multiplied with."""
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))


ATTENTION = 12 * LAYERS * HEADS * HEAD_SIZE * LENGTH  # per token, a third of it in forward


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_model_flops_are_six_for_each_weight_and_token_and_those_of_attention(attention: str) -> None:
    model = build_language_model("llama", "cpu", attn_implementation=attention)
    flops, num_weights, num_tokens = count_step(model), count_products(model), ROWS * LENGTH
    assert flops.forward == (2 * num_weights + ATTENTION // 3) * num_tokens
    assert flops.model == (6 * num_weights + ATTENTION) * num_tokens
    # The fused kernel computes the scores once more.
    assert flops.recomputed == (ATTENTION // 6 * num_tokens if attention == "sdpa" else 0)
    assert flops.uncounted == ()


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_changes_hardware_flops_only(mode: Any) -> None:
    plain = count_step(build_language_model("llama", "cpu", attn_implementation="eager"))
    model = build_language_model("llama", "cpu", attn_implementation="eager")
    blocks = list(iterate_blocks(plan_units(model, Wrap())))
    apply_activation_checkpointing(model, ActivationCheckpointing(mode=mode), blocks)
    flops = count_step(model)
    assert flops.model == plain.model
    head = 2 * model.lm_head.weight.numel() * ROWS * LENGTH
    # All of the blocks, but the last product of each, which nothing in backward asks for.
    last = 2 * LAYERS * model.model.layers[0].mlp.down_proj.weight.numel() * ROWS * LENGTH
    assert flops.recomputed == (0 if mode == "selective" else plain.forward - head - last)


def test_all_together_are_what_torch_counts() -> None:
    model = build_language_model("llama", "cpu", attn_implementation="eager")
    apply_activation_checkpointing(
        model, ActivationCheckpointing(mode="full"), list(iterate_blocks(plan_units(model, Wrap())))
    )
    with FlopCounterMode(display=False) as truth:
        compute_loss(model, make_tokens(ROWS, LENGTH)).backward()
    assert count_step(model).hardware == truth.get_total_flops()


@pytest.mark.parametrize("kind", ["dense", "nf4", "nf4 again", "int8", "int8 again"])
def test_frozen_weights_have_no_gradient_to_compute(kind: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = build_language_model("llama", "meta", **sizes, head_dim=64)
    num_weights = count_products(model)
    if kind != "dense":
        quantize_model(model, Quantization(type=kind.split(maxsplit=1)[0], skip_modules=()))  # type: ignore[arg-type]
    add_adapters(model, LoRA(r=4))
    materialize(model, torch.device("cpu"))
    init_weights(model, 0)
    if "again" in kind:
        apply_activation_checkpointing(
            model, ActivationCheckpointing(mode="full"), list(iterate_blocks(plan_units(model, Wrap())))
        )
    flops, num_tokens = count_step(model), ROWS * LENGTH
    num_adapted = sum(p.numel() for p in model.parameters() if p.requires_grad)
    layer = model.model.layers[0]
    # Nothing before the first adapters needs a gradient: the input of the first block.
    first = [getattr(layer.self_attn, f"{n}_proj") for n in "qkv"]
    unneeded = sum(2 * 64 * 64 + 2 * m.lora_A["default"].weight.numel() for m in first)
    attention = 12 * LAYERS * 64 * LENGTH
    expected = (4 * num_weights + 6 * num_adapted + attention - unneeded) * num_tokens
    assert flops.model == expected
    assert flops.uncounted == ()
    again = flops.recomputed - attention // 6 * num_tokens
    assert (again > flops.forward // 2) if "again" in kind else again == 0


def count_sharded(out: Path) -> None:
    torch.manual_seed(0)
    model = build_language_model("llama", "cpu")
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    per_rank = ROWS // dist.get_world_size()
    flops = count_step(model, per_rank, first=dist.get_rank() * per_rank)
    (out / str(dist.get_rank())).write_text(json.dumps([flops.model, flops.hardware]))


def test_the_ranks_of_a_sharded_model_add_up_to_one_device(tmp_path: Path) -> None:
    run_ranks(count_sharded, tmp_path)
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    truth = count_step(build_language_model("llama", "cpu"))
    assert found[0][0] + found[1][0] == truth.model
    assert found[0][1] + found[1][1] == truth.hardware


def test_experts_count_by_the_tokens_that_go_to_them() -> None:
    groups, tokens = torch.randn(3, 16, 32, dtype=torch.bfloat16), torch.randn(10, 16, dtype=torch.bfloat16)
    ends = torch.tensor([2, 5, 10], dtype=torch.int32)
    with FlopCounter() as counter:
        torch._grouped_mm(tokens, groups, offs=ends)
    assert counter.flops.forward == 2 * 10 * 16 * 32


def test_kernels_without_a_formula_are_named() -> None:
    @torch.library.custom_op("flops_test::product", mutates_args=())
    def product(a: Tensor) -> Tensor:
        return a @ a

    with FlopCounter() as counter:
        product(torch.ones(2, 2))
    assert counter.flops.uncounted == ("flops_test.product",)


def test_compiled_models_are_known() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert not is_compiled(model)
    assert is_compiled(nn.Sequential(torch.compile(model)))  # type: ignore[arg-type]
    model[0].compile()
    assert is_compiled(model)
