"""Who speaks: an ECAPA-TDNN (arXiv:2005.07143) over log-mel frames, that of Qwen2.5-Omni under the same names."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.audio_utils import mel_filter_bank

# Not in Transformers' public face, seen in 5.23.
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import ECAPA_TimeDelayNet

from lit_fsdp.tasks.tts.config import SpeakerEncoderConfig
from lit_fsdp.weights.safetensors_io import TensorFiles

_FFT, _HOP = 1024, 256
_PREFIX = "speaker_encoder."  # of its tensors in the files of a model


class SpeakerEncoder(ECAPA_TimeDelayNet):
    """From log-mel frames [batch, frames, mels] to embeddings [batch, enc_dim], as wide as the talker.

    Args:
        config: Sizes.
    """

    def __init__(self, config: SpeakerEncoderConfig) -> None:
        super().__init__(config)  # type: ignore[arg-type]  # reads nothing but the sizes
        self.config = config


def compute_mels(audio: Tensor, config: SpeakerEncoderConfig) -> Tensor:
    """Return log-mel frames [batch, frames, mels] of audio [batch, samples].

    Args:
        audio: Between -1 and 1, at ``config.sample_rate``.
        config: Of the speaker encoder.

    Raises:
        ValueError: The audio is too short.
    """
    padding = (_FFT - _HOP) // 2
    if audio.shape[1] < config.sample_rate // 10:
        seconds = audio.shape[1] / config.sample_rate
        raise ValueError(f"reference audio: got {seconds:.3f} s: expected 0.1 s or more, better 3 s")
    padded = F.pad(audio.unsqueeze(1), (padding, padding), mode="reflect").squeeze(1)
    window = torch.hann_window(_FFT, device=audio.device)
    spectrum = torch.stft(padded, _FFT, hop_length=_HOP, window=window, center=False, return_complex=True)
    magnitude = (torch.view_as_real(spectrum).pow(2).sum(-1) + 1e-9).sqrt()  # [batch, bins, frames]
    filters = _build_filters(config.mel_dim, config.sample_rate).to(audio.device)
    return (filters @ magnitude).clamp(min=1e-5).log().transpose(1, 2)


def load_speaker_encoder(folder: Path, config: SpeakerEncoderConfig) -> SpeakerEncoder:
    """Return the speaker encoder of a model, on the CPU in float32, ready to use; reads nothing else of the model.

    Args:
        folder: Of the model.
        config: Of the encoder.

    Raises:
        ValueError: The files do not fit, tensor by tensor.
    """
    with torch.device("meta"):
        encoder = SpeakerEncoder(config)
    with TensorFiles(folder) as files:
        sizes = {n.removeprefix(_PREFIX): t.num_rows for n, t in files.tensors.items() if n.startswith(_PREFIX)}
        weights = {name: files.read_rows(f"{_PREFIX}{name}", 0, size).float() for name, size in sizes.items()}
    try:
        encoder.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        found = " ".join(str(error).split())
        raise ValueError(f"{folder}: its speaker encoder does not fit config.json: {found}") from error
    return encoder.requires_grad_(False).eval()


@lru_cache(maxsize=4)
def _build_filters(num_mels: int, sample_rate: int) -> Tensor:
    """Return [mels, bins] with Slaney's scale and norm, as librosa makes them."""
    filters = mel_filter_bank(
        num_frequency_bins=_FFT // 2 + 1,
        num_mel_filters=num_mels,
        min_frequency=0.0,
        max_frequency=sample_rate / 2,
        sampling_rate=sample_rate,
        norm="slaney",
        mel_scale="slaney",
    )
    return torch.from_numpy(filters).float().T.contiguous()
