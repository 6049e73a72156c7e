"""Which layers are quantized, what they hold, and that experts compute what Transformers' experts do."""

from typing import Any

import pytest
import torch
from models import build_language_model, make_tokens
from torch import nn

from lit_fsdp.quantization.layers import QuantizedExperts, QuantizedLinear, iterate_quantized, quantize_model
from lit_fsdp.quantization.quantize import Quantization, dequantize
from lit_fsdp.weights.load import init_weights, materialize

WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": WIDE,
    "qwen3_moe": {**WIDE, "moe_intermediate_size": 64},
    "gpt_oss": WIDE,
}

KINDS = [Quantization(), Quantization(type="fp4", double_quant=False), Quantization(type="int8")]


def list_quantized(model: nn.Module) -> set[str]:
    return {name.rpartition(".")[2] for name, _ in iterate_quantized(model)}


def dequantize_model(model: nn.Module, like: nn.Module) -> nn.Module:
    """Fill ``like``, an unquantized model, with the weights that a quantized one computes with."""
    state = dict(like.named_parameters())
    quantized = dict(iterate_quantized(model))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            layer = quantized.get(name.rpartition(".")[0])
            key = name.rpartition(".")[2]
            if layer is None or key not in (*layer.dense_shapes, "bias"):
                if name in state:
                    state[name].copy_(parameter)
                continue
            if key == "bias":
                state[name].copy_(parameter)
                continue
            stored = layer.get_stored(key)
            if parameter.dim() == 2:
                state[name].copy_(dequantize(*stored, layer.quantization, torch.float32))
                continue
            for i, matrix in enumerate(state[name]):
                matrix.copy_(dequantize(*layer.get_stored(key, i), layer.quantization, torch.float32))
    return like


def build_quantized(family: str, settings: Quantization, **config: Any) -> nn.Module:
    model = build_language_model(family, **config)
    quantize_model(model, settings)
    materialize(model, torch.device("cpu"))
    init_weights(model, 3)
    return model


def test_all_linear_layers_but_the_head_are_quantized_and_frozen() -> None:
    model = build_language_model("llama", **WIDE)
    assert quantize_model(model, Quantization()) == []
    assert list_quantized(model) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert all(not p.requires_grad for _, layer in iterate_quantized(model) for p in layer.parameters())
    assert type(model.lm_head) is nn.Linear


@pytest.mark.parametrize(
    ("skip", "expected"),
    [
        ([], {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}),
        (["self_attn", "lm_head"], {"gate_proj", "up_proj", "down_proj"}),
        (["*_proj"], {"lm_head"}),
        (["model.layers.*.mlp", "lm_head"], {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ],
)
def test_names_parts_of_names_and_patterns_are_skipped(skip: list[str], expected: set[str]) -> None:
    model = build_language_model("llama", **WIDE)
    quantize_model(model, Quantization(skip_modules=skip))
    assert list_quantized(model) == expected


def test_a_name_to_skip_that_is_none_gets_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"quantization.skip_modules: got 'q_prj': .* did you mean q_proj\?"):
        quantize_model(build_language_model("llama", **WIDE), Quantization(skip_modules=["q_prj"]))


def test_a_shared_head_and_rows_that_make_no_blocks_stay_and_are_named() -> None:
    model = build_language_model("llama", **{**WIDE, "intermediate_size": 100}, tie_word_embeddings=True)
    left = quantize_model(model, Quantization(skip_modules=[]))
    assert any(text.startswith("lm_head (its weight is that of another layer") for text in left)
    assert any("mlp.down_proj (its rows of 100 do not divide into blocks of 64)" in text for text in left)
    assert list_quantized(model) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}


def test_a_model_in_which_nothing_can_be_quantized_is_refused() -> None:
    with pytest.raises(ValueError, match=r"nothing to quantize in LlamaForCausalLM: .* do not divide"):
        quantize_model(build_language_model("llama", hidden_size=40, intermediate_size=72), Quantization())


@pytest.mark.parametrize("type_", ["nf4", "fp4", "int8"])
def test_a_layer_takes_the_bytes_it_should(type_: Any) -> None:
    dense = nn.Linear(256, 64, device="meta")
    for double in (False, True) if type_ != "int8" else (None,):
        layer = QuantizedLinear(dense, Quantization(type=type_, double_quant=double))
        bits = 8 * sum(t.numel() for t in (*layer.parameters(), *layer.buffers()) if t.dtype == torch.uint8)
        settings = layer.quantization
        per_weight = 8 + 32 / 256 if type_ == "int8" else 4 + (8 / 64 if settings.is_double else 32 / 64)
        nested = 32 * (256 * 64 / 64 / 256 + 1) if settings.is_double else 0
        assert bits == per_weight * 256 * 64 + nested


@pytest.mark.parametrize(
    "settings", [Quantization(), Quantization(type="fp4", double_quant=False), Quantization(type="int8")]
)
@pytest.mark.parametrize("family", ["llama", *EXPERTS])
def test_a_quantized_model_computes_what_a_dense_one_does_with_its_weights(family: str, settings: Quantization) -> None:
    config = EXPERTS.get(family, WIDE)
    model = build_quantized(family, settings, **config)
    dense = dequantize_model(model, build_language_model(family, "cpu", **config))
    kinds = {type(layer) for _, layer in iterate_quantized(model)}
    assert any(issubclass(kind, QuantizedExperts) for kind in kinds) == (family != "llama")
    tokens = make_tokens()
    with torch.no_grad():
        difference = model(tokens).logits - dense(tokens).logits
    assert float(difference.abs().max()) <= 1e-6


def test_the_seed_gives_the_same_codes_whether_the_model_is_quantized_at_once_or_later() -> None:
    whole = build_language_model("llama", **WIDE)
    materialize(whole, torch.device("cpu"))
    init_weights(whole, 3)
    model = build_quantized("llama", Quantization(type="int8"), **WIDE)
    dense = dequantize_model(model, build_language_model("llama", "cpu", **WIDE))
    for (name, a), (_, b) in zip(whole.named_parameters(), dense.named_parameters(), strict=True):
        assert float((a - b).abs().max()) <= float(a.abs().max()) * (0.5 / 127 + 1e-3), name
