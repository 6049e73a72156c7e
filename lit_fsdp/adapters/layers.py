"""The layers of peft inside a model: which there are, what their parameters are called.

Note [peft starts CUDA]: ``import peft`` imports bitsandbytes (``peft/helpers.py``, seen in 0.21), which starts CUDA
wherever a GPU is visible. So it is imported by ``import_peft``, when adapters are added, and a model without any is
read without it. Import it at the top when that has gone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn

from lit_fsdp.quantization.kernels import compile_later

ADAPTER = "default"  # the name under which peft keeps it
_WRAPPERS = ("base_layer", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # the last is FSDP1's
# LoraLayer.adapter_layer_names of peft, which need not be imported to read a checkpoint.
ADAPTER_PARTS = frozenset(("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"))


def import_peft() -> ModuleType:
    """Return peft; see Note [peft starts CUDA]."""
    # On the CPU, as adapters are added under "meta", where tensors that modules keep would have no values.
    with compile_later(), torch.device("cpu"):
        import peft
    return peft


def is_adapter(module: nn.Module) -> bool:
    """Whether a module is a layer of peft; none can be before something has imported its class."""
    if "peft.tuners.lora" not in sys.modules:
        return False
    from peft.tuners.lora import LoraLayer

    return isinstance(module, LoraLayer)


def iterate_adapters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers that have an adapter, with their names."""
    return ((name, module) for name, module in model.named_modules() if is_adapter(module))


@contextmanager
def switch_off_adapters(model: nn.Module) -> Iterator[None]:
    """Let a model compute as if it had no adapters.

    Which parameters need a gradient stays as it is, as sharded ones would be gathered anew after each change: so run
    nothing here that a backward shall follow.
    """
    layers = [layer for _, layer in iterate_adapters(model)]
    # Private, seen in peft 0.21: the public ``enable_adapters`` changes who needs a gradient, too.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def iterate_casting(model: nn.Module) -> Iterator[tuple[Any, list[nn.Parameter]]]:
    """Yield the layers that cast the matrices of their adapter themselves if ``compute_dtype`` is set, with these."""
    for _, layer in iterate_adapters(model):
        if hasattr(layer, "compute_dtype") and layer.is_plain():
            yield layer, [layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight]


def list_adapter_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return all trainable parameters of a model with adapters; of one without, nothing."""
    if next(iterate_adapters(model), None) is None:
        return []
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def is_adapter_name(name: str) -> bool:
    """Whether a parameter belongs to an adapter, and so is in no file of the base model."""
    return not ADAPTER_PARTS.isdisjoint(name.split("."))


def is_own_part(name: str) -> bool:
    """Whether a name inside a layer of peft is of its adapter, not of one that is its base layer, as of experts."""
    return is_adapter_name(name) and not name.startswith("base_layer.")


def clean_name(name: str) -> str:
    """Return a name in the model as files and users know it, without the wrappers around a module."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def check_units(model: nn.Module, units: Sequence[str]) -> None:
    """Refuse FSDP units, given by name, whose parameters a layer around them reads.

    A layer of DoRA reads the weight of its base layer, and experts read the matrices of their adapters.
    """
    for name, layer in iterate_adapters(model):
        inside = [unit for unit in units if unit.startswith(f"{name}.")]
        own = [unit for unit in inside if is_own_part(unit.removeprefix(f"{name}."))]
        if own and hasattr(layer, "parameter_name"):
            raise ValueError(
                f"wrap: {own[0]} would be gathered apart from the experts around it, which compute with it; leave wrap "
                "at its default, or name larger modules"
            )
        if inside and len(layer.lora_magnitude_vector):
            raise ValueError(
                f"wrap: {inside[0]} would be gathered apart from the layer around it, whose use_dora needs its "
                "weight; leave wrap at its default, or name larger modules"
            )
