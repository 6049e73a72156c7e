"""Layers of bitsandbytes in a user's module, as ``load_in_4bit`` of Transformers makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def view_as_bytes(model: nn.Module, device: torch.device) -> None:
    """Make plain parameters of the codes of 4-bit layers, as bytes, in any ``bnb_4bit_quant_storage``. In place.

    As floats they would be cast to the dtype that is stored or gathered, which makes other codes of them. What codes
    mean stays in the layer, on the device where it computes; from there bitsandbytes (0.50) gives it to a parameter
    that has lost it. Checkpoints hold codes only: torch finds nothing in the module for what else its ``state_dict``
    has, and a module that is built again brings it. In 8 bits it is kept in the parameter, which stays as it is.
    """
    layer: Any
    for layer in model.modules():
        meaning = getattr(layer, "quant_state", None)
        for name, parameter in list(layer._parameters.items()):
            if not type(parameter).__module__.startswith("bitsandbytes."):
                continue
            layer.register_state_dict_post_hook(_keep_codes)
            if meaning is not None:
                meaning.to(device)
                layer.support_avx512bf16_for_cpu = False  # another order of the codes, in evaluations on some CPUs
                codes = parameter.detach().as_subclass(Tensor).reshape(-1).view(torch.uint8).reshape(-1, 1)
                layer._parameters[name] = nn.Parameter(codes, requires_grad=False)


def _keep_codes(layer: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    own = {f"{prefix}{name}" for name in (*layer._parameters, *layer._buffers)}
    for name in [name for name in state_dict if name.startswith(prefix) and name not in own]:
        del state_dict[name]
