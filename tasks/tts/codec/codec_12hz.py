"""The 12 Hz codec: 24 kHz audio to frames of 16 codes and back, under the official names.

Note [Attention of the codec]: the published codes were made by Mimi on Transformers 4.57, whose attention under sdpa
looks back to the beginning; later releases look back 250 positions, ten seconds, and write other codes from there
on. So the window of the encoder is set wider than any audio here, whatever its configuration says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MimiConfig

# Not in Transformers' public face, seen in 5.23: the parts that MimiModel is made of.
from transformers.models.mimi.modeling_mimi import (
    MimiConv1d,
    MimiEncoder,
    MimiSplitResidualVectorQuantizer,
    MimiTransformerModel,
)
from typing_extensions import override

from lit_fsdp.tasks.tts.codec.decoder_12hz import CodecDecoder, parse_decoder_config
from lit_fsdp.tasks.tts.codec.decoder_stream import DecoderStream
from lit_fsdp.tasks.tts.codec.frame_codec import FrameCodec

MODEL_TYPE = "qwen3_tts_tokenizer_12hz"
_NO_WINDOW = 2**30
_LATENT_RATIO = 2  # encoder positions in a frame


class CodecEncoder(nn.Module):
    """Mimi's encoder and quantizer.

    Args:
        config: Of Mimi.
    """

    def __init__(self, config: MimiConfig) -> None:
        super().__init__()
        self.encoder = MimiEncoder(config)
        self.encoder_transformer = MimiTransformerModel(config)
        size = config.hidden_size
        self.downsample = MimiConv1d(
            config, size, size, 2 * _LATENT_RATIO, stride=_LATENT_RATIO, bias=False, pad_mode="replicate"
        )
        self.quantizer = MimiSplitResidualVectorQuantizer(config)

    def forward(self, audio: Tensor, num_codebooks: int) -> Tensor:
        """Map audio [batch, samples] to codes [batch, frames, codebooks]."""
        hidden = self.encoder(audio.unsqueeze(1)).transpose(1, 2)
        hidden = self.encoder_transformer(hidden, use_cache=False).last_hidden_state.transpose(1, 2)
        return self.quantizer.encode(self.downsample(hidden), num_codebooks).permute(1, 2, 0)


class Codec(FrameCodec):
    """The codec of a Qwen3-TTS checkpoint.

    Args:
        settings: Contents of its ``config.json``.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        if settings.get("model_type") != MODEL_TYPE:
            raise ValueError(f"codec: model_type: got {settings.get('model_type')!r}: expected {MODEL_TYPE!r}")
        self.settings = dict(settings)
        self.num_codebooks: int = settings["encoder_valid_num_quantizers"]
        self.samples_per_frame: int = settings["encode_downsample_rate"]
        self.sample_rate: int = settings["input_sample_rate"]
        if settings["decode_upsample_rate"] != self.samples_per_frame:
            raise ValueError(
                f"codec: got encode_downsample_rate {self.samples_per_frame} and decode_upsample_rate "
                f"{settings['decode_upsample_rate']}: expected the same number"
            )
        self.encoder = CodecEncoder(_parse_encoder_config(settings["encoder_config"]))
        self.decoder = CodecDecoder(parse_decoder_config(settings["decoder_config"]))

    @override
    @torch.inference_mode()
    def encode(self, clips: Sequence[Tensor]) -> list[Tensor]:
        """Return the codes [frames, codebooks] of each clip [samples]; the last frame may be part silence.

        A clip gets the same codes in any batch: each is first filled up with zeros to whole frames, as the last
        convolution would else look at what happens to lie behind it.
        """
        counts = [-(-len(clip) // self.samples_per_frame) for clip in clips]
        audio = torch.zeros(len(clips), max(counts) * self.samples_per_frame, device=self.device, dtype=self.dtype)
        for row, clip in zip(audio, clips, strict=True):
            row[: len(clip)] = clip.to(audio)
        codes = self.encoder(audio, self.num_codebooks)
        return [row[:count].cpu() for row, count in zip(codes, counts, strict=True)]

    @override
    def decode_one(self, codes: Tensor) -> Tensor:
        return self.decoder.decode_long(codes.T[None])[0, 0]

    @override
    def open_stream(self) -> DecoderStream:
        return DecoderStream(self.decoder)


def _parse_encoder_config(settings: Mapping[str, Any]) -> MimiConfig:
    known = {name: value for name, value in settings.items() if name in MimiConfig.__dataclass_fields__}
    rope = {"rope_type": "default", "rope_theta": settings.get("rope_theta", 10000.0)}
    # See Note [Attention of the codec].
    known |= {"rope_parameters": rope, "sliding_window": _NO_WINDOW, "use_cache": False}
    config = MimiConfig(**known)
    config._attn_implementation = "sdpa"
    return config
