"""Adapters over a random Llama architecture as Transformers, bitsandbytes and peft make them, for ``qlora.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

RANK = 16  # of the adapters
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "small": {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "deep": {  # as many layers as 8b, each next to nothing: what a step costs the host
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "70b": {
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}


def save_model(folder: str) -> None:
    """Write the random model that all variants of ``small`` read."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SHAPES["small"])
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def load_stock(shape: str, base: str, folder: Path, device: Any, *, recomputes: bool = True) -> Any:
    """Return the model with adapters; ``base`` is ``nf4`` or ``bf16``."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = None
    if base == "nf4":
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    if shape == "small":
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, quantization_config=quantization, device_map={"": device}
        )
    else:
        model = _draw(shape, quantization, device)
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))


def _draw(shape: str, quantization: Any, device: Any) -> Any:
    """Return a random model of stock layers, drawn layer by layer on the device."""
    import torch
    from bitsandbytes.nn import Params4bit
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    config = AutoConfig.for_model("llama", **SHAPES[shape])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if quantization is not None:
        model = replace_with_bnb_linear(model, modules_to_not_convert=["lm_head"], quantization_config=quantization)
    for module in model.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            is_4bit = isinstance(parameter, Params4bit)
            sizes = (module.out_features, module.in_features) if is_4bit else parameter.shape
            values = torch.randn(sizes, dtype=torch.bfloat16, device=device).mul_(0.02)
            if is_4bit:
                made = Params4bit(values, requires_grad=False, quant_type="nf4", compress_statistics=True)
                module._parameters[key] = made.to(device)
            else:
                module._parameters[key] = torch.nn.Parameter(values, requires_grad=False)
    # Its buffers are computed, not loaded, and were on the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.to(device)
