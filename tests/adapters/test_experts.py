"""Adapters of fused experts equal peft's ``target_parameters``, over full and 4-bit weights, on any number of ranks."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adapter_training import BATCH, TOLERANCE, compare, save_dequantized, train_plainly, train_sharded
from differences import find_largest
from models import LANGUAGE_MODELS, build_language_model, compute_loss, dequantize_model, make_tokens
from peft import get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training import NUM_STEPS, Recorder, Result, Rows, build_task, build_trainer, fit_and_write
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp import FSDP2Strategy
from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.adapters.layers import check_units, is_adapter_name, iterate_adapters, switch_off_adapters
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.quantization import groups
from lit_fsdp.quantization.layers import quantize_model
from lit_fsdp.quantization.quantize import Quantization
from lit_fsdp.sharding.activation_checkpointing import ActivationCheckpointing
from lit_fsdp.sharding.mesh import Mesh
from lit_fsdp.sharding.shard import Compile
from lit_fsdp.weights.load import init_weights, materialize
from ranks import run_ranks

GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
# A rank of which no kernel takes rows; named, as peft takes other names for those of experts in Transformers 4.
LORA = LoRA(r=3, alpha=8, target_modules=["q_proj", "o_proj"], target_parameters=[GATE_UP, DOWN])
# Rows of 64 and 128 weights make blocks.
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**WIDE, "moe_intermediate_size": 64},  # 5 experts: uneven shards
    "mixtral": WIDE,
    "gpt_oss": WIDE,  # weights [in, out], with biases
    "olmoe": WIDE,
    "deepseek_v3": {**WIDE, "moe_intermediate_size": 64, "v_head_dim": 16},  # a dense layer first, a shared expert
}
BASES: dict[str, Quantization | None] = {
    "full": None,
    "nf4 double": Quantization(),
    "nf4": Quantization(double_quant=False),
}


def build(family: str, lora: LoRA, quantization: Quantization | None = None, **config: Any) -> Any:
    """Return a model with adapters that add something."""
    model = build_language_model(family, **{**FAMILIES[family], **config})
    if quantization is not None:
        quantize_model(model, quantization)
    add_adapters(model, lora)
    materialize(model, torch.device("cpu"))
    init_weights(model, 3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def build_stock(family: str, model: nn.Module, lora: LoRA) -> dict[str, Any]:
    """Return peft's model over the same weights, and its parameters by our names."""
    dense = dequantize_model(model, build_language_model(family, "cpu", **FAMILIES[family]))
    stock = get_peft_model(dense, lora.build_config())
    parameters = {name.removeprefix("base_model.model."): p for name, p in stock.named_parameters()}
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert own.keys() == {name for name, p in parameters.items() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in own.items():
            parameters[name].copy_(parameter)
    return {"model": stock, "parameters": parameters}


@pytest.mark.full(after=10)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_peft(family: str, base: str) -> None:
    lora = replace(LORA, rank_pattern={GATE_UP: 5}, alpha_pattern={"down_proj": 3})
    model = build(family, lora, BASES[base])
    stock = build_stock(family, model, lora)
    tokens = make_tokens(4, 16)
    for one in (model, stock["model"]):
        compute_loss(one, tokens).backward()
    logits, truth = (one(tokens).logits for one in (model, stock["model"]))
    assert float((logits - truth).abs().max()) <= TOLERANCE
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            grad, expected = parameter.grad, stock["parameters"][name].grad
            assert float(expected.abs().max()) > 0, name
            assert float((grad - expected).abs().max()) <= TOLERANCE, name
    with switch_off_adapters(model), stock["model"].disable_adapter(), torch.no_grad():
        assert float((model(tokens).logits - stock["model"](tokens).logits).abs().max()) <= TOLERANCE
        assert float((model(tokens).logits - logits).abs().max()) > 1e-3


class Operators(TorchDispatchMode):
    """Lists the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.append(str(func))
        return func(*args, **(kwargs or {}))


def run_step(model: nn.Module) -> tuple[list[str], list[torch.Tensor]]:
    """Return which operators a step runs, and the gradients of the adapters."""
    model.zero_grad()
    with Operators() as operators:
        compute_loss(model, make_tokens(4, 16)).backward()
    return operators.ran, [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("base", ["full", "nf4 double"])
def test_products_of_adapters_run_in_groups_however_many_experts_there_are(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [build("mixtral", LORA, BASES[base], num_local_experts=num) for num in (4, 8)]
    run_step(models[0])  # makes tables that are kept
    (few, grads), (many, _) = map(run_step, models)
    assert few == many
    bare = build("mixtral", replace(LORA, target_parameters=[]), num_local_experts=4)
    waits = [
        [n for n in ran if re.search("_local_scalar_dense|nonzero|unique|bincount", n)]
        for ran in (few, run_step(bare)[0])
    ]
    assert waits[0] == waits[1]  # no more than without adapters of experts
    products = [name for name in few if "_grouped_mm" in name]
    # In each of 3 layers two weights: each product and two of an adapter; backward of rows, and of two factors.
    assert len(products) == 3 * 2 * (3 + 3 + 2)
    monkeypatch.setattr(groups, "has_grouped_product", lambda *_: False)
    one_by_one, same = run_step(models[0])
    assert "aten._grouped_mm.default" not in one_by_one
    assert all(torch.allclose(a, b, rtol=0, atol=TOLERANCE) for a, b in zip(grads, same, strict=True))


def test_adapters_of_several_weights_start_apart_and_as_the_base_does() -> None:
    model = build_language_model("mixtral", **WIDE)
    add_adapters(model, replace(LORA, target_modules=[]))
    materialize(model, torch.device("cpu"))
    init_weights(model, 3)
    assert all((".lora_" in name) == p.requires_grad for name, p in model.named_parameters())
    layers = dict(iterate_adapters(model))
    assert set(layers) == {f"model.layers.{i}.mlp.experts{inner}" for i in range(3) for inner in ("", ".base_layer")}
    outer, inner = (layers[f"model.layers.0.mlp.experts{name}"] for name in ("", ".base_layer"))
    assert (outer.parameter_name, inner.parameter_name) == ("down_proj", "gate_up_proj")
    first = [layer.lora_A["default"].weight.detach().flatten()[:8] for layer in (outer, inner)]
    ratio = first[0] / first[1]
    assert float(ratio.std()) > 1e-3  # the same numbers, scaled to other widths, would be one draw
    assert not any(layer.lora_B["default"].weight.any() for layer in layers.values())
    for layer in (outer, inner):  # as peft draws them
        bound = layer.lora_A["default"].weight.shape[1] ** -0.5
        assert bound * 0.95 < float(layer.lora_A["default"].weight.abs().max()) <= bound


# Runs


def save_family(folder: Path, family: str) -> Path:
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **{**LANGUAGE_MODELS[family], **FAMILIES[family]})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


Case = tuple[str, str, int]  # a family, its base, ranks
RUNS: list[Case] = [
    *product(FAMILIES, ("nf4 double", "full"), (2, 1, 4)),
    ("qwen3_moe", "nf4", 4),
    ("olmoe", "nf4", 4),
]
# What some of these do besides.
STRATEGIES: dict[Case, dict[str, Any]] = {
    ("qwen3_moe", "nf4", 4): {"activation_checkpointing": ActivationCheckpointing(mode="full")},
    ("mixtral", "full", 2): {"activation_checkpointing": ActivationCheckpointing(mode="selective")},
    ("mixtral", "nf4 double", 4): {"mesh": Mesh(replicate=2)},
    ("gpt_oss", "nf4 double", 2): {"compile": Compile(backend="aot_eager")},  # breaks at the experts in float32
    ("gpt_oss", "full", 2): {"compile": Compile(backend="aot_eager")},
}
# One family on any number of ranks, the others on one and on two; the rest with -m slow.
USUAL = [*product(FAMILIES, ("nf4 double",), (2,)), *product(FAMILIES, ("full",), (1,)), *STRATEGIES]


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "base", "ranks"),
    [pytest.param(*case, marks=() if case in USUAL or case[0] == "qwen3_moe" else pytest.mark.slow) for case in RUNS],
)
def test_runs_train_as_peft_does_on_one_device(family: str, base: str, ranks: int, tmp_path: Path) -> None:
    folder, quantization = save_family(tmp_path / "model", family), BASES[base]
    strategy = STRATEGIES.get((family, base, ranks))
    result, start = train_sharded(folder, tmp_path, ranks, lora=LORA, quantization=quantization, strategy=strategy)
    assert any(".experts.base_layer.lora_A." in name for name in result.weights)
    dense = folder
    if quantization is not None:
        dense = save_dequantized(tmp_path / "dense", folder, quantization)
    differences = compare(result, train_plainly(dense, start, None, LORA))
    assert result.losses[-1] != result.losses[0]
    assert max(differences.values()) <= TOLERANCE, differences


def fit_from(folder: Path, out: Path, save: Path | None, load: Path | None) -> None:
    """Train 4-bit weights for 8 steps, or from a checkpoint of 4; rank 0 writes losses and weights."""
    trainer = build_trainer(FSDP2Strategy(print_plan=False), callbacks=[Recorder()], max_steps=4 if save else 8)
    task = build_task(folder, lora=LORA, quantization=Quantization())
    data = Rows(67, BATCH // dist.get_world_size(), num_rows=NUM_STEPS * BATCH)
    fit_and_write(trainer, task, data, out, save=save, load=load)


@pytest.mark.full
def test_a_resumed_run_goes_on_at_another_number_of_ranks(tmp_path: Path) -> None:
    folder, path = save_family(tmp_path / "model", "qwen3_moe"), tmp_path / "last.ckpt"
    run_ranks(fit_from, folder, tmp_path / "whole", None, None)
    run_ranks(fit_from, folder, tmp_path / "half", path, None)
    run_ranks(fit_from, folder, tmp_path / "resumed", None, path, world_size=3)
    whole, half, resumed = (Result(**torch.load(tmp_path / name)) for name in ("whole", "half", "resumed"))
    assert half.losses == whole.losses[:4]
    assert find_largest(abs(a - b) for a, b in zip(resumed.losses[4:], whole.losses[4:], strict=True)) <= TOLERANCE
    for name, weight in whole.weights.items():
        if is_adapter_name(name):
            assert float((resumed.weights[name] - weight).abs().max()) <= TOLERANCE, name


@pytest.mark.full
@pytest.mark.parametrize("base", ["full", "nf4 double"])
def test_blocks_in_bfloat16_compile_to_one_graph(base: str, tmp_path: Path) -> None:
    folder, options = save_family(tmp_path / "model", "mixtral"), {"lora": LORA, "quantization": BASES[base]}
    compiled = {"compile": Compile(backend="aot_eager", fullgraph=True)}  # fails where Python is needed
    one, two = (
        train_sharded(folder, tmp_path, 2, strategy=strategy, precision="bf16-true", max_steps=3, **options)[0]
        for strategy in ({}, compiled)
    )
    differences = compare(two, one)
    assert max(differences.values()) <= 1e-3, differences  # of bfloat16, which rounds to 4e-3


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, "lora.dropout: got 0.1 with target_parameters, which take only 0"),
        ({"use_dora": True}, "lora.use_dora: got True with target_parameters"),
        ({"init_lora_weights": "pissa"}, "lora.init_lora_weights: got 'pissa' with target_parameters"),
        (
            {"target_parameters": ["mlp.experts.gate_up_prj"]},
            r"lora.target_parameters: got 'mlp.experts.gate_up_prj': .*; did you mean mlp.experts.gate_up_proj\?",
        ),
        ({"target_parameters": ["xyz"]}, "got 'xyz': .*; expected one such as down_proj, gate_up_proj"),
        (
            {"target_parameters": ["mlp.gate.weight"]},
            "got 'mlp.gate.weight': no weight of fused experts, such as mlp.experts.down_proj; name linear layers in",
        ),
        ({"modules_to_save": ["experts"]}, "lora.target_parameters: got .*: exclude_modules and modules_to_save leave"),
        ({"rank_pattern": {"experts": 2}}, "lora.rank_pattern: got 'experts': none of the targets has such a name"),
        (
            {"target_modules": ["experts"]},
            "lora.target_modules: got .*experts.*name their weights in target_parameters",
        ),
    ],
    ids=str,
)
def test_what_experts_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        add_adapters(build_language_model("mixtral", **WIDE), replace(LORA, **options))


def test_units_apart_from_the_experts_that_compute_with_them_are_refused() -> None:
    model = build_language_model("mixtral", **WIDE)
    add_adapters(model, LORA)
    inside = "model.layers.0.mlp.experts"
    check_units(model, [inside, f"{inside}.base_layer", f"{inside}.base_layer.base_layer"])
    for name in ("lora_A.default", "base_layer.lora_B.default"):
        with pytest.raises(ValueError, match=f"wrap: {inside}.{name} would be gathered apart from the experts"):
            check_units(model, [f"{inside}.{name}"])


@pytest.mark.parametrize("setting", ["target_parameters", "exclude_modules", "modules_to_save"])
def test_one_name_is_written_as_a_list(setting: str) -> None:
    with pytest.raises(ValueError, match=rf"lora.{setting}: got '{DOWN}': expected a list .* set it to \[{DOWN}\]"):
        LoRA(**{setting: DOWN})  # type: ignore[arg-type]


def test_a_model_without_experts_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"lora.target_parameters: got .*: the model has no fused experts; leave it out"
    ):
        add_adapters(build_language_model("llama"), LORA)


@pytest.mark.parametrize(
    ("family", "names", "owner"),
    [
        ("llama4_text", ["experts.gate_up_proj"], "Llama4TextExperts"),
        ("jetmoe", ["mlp.output_linear.weight"], "JetMoeParallelExperts"),
    ],
)
def test_experts_of_other_layouts_are_named(family: str, names: list[str], owner: str) -> None:
    message = f"lora.target_parameters: got '{names[0]}': {owner} computes .* takes no adapters yet; leave it out, and"
    sizes = {"num_hidden_layers": 1, "vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    config = AutoConfig.for_model(family, **sizes, num_attention_heads=2, num_key_value_heads=2, num_local_experts=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=message):
        add_adapters(model, replace(LORA, target_modules=[], target_parameters=names))
