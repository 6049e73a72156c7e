"""Audio of codes that are still being written: the same as of all of them together, in any pieces.

Note [Decoding in pieces]: all parts of the decoder look back only. Between two pieces the transformer keeps keys and
values, and each convolution the last positions that it has read: as many as its kernel reaches back. They come again
before the next piece, and what it makes of them is dropped. ``decode_long`` begins anew every 300 frames with some
frames as context, as the official codec does; so does a stream, at the same places.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import DynamicCache

# Not in Transformers' public face, seen in 5.23.
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCausalConvNet
from typing_extensions import override

from lit_fsdp.tasks.tts.codec.decoder_12hz import CHUNK, CONTEXT, CausalTransposedConv, CodecDecoder
from lit_fsdp.tasks.tts.codec.frame_codec import AudioStream


class DecoderStream(AudioStream):
    """Decodes one clip piece by piece, see Note [Decoding in pieces]. To be used in a ``with``; one at a time.

    Args:
        decoder: Of a codec; decodes nothing else meanwhile.
    """

    def __init__(self, decoder: CodecDecoder) -> None:
        self._decoder = decoder
        self._memories: list[_Memory] = []
        self._cache: Any = None
        self._recent: Tensor | None = None  # the last codes [1, codebooks, up to CONTEXT]
        self._num_frames = 0  # of this chunk, without its context

    @override
    def __enter__(self) -> Self:
        self._begin_chunk()
        self._memories = [_Memory(conv) for conv in self._decoder.modules() if _reaches_back(conv)]
        return self

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for memory in self._memories:
            memory.detach()

    @override
    @torch.inference_mode()
    def decode(self, codes: Tensor) -> Tensor:
        parts = [torch.zeros(0, device=codes.device)]
        rest = codes.T[None]
        while rest.shape[-1]:
            if self._num_frames == CHUNK:
                self._begin_chunk()
                assert self._recent is not None
                self._decoder(self._recent, self._cache)  # as context: of its audio nothing is new
            n = min(CHUNK - self._num_frames, rest.shape[-1])
            piece, rest = rest[..., :n], rest[..., n:]
            parts.append(self._decoder(piece, self._cache).flatten())
            self._num_frames += n
            before = piece if self._recent is None else torch.cat([self._recent, piece], dim=-1)
            self._recent = before[..., -CONTEXT:]
        return torch.cat(parts)

    def _begin_chunk(self) -> None:
        self._cache, self._num_frames = DynamicCache(config=self._decoder.pre_transformer.config), 0
        for memory in self._memories:
            memory.kept = None


class _Memory:
    """Shows a convolution again what it has read last."""

    def __init__(self, conv: Any) -> None:
        is_up = isinstance(conv, CausalTransposedConv)
        # Of the positions before, an upsampled one reaches over the next one only: its kernel has two strides.
        self.reach = -(-conv.conv.kernel_size[0] // conv.conv.stride[0]) - 1 if is_up else conv.padding
        self.rate: int = conv.conv.stride[0] if is_up else 1
        self.kept: Tensor | None = None
        self._handles = [conv.register_forward_pre_hook(self._recall), conv.register_forward_hook(self._drop)]
        self._num_recalled = 0

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _recall(self, _: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        hidden = args[0] if self.kept is None else torch.cat([self.kept, args[0]], dim=-1)
        self._num_recalled = 0 if self.kept is None else self.kept.shape[-1]
        self.kept = hidden[..., -self.reach :]
        return (hidden,)

    def _drop(self, _: nn.Module, __: tuple[Tensor], made: Tensor) -> Tensor:
        return made[..., self._num_recalled * self.rate :]


def _reaches_back(module: nn.Module) -> bool:
    """Tell whether a module is a convolution that reads positions before its own."""
    if isinstance(module, CausalTransposedConv):
        return module.conv.kernel_size[0] > module.conv.stride[0]
    return isinstance(module, Qwen3OmniMoeCausalConvNet) and module.padding > 0
