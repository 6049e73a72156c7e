"""The second half of the codec: from codes to audio, by a small transformer and causal convolutions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache

# Not in Transformers' public face, seen in 5.23: the vocoder of Qwen3-Omni has most of these parts, under these names.
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as omni
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig

CHUNK, CONTEXT = 300, 25  # frames decoded at once, and before them, as the official codec does it
_EPSILON = 1e-5


class CausalTransposedConv(omni.Qwen3OmniMoeCausalTransConvNet):
    """Makes ``stride`` positions of each one."""

    def __init__(self, num_in: int, num_out: int, kernel_size: int, stride: int) -> None:
        super().__init__(num_in, num_out, kernel_size, stride)  # type: ignore[no-untyped-call]
        self.left_pad = 0  # Qwen3-Omni cuts on both sides


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


class UpsamplingBlock(nn.Module):
    """Halves the channels and makes ``rate`` positions of each one."""

    def __init__(self, size: int, rate: int) -> None:
        super().__init__()
        steps = [SnakeBeta(size), CausalTransposedConv(size, size // 2, 2 * rate, rate)]
        steps += [omni.Qwen3OmniMoeCode2WavDecoderResidualUnit(size // 2, dilation) for dilation in (1, 3, 9)]
        self.block = nn.ModuleList(steps)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [batch, channels, length] to [batch, channels / 2, length * rate]."""
        for step in self.block:
            hidden = step(hidden)
        return hidden


class FrameTransformer(omni.Qwen3OmniMoeCode2WavTransformerModel):
    """Looks back over a window of frames; between projections from and to the width of the convolutions."""

    def __init__(self, config: Qwen3OmniMoeCode2WavConfig) -> None:
        super().__init__(config)
        size: int = config.latent_dim
        self.input_proj, self.output_proj = nn.Linear(size, config.hidden_size), nn.Linear(config.hidden_size, size)

    def post_init(self) -> None:
        """Leave the weights as torch draws them: those of the small codec must stay the same."""

    def forward(self, latents: Tensor, cache: Cache | None = None) -> Tensor:
        """Keep the shape [batch, frames, latent_dim]; ``cache`` has the frames before and gets these."""
        options = {} if cache is None else {"past_key_values": cache, "use_cache": True}
        return self.output_proj(super().forward(inputs_embeds=self.input_proj(latents), **options).last_hidden_state)


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
        config: From ``parse_decoder_config``.
    """

    def __init__(self, config: Qwen3OmniMoeCode2WavConfig) -> None:
        super().__init__()
        latent, size = config.latent_dim, config.decoder_dim
        self.samples_per_frame = math.prod([*config.upsample_rates, *config.upsampling_ratios])
        self.quantizer = SplitQuantizer(config.num_quantizers, config.codebook_size, config.codebook_dim)
        self.pre_conv = omni.Qwen3OmniMoeCausalConvNet(config.codebook_dim, latent, 3)
        self.pre_transformer = FrameTransformer(config)
        self.upsample = nn.ModuleList(
            nn.ModuleList([CausalTransposedConv(latent, latent, ratio, ratio), omni.Qwen3OmniMoeConvNeXtBlock(latent)])
            for ratio in config.upsampling_ratios
        )
        blocks: list[nn.Module] = [omni.Qwen3OmniMoeCausalConvNet(latent, size, 7)]
        for rate in config.upsample_rates:
            blocks.append(UpsamplingBlock(size, rate))
            size //= 2
        self.decoder = nn.ModuleList([*blocks, SnakeBeta(size), omni.Qwen3OmniMoeCausalConvNet(size, 1, 7)])

    def forward(self, codes: Tensor, cache: Cache | None = None) -> Tensor:
        """Map codes [batch, codebooks, frames] to audio [batch, 1, samples] between -1 and 1.

        Args:
            codes: Of the frames.
            cache: Keys and values of the frames before, for ``DecoderStream``.
        """
        hidden = self.pre_conv(self.quantizer(codes)).transpose(1, 2)
        hidden = self.pre_transformer(hidden, cache).permute(0, 2, 1)
        for steps in self.upsample:
            for step in steps:  # type: ignore[attr-defined]
                hidden = step(hidden)
        for block in self.decoder:
            hidden = block(hidden)
        return hidden.clamp(min=-1, max=1)

    def decode_long(self, codes: Tensor) -> Tensor:
        """Do the same in chunks, each with some frames before it as context."""
        parts = []
        for begin in range(0, codes.shape[-1], CHUNK):
            context = min(begin, CONTEXT)
            audio = self(codes[..., begin - context : begin + CHUNK])
            parts.append(audio[..., context * self.samples_per_frame :])
        return torch.cat(parts, dim=-1)


def parse_decoder_config(settings: Mapping[str, Any]) -> Qwen3OmniMoeCode2WavConfig:
    """Return the settings of a decoder as Transformers' configuration of the vocoder of Qwen3-Omni, with further names.

    Raises:
        ValueError: Its attention has biases, which no published one has.
    """
    if settings.get("attention_bias"):
        raise ValueError("codec: decoder_config.attention_bias: got true: expected false, as published codecs have it")
    rope = {"rope_type": "default", "rope_theta": float(settings["rope_theta"])}
    config = Qwen3OmniMoeCode2WavConfig(**{**settings, "rope_parameters": rope})
    config._attn_implementation = "sdpa"
    return config
