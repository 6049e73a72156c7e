"""Qwen3-TTS as a family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from torch import nn
from typing_extensions import override

from lit_fsdp.planning.closed_form.model_reader import ModelReader
from lit_fsdp.tasks.tts.config import MODEL_TYPE, SpeechConfig, parse_config
from lit_fsdp.tasks.tts.families.family import Family, Voice
from lit_fsdp.tasks.tts.families.qwen3_layout import (
    collate_prompts,
    collate_training,
    encode_instruct,
    encode_text,
)
from lit_fsdp.tasks.tts.families.qwen3_model import PREDICTOR_WEIGHT, Qwen3TTS, generate_qwen3, write_qwen3
from lit_fsdp.tasks.tts.families.qwen3_tape import read_qwen3
from lit_fsdp.tasks.tts.generation import Frame, SamplingValues, Speech
from lit_fsdp.tasks.tts.preparation.prepared import PreparedRow, average_speakers
from lit_fsdp.tasks.tts.utterance import Batch, Utterance


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
    reads_context = True
    reads_instructions = True
    decodes_context = True
    has_kinds = True
    predicts_ends = False

    @override
    def parse_config(self, raw: Mapping[str, Any], *, where: str = "config") -> SpeechConfig:
        return parse_config(raw, where=where)

    @override
    def build_model(self, config: SpeechConfig, attention: str = "sdpa") -> Qwen3TTS:
        return Qwen3TTS(config, attention)

    @override
    def get_loss_weights(self, config: SpeechConfig) -> tuple[float, float]:
        return 1.0, PREDICTOR_WEIGHT

    @override
    def encode_text(self, tokenizer: Any, text: str, config: SpeechConfig, speaker: Voice | None) -> list[int]:
        return encode_text(tokenizer, text)

    @override
    def encode_instruct(self, tokenizer: Any, instruct: str) -> list[int]:
        return encode_instruct(tokenizer, instruct)

    @override
    def assign_voices(self, rows: Sequence[PreparedRow], known: Mapping[str, Voice]) -> dict[str, Voice]:
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
    def read_step(self, model: Qwen3TTS, step: ModelReader) -> int:
        return read_qwen3(model, step)

    @override
    def generate(self, model: Qwen3TTS, batch: Batch, sampling: SamplingValues) -> list[Speech]:
        return generate_qwen3(model, batch, sampling)

    @override
    def write(self, model: Qwen3TTS, batch: Batch, sampling: SamplingValues) -> Iterator[Frame]:
        return write_qwen3(model, batch, sampling)

    @override
    def prepare_speaking(self, model: Qwen3TTS) -> None:
        model.prepare_speaking()

    @override
    def list_parts(self, model: nn.Module) -> dict[str, nn.Module | None]:
        assert isinstance(model, Qwen3TTS)
        talker = model.talker
        return {
            "talker layers": talker.model.layers,
            "text_embedding": talker.model.text_embedding,
            "codec_embedding": talker.model.codec_embedding,
            "text_projection": talker.text_projection,
            "norm": talker.model.norm,
            "codec_head": talker.codec_head,
            "code_predictor": talker.code_predictor,
            "speaker_encoder": model.speaker_encoder,
        }
