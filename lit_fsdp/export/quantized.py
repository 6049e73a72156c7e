"""Weights on their way into a folder become those of bitsandbytes, as Transformers saves and loads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_fsdp.quantization.layers import QuantizedLinear, list_quantizable, quantize_model
from lit_fsdp.quantization.quantize import Quantization, pack_4bit, quantize_rows


class Quantizer:
    """Takes dense weights under the names of the Hub, and returns what bitsandbytes stores of them.

    Args:
        model: On the meta device, without quantized layers; changed in place.
        settings: How to quantize. Linear layers only, as Transformers keeps experts and subclasses (Falcon's) dense.
        outputs: All dense tensors that will be written, on the meta device; a layer whose weight has another name
            there stays dense.

    Raises:
        ValueError: A setting is wrong, or nothing is left to quantize.
    """

    def __init__(self, model: PreTrainedModel, settings: Quantization, outputs: Mapping[str, Tensor]) -> None:
        self.settings = settings
        candidates = list_quantizable(model)
        dense = [n for n, m in candidates.items() if type(m) is not nn.Linear or f"{n}.weight" not in outputs]
        if settings.skip_modules is None:
            get_head: Any = model.get_output_embeddings
            dense += [name for name, module in candidates.items() if module is get_head()]
        quantize_model(model, replace(settings, skip_modules=[*(settings.skip_modules or ()), *dense]))
        quantized = [name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)]
        self._weights = {f"{name}.weight": outputs[f"{name}.weight"].dtype for name in quantized}
        self._skipped = [n for n, m in candidates.items() if isinstance(m, nn.Linear) and n not in quantized]

    @property
    def config(self) -> dict[str, Any]:
        """What ``config.json`` says of it."""
        is_int8 = self.settings.type == "int8"
        config: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_8bit": is_int8, "load_in_4bit": not is_int8}
        if not is_int8:
            config |= {
                "bnb_4bit_quant_type": self.settings.type,
                "bnb_4bit_use_double_quant": self.settings.is_double,
                "bnb_4bit_compute_dtype": str(next(iter(self._weights.values()))).removeprefix("torch."),
                "bnb_4bit_quant_storage": "uint8",
            }
        return {**config, "llm_int8_skip_modules": self._skipped}

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what is written of dense tensors; of those on the meta device, shapes and dtypes."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if name not in self._weights:
                found[name] = tensor
            elif self.settings.type == "int8":
                codes, scale = quantize_rows(tensor, self.settings)
                found |= {name: codes.view(torch.int8), f"{name.removesuffix('weight')}SCB": scale.view(-1)}
                found[f"{name}_format"] = torch.zeros((), dtype=torch.uint8, device=tensor.device)  # row by row
            else:
                found |= {name + end: part for end, part in pack_4bit(tensor, self.settings).items()}
        return found
