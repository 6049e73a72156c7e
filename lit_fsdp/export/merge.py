"""A model with its adapters merged into the weights that they were trained over, one tensor after another.

Each layer of peft gets its values for as long as its weight is merged, and merges it by itself, so that every kind of
adapter is merged as peft does it. The host holds the tensors of one conversion, never the model.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_fsdp.adapters.lora import (
    LoRA,
    add_adapters,
    clean_name,
    decompose,
    is_adapter_name,
    is_decomposed,
    iterate_adapters,
)
from lit_fsdp.checkpoint.reader import StoredCheckpoint, build_on_meta
from lit_fsdp.quantization.layers import iterate_quantized, quantize_model
from lit_fsdp.quantization.quantize import Quantization, requantize
from lit_fsdp.weights.base_weights import BASE, LORA, fetch_pretrained, find_pretrained
from lit_fsdp.weights.convert import Conversion, convert_rows, plan_conversions
from lit_fsdp.weights.prequantized import QuantizedFiles
from lit_fsdp.weights.safetensors_io import compute_fingerprint


class BaseWeights:
    """The tensors of a base model by their names in the model, whole; a context that keeps the files open.

    Args:
        folder: Of its files.
        model: On the meta device, in which tied parameters are tied.
        replaced: Names of tensors that were trained in full, which files may lack, such as a classification head.

    Raises:
        ValueError: The files do not fit the model.
    """

    def __init__(self, folder: Path, model: PreTrainedModel, replaced: Collection[str] = ()) -> None:
        self.folder = folder
        self._model = model
        self._files = QuantizedFiles(folder)
        state = model.state_dict()
        conversions, _ = plan_conversions(model, self._files.tensors, state)
        self._by_name = {name: conversion for conversion in conversions for name in conversion.shapes}
        self._aliases = find_aliases(model)
        if missing := [name for name in state if self._find(name) is None and name not in replaced]:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise ValueError(f"base: {folder} lacks {', '.join(missing[:5])}{more}: it is no {type(model).__name__}")

    def __enter__(self) -> Self:
        self._files.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.__exit__(kind, error, trace)

    def get_dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor, or what it is made of, is stored, or was before it was quantized.

        Of one that is not there, it is that of the first one.
        """
        found = self._find(name)
        conversion = next(iter(self._by_name.values())) if found is None else self._by_name[found]
        return self._files.get_dtype(conversion.sources[0][1])

    def read(self, name: str) -> Tensor:
        """Return a tensor in the dtype in which it is stored, a quantized one in that which it had before."""
        found, conversion = self._get(name)
        if conversion.converter is None:
            stored = conversion.sources[0][1]
            if stored in self._files.quantized:
                return self._files.read_dense(stored)
            return self._files.read_rows(stored, 0, self._files.tensors[stored].num_rows)
        dtype = self.get_dtype(name)
        made = convert_rows(self._model, conversion, self._files.tensors, self._files.read_rows, dtype)
        return made[found].contiguous()

    def _get(self, name: str) -> tuple[str, Conversion]:
        found = self._find(name)
        assert found is not None, name
        return found, self._by_name[found]

    def _find(self, name: str) -> str | None:
        return next((alias for alias in [name, *self._aliases.get(name, [])] if alias in self._by_name), None)


class AdaptedWeights:
    """What the layers of a run start from and what they have become, by names in the model without adapters.

    Args:
        checkpoint: Of adapters.
    """

    def __init__(self, checkpoint: StoredCheckpoint) -> None:
        self.checkpoint = checkpoint
        self.lora = read_lora(checkpoint)
        self.quantization = read_quantization(checkpoint)
        model = build_on_meta(checkpoint)
        # LoftQ would be refused over a base that is not quantized, as this one, so that it can be merged into.
        add_adapters(model, replace(self.lora, init_lora_weights="default"))
        for _, layer in iterate_adapters(model):
            layer.initialization = self.lora.init_lora_weights
        self.layers = {clean_name(f"{n}.{find_weight_name(m)}"): (n, m) for n, m in iterate_adapters(model)}
        self.trained = {n: n for n in checkpoint.tensors if is_saved(n, self.lora) and not is_adapter_name(n)}
        self._quantized: set[str] = set()
        if self.quantization is not None:
            model = build_on_meta(checkpoint)
            quantize_model(model, self.quantization, keep=self.lora.modules_to_save)
            self._quantized = {f"{n}.{key}" for n, layer in iterate_quantized(model) for key in layer.dense_shapes}

    @property
    def changed(self) -> set[str]:
        """The names of all tensors that are not those of the base."""
        return {*self.layers, *self.trained}

    def list_trained(self) -> list[str]:
        """Return the names of all tensors that trained, in the checkpoint."""
        return [*self.trained, *(key for name in self.layers for key in self.describe_adapter(name))]

    def describe_adapter(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of the adapter of one weight on the meta device, by their names in the checkpoint."""
        prefix, layer = self.layers[name]
        own = (n for n, _ in layer.named_parameters() if not n.startswith("base_layer.") and is_adapter_name(n))
        return {f"{prefix}.{n}": self.checkpoint.describe(f"{prefix}.{n}").float() for n in own}

    def start(self, name: str, weight: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Return the weight that an adapter was trained over, and ``A`` and ``B`` that were taken out of it.

        Args:
            name: Of a weight with an adapter.
            weight: Of the base, ``float32``.
        """
        _, layer = self.layers[name]
        if not is_decomposed(layer):
            return weight, None
        quantize = partial(requantize, settings=self.quantization or Quantization())
        a, b, rest = decompose(layer, weight, quantize)
        return (quantize(rest) if name in self._quantized else rest), (a, b)

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """Return a weight with its adapter merged, ``float32``.

        Args:
            name: Of a weight with an adapter.
            weight: Of the base.
        """
        prefix, layer = self.layers[name]
        weight, _ = self.start(name, weight.float())
        values = self.checkpoint.read(self.describe_adapter(name))
        places = {f"base_layer.{find_weight_name(layer)}": weight}
        places |= {key.removeprefix(f"{prefix}."): value for key, value in values.items()}
        holders = {key: _find_holder(layer, key) for key in places}
        kept: dict[str, Any] = {key: holder._parameters[key.rpartition(".")[2]] for key, holder in holders.items()}
        try:
            for key, value in places.items():
                parameter = nn.Parameter(value, requires_grad=False)
                holders[key]._parameters[key.rpartition(".")[2]] = parameter
            with torch.no_grad():
                layer.merge()
            merged = getattr(layer.get_base_layer(), find_weight_name(layer)).data
        finally:
            for key, parameter in kept.items():
                holders[key]._parameters[key.rpartition(".")[2]] = parameter
        return merged


def read_lora(checkpoint: StoredCheckpoint) -> LoRA:
    """Return the settings of the adapters in a checkpoint."""
    return LoRA(**checkpoint.meta[LORA])


def read_quantization(checkpoint: StoredCheckpoint) -> Quantization | None:
    """Return how the base of the adapters in a checkpoint was quantized."""
    settings = checkpoint.meta[BASE]["quantization"]
    return None if settings is None else Quantization(**settings)


def open_base(checkpoint: StoredCheckpoint, base: str | None) -> Path:
    """Return the folder of the base model of a checkpoint of adapters.

    Args:
        checkpoint: Of adapters.
        base: Its name on the Hub or its folder, if not the recorded one.

    Raises:
        ValueError: It is not there, or has other weights than those that the adapters were trained over.
    """
    name = base or str(checkpoint.meta[BASE]["name"])
    fetch_pretrained(name, "base")
    folder = find_pretrained(name)
    if compute_fingerprint(folder) != checkpoint.meta[BASE]["fingerprint"]:
        trained = checkpoint.meta[BASE]["name"]
        raise ValueError(
            f"base: got {name!r}: its weights are not those of {trained!r} that the adapters were trained over; set "
            "base to a copy of that model"
        )
    return folder


def find_aliases(model: PreTrainedModel) -> dict[str, list[str]]:
    """Map each parameter's name to all names it has; those of a tied one are several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: group for group in names.values() for name in group}


def find_weight_name(layer: Any) -> str:
    """Return what the weight that an adapter belongs to is called in its module."""
    return getattr(layer, "parameter_name", "weight")  # of one that is no layer, such as experts


def is_saved(name: str, lora: LoRA) -> bool:
    """Whether a tensor is one of the modules that train in full."""
    parts = name.split(".")
    modules = [".".join(parts[:i]) for i in range(1, len(parts))]
    return any(m == part or m.endswith(f".{part}") for m in modules for part in lora.modules_to_save)


def _find_holder(layer: Any, key: str) -> nn.Module:
    """Return the module that has a parameter, of the base weight that within all wrappers."""
    if key.startswith("base_layer."):
        return layer.get_base_layer()
    return layer.get_submodule(key.rpartition(".")[0])
