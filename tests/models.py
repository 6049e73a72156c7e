"""Tiny models of many families, and a parent that holds one as a LightningModule does."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification

from lit_fsdp.adapters.layers import clean_name
from lit_fsdp.quantization.layers import iterate_quantized
from lit_fsdp.quantization.quantize import dequantize

_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_WIDTH = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 67, **_ENDS}
_GATED = {**_WIDTH, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    "llama": _GATED,
    "qwen2": _GATED,
    "qwen3": _GATED,
    "qwen3_moe": {**_GATED, "num_experts": 5, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
    "gemma3_text": _GATED,
    "mistral": _GATED,
    "falcon": {**_WIDTH, "ffn_hidden_size": 64, "attention_dropout": 0.0},
    "apertus": _GATED,
    "mixtral": {**_GATED, "num_local_experts": 4},
    "gpt_oss": {**_GATED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {**_WIDTH, "intermediate_size": 64, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {
        **_GATED,
        "intermediate_size_mlp": 64,
        "interleave_moe_layer_step": 1,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
    },
    "deepseek_v3": {
        **{key: value for key, value in _GATED.items() if key != "head_dim"},
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 8,
        "v_head_dim": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
    },
    "gpt_neox": {**_WIDTH, "intermediate_size": 64},
    "opt": {**_WIDTH, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 67, "n_positions": 32, **_ENDS},
}


def to_full(tensor: Tensor) -> Tensor:
    """Return the whole tensor, on all ranks, of one that may be a shard. All ranks must call it."""
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole


class Parent(nn.Module):
    """Holds a model as ``model``, as a LightningModule does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


class Block(nn.Module):
    """A residual block of two linears and a norm."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Plain torch: blocks between two linears, with one parameter of its own."""

    def __init__(self, width: int = 7, num_blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.last = nn.Linear(width, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def reset_parameters(self) -> None:
        """Set what is not in a child."""
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.scale


def build_language_model(family: str, device: str = "meta", **config: Any) -> Any:
    """Return a tiny causal language model of a family of Transformers."""
    settings = AutoConfig.for_model(family, **{**LANGUAGE_MODELS[family], **config})
    with torch.device(device):
        return AutoModelForCausalLM.from_config(settings)


def dequantize_model(model: nn.Module, like: nn.Module) -> nn.Module:
    """Fill ``like``, an unquantized model, with the weights that a quantized one computes with, below its adapters."""
    state = dict(like.named_parameters())
    quantized = {clean_name(name): layer for name, layer in iterate_quantized(model)}
    with torch.no_grad():
        for full_name, parameter in model.named_parameters():
            name = clean_name(full_name)
            layer = quantized.get(name.rpartition(".")[0])
            key = name.rpartition(".")[2]
            if layer is None or key not in layer.dense_shapes:
                if name in state:
                    state[name].copy_(parameter)
                continue
            stored = layer.get_stored(key)
            if parameter.dim() == 2:
                state[name].copy_(dequantize(*stored, layer.quantization, torch.float32))
                continue
            for i, matrix in enumerate(state[name]):
                own = [None if part is None else part[i] for part in stored]
                matrix.copy_(dequantize(*own, layer.quantization, torch.float32))
    return like


def build_image_model(device: str = "meta", model_type: str = "vit", **sizes: Any) -> Any:
    """Return a tiny vision transformer."""
    config = {k: v for k, v in _WIDTH.items() if k.startswith(("hidden", "num"))}
    config |= {"image_size": 16, "patch_size": 8, **({"intermediate_size": 64} if model_type == "vit" else {}), **sizes}
    settings = AutoConfig.for_model(model_type, **config)
    with torch.device(device):
        return AutoModelForImageClassification.from_config(settings)


def make_tokens(num_rows: int = 2, length: int = 8, vocab_size: int = 67) -> Tensor:
    """Return the same random tokens on every rank."""
    return torch.randint(3, vocab_size, (num_rows, length), generator=torch.Generator().manual_seed(3))


def compute_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the next-token loss of a Transformers model, possibly inside a ``Parent``."""
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss
