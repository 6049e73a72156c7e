"""Which parameters an adapter makes trainable, and what is refused before anything runs."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import build_language_model
from peft.tuners.lora import LoraLayer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp.adapters.inject import add_adapters, find_misreading, list_left_out
from lit_fsdp.adapters.layers import ADAPTER_PARTS, clean_name, iterate_adapters, list_adapter_parameters
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.quantization.layers import quantize_model
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.sharding.shard import Sharding, shard_model
from lit_fsdp.sharding.wrap import Wrap, plan_units
from lit_fsdp.weights.load import init_weights, materialize
from ranks import run_ranks

WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def build(lora: LoRA, quantization: Quantization | None = None, **config: Any) -> Any:
    model = build_language_model("llama", **WIDE, **config)
    if quantization is not None:
        quantize_model(model, quantization, keep=lora.modules_to_save)
    add_adapters(model, lora)
    return model


def list_adapted(model: Any) -> set[str]:
    return {name.rpartition(".")[2] for name, _ in iterate_adapters(model)}


def test_parameters_of_adapters_are_known_by_the_names_of_peft() -> None:
    assert set(LoraLayer.adapter_layer_names) == ADAPTER_PARTS


@pytest.mark.parametrize("quantization", [None, Quantization()])
def test_all_linear_means_all_but_the_head_and_what_is_trained_in_full(quantization: Quantization | None) -> None:
    model = build(LoRA(modules_to_save=["lm_head", "up_proj"]), quantization)
    assert list_adapted(model) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"}
    trained = {n.split(".")[-2] for n, p in model.named_parameters() if p.requires_grad and "lora" not in n}
    assert trained == {"lm_head", "up_proj"}
    assert {id(p) for p in list_adapter_parameters(model)} == {id(p) for p in model.parameters() if p.requires_grad}


SHARED = {"gate_proj", "up_proj", "down_proj"}  # of experts that see all tokens


@pytest.mark.parametrize("quantization", [None, Quantization()])
@pytest.mark.parametrize(("family", "others"), [("qwen3_moe", set()), ("llama4_text", SHARED)])
def test_experts_and_their_router_get_no_adapter(
    family: str, others: set[str], quantization: Quantization | None
) -> None:
    model = build_language_model(family, **{**WIDE, "moe_intermediate_size": 64})
    if quantization is not None:
        quantize_model(model, quantization)
    left = list_left_out(model, LoRA())
    add_adapters(model, LoRA())
    assert list_adapted(model) == {"q_proj", "k_proj", "v_proj", "o_proj"} | others
    assert left == [f"model.layers.{i}.feed_forward.router" for i in range(3 if others else 0)]


@pytest.mark.parametrize(("family", "left_out"), [("mamba", {"dt_proj", "out_proj"}), ("mamba2", {"out_proj"})])
def test_layers_whose_weights_a_model_reads_itself_get_no_adapter(family: str, left_out: set[str]) -> None:
    """Those that kernels of GPUs read are refused by peft when it loads the adapters."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 67, "num_heads": 8, "head_dim": 16}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    left = {name.rpartition(".")[2] for name in list_left_out(model, LoRA())}
    add_adapters(model, LoRA())
    assert left == left_out
    assert list_adapted(model) == {"in_proj", "x_proj"} - ({"x_proj"} if family == "mamba2" else set())
    assert not find_misreading(model, model.peft_config["default"])
    with torch.device("meta"):
        named = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    add_adapters(named, LoRA(target_modules=["out_proj"]))
    assert "incompatible with Mamba" in find_misreading(named, named.peft_config["default"])


@pytest.mark.parametrize(
    ("family", "num_layers", "message"),
    [
        ("llama", 2, ""),
        ("llama", 4, ""),
        ("glm4_moe", 2, "for a weight of fused experts"),
        ("laguna", 2, "another name"),
        ("laguna", 4, "another name"),  # of 20 targets and more peft keeps last parts only
    ],
)
def test_what_peft_would_not_find_again_is_told(family: str, num_layers: int, message: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 67, "head_dim": 16}
    sizes["num_hidden_layers"] = num_layers
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    add_adapters(model, LoRA())
    found = find_misreading(model, model.peft_config["default"])
    assert message in found if message else not found


def test_only_adapters_train_in_their_own_dtype() -> None:
    model = build(LoRA(r=3, dtype="bfloat16", target_modules=["q_proj"], exclude_modules=["layers.0.self_attn.q_proj"]))
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2
    assert {p.dtype for p in trained.values()} == {torch.bfloat16}
    assert {p.shape for p in trained.values()} == {(3, 64), (64, 3)}


def test_names_in_files_have_no_trace_of_adapters() -> None:
    names = {clean_name(n) for n, _ in build(LoRA()).named_parameters() if "lora_" not in n}
    assert names == {n for n, _ in build_language_model("llama", **WIDE).named_parameters()}


def test_a_seed_draws_the_same_model_below_adapters_and_a_start_that_adds_nothing() -> None:
    plain, model = build_language_model("llama", **WIDE), build(LoRA(init_lora_weights="gaussian", r=8))
    for each in (plain, model):
        materialize(each, torch.device("cpu"))
        init_weights(each, 5)
    own = {clean_name(name): p for name, p in model.named_parameters()}
    assert all(torch.equal(p, own[name]) for name, p in plain.named_parameters())
    a = torch.cat([p.flatten() for n, p in own.items() if "lora_A" in n])
    assert float(a.std().detach()) == pytest.approx(1 / 8, rel=0.05)
    assert all(not p.any() for n, p in own.items() if "lora_B" in n)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": 0}, "lora.r: got 0: expected 1 or more"),
        ({"r": 2.5}, "lora.r: got 2.5: expected 1 or more, and whole"),
        ({"rank_pattern": {"q_proj": 0.5}}, "lora.rank_pattern: got .*: expected ranks of 1 or more, and whole"),
        ({"rank_pattern": {"(": 4}}, r"lora.rank_pattern: got '\(': no regular expression: missing \)"),
        ({"init_lora_weights": True}, "lora.init_lora_weights: got True: expected one of default, gaussian, pissa"),
        ({"init_lora_weights": "eva"}, "lora.init_lora_weights: got 'eva': expected one of default, gaussian, pissa"),
        ({"dtype": "float16"}, "lora.dtype: got 'float16': expected float32 or bfloat16"),
        ({"target_modules": "q_proj"}, r"got 'q_proj': a text is a regular .* names; set a list of names, \[q_proj\]"),
        ({"target_modules": "all_linear"}, "got 'all_linear': no module .* has such a name; did you mean all-linear"),
        (
            {"target_modules": ["q_proj"], "exclude_modules": ["self_attn"]},
            r"lora.target_modules: got \('q_proj',\): exclude_modules and modules_to_save leave none",
        ),
        (
            {"modules_to_save": ["model"]},
            "lora.target_modules: got 'all-linear': the model has no plain linear layers outside of model ",
        ),
        ({"alpha": 0}, "lora.alpha: got 0: expected above 0"),
        ({"dropout": 1.0}, "lora.dropout: got 1.0: expected from 0 to below 1"),
        ({"target_modules": []}, r"lora.target_modules: got \(\): expected all-linear, names or"),
        (
            {"target_modules": ["q_prj"]},
            r"lora.target_modules: got 'q_prj': the model has no such module; did you mean q_proj\?",
        ),
        ({"target_modules": ["q_proj", "qq"]}, "lora.target_modules: got 'qq': the model has no such module"),
        ({"target_modules": "q_.*"}, r"lora.target_modules: got 'q_\.\*': no module of the model has such a name"),
        ({"target_modules": ["mlp"]}, "lora.target_modules: got .*mlp.*: Target module LlamaMLP is not supported"),
        ({"exclude_modules": ["q_prj"]}, "lora.exclude_modules: got 'q_prj': the model has no such module"),
        ({"modules_to_save": ["head"]}, r"lora.modules_to_save: got 'head': .*did you mean lm_head\?"),
        (
            {"init_lora_weights": "loftq"},
            "lora.init_lora_weights: got 'loftq': it fits adapters to the error of quantization",
        ),
        ({"init_lora_weights": "pissa", "use_dora": True}, "lora.init_lora_weights: got 'pissa' with use_dora"),
    ],
)
def test_settings_that_would_train_nothing_or_something_else_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(LoRA(**options))


def test_what_shares_its_weight_is_not_trained_in_full() -> None:
    with pytest.raises(ValueError, match=r"lm_head shares its weight with model.embed_tokens"):
        build(LoRA(modules_to_save=["lm_head"]), tie_word_embeddings=True)


def test_what_is_quantized_is_not_trained_in_full() -> None:
    model = build_language_model("llama", **WIDE)
    quantize_model(model, Quantization(skip_modules=[]))
    with pytest.raises(ValueError, match=r"lora.modules_to_save: lm_head is quantized, and cannot be trained"):
        add_adapters(model, LoRA(modules_to_save=["lm_head"]))


def test_merging_into_quantized_weights_names_the_export() -> None:
    model = build(LoRA(), Quantization())
    layer = next(m for m in model.modules() if isinstance(m, LoraLayer))
    with pytest.raises(ValueError, match="python -m lit_fsdp export --merge true"):
        layer.merge()


def test_a_sharded_model_is_neither_quantized_nor_adapted() -> None:
    def body() -> None:
        model = build_language_model("llama", **WIDE)
        fully_shard(model)
        with pytest.raises(ValueError, match="lora: the model is sharded already"):
            add_adapters(model, LoRA())
        with pytest.raises(ValueError, match="quantization: the model is sharded already"):
            quantize_model(model, Quantization())

    run_ranks(body)


def test_several_dtypes_that_train_in_one_unit_are_refused() -> None:
    def body() -> None:
        model = build(LoRA(dtype="float32"))
        model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.bfloat16())
        model.lm_head.weight.requires_grad_()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
        options = {"mp_policy": MixedPrecisionPolicy(), "offload_policy": OffloadPolicy()}
        with pytest.raises(ValueError, match="the trainable parameters of one unit must have one dtype"):
            shard_model(model, plan_units(model, Wrap()), mesh=mesh, sharding=Sharding(), **options)

    run_ranks(body)
