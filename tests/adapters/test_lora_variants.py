"""Relatives of LoRA, and models with experts or tied weights below it, train as those of stock libraries."""

from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from adapter_training import LORA, SIZES, TOLERANCE, compare, load_stock, train_plainly, train_sharded
from peft import get_peft_model
from training import (
    save_model,
)
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp import Mesh
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.quantization.quantize import Quantization


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "model", **SIZES)


@pytest.mark.full
@pytest.mark.parametrize(
    ("lora", "quantization"),
    [
        pytest.param(
            LoRA(r=4, alpha=8, target_modules=["q_proj", "embed_tokens", "lm_head"]),
            Quantization(),
            marks=pytest.mark.slow,
        ),
        (LoRA(r=4, alpha=8, target_modules=r".*layers\.[02]\.(self_attn|mlp)\.[gv].*", use_rslora=True), None),
        pytest.param(
            LoRA(r=4, modules_to_save=["lm_head"], rank_pattern={"v_proj": 2}, alpha_pattern={"v_proj": 3}),
            Quantization(),
            marks=pytest.mark.slow,
        ),
        (LoRA(r=4, alpha=8, use_dora=True), Quantization()),
        pytest.param(
            LoRA(r=4, alpha=8, use_dora=True, target_modules=["up_proj", "k_proj"]), None, marks=pytest.mark.slow
        ),
    ],
    ids=["embeddings", "regex rslora", "modules_to_save patterns", "dora nf4", "dora full"],
)
def test_relatives_of_lora_train_as_those_of_peft(
    lora: LoRA, quantization: Quantization | None, folder: Path, tmp_path: Path
) -> None:
    result, start = train_sharded(folder, tmp_path, 3, lora=lora, quantization=quantization)
    truth = train_plainly(folder, start, quantization, lora)
    differences = compare(result, truth)
    assert len(truth.weights) >= 3
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.full
@pytest.mark.parametrize(
    "init", ["pissa", "loftq", *(pytest.param(init, marks=pytest.mark.slow) for init in ("pissa_niter_16", "olora"))]
)
def test_decomposed_weights_and_adapters_add_up_to_the_model(init: Any, folder: Path, tmp_path: Path) -> None:
    quantization = None if init != "loftq" else Quantization(double_quant=False)
    lora = LoRA(r=4, alpha=8, init_lora_weights=init)
    _, start = train_sharded(folder, tmp_path, 3, lora=lora, quantization=quantization, max_steps=1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = load_stock(folder, quantization)
    found = {name: f"{name.removesuffix('.weight')}.base_layer.weight" for name, _ in model.named_parameters()}
    found = {name: base for name, base in found.items() if base in start}
    assert len(found) == 3 * 7
    for name, base in found.items():
        weight = model.get_parameter(name)
        a, b = (start[base.replace("base_layer.weight", f"{key}.default.weight")] for key in ("lora_A", "lora_B"))
        added = lora.alpha / lora.r * b @ a
        if quantization is None:
            assert float((start[base] + added - weight).abs().max()) <= TOLERANCE, name
            strongest = torch.linalg.svdvals(weight.detach())[0]
            assert float(torch.linalg.svdvals(start[base])[0]) < strongest or init == "olora"
            assert float(added.abs().max()) > 0
        else:
            stock = plain.get_submodule(name.removesuffix(".weight"))
            assert torch.equal(start[base].view(-1), stock.weight.view(-1))
            rounded = bnb.functional.dequantize_4bit(stock.weight, stock.weight.quant_state)  # type: ignore[attr-defined]
            assert float((rounded + added - weight).norm()) < 0.95 * float((rounded - weight).norm()), name


@pytest.mark.full
def test_pissa_starts_where_that_of_peft_does(folder: Path, tmp_path: Path) -> None:
    lora = LoRA(r=4, alpha=8, init_lora_weights="pissa")
    _, start = train_sharded(folder, tmp_path, 2, lora=lora, max_steps=1)
    config = lora.build_config()
    config.init_lora_weights = "pissa"
    stock = get_peft_model(load_stock(folder, None), config)
    for name, parameter in stock.named_parameters():
        own = start[name.removeprefix("base_model.model.")]
        # A singular vector may have either sign, the product has not.
        if "lora_" not in name:
            assert float((own - parameter).abs().max()) <= TOLERANCE, name
        assert own.shape == parameter.shape


EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 3},
    "qwen3_moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}


@pytest.mark.full
@pytest.mark.parametrize("model_type", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_experts_are_quantized_from_their_files_and_train_alike_at_every_world_size(
    model_type: str, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    config = AutoConfig.for_model(model_type, num_hidden_layers=2, **SIZES, **EXPERTS[model_type])
    folder = tmp_path / "model"
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    truth, start = train_sharded(folder, tmp_path, 1, quantization=Quantization(), max_steps=4)
    experts = model.model.layers[1].mlp.experts
    for name, expected in experts.named_parameters():
        for i, matrix in enumerate(expected.detach()):
            codes, _ = bnb.functional.quantize_4bit(matrix, quant_type="nf4")  # type: ignore[attr-defined]
            assert torch.equal(start[f"model.layers.1.mlp.experts.{name}"][i].view(-1), codes.view(-1))
    for world_size, mesh in ((2, Mesh()), (4, Mesh(replicate=2))):
        result, _ = train_sharded(
            folder, tmp_path, world_size, quantization=Quantization(), max_steps=4, strategy={"mesh": mesh}
        )
        differences = compare(result, truth)
        assert max(differences.values()) <= TOLERANCE, (world_size, differences)


@pytest.mark.full
def test_a_tied_embedding_below_adapters_trains_as_in_stock_libraries(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", **SIZES, tie_word_embeddings=True)
    result, start = train_sharded(folder, tmp_path, 2, quantization=Quantization(skip_modules=[]))
    assert "lm_head.weight" in start
    differences = compare(result, train_plainly(folder, start, Quantization(), LORA))
    assert max(differences.values()) <= TOLERANCE, differences
