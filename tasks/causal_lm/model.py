"""Language models of Transformers, without values."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

_DEFAULT = "sdpa"


def build_model(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """Return a causal language model on the meta device, in float32.

    Args:
        config: Of the model.
        attention: Its implementation, a name of Transformers'.

    Raises:
        ValueError: There is no such model, or not with that attention.
    """
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, attn_implementation=attention, dtype=torch.float32
            )
    except (ImportError, ValueError) as error:
        text = str(error)
        if text.startswith("Unrecognized configuration class"):
            raise ValueError(
                f"model_type: got {config.model_type!r}: Transformers has no causal language model of this type: "
                "expected one of a decoder, such as llama, qwen3 or gpt2"
            ) from error
        if "attention" not in text:
            raise
        got = f"attention: got {attention!r}{', the default' if attention == _DEFAULT else ''}"
        if " does not support an attention implementation" in text:
            raise ValueError(f"{got}: {text.split(maxsplit=1)[0]} does not have it; nearest: eager") from error
        raise ValueError(f"{got}: {text.strip().splitlines()[0]}; nearest: eager") from error
    return model
