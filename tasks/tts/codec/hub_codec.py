"""Codecs of Transformers, for the families that have no codec of their own: Mimi, and DAC."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    CsmConfig,
    CsmForConditionalGeneration,
    DacModel,
    MimiConfig,
    MimiModel,
)
from typing_extensions import override

from lit_fsdp.tasks.tts.codec.frame_codec import FrameCodec
from lit_fsdp.tasks.tts.config import CONFIG, read_raw_config
from lit_fsdp.weights.load import load_weights, materialize
from lit_fsdp.weights.safetensors_io import TensorFiles

MODEL_TYPES = ("mimi", "dac")
WITH_CODEC = "csm"  # the type of model whose checkpoint has Mimi in it
CODEC = "codec_model."  # the beginning of its names there


class HubCodec(FrameCodec):
    """Mimi or DAC.

    Args:
        model: Of Transformers.
        num_codebooks: How many of its codebooks are used; all if not given.
    """

    def __init__(self, model: MimiModel | DacModel, num_codebooks: int | None = None) -> None:
        super().__init__()
        self.model: Any = model
        settings: Any = model.config
        is_mimi = isinstance(settings, MimiConfig)
        self.num_codebooks = int(num_codebooks or (settings.num_quantizers if is_mimi else settings.n_codebooks))
        self.samples_per_frame = int(settings.frame_size if is_mimi else settings.hop_length)
        self.sample_rate = int(settings.sampling_rate)

    @override
    @torch.inference_mode()
    def encode(self, clips: Sequence[Tensor]) -> list[Tensor]:
        """Return the codes [frames, codebooks] of each clip [samples], one by one, filled up to whole frames."""
        return [self._encode_one(clip) for clip in clips]

    def _encode_one(self, clip: Tensor) -> Tensor:
        num_frames = -(-len(clip) // self.samples_per_frame)
        audio = torch.zeros(1, 1, num_frames * self.samples_per_frame, device=self.device, dtype=self.dtype)
        audio[0, 0, : len(clip)] = clip.to(audio)
        codes = self.model.encode(audio, **{self._count_name: self.num_codebooks}).audio_codes
        return codes[0, :, :num_frames].T.cpu()

    @override
    def decode_one(self, codes: Tensor) -> Tensor:
        audio: Tensor = self.model.decode(audio_codes=codes.T[None]).audio_values
        return audio.flatten()

    @property
    def _count_name(self) -> str:
        return "num_quantizers" if isinstance(self.model.config, MimiConfig) else "n_quantizers"


def is_hub_codec(folder: Path) -> bool:
    """Tell whether a folder holds Mimi or DAC, or a model with Mimi in it."""
    if not (folder / CONFIG).is_file():
        return False
    return read_raw_config(folder).get("model_type") in (*MODEL_TYPES, WITH_CODEC)


def holds_codec(folder: Path) -> bool:
    """Tell whether the weights of a codec are in a folder: those of a CSM that was made without one are not.

    Args:
        folder: For which ``is_hub_codec`` holds.
    """
    if read_raw_config(folder)["model_type"] != WITH_CODEC:
        return True
    with TensorFiles(folder) as files:
        return any(name.startswith(CODEC) for name in files.tensors)


def measure_hub_codec(folder: Path) -> tuple[int, int]:
    """Return the number of codebooks of the codec in a folder and their size, from its configuration alone.

    Args:
        folder: For which ``is_hub_codec`` holds.
    """
    raw = read_raw_config(folder)
    config: Any = AutoConfig.for_model(**raw)
    if raw["model_type"] == WITH_CODEC:
        return int(config.num_codebooks), int(config.codec_config.codebook_size)
    num_codebooks = config.num_quantizers if isinstance(config, MimiConfig) else config.n_codebooks
    return int(num_codebooks), int(config.codebook_size)


def load_hub_codec(folder: Path) -> HubCodec:
    """Return the codec in a folder, or the one that is part of a model there, on the CPU in float32.

    Args:
        folder: For which ``is_hub_codec`` holds.

    Raises:
        ValueError: The files are missing or do not fit, tensor by tensor.
    """
    raw = read_raw_config(folder)
    config: Any = AutoConfig.for_model(**raw)
    with torch.device("meta"):
        holder: Any = _CodecOfCsm(config) if raw["model_type"] == WITH_CODEC else AutoModel.from_config(config)
    materialize(holder, torch.device("cpu"))
    unused = load_weights(holder, folder, takes_part=True)
    if raw["model_type"] == WITH_CODEC:
        unused = [name for name in unused if name.startswith(CODEC)]
    if unused:
        raise ValueError(f"codec: {folder} holds {unused[0]}, which its config.json has no place for")
    codec = HubCodec(holder.codec_model, config.num_codebooks) if isinstance(holder, _CodecOfCsm) else HubCodec(holder)
    return codec.float().eval()


class _CodecOfCsm(CsmForConditionalGeneration):
    """CSM with nothing but its codec, as names of its tensors are converted like those of the whole model."""

    def __init__(self, config: CsmConfig) -> None:
        super().__init__(config)
        for name in ("lm_head", "embed_text_tokens", "backbone_model", "depth_decoder"):
            delattr(self, name)
