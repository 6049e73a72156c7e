"""What all codecs have in common: audio to frames of codes and back, clip by clip."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn


class AudioStream(AbstractContextManager["AudioStream"]):
    """Decodes one clip piece by piece. The codec decodes nothing else meanwhile."""

    @abstractmethod
    def decode(self, codes: Tensor) -> Tensor:
        """Return the audio [samples] of the next frames [frames, codebooks], both on the device of the codec."""


class FrameCodec(nn.Module, ABC):
    """A codec with ``num_codebooks``, ``samples_per_frame`` and ``sample_rate``."""

    num_codebooks: int
    samples_per_frame: int
    sample_rate: int

    @abstractmethod
    def encode(self, clips: Sequence[Tensor]) -> list[Tensor]:
        """Return the codes [frames, codebooks] of each clip [samples]; the last frame may be part silence.

        A clip has the same codes in any batch, as far as kernels round alike whatever shares one.
        """

    @torch.inference_mode()
    def decode(self, codes: Sequence[Tensor]) -> list[Tensor]:
        """Return the audio [samples] of each list of frames [frames, codebooks], in float32 on the CPU."""
        return [self.decode_one(part.to(self.device)).float().cpu() if len(part) else torch.zeros(0) for part in codes]

    @abstractmethod
    def decode_one(self, codes: Tensor) -> Tensor:
        """Return the audio [samples] of frames [frames, codebooks], both on the device of the codec."""

    def open_stream(self) -> AudioStream:
        """Return what decodes one clip piece by piece.

        Raises:
            ValueError: The codec decodes whole clips only.
        """
        raise ValueError("to_stdout: the codec of this model decodes whole clips only; leave it out")

    @property
    def device(self) -> torch.device:
        """Where the codec computes."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """In which dtype it computes."""
        return next(self.parameters()).dtype
