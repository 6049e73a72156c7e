"""Adapters that would compute something else than the setting says are refused, by the name of the layer."""

import pytest
from models import build_language_model

from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.adapters.layers import iterate_adapters
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.quantization.layers import quantize_model
from lit_fsdp.quantization.quantize import Quantization

SMALL = Quantization(block_size=32)


@pytest.mark.parametrize(
    ("family", "lora", "quantization", "message"),
    [
        (
            "mixtral",
            LoRA(r=4, target_modules=["experts"]),
            SMALL,
            "fused experts are no layers; name their weights in target_parameters",
        ),
        (
            "mixtral",
            LoRA(r=4, target_modules=["experts"], init_lora_weights="olora"),
            None,
            "fused experts are no layers; name their weights in target_parameters",
        ),
        (
            "llama",
            LoRA(use_dora=True, target_modules=["embed_tokens"]),
            None,
            "model.embed_tokens: use_dora is only for linear layers",
        ),
        ("gpt2", LoRA(use_dora=True), None, "transformer.h.0.attn.c_attn: use_dora is only for linear layers"),
        (
            "gpt2",
            LoRA(r=4, init_lora_weights="pissa"),
            None,
            "c_attn: init_lora_weights 'pissa' is only for linear layers; set it to default",
        ),
        (
            "llama",
            LoRA(r=99, init_lora_weights="pissa"),
            None,
            r"q_proj: init_lora_weights 'pissa' has no rank 99 in a weight of \(32, 32\)",
        ),
    ],
)
def test_what_would_be_wrong_is_refused(
    family: str, lora: LoRA, quantization: Quantization | None, message: str
) -> None:
    model = build_language_model(family)
    if quantization is not None:
        quantize_model(model, quantization)
    with pytest.raises(ValueError, match=f"lora.target_modules: .*{message}"):
        add_adapters(model, lora)


@pytest.mark.parametrize(
    ("family", "lora", "quantization"),
    [
        ("mixtral", LoRA(r=4), SMALL),
        ("mixtral", LoRA(r=4, init_lora_weights="olora"), None),
        ("mixtral", LoRA(r=4), Quantization(block_size=32, skip_modules=["experts", "lm_head"])),
        ("llama", LoRA(r=4, init_lora_weights="pissa", target_modules=["q_proj"]), None),
        ("llama", LoRA(r=4, init_lora_weights="olora"), SMALL),
        ("gpt2", LoRA(r=4), None),
    ],
)
def test_their_neighbours_are_accepted(family: str, lora: LoRA, quantization: Quantization | None) -> None:
    model = build_language_model(family)
    if quantization is not None:
        quantize_model(model, quantization)
    add_adapters(model, lora)
    assert next(iterate_adapters(model), None) is not None
