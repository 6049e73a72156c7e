"""A model with its adapters merged into the weights that they were trained over, one tensor after another.

Each layer of peft gets its values for as long as its weight is merged, and merges it by itself, so that every kind of
adapter is merged as peft does it. The host holds the tensors of one conversion, never the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lit_fsdp.adapters.initialization import decompose, is_decomposed
from lit_fsdp.adapters.inject import add_adapters
from lit_fsdp.adapters.layers import ADAPTER, clean_name, is_adapter_name, is_own_part, iterate_adapters
from lit_fsdp.adapters.lora import KEEPS_BASE, LoRA
from lit_fsdp.checkpoint.reader import StoredCheckpoint, build_on_meta
from lit_fsdp.checkpoint.untrusted import refuse_other_forms
from lit_fsdp.errors import join_names
from lit_fsdp.export.position_embeddings import ResizedCheckpoint
from lit_fsdp.quantization.layers import QuantizedExperts, is_named, iterate_quantized, quantize_model
from lit_fsdp.quantization.quantize import Quantization, requantize
from lit_fsdp.weights.base_weights import BASE, LORA, fetch_base, fetch_pretrained, get_pretrained_folder, is_base
from lit_fsdp.weights.convert import convert_rows, plan_conversions
from lit_fsdp.weights.prequantized import QuantizedFiles


class BaseWeights:
    """The tensors of a base model by their names in the model, whole.

    Args:
        files: Of the model, open.
        model: On the meta device, in which tied parameters are tied.
        replaced: Names of tensors that were trained in full, which files may lack, such as a classification head.

    Raises:
        ValueError: The files do not fit the model.
    """

    def __init__(self, files: QuantizedFiles, model: PreTrainedModel, replaced: Collection[str] = ()) -> None:
        self._files = files
        self._model = model
        state, aliases = model.state_dict(), list_aliases(model)
        conversions, _ = plan_conversions(model, files.tensors, state)
        made = {name: (name, conversion) for conversion in conversions for name in conversion.shapes}
        known = {name: [n for n in (name, *aliases.get(name, ())) if n in made] for name in state}
        self._sources = {name: made[names[0]] for name, names in known.items() if names}
        if missing := [name for name, names in known.items() if not names and name not in replaced]:
            raise ValueError(f"base: {files.folder} lacks {join_names(missing)}: it is no {type(model).__name__}")

    def get_dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor, or what it is made of, is stored, or was before it was quantized.

        Of one that is not there, it is that of the first one.
        """
        _, conversion = self._sources.get(name) or next(iter(self._sources.values()))
        return self._files.get_dtype(conversion.sources[0][1])

    def read(self, name: str) -> Tensor:
        """Return a tensor in the dtype in which it is stored, a quantized one in that which it had before."""
        target, conversion = self._sources[name]
        if conversion.converter is None:
            stored = conversion.sources[0][1]
            return self._files.read_dense(stored) if stored in self._files.quantized else self._files.read(stored)
        dtype = self.get_dtype(name)
        made = convert_rows(self._model, conversion, self._files.tensors, self._files.read_rows, dtype)
        return made[target].contiguous()


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
        self.peft_config: Any = model.peft_config[ADAPTER]
        for _, layer in iterate_adapters(model):
            layer.initialization = self.lora.init_lora_weights
        self.layers = {clean_name(f"{n}.{get_weight_name(m)}"): (n, m) for n, m in iterate_adapters(model)}
        self.trained = [n for n in checkpoint.tensors if is_saved(n, self.lora) and not is_adapter_name(n)]
        self._quantized: set[str] = set()
        self.quantized_more: list[str] = []  # than Transformers quantizes: experts, and layers of Falcon
        self.unquantized: list[str] | None = None  # for Transformers, where its own choice would be another
        if self.quantization is not None:
            model = build_on_meta(checkpoint)
            kinds, linear, head = dict(model.named_modules()), _list_linear(model), model.get_output_embeddings()
            quantize_model(model, self.quantization, keep=self.lora.modules_to_save)
            layers = dict(iterate_quantized(model))
            self._quantized = {f"{n}.{key}" for n, layer in layers.items() for key in layer.dense_shapes}
            has_experts = any(isinstance(layer, QuantizedExperts) for layer in layers.values())
            others = {type(kinds[n]).__name__ for n in layers if n not in linear and isinstance(kinds[n], nn.Linear)}
            self.quantized_more = ["experts"] * has_experts + [f"{kind} layers" for kind in sorted(others)]
            dense = [name for name in linear if name not in layers]
            if dense != [name for name, module in linear.items() if module is head]:
                self.unquantized = shorten_names(dense, linear)

    def describe_adapter(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of the adapter of one weight on the meta device, by their names in the checkpoint."""
        prefix, layer = self.layers[name]
        own = (n for n, _ in layer.named_parameters() if is_own_part(n))
        return {f"{prefix}.{n}": self.checkpoint.describe(f"{prefix}.{n}").float() for n in own}

    def start(self, name: str, weight: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Return the weight that an adapter was trained over, and ``A`` and ``B`` that were taken out of it.

        ``weight`` is that of the base, ``float32``.
        """
        _, layer = self.layers[name]
        if not is_decomposed(layer):
            return weight, None
        quantize = partial(requantize, settings=self.quantization or Quantization())
        a, b, rest = decompose(layer, weight, quantize)
        return self._requantize(name, rest), (a, b)

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """Return a weight of the base with its adapter merged, ``float32``."""
        prefix, layer = self.layers[name]
        weight, _ = self.start(name, weight.float())
        values = self.checkpoint.read(self.describe_adapter(name))
        state = {key.removeprefix(f"{prefix}."): value for key, value in values.items()}
        layer, base_name = deepcopy(layer), get_weight_name(layer)
        layer.load_state_dict(state, strict=False, assign=True)
        setattr(layer.get_base_layer(), base_name, nn.Parameter(weight, requires_grad=False))
        with torch.no_grad():
            layer.merge()
        return getattr(layer.get_base_layer(), base_name).data

    def read_merged(self, base: BaseWeights, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of the merged model, by name, in the dtypes of ``wanted``."""
        tensors: dict[str, Tensor] = {}
        for name, like in wanted.items():
            if name in self.trained:
                tensors |= self.checkpoint.read({name: like})
                continue
            tensor = base.read(name)
            if name in self.layers:
                tensor = self.merge(name, tensor)
            elif self.lora.init_lora_weights not in KEEPS_BASE:  # others fit the quantized layers around them
                tensor = self._requantize(name, tensor)
            if isinstance(self.checkpoint, ResizedCheckpoint) and name == self.checkpoint.position_name:
                tensor = self.checkpoint.interpolate(tensor)
            tensors[name] = tensor.to(like.dtype)
        return tensors

    def _requantize(self, name: str, weight: Tensor) -> Tensor:
        """Return what quantization made of a weight, if it did; of experts, of one matrix after another."""
        if name not in self._quantized or self.quantization is None:
            return weight
        if weight.dim() == 2:
            return requantize(weight.float(), self.quantization)
        return torch.stack([requantize(matrix.float(), self.quantization) for matrix in weight])


def read_lora(checkpoint: StoredCheckpoint) -> LoRA:
    """Return the settings of the adapters in a checkpoint."""
    with refuse_other_forms():
        return LoRA(**checkpoint.meta[LORA])


def read_quantization(checkpoint: StoredCheckpoint) -> Quantization | None:
    """Return how the base of the adapters in a checkpoint was quantized."""
    with refuse_other_forms():
        settings = checkpoint.meta[BASE]["quantization"]
        return None if settings is None else Quantization(**settings)


def open_base(
    checkpoint: StoredCheckpoint, base: str | None, fetch: Callable[[str, str], None] = fetch_pretrained
) -> Path:
    """Return the folder of the base model of adapters: the recorded one, or ``base``, a name on the Hub or a folder.

    Args:
        checkpoint: That of the adapters.
        base: Instead of the recorded one.
        fetch: Downloads it, called with its name and what the user calls it.

    Raises:
        ValueError: It is not there, or has other weights than those that the adapters were trained over.
    """
    with refuse_other_forms():
        trained, fingerprint = checkpoint.meta[BASE]["name"], checkpoint.meta[BASE]["fingerprint"]
    name = fetch_base(str(trained), base, fetch)
    folder = get_pretrained_folder(name)
    if not is_base(fingerprint, folder):
        raise ValueError(
            f"base: got {name!r}: its weights are not those of {trained!r} that the adapters were trained over; set "
            "base to a copy of that model"
        )
    return folder


def shorten_names(names: Sequence[str], among: Collection[str]) -> list[str]:
    """Return the last parts of names by which Transformers finds these ``among`` others, or else the names in full.

    It takes all whose name ends so, also in the middle of a word; seen in 5.23.
    """
    short = []
    for name in names:
        part = name.rpartition(".")[2]
        whole = f"{name}$"  # only read as an expression
        short.append(part if {n for n in among if n.endswith(part)} <= {*names} else name if "." in name else whole)
    return list(dict.fromkeys(short))


def _list_linear(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that Transformers quantizes if it is not told otherwise; seen in 5.23."""
    return {n: m for n, m in model.named_modules() if type(m) is nn.Linear or isinstance(m, Conv1D)}


def list_aliases(model: PreTrainedModel) -> dict[str, list[str]]:
    """Map each parameter's name to all names it has; those of a tied one are several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: group for group in names.values() for name in group}


def get_weight_name(layer: Any) -> str:
    """Return what the weight that an adapter belongs to is called in its module."""
    return getattr(layer, "parameter_name", "weight")  # of one that is no layer, such as experts


def is_saved(name: str, lora: LoRA) -> bool:
    """Whether a tensor is one of the modules that train in full."""
    return is_named(name.rpartition(".")[0], lora.modules_to_save)
