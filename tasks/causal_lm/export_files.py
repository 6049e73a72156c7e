"""The small files of a Hugging Face folder that a checkpoint carries, so that it is enough to export."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from transformers import PreTrainedModel

from lit_fsdp.adapters.lora import LoRA
from lit_fsdp.export.adapter import describe_adapters
from lit_fsdp.export.folder import ADAPTER_CONFIG
from lit_fsdp.tasks.causal_lm.tokenizer import find_pad_id, read_tokenizer_files
from lit_fsdp.weights.base_weights import get_pretrained_folder

GENERATION = "generation_config.json"


def collect_export_files(
    model: PreTrainedModel, pretrained: str | None, lora: LoRA | None, tokenizer: Any
) -> dict[str, str | bytes]:
    """Return them by name.

    Args:
        model: Sharded or not.
        pretrained: Where its weights came from.
        lora: Its adapters.
        tokenizer: Of its data, if there is one.
    """
    config, generation = deepcopy(model.config), deepcopy(model.generation_config)
    # FSDP2 puts a class of its own in front of the model's.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    files: dict[str, str | bytes] = {}
    if tokenizer is not None:
        if pretrained is None:  # or generation would end at a token that the model has never seen
            for name in ("bos_token_id", "eos_token_id"):
                setattr(config, name, getattr(tokenizer, name))
                setattr(generation, name, getattr(tokenizer, name))
            generation.pad_token_id = find_pad_id(tokenizer)
        files |= read_tokenizer_files(tokenizer)
    files["config.json"] = config.to_json_string()
    if lora is not None:
        files[ADAPTER_CONFIG] = describe_adapters(model, lora, pretrained)
    if model.can_generate():
        files[GENERATION] = generation.to_json_string()
    if pretrained is not None and (given := get_pretrained_folder(pretrained) / GENERATION).is_file():
        files[GENERATION] = given.read_text()
    return files
