"""The transformers of Qwen3-TTS one position after the other, for a model that only speaks.

Note [Steps by hand]: a frame takes one step of the talker and 15 of the code predictor, each over a single position.
What Transformers does around the matrices of a layer, in a hundred small operations, takes a good part of the time.
So a model that only speaks has matrices that read the same side by side, and keeps keys and values in buffers that are
there beforehand. The operations are those of Transformers, in its order.

On the CPU, a matrix that makes at least as many numbers as it reads is stored by columns: times one position, it is
then read faster. Sums are rounded in another order there, so states differ in their last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3MLP, Qwen3RMSNorm

_FEWEST_PLACES = 256  # positions of a cache at first; it doubles


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """The weights of a layer, side by side where they read the same."""

    qkv: Tensor  # [(heads + 2 * key_value_heads) * head_dim, size]
    out: Tensor
    gate_up: Tensor
    down: Tensor
    input_norm: Tensor
    qk_norm: Tensor  # [heads + key_value_heads, head_dim]
    post_norm: Tensor


class StepCache:
    """Keys and values of all layers, and the positions of the rotary embedding.

    Args:
        steps: Whose.
        num_rows: Texts that are spoken together.
        num_places: Positions to have room for at first.
    """

    def __init__(self, steps: TransformerSteps, num_rows: int, num_places: int = _FEWEST_PLACES) -> None:
        self.length = 0
        self._steps, self._num_rows = steps, num_rows
        self._keys = self._values = torch.empty(0)
        self.cos = self.sin = torch.empty(0)  # [places, head_dim]
        self._room = 0
        self._grow(num_places)

    def reset(self) -> None:
        """Forget all positions, and keep the room."""
        self.length = 0

    def extend(self, num_places: int) -> None:
        """Make room for so many positions more, and count them."""
        self.length += num_places
        if self.length > self._room:
            self._grow(max(self.length, 2 * self._room))

    def put(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [rows, heads, places, head_dim] of the last positions; return those of all."""
        begin = self.length - keys.shape[2]
        own_keys, own_values = self._keys[layer], self._values[layer]
        own_keys[:, :, begin : self.length] = keys
        own_values[:, :, begin : self.length] = values
        return own_keys[:, :, : self.length], own_values[:, :, : self.length]

    def _grow(self, room: int) -> None:
        steps, old = self._steps, self._room
        like = steps.layers[0].qkv
        shape = len(steps.layers), self._num_rows, steps.num_key_values, room, steps.head_dim
        keys, values = like.new_empty(shape), like.new_empty(shape)
        if old:
            keys[..., :old, :], values[..., :old, :] = self._keys, self._values
        self._keys, self._values, self._room = keys, values, room
        cos, sin = steps.rotary(like, torch.arange(room, device=like.device)[None])
        half = steps.head_dim // 2
        self.cos, self.sin = cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)


class TransformerSteps:
    """A transformer of Transformers by hand: Note [Steps by hand]. Its weights move, and stay those of the model.

    Args:
        model: For which ``can_step`` holds.
    """

    def __init__(self, model: Qwen3Model) -> None:
        config: Any = model.config
        self.num_heads, self.num_key_values = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        first: Any = model.layers[0]
        self.rotary, self.norm, self.act = model.rotary_emb, model.norm.weight, first.mlp.act_fn
        self.layers = [self._take(layer) for layer in model.layers]

    def _take(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        q_norm, k_norm = attention.q_norm.weight, attention.k_norm.weight
        return _Layer(
            qkv=lay_out([attention.q_proj, attention.k_proj, attention.v_proj]),
            out=lay_out([attention.o_proj]),
            gate_up=lay_out([mlp.gate_proj, mlp.up_proj]),
            down=lay_out([mlp.down_proj]),
            input_norm=layer.input_layernorm.weight,
            qk_norm=torch.cat([q_norm.expand(self.num_heads, -1), k_norm.expand(self.num_key_values, -1)]),
            post_norm=layer.post_attention_layernorm.weight,
        )

    def run(self, inputs: Tensor, cache: StepCache, places: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return the states [rows, length, size] of inputs [rows, length, size], which come after those of the cache.

        Args:
            inputs: Embedded.
            cache: Has the positions before, and gets these.
            places: Of the inputs [rows, length], for the rotary embedding; in order if not given.
            mask: Which positions [rows, 1, length, all] they look at; all up to their own if not given.
        """
        num_rows, length, _ = inputs.shape
        begin = cache.length
        cache.extend(length)
        is_causal = mask is None and length > 1
        assert not (is_causal and begin), "several positions after others need a mask"
        if places is None:
            cos, sin = cache.cos[None, begin : cache.length, None], cache.sin[None, begin : cache.length, None]
        else:
            cos, sin = cache.cos[places].unsqueeze(2), cache.sin[places].unsqueeze(2)
        num_rotated = self.num_heads + self.num_key_values
        hidden = inputs
        for i, layer in enumerate(self.layers):
            normed = F.rms_norm(hidden, hidden.shape[-1:], layer.input_norm, self.eps)
            qkv = F.linear(normed, layer.qkv).view(num_rows, length, -1, self.head_dim)
            qk = F.rms_norm(qkv[:, :, :num_rotated], (self.head_dim,), None, self.eps).mul_(layer.qk_norm)
            qk = (qk * cos).add_(qk.roll(self.head_dim // 2, -1).mul_(sin)).transpose(1, 2)
            keys, values = cache.put(i, qk[:, self.num_heads :], qkv[:, :, num_rotated:].transpose(1, 2))
            attended = F.scaled_dot_product_attention(
                qk[:, : self.num_heads], keys, values, attn_mask=mask, is_causal=is_causal, enable_gqa=True
            )
            hidden = hidden + F.linear(attended.transpose(1, 2).reshape(num_rows, length, -1), layer.out)
            normed = F.rms_norm(hidden, hidden.shape[-1:], layer.post_norm, self.eps)
            gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + F.linear(self.act(gate).mul_(up), layer.down)
        return F.rms_norm(hidden, hidden.shape[-1:], self.norm, self.eps)


def can_step(model: nn.Module) -> bool:
    """Tell whether a transformer can be computed by hand: whole, without adapters and quantization, in float32.

    Also without attention over a window, and with that of torch.
    """
    if not isinstance(model, Qwen3Model) or any(p.dtype != torch.float32 for p in model.parameters()):
        return False
    config: Any = model.config
    first: Any = model.layers[0]
    known = (Qwen3DecoderLayer, Qwen3Attention, Qwen3MLP, Qwen3RMSNorm, nn.Linear, type(first.mlp.act_fn))
    parts = [part for layer in model.layers for part in layer.modules()]
    # Exact types: FSDP2 and adapters put theirs in place of these.
    return (
        all(type(part) in known and getattr(part, "bias", None) is None for part in parts)
        and config._attn_implementation == "sdpa"
        and not model.has_sliding_layers
    )


@torch.no_grad()
def lay_out(linears: Sequence[nn.Linear]) -> Tensor:
    """Return the weights of layers that read the same as one [all outputs, inputs]; theirs become parts of it."""
    weight = torch.cat([linear.weight for linear in linears])
    if weight.device.type == "cpu" and weight.shape[0] >= weight.shape[1]:
        weight = weight.t().contiguous().t()
    for linear, part in zip(linears, weight.split([linear.out_features for linear in linears]), strict=True):
        linear.weight.data = part
    return weight
