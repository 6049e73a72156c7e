"""Qwen3-TTS as a family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from lit_fsdp.planning.model_reader import ModelReader
from lit_fsdp.tasks.tts.config import MODEL_TYPE, SpeechConfig, parse_config
from lit_fsdp.tasks.tts.families.family import Family, Voice
from lit_fsdp.tasks.tts.families.qwen3_model import PREDICTOR_WEIGHT, Qwen3TTS, list_parts
from lit_fsdp.tasks.tts.families.qwen3_tape import read_qwen3
from lit_fsdp.tasks.tts.generation import SamplingValues, Speech, generate_codes
from lit_fsdp.tasks.tts.layout import (
    Batch,
    Utterance,
    collate_prompts,
    collate_training,
    count_positions,
    encode_text,
)

if TYPE_CHECKING:
    from lit_fsdp.tasks.tts.preparation.prepared import PreparedRow


class Qwen3Family(Family):
    """Qwen3-TTS (12 Hz): a talker and a code predictor, voices as embeddings."""

    model_type = MODEL_TYPE
    parts: ClassVar = {
        "talker": (
            *("talker.model.layers.", "talker.model.norm.", "talker.model.codec_embedding."),
            *("talker.text_projection.", "talker.codec_head."),
        ),
        "text_embedding": ("talker.model.text_embedding.",),
        "code_predictor": ("talker.code_predictor.",),
    }
    linears = r"talker\.model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj"  # not those of the code predictor
    # A pattern, as FSDP2 puts a class of its own in front of the block's, and plans are made of sharded models too.
    blocks = ("*Qwen3DecoderLayer",)
    has_streaming = True
    has_kinds = True
    predicts_ends = False

    @override
    def parse_config(self, raw: Mapping[str, Any], *, where: str = "config") -> SpeechConfig:
        return parse_config(raw, where=where)

    @override
    def build_model(self, config: SpeechConfig, attention: str = "sdpa") -> Qwen3TTS:
        return Qwen3TTS(config, attention)

    @override
    def weigh_losses(self, config: SpeechConfig) -> tuple[float, float]:
        return 1.0, PREDICTOR_WEIGHT

    @override
    def encode_text(self, tokenizer: Any, text: str, config: SpeechConfig, speaker: Voice | None) -> list[int]:
        return encode_text(tokenizer, text)

    @override
    def find_voices(self, rows: Sequence[PreparedRow], known: Mapping[str, Voice]) -> dict[str, Voice]:
        from lit_fsdp.tasks.tts.preparation.prepared import average_speakers

        return {**average_speakers(rows), **known}

    @override
    def collate(self, utterances: Sequence[Utterance], config: SpeechConfig, *, is_streaming: bool = False) -> Batch:
        return collate_training(utterances, config, is_streaming=is_streaming)

    @override
    def collate_prompts(
        self, utterances: Sequence[Utterance], config: SpeechConfig, *, is_streaming: bool = False
    ) -> Batch:
        return collate_prompts(utterances, config, is_streaming=is_streaming)

    @override
    def make_example_batch(
        self, config: SpeechConfig, *, batch_size: int, num_text_ids: int, num_frames: int, is_streaming: bool = False
    ) -> Batch:
        length = count_positions(num_text_ids, num_frames, has_language=True, is_streaming=is_streaming)
        shape = batch_size, length
        ids, ones = torch.zeros(shape, dtype=torch.int64), torch.ones(shape, dtype=torch.bool)
        tokens, frames = batch_size * (num_frames + 1), batch_size * num_frames
        return {
            "text_ids": ids,
            "codec_ids": ids.clone(),
            "attention_mask": ones.long(),
            "codec_mask": ones,
            "speaker_mask": ones.clone(),
            "codes": torch.zeros(*shape, config.num_codebooks, dtype=torch.int64),
            "frame_mask": ones.clone(),
            "state_index": torch.zeros(tokens, dtype=torch.int64),
            "labels": torch.zeros(tokens, dtype=torch.int64),
            "label_weights": torch.ones(tokens, dtype=torch.int64),
            "frame_index": torch.ones(frames, dtype=torch.int64),
            "frame_weights": torch.ones(frames, dtype=torch.int64),
        }

    @override
    def read_step(self, model: Qwen3TTS, step: ModelReader) -> int:
        return read_qwen3(model, step)

    @override
    def generate(self, model: Qwen3TTS, batch: Batch, sampling: SamplingValues) -> list[Speech]:
        return generate_codes(model, batch, sampling)

    @override
    def list_parts(self, model: nn.Module) -> dict[str, nn.Module | None]:
        assert isinstance(model, Qwen3TTS)
        return list_parts(model)
