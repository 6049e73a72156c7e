"""Adapters as a folder of peft: what is added to a base model that stays where it is."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_fsdp.adapters.inject import find_misreading
from lit_fsdp.adapters.layers import ADAPTER, clean_name, is_adapter_name
from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.checkpoint.reader import build_on_meta
from lit_fsdp.export.folder import ADAPTER_CONFIG, check_room
from lit_fsdp.export.merge import AdaptedWeights, BaseWeights
from lit_fsdp.export.safetensors_writer import open_tensor_files

ADAPTER_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of peft around the model
_STARTS_ELSEWHERE = ("pissa", "pissa_niter_16", "olora")  # with other base weights


def describe_adapters(model: PreTrainedModel, lora: LoRA, base_model: str | None) -> str:
    """Return ``adapter_config.json``, with the targets that peft found in this model and where its base model is."""
    config: Any = deepcopy(model.peft_config[ADAPTER])
    config.modules_to_save = _name_saved(model, lora) or None
    config.base_model_name_or_path = base_model
    config.inference_mode = True
    config.task_type = "CAUSAL_LM" if model.can_generate() else None
    config.init_lora_weights = True  # another one would change the base when it is loaded
    with tempfile.TemporaryDirectory() as name:
        config.save_pretrained(name)
        return (Path(name) / ADAPTER_CONFIG).read_text()


def needs_base(lora: LoRA) -> bool:
    """Whether adapters can be exported only with their base at hand."""
    return lora.init_lora_weights in _STARTS_ELSEWHERE


def write_adapter(
    folder: Path, weights: AdaptedWeights, base: BaseWeights | None, dtype: torch.dtype | None
) -> list[Tensor]:
    """Write the adapters and the modules that train beside them; return what was written, on the meta device.

    With ``base``, whose weights the adapters were taken out of, they are written relative to it, with twice the rank.
    Without ``dtype``, tensors keep theirs.

    Raises:
        ValueError: peft would take some for others.
    """
    _check_targets(weights)
    outputs: dict[str, Tensor] = {}
    reads: list[Callable[[], dict[str, Tensor]]] = []
    for name in weights.layers:
        like = weights.describe_adapter(name)
        reads.append(partial(weights.checkpoint.read, like))
        if base is not None:
            like = {key: tensor.repeat(2, 1) if _is_first(key) else tensor.repeat(1, 2) for key, tensor in like.items()}
            reads[-1] = partial(_subtract_start, weights, base, name)
        outputs |= like
    for name in weights.trained:
        outputs[name] = weights.checkpoint.describe(name)
        reads.append(partial(weights.checkpoint.read, {name: outputs[name]}))
    outputs = {n: tensor.to(dtype or weights.checkpoint.describe(n).dtype) for n, tensor in outputs.items()}
    check_room(folder, outputs)
    files = {ADAPTER_FILE: {name_for_peft(name): tensor for name, tensor in outputs.items()}}
    with open_tensor_files(folder, files) as write:
        for read in reads:
            for name, tensor in read().items():
                write(name_for_peft(name), tensor.to(outputs[name].dtype))
    return list(outputs.values())


def _check_targets(weights: AdaptedWeights) -> None:
    """Refuse linear layers that are called as single experts were in Transformers 4."""
    if reason := find_misreading(build_on_meta(weights.checkpoint), weights.peft_config):
        raise ValueError(f"merge: got false: {reason}; set merge to true, or train with other lora.target_modules")


def name_for_peft(name: str) -> str:
    """Return the name of a trained tensor in a folder of peft."""
    if is_adapter_name(name):
        name = name.removesuffix(".weight") if ".lora_magnitude_vector." in name else name
        name = name.replace(f".{ADAPTER}.", ".") if f".{ADAPTER}." in name else name.removesuffix(f".{ADAPTER}")
    return _PREFIX + name


def double_ranks(config: dict[str, Any]) -> dict[str, Any]:
    """Return ``adapter_config.json`` for adapters of twice the rank and the same scaling."""
    factor = math.sqrt(2) if config["use_rslora"] else 2
    return {
        **config,
        "r": 2 * config["r"],
        "lora_alpha": factor * config["lora_alpha"],
        "rank_pattern": {name: 2 * r for name, r in config["rank_pattern"].items()},
        "alpha_pattern": {name: factor * alpha for name, alpha in config["alpha_pattern"].items()},
    }


def _name_saved(model: PreTrainedModel, lora: LoRA) -> list[str]:
    """Return names of modules by which peft finds those that train in full, and no others.

    It takes every module whose name ends so, also in the middle of a word; seen in peft 0.21.
    """
    names = [clean_name(name) for name, _ in model.named_modules() if not is_adapter_name(name)]
    saved: list[str] = []
    for part in lora.modules_to_save:
        found = [name for name in names if name == part or name.endswith(f".{part}")]
        saved += [part] if len(found) == sum(name.endswith(part) for name in names) else found
    return list(dict.fromkeys(saved))


def _is_first(key: str) -> bool:
    """Whether a factor has the rank as its rows."""
    return ".lora_A." in key or ".lora_embedding_A." in key or key.endswith(".lora_embedding_A")


def _subtract_start(weights: AdaptedWeights, base: BaseWeights, name: str) -> dict[str, Tensor]:
    """Return factors of ``B A - B0 A0``: what an adapter adds to the weight that it was taken out of."""
    _, start = weights.start(name, base.read(name).float())
    result = weights.checkpoint.read(weights.describe_adapter(name))
    for key, value in result.items():
        first = start[0] if start is not None else torch.zeros_like(value)
        last = -start[1] if start is not None else torch.zeros_like(value)
        result[key] = torch.cat([value, first]) if _is_first(key) else torch.cat([value, last], dim=1)
    return result
