"""Who speaks: an ECAPA-TDNN (arXiv:2005.07143) over log-mel frames, under the official names."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_fsdp.tasks.tts.config import SpeakerEncoderConfig
from lit_fsdp.weights.safetensors_io import TensorFiles

_EPS = 1e-12
_FFT, _HOP = 1024, 256
_PREFIX = "speaker_encoder."  # of its tensors in the files of a model


class TimeDelayBlock(nn.Module):
    """A convolution over time with a ReLU."""

    def __init__(self, num_in: int, num_out: int, kernel_size: int, dilation: int) -> None:
        super().__init__()
        self.conv = _build_conv(num_in, num_out, kernel_size, dilation)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [batch, channels, frames] to as many frames."""
        return F.relu(self.conv(hidden))


class Res2NetBlock(nn.Module):
    """Groups of channels, each convolved together with what became of the group before."""

    def __init__(self, num_channels: int, scale: int, kernel_size: int, dilation: int) -> None:
        super().__init__()
        size = num_channels // scale
        self.scale = scale
        self.blocks = nn.ModuleList(TimeDelayBlock(size, size, kernel_size, dilation) for _ in range(scale - 1))

    def forward(self, hidden: Tensor) -> Tensor:
        """Keep the shape [batch, channels, frames]."""
        first, *groups = hidden.chunk(self.scale, dim=1)
        outputs = [first]
        for i, (group, block) in enumerate(zip(groups, self.blocks, strict=True)):
            outputs.append(block(group if i == 0 else group + outputs[-1]))
        return torch.cat(outputs, dim=1)


class SqueezeExcitation(nn.Module):
    """Weighs channels by what their means over time say."""

    def __init__(self, num_channels: int, num_squeezed: int) -> None:
        super().__init__()
        self.conv1 = _build_conv(num_channels, num_squeezed, 1)
        self.conv2 = _build_conv(num_squeezed, num_channels, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Keep the shape [batch, channels, frames]."""
        mean = hidden.mean(dim=2, keepdim=True)
        return hidden * torch.sigmoid(self.conv2(F.relu(self.conv1(mean))))


class SqueezeExcitationRes2NetBlock(nn.Module):
    """TDNN, Res2Net, TDNN, squeeze and excitation, with a residual connection."""

    def __init__(
        self, config: SpeakerEncoderConfig, num_in: int, num_out: int, kernel_size: int, dilation: int
    ) -> None:
        super().__init__()
        self.tdnn1 = TimeDelayBlock(num_in, num_out, 1, 1)
        self.res2net_block = Res2NetBlock(num_out, config.enc_res2net_scale, kernel_size, dilation)
        self.tdnn2 = TimeDelayBlock(num_out, num_out, 1, 1)
        self.se_block = SqueezeExcitation(num_out, config.enc_se_channels)

    def forward(self, hidden: Tensor) -> Tensor:
        """Keep the shape [batch, channels, frames]."""
        return self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(hidden)))) + hidden


class AttentiveStatisticsPooling(nn.Module):
    """Mean and deviation over time, by weights that see those of the whole utterance."""

    def __init__(self, num_channels: int, num_attention: int) -> None:
        super().__init__()
        self.tdnn = TimeDelayBlock(num_channels * 3, num_attention, 1, 1)
        self.conv = _build_conv(num_attention, num_channels, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [batch, channels, frames] to [batch, 2 * channels, 1]."""
        num_frames = hidden.shape[-1]
        even = torch.ones(len(hidden), 1, num_frames, dtype=hidden.dtype, device=hidden.device)
        mean, deviation = self._compute_statistics(hidden, even / even.sum(dim=2, keepdim=True))
        spread = [t.unsqueeze(2).repeat(1, 1, num_frames) for t in (mean, deviation)]
        weights = self.conv(torch.tanh(self.tdnn(torch.cat([hidden, *spread], dim=1)))).softmax(dim=2)
        return torch.cat(self._compute_statistics(hidden, weights), dim=1).unsqueeze(2)

    @staticmethod
    def _compute_statistics(hidden: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        mean = (weights * hidden).sum(2)
        variance = (weights * (hidden - mean.unsqueeze(2)).pow(2)).sum(2)
        return mean, variance.clamp(_EPS).sqrt()


class SpeakerEncoder(nn.Module):
    """From log-mel frames to one embedding, as wide as the talker.

    Args:
        config: Sizes.
    """

    def __init__(self, config: SpeakerEncoderConfig) -> None:
        super().__init__()
        self.config = config
        sizes, kernels, dilations = config.enc_channels, config.enc_kernel_sizes, config.enc_dilations
        self.blocks = nn.ModuleList([TimeDelayBlock(config.mel_dim, sizes[0], kernels[0], dilations[0])])
        for i in range(1, len(sizes) - 1):
            block = SqueezeExcitationRes2NetBlock(config, sizes[i - 1], sizes[i], kernels[i], dilations[i])
            self.blocks.append(block)
        self.mfa = TimeDelayBlock(sizes[-1], sizes[-1], kernels[-1], dilations[-1])
        self.asp = AttentiveStatisticsPooling(sizes[-1], config.enc_attention_channels)
        self.fc = _build_conv(sizes[-1] * 2, config.enc_dim, 1)

    def forward(self, mels: Tensor) -> Tensor:
        """Map log-mel frames [batch, frames, mels] to embeddings [batch, enc_dim]."""
        hidden, outputs = mels.transpose(1, 2), []
        for block in self.blocks:
            hidden = block(hidden)
            outputs.append(hidden)
        return self.fc(self.asp(self.mfa(torch.cat(outputs[1:], dim=1)))).squeeze(-1)


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
    from transformers.audio_utils import mel_filter_bank

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


def _build_conv(num_in: int, num_out: int, kernel_size: int, dilation: int = 1) -> nn.Conv1d:
    return nn.Conv1d(num_in, num_out, kernel_size, dilation=dilation, padding="same", padding_mode="reflect")
