"""From the tensors of a Transformers model to those that the Hugging Face Hub stores.

Transformers 5 fuses some tensors when it loads a model, such as the experts of a layer into one, and its
``save_pretrained`` takes them apart again, all at once. Here it is done part by part: what belongs together is found
out on the meta device, so that later no more than one part has to be in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, apply_converters, revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict


@dataclass(frozen=True, kw_only=True)
class Part:
    """Tensors that are converted together, on the meta device."""

    inputs: Mapping[str, Tensor]  # by their names in the model's state dict
    outputs: Mapping[str, Tensor]  # what they become, by their names on the Hub


def list_saved_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the tensors that ``save_pretrained`` would write, a tied one under one name."""
    state = dict(model.state_dict())
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    return list(remove_tied_weights_from_state_dict(state, model))


def plan_parts(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> list[Part]:
    """Return what to convert together, in the order of ``tensors``, which like the model are on the meta device.

    Raises:
        ValueError: Transformers cannot convert this architecture part by part.
    """
    groups: dict[str, list[str]] = {}
    converters = _find_converters(model)
    for name in tensors:
        groups.setdefault(apply_converters(name, converters)[0], []).append(name)
    who = f"{type(model).__name__} cannot be exported:"
    try:
        inputs = [{name: tensors[name] for name in names} for names in groups.values()]
        parts = [Part(inputs=part, outputs=_describe(convert_part(model, part))) for part in inputs]
        whole = _describe(revert_weight_conversion(model, dict(tensors)))
    except (RuntimeError, ValueError, LookupError, AttributeError) as error:
        raise ValueError(f"{who} Transformers does not convert it back: {error}") from error
    apart = [(name, tensor.shape) for part in parts for name, tensor in part.outputs.items()]
    if sorted(apart) != sorted((name, tensor.shape) for name, tensor in whole.items()):
        raise ValueError(
            f"{who} Transformers converts its tensors only all at once; load the "
            "checkpoint into the model and call save_pretrained"
        )
    return parts


def convert_part(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of one part, by their names in the state dict, as the Hub stores them."""
    return revert_weight_conversion(model, dict(tensors))


def _find_converters(model: PreTrainedModel) -> list[WeightConverter]:
    """Return what joins or splits tensors on the way to the Hub, as ``revert_weight_conversion`` applies it."""
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    reverse = [c.reverse_transform() for c in reversed(conversions) if isinstance(c, WeightConverter)]
    return [c for c in reverse if isinstance(c, WeightConverter)]


def _describe(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return shapes and dtypes, not views of something larger."""
    return {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}
