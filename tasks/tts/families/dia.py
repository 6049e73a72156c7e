"""Dia (Nari Labs) as a family: text says who speaks, ``[S1] Hello. [S2] Hi.``, and codebooks are delayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from transformers import DiaConfig
from typing_extensions import override

from lit_fsdp.planning.closed_form.model_reader import ModelReader
from lit_fsdp.planning.step_parts import MicroBatch
from lit_fsdp.tasks.tts.families.dia_model import Dia, generate_dia
from lit_fsdp.tasks.tts.families.dia_tape import read_dia
from lit_fsdp.tasks.tts.families.family import Family, HubConfig, Voice, collate_targets
from lit_fsdp.tasks.tts.families.speech_tape import describe_batch
from lit_fsdp.tasks.tts.generation import SamplingValues, Speech
from lit_fsdp.tasks.tts.preparation.prepared import PreparedRow
from lit_fsdp.tasks.tts.utterance import Batch, Utterance, get_codes

FRAMES_PER_S = 44100 / 512  # of DAC at 44.1 kHz
_SPEAKERS = ("[S1]", "[S2]")


class DiaSettings(HubConfig):
    """A Dia model."""

    kind = DiaConfig

    @property
    def num_codebooks(self) -> int:
        """Codes in a frame."""
        return int(self.model.decoder_config.num_channels)

    @property
    def codebook_size(self) -> int:
        """Codes of speech are below it: ids of special tokens follow them."""
        decoder = self.model.decoder_config
        return min(decoder.eos_token_id, decoder.pad_token_id, decoder.bos_token_id)

    @property
    def frames_per_s(self) -> float:
        """Of the codec."""
        return FRAMES_PER_S


class DiaFamily(Family):
    """Dia, as ``DiaForConditionalGeneration`` of Transformers has it."""

    model_type = "dia"
    parts: ClassVar = {"encoder": ("model.encoder.",), "decoder": ("model.decoder.", "logits_dense.")}
    linears = r"model\.(encoder|decoder)\.layers\.\d+\.(self_attention|cross_attention|mlp)\.\w+_proj"
    blocks = ("*DiaEncoderLayer", "*DiaDecoderLayer")
    default_text_dropout = 0.15  # official training is not published; others that are take this share
    unused_sampling = (
        *("repetition_penalty", "predictor_do_sample", "predictor_temperature", "predictor_top_k"),
        "predictor_top_p",
    )

    @property
    @override
    def default_sampling(self) -> SamplingValues:
        return SamplingValues(
            temperature=1.2, top_k=45, top_p=0.95, repetition_penalty=1.0, guidance_scale=3.0, max_frames=3056
        )

    @override
    def parse_config(self, raw: Mapping[str, Any], *, where: str = "config") -> DiaSettings:
        return DiaSettings.parse(raw, where)

    @override
    def build_model(self, config: DiaSettings, attention: str = "sdpa") -> Dia:
        return Dia(config.copy_model_config(attention))

    @override
    def get_loss_weights(self, config: DiaSettings) -> tuple[float, float]:
        # Together the mean over all codebooks.
        return 1 / config.num_codebooks, 1 - 1 / config.num_codebooks

    @override
    def encode_text(self, tokenizer: Any, text: str, config: DiaSettings, speaker: Voice | None) -> list[int]:
        text = text.strip()
        if not text:
            raise ValueError("text: empty: expected a word or more")
        if not text.startswith(_SPEAKERS):
            text = f"{_SPEAKERS[0]} {text}"
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        encoder = config.model.encoder_config
        if max(ids) >= encoder.vocab_size:
            raise ValueError(
                f"tokenizer: got id {max(ids)}: expected below vocab_size {encoder.vocab_size}: take that of the model"
            )
        if len(ids) > encoder.max_position_embeddings:
            raise ValueError(
                f"text: got {len(ids)} tokens: expected up to {encoder.max_position_embeddings}: {text[:40]!r}..."
            )
        return ids

    @override
    def assign_voices(self, rows: Sequence[PreparedRow], known: Mapping[str, Voice]) -> dict[str, Voice]:
        speakers = {row.speaker for row in rows if not row.text.lstrip().startswith(_SPEAKERS)}
        if len(speakers) > 1:
            rank_zero_warn(
                f"train: {len(speakers)} speakers, whose names dia is not told: texts without [S1] or [S2] at their "
                "beginning are all taken for [S1]"
            )
        return {}

    @override
    def collate(self, utterances: Sequence[Utterance], config: DiaSettings, *, is_streaming: bool = False) -> Batch:
        decoder, delays = config.model.decoder_config, torch.tensor(config.model.delay_pattern)
        longest = int(delays.max()) + 1 + max(len(get_codes(u)) for u in utterances)
        decoder_ids = torch.full((len(utterances), longest, len(delays)), decoder.pad_token_id)
        state_index = []
        for row, utterance in enumerate(utterances):
            codes = torch.from_numpy(get_codes(utterance))
            num_frames = len(codes)
            for i, delay in enumerate(delays.tolist()):
                decoder_ids[row, : delay + 1, i] = decoder.bos_token_id
                decoder_ids[row, delay + 1 : delay + 1 + num_frames, i] = codes[:, i]
                # The end itself is read by a position that predicts nothing of this codebook, but of others.
                rest = decoder_ids[row, delay + 1 + num_frames :, i]
                rest[:1] = decoder.eos_token_id
            state_index.append(row * longest + torch.arange(num_frames + 1).unsqueeze(1) + delays)
        # Padding of the decoder is on the right, where causal attention does not look.
        whole = torch.ones(len(utterances), longest, dtype=torch.int64)
        targets = collate_targets(utterances, state_index, decoder.eos_token_id)
        return {**targets, "decoder_ids": decoder_ids, "attention_mask": whole, **_stack_text(utterances)}

    @override
    def drop_texts(self, batch: Batch, rows: Sequence[int]) -> Batch:
        # As generate_dia has it: the mask stays.
        return {**batch, "text_ids": batch["text_ids"].index_fill(0, torch.tensor(rows, dtype=torch.int64), 0)}

    @override
    def collate_prompts(
        self, utterances: Sequence[Utterance], config: DiaSettings, *, is_streaming: bool = False
    ) -> Batch:
        return _stack_text(utterances)

    @override
    def make_example_batch(
        self, config: DiaSettings, *, batch_size: int, num_text_ids: int, num_frames: int, is_streaming: bool = False
    ) -> Batch:
        batch = super().make_example_batch(
            config,
            batch_size=batch_size,
            num_text_ids=min(num_text_ids, config.model.encoder_config.max_position_embeddings),
            num_frames=num_frames,
        )
        batch["text_mask"][0, -1] = 0  # texts differ in length, so attention gets a mask
        return batch

    @override
    def measure_batch(self, batch: Mapping[str, Any]) -> MicroBatch:
        rows, length = batch["decoder_ids"].shape[:2]
        return describe_batch(batch, rows=rows, length=length, is_masked=not bool(batch["text_mask"].all()))

    @override
    def read_step(self, model: Dia, step: ModelReader) -> int:
        return read_dia(model, step)

    @override
    def generate(self, model: Dia, batch: Batch, sampling: SamplingValues) -> list[Speech]:
        return generate_dia(model, batch, sampling)

    @override
    def list_parts(self, model: nn.Module) -> dict[str, nn.Module | None]:
        assert isinstance(model, Dia)
        return {"encoder": model.model.encoder, "decoder": model.model.decoder, "logits_dense": model.logits_dense}


def _stack_text(utterances: Sequence[Utterance]) -> Batch:
    shape = len(utterances), max(len(u.text_ids) for u in utterances)
    batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("text_ids", "text_mask")}
    for row, utterance in enumerate(utterances):
        batch["text_ids"][row, : len(utterance.text_ids)] = torch.tensor(utterance.text_ids)
        batch["text_mask"][row, : len(utterance.text_ids)] = 1
    return batch
