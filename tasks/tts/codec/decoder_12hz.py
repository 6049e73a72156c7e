"""The second half of the codec: from codes to audio, by a small transformer and causal convolutions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MistralConfig
from transformers.masking_utils import create_sliding_window_causal_mask

# Not in Transformers' public face, seen in 5.23.
from transformers.models.mimi.modeling_mimi import MimiLayerScale
from transformers.models.mistral.modeling_mistral import (
    MistralAttention,
    MistralMLP,
    MistralRMSNorm,
    MistralRotaryEmbedding,
)

_CHUNK, _CONTEXT = 300, 25  # frames decoded at once, and before them, as the official codec does it
_EPSILON = 1e-5


class CausalConv(nn.Module):
    """A convolution that looks back only."""

    def __init__(self, num_in: int, num_out: int, kernel_size: int, dilation: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(num_in, num_out, kernel_size, dilation=dilation, groups=groups)
        self.padding = (kernel_size - 1) * dilation

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [batch, channels, length] to as many positions."""
        return self.conv(F.pad(hidden, (self.padding, 0))).contiguous()


class CausalTransposedConv(nn.Module):
    """Makes ``stride`` positions of each one."""

    def __init__(self, num_in: int, num_out: int, kernel_size: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(num_in, num_out, kernel_size, stride=stride)
        self.num_cut = kernel_size - stride

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [batch, channels, length] to [batch, channels, length * stride]."""
        hidden = self.conv(hidden)
        return hidden[..., : hidden.shape[-1] - self.num_cut].contiguous()


class ConvNeXtBlock(nn.Module):
    """A convolution for each channel, then two linears over channels, with a residual connection."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.dwconv = CausalConv(size, size, 7, groups=size)
        self.norm = nn.LayerNorm(size, eps=1e-6)
        self.pwconv1 = nn.Linear(size, 4 * size)
        self.pwconv2 = nn.Linear(4 * size, size)
        self.gamma = nn.Parameter(torch.full((size,), 1e-6))

    def forward(self, hidden: Tensor) -> Tensor:
        """Keep the shape [batch, channels, length]."""
        inner = self.norm(self.dwconv(hidden).permute(0, 2, 1))
        inner = self.gamma * self.pwconv2(F.gelu(self.pwconv1(inner)))
        return hidden + inner.permute(0, 2, 1)


class SnakeBeta(nn.Module):
    """``x + sin^2(a x) / b`` with ``a`` and ``b`` of each channel, kept as logarithms (arXiv:2006.08195)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(size))
        self.beta = nn.Parameter(torch.zeros(size))

    def forward(self, hidden: Tensor) -> Tensor:
        """Keep the shape [batch, channels, length]."""
        alpha, beta = (p[None, :, None].exp() for p in (self.alpha, self.beta))
        return hidden + (1.0 / (beta + 1e-9)) * (hidden * alpha).sin().pow(2)


class ResidualUnit(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, size: int, dilation: int) -> None:
        super().__init__()
        self.act1, self.act2 = SnakeBeta(size), SnakeBeta(size)
        self.conv1 = CausalConv(size, size, 7, dilation=dilation)
        self.conv2 = CausalConv(size, size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Keep the shape [batch, channels, length]."""
        return self.conv2(self.act2(self.conv1(self.act1(hidden)))) + hidden


class UpsamplingBlock(nn.Module):
    """Halves the channels and makes ``rate`` positions of each one."""

    def __init__(self, size: int, rate: int) -> None:
        super().__init__()
        steps = [SnakeBeta(size), CausalTransposedConv(size, size // 2, 2 * rate, rate)]
        self.block = nn.ModuleList([*steps, *(ResidualUnit(size // 2, dilation) for dilation in (1, 3, 9))])

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [batch, channels, length] to [batch, channels / 2, length * rate]."""
        for step in self.block:
            hidden = step(hidden)
        return hidden


class Layer(nn.Module):
    """A transformer layer whose branches are scaled."""

    def __init__(self, config: MistralConfig, index: int) -> None:
        super().__init__()
        self.self_attn = MistralAttention(config, index)
        self.mlp = MistralMLP(config)
        self.input_layernorm = MistralRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = MistralRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn_layer_scale, self.mlp_layer_scale = MimiLayerScale(config), MimiLayerScale(config)

    def forward(self, hidden: Tensor, mask: Tensor | None, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Keep the shape [batch, length, size]."""
        attended, _ = self.self_attn(self.input_layernorm(hidden), position_embeddings=rotary, attention_mask=mask)
        hidden = hidden + self.self_attn_layer_scale(attended)
        return hidden + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(hidden)))


class FrameTransformer(nn.Module):
    """Looks back over a window of frames."""

    def __init__(self, config: MistralConfig, latent_size: int) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = MistralRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = MistralRotaryEmbedding(config)
        self.input_proj = nn.Linear(latent_size, config.hidden_size)
        self.output_proj = nn.Linear(config.hidden_size, latent_size)

    def forward(self, latents: Tensor) -> Tensor:
        """Keep the shape [batch, frames, latent_size]."""
        hidden = self.input_proj(latents)
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        mask = create_sliding_window_causal_mask(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
        )
        rotary = self.rotary_emb(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, mask, rotary)
        return self.output_proj(self.norm(hidden))


class Codebook(nn.Module):
    """Sums of vectors and how many there were: their means are the entries."""

    def __init__(self, num_entries: int, size: int) -> None:
        super().__init__()
        self.cluster_usage = nn.Parameter(torch.ones(num_entries))
        self.embedding_sum = nn.Parameter(torch.zeros(num_entries, size))

    def forward(self, codes: Tensor) -> Tensor:
        """Map codes [...] to entries [..., size]."""
        return F.embedding(codes, self.embedding_sum / self.cluster_usage.clamp(min=_EPSILON)[:, None])


class _Quantization(nn.Module):
    """Holds a codebook under its official name."""

    def __init__(self, num_entries: int, size: int) -> None:
        super().__init__()
        self._codebook = Codebook(num_entries, size)


class _QuantizerList(nn.Module):
    def __init__(self, num_quantizers: int, num_entries: int, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Quantization(num_entries, size) for _ in range(num_quantizers))


class ResidualQuantizer(nn.Module):
    """The sum of entries of several codebooks, projected."""

    def __init__(self, num_quantizers: int, num_entries: int, size: int) -> None:
        super().__init__()
        inner = size // 2
        self.input_proj = nn.Conv1d(size, inner, 1, bias=False)  # only in the files: decoding has no use for it
        self.output_proj = nn.Conv1d(inner, size, 1, bias=False)
        self.vq = _QuantizerList(num_quantizers, num_entries, inner)

    def forward(self, codes: Tensor) -> Tensor:
        """Map codes [batch, quantizers, frames] to [batch, size, frames]."""
        total = torch.zeros((), device=codes.device)
        for i, layer in enumerate(self.vq.layers):
            total = total + layer.get_submodule("_codebook")(codes[:, i]).transpose(1, 2)
        return self.output_proj(total)


class SplitQuantizer(nn.Module):
    """One semantic codebook, and the acoustic ones."""

    def __init__(self, num_quantizers: int, num_entries: int, size: int) -> None:
        super().__init__()
        self.rvq_first = ResidualQuantizer(1, num_entries, size)
        self.rvq_rest = ResidualQuantizer(num_quantizers - 1, num_entries, size)

    def forward(self, codes: Tensor) -> Tensor:
        """Map codes [batch, codebooks, frames] to [batch, size, frames]."""
        return self.rvq_first(codes[:, :1]) + self.rvq_rest(codes[:, 1:])


class CodecDecoder(nn.Module):
    """From codes to audio.

    Args:
        config: Of the transformer; all further settings are in its ``codec``.
    """

    def __init__(self, config: MistralConfig) -> None:
        super().__init__()
        codec: dict[str, Any] = config.codec
        latent, size = codec["latent_dim"], codec["decoder_dim"]
        self.samples_per_frame = math.prod([*codec["upsample_rates"], *codec["upsampling_ratios"]])
        self.quantizer = SplitQuantizer(codec["num_quantizers"], codec["codebook_size"], codec["codebook_dim"])
        self.pre_conv = CausalConv(codec["codebook_dim"], latent, 3)
        self.pre_transformer = FrameTransformer(config, latent)
        self.upsample = nn.ModuleList(
            nn.ModuleList([CausalTransposedConv(latent, latent, ratio, ratio), ConvNeXtBlock(latent)])
            for ratio in codec["upsampling_ratios"]
        )
        blocks: list[nn.Module] = [CausalConv(latent, size, 7)]
        for rate in codec["upsample_rates"]:
            blocks.append(UpsamplingBlock(size, rate))
            size //= 2
        self.decoder = nn.ModuleList([*blocks, SnakeBeta(size), CausalConv(size, 1, 7)])

    def forward(self, codes: Tensor) -> Tensor:
        """Map codes [batch, codebooks, frames] to audio [batch, 1, samples] between -1 and 1."""
        hidden = self.pre_conv(self.quantizer(codes)).transpose(1, 2)
        hidden = self.pre_transformer(hidden).permute(0, 2, 1)
        for steps in self.upsample:
            for step in steps:  # type: ignore[attr-defined]
                hidden = step(hidden)
        for block in self.decoder:
            hidden = block(hidden)
        return hidden.clamp(min=-1, max=1)

    def decode_long(self, codes: Tensor) -> Tensor:
        """Do the same in chunks, each with some frames before it as context."""
        parts = []
        for begin in range(0, codes.shape[-1], _CHUNK):
            context = min(begin, _CONTEXT)
            audio = self(codes[..., begin - context : begin + _CHUNK])
            parts.append(audio[..., context * self.samples_per_frame :])
        return torch.cat(parts, dim=-1)


def parse_decoder_config(settings: Mapping[str, Any]) -> MistralConfig:
    """Return the settings of a decoder as those of its transformer, with the others in ``codec``.

    Raises:
        ValueError: Its attention has biases, which no published one has.
    """
    if settings.get("attention_bias"):
        raise ValueError("codec: decoder_config.attention_bias: got true: expected false, as published codecs have it")
    names = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "sliding_window"),
    )
    rope = {"rope_type": "default", "rope_theta": float(settings["rope_theta"])}
    config = MistralConfig(rope_parameters=rope, **{name: settings[name] for name in names if name in settings})
    config.layer_scale_initial_scale = settings["layer_scale_initial_scale"]
    config.codec = dict(settings)
    config._attn_implementation = "sdpa"
    return config
