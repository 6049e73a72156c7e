"""A model as one GGUF file, for llama.cpp and what is built on it: metadata, tokenizer and tensors.

What llama.cpp expects of each family is in its converter and its loader; the package gguf knows the names. Tensors are
read, changed and written one after the other, as in a Hugging Face folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lit_fsdp.errors import ConfigError
from lit_fsdp.export.folder import check_room
from lit_fsdp.export.gguf_tokenizer import add_tokenizer, check_tokenizer
from lit_fsdp.weights.hub_names import Part, convert_part

if TYPE_CHECKING:
    from gguf import GGUFWriter

GGUFType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
# By model_type: the name of the architecture in gguf, and what activates its feed-forward.
_FAMILIES = {
    "llama": ("LLAMA", "silu"),
    "qwen2": ("QWEN2", "silu"),
    "qwen3": ("QWEN3", "silu"),
    "gemma": ("GEMMA", "gelu_pytorch_tanh"),
    "gemma2": ("GEMMA2", "gelu_pytorch_tanh"),
    "gemma3_text": ("GEMMA3", "gelu_pytorch_tanh"),
}
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6}  # blocks; the others see a window. llama.cpp has it built in.
_LOCAL_THETA = 10_000.0  # of the blocks that see a window, likewise
_WIDE = {"gemma2": 46, "gemma3_text": 62}  # blocks of the one size whose attention llama.cpp scales by the width
_ROPE_FREQS = "rope_freqs.weight"


def check_gguf(config: Any, files: Mapping[str, str | bytes]) -> None:
    """Refuse a model that llama.cpp would not load, or would run otherwise than Transformers.

    Raises:
        ValueError: With what it has, and what there is for it.
        ConfigError: The package gguf is missing.
    """
    try:
        import gguf  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError('gguf needs the package gguf: pip install "lit_fsdp[gguf]"') from None
    family = config.model_type
    if family not in _FAMILIES:
        raise ValueError(f"gguf: got a model of type {family}: expected one of {', '.join(_FAMILIES)}")
    for problem in _list_differences(config):
        raise ValueError(f"gguf: llama.cpp has no {family} with {problem}: export it without gguf")
    check_tokenizer(files, config.vocab_size)


def write_gguf(
    path: Path,
    gguf_type: GGUFType,
    parts: Sequence[Part],
    read: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    model: PreTrainedModel,
    files: Mapping[str, str | bytes],
    name: str,
) -> int:
    """Write one file with all that llama.cpp needs; return the bytes of the tensors.

    Norms and other vectors stay in float32. A matrix whose rows do not divide into blocks becomes float16.

    Raises:
        ValueError: The disk is too small, or a value is beyond float16.
    """
    import gguf
    from gguf.quants import quant_shape_to_byte_shape

    config: Any = model.config
    architecture = gguf.MODEL_ARCH[_FAMILIES[config.model_type][0]]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    chosen = gguf.GGMLQuantizationType[gguf_type.upper()]
    shapes = {key: tuple(tensor.shape) for part in parts for key, tensor in part.outputs.items()}
    types = {key: _choose_type(shape, chosen) for key, shape in shapes.items()}
    sizes = {key: math.prod(quant_shape_to_byte_shape(shapes[key], types[key])) for key in shapes}
    num_bytes = check_room(path.parent, {k: torch.empty(n, dtype=torch.uint8, device="meta") for k, n in sizes.items()})
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_name(name)
    _add_settings(writer, config, "ALL_F32" if gguf_type == "f32" else f"MOSTLY_{gguf_type.upper()}")
    add_tokenizer(writer, files, config.vocab_size)
    factors = _compute_rope_factors(config)
    if factors is not None:
        writer.add_tensor_info(_ROPE_FREQS, factors.shape, factors.dtype, factors.nbytes)
    for key, shape in shapes.items():
        new = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if new is None:
            raise ValueError(f"gguf: llama.cpp has no name for {key}: export it without gguf")
        writer.add_tensor_info(new, shape, np.dtype(np.float32), sizes[key], raw_dtype=types[key])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        for part in parts:
            converted = convert_part(model, read(part.inputs))
            for key in part.outputs:
                values = change_for_llama_cpp(key, converted[key].float(), config).numpy()
                writer.write_tensor_data(_store(key, values, types[key]))
    finally:
        writer.close()
    return num_bytes


def change_for_llama_cpp(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Return a tensor as llama.cpp computes with it.

    Llama: rows of queries and keys in pairs of neighbours, as it rotates those. Gemma: norms with their 1 added.
    """
    if config.model_type == "llama" and (".q_proj." in name or ".k_proj." in name):
        num_heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        halves = tensor.unflatten(0, (num_heads, 2, -1))  # [heads, 2, head_dim / 2, ...]
        return halves.transpose(1, 2).flatten(0, 2).contiguous()
    if config.model_type.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    return tensor


def _choose_type(shape: Sequence[int], chosen: Any) -> Any:
    import gguf

    if len(shape) == 1:
        return gguf.GGMLQuantizationType.F32
    return gguf.GGMLQuantizationType.F16 if shape[-1] % gguf.GGML_QUANT_SIZES[chosen][0] else chosen


def _store(name: str, values: np.ndarray[Any, Any], stored_type: Any) -> np.ndarray[Any, Any]:
    from gguf.quants import quantize

    with np.errstate(over="ignore"):
        stored: np.ndarray[Any, Any] = quantize(values, stored_type)
    if stored_type.name == "F16" and np.isinf(stored).any():
        raise ValueError(f"gguf: {name} holds values beyond those of float16: expected bf16 or f32")
    return stored


def _add_settings(writer: GGUFWriter, config: Any, file_type: str) -> None:
    import gguf

    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)

    head_dim, rope = _get_head_dim(config), _get_rope(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if config.model_type in _FULL_EVERY:
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _list_differences(config: Any) -> list[str]:
    """Return what llama.cpp computes otherwise for this family, however it is written."""
    found = []
    family, rope = config.model_type, _get_rope(config)
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation != _FAMILIES[family][1]:
        found.append(f"hidden_act {activation!r}")
    known = ("default", "linear", "llama3") if family == "llama" else ("default", "linear")
    if rope["rope_type"] not in known:
        found.append(f"rope_type {rope['rope_type']!r}")
    if getattr(config, "attention_bias", False) and family != "llama":
        found.append("attention_bias")
    every, layers = _FULL_EVERY.get(family), getattr(config, "layer_types", None)
    kinds = ["full_attention" if every is None or not (i + 1) % every else "sliding_attention" for i in range(512)]
    if layers and list(layers) != kinds[: len(layers)]:
        found.append(f"layer_types {layers}")
    if every is not None:
        is_wide = config.num_hidden_layers == _WIDE[family]
        scalar = config.hidden_size / config.num_attention_heads if is_wide else _get_head_dim(config)
        if config.query_pre_attn_scalar != scalar:
            found.append(f"query_pre_attn_scalar {config.query_pre_attn_scalar}, but only {scalar:g}")
    if family == "gemma3_text" and (local := _get_rope(config, "sliding_attention"))["rope_theta"] != _LOCAL_THETA:
        found.append(f"rope_theta {local['rope_theta']} of sliding attention, but only {_LOCAL_THETA:g}")
    if family == "gemma3_text" and getattr(config, "attn_logit_softcapping", None):
        found.append("attn_logit_softcapping")
    return found


def _get_head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _get_rope(config: Any, layers: str = "full_attention") -> Mapping[str, Any]:
    parameters: Mapping[str, Any] = config.rope_parameters
    return {"rope_type": "default", **parameters.get(layers, parameters)}


def _compute_rope_factors(config: Any) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    """Return by what each frequency is divided, which only Llama 3 has."""
    rope = _get_rope(config)
    if rope["rope_type"] != "llama3":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    exponents = torch.arange(0, _get_head_dim(config), 2, dtype=torch.float32) / _get_head_dim(config)
    factors: np.ndarray[Any, np.dtype[np.float32]] = (1 / rope["rope_theta"] ** exponents / scaled).float().numpy()
    return factors
