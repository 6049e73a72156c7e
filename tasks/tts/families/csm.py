"""CSM (Sesame) as a family: speakers are numbers before the text, ``[0]Hello.``, and the end is a frame of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import CsmConfig
from typing_extensions import override

from lit_fsdp.planning.closed_form.model_reader import ModelReader
from lit_fsdp.tasks.tts.codec.hub_codec import CODEC
from lit_fsdp.tasks.tts.families.csm_model import Csm, generate_csm
from lit_fsdp.tasks.tts.families.csm_tape import read_csm
from lit_fsdp.tasks.tts.families.family import Family, HubConfig, Voice, collate_targets
from lit_fsdp.tasks.tts.generation import SamplingValues, Speech
from lit_fsdp.tasks.tts.preparation.prepared import PreparedRow
from lit_fsdp.tasks.tts.utterance import Batch, Utterance, get_codes, get_context
from lit_fsdp.weights.load import load_weights
from lit_fsdp.weights.safetensors_io import TensorFiles

_END_OF_TEXT = "<|end_of_text|>"
_MAX_FRAMES = 1125  # 90 seconds, as in the original inference


class CsmSettings(HubConfig):
    """A CSM model."""

    kind = CsmConfig

    @property
    def num_codebooks(self) -> int:
        """Codes in a frame."""
        return int(self.model.num_codebooks)

    @property
    def codebook_size(self) -> int:
        """Codes of speech are below it."""
        return int(self.model.codec_config.codebook_size)

    @property
    def frames_per_s(self) -> float:
        """Of the codec."""
        return float(self.model.codec_config.frame_rate)

    @property
    @override
    def speakers(self) -> Mapping[str, int]:
        """The numbers themselves are names."""
        return {str(i): i for i in range(10)}


class CsmFamily(Family):
    """CSM, as ``CsmForConditionalGeneration`` of Transformers has it."""

    model_type = "csm"
    parts: ClassVar = {
        "talker": ("backbone_model.layers.", "backbone_model.norm.", "lm_head."),
        "text_embedding": ("embed_text_tokens.",),
        "audio_embedding": ("backbone_model.embed_tokens.", "depth_decoder.model.embed_tokens."),
        "code_predictor": (
            *("depth_decoder.model.layers.", "depth_decoder.model.norm.", "depth_decoder.codebooks_head."),
            "depth_decoder.model.inputs_embeds_projector.",
        ),
    }
    linears = r"backbone_model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj"  # not those of the depth decoder
    blocks = ("*CsmDecoderLayer",)
    reads_context = True
    # 10 seconds in that of csm-1b, which is too short for many texts.
    unread_generation = ("max_new_tokens",)

    @property
    @override
    def default_sampling(self) -> SamplingValues:
        return SamplingValues(repetition_penalty=1.0, max_frames=_MAX_FRAMES)

    @override
    def parse_config(self, raw: Mapping[str, Any], *, where: str = "config") -> CsmSettings:
        return CsmSettings.parse(raw, where)

    @override
    def build_model(self, config: CsmSettings, attention: str = "sdpa") -> Csm:
        return Csm(config.copy_model_config(attention))

    @override
    def load_weights(self, model: nn.Module, folder: Path, *, seed: int = 0) -> None:
        unknown = load_weights(model, folder, seed=seed, takes_part=True)
        if unknown := [name for name in unknown if not name.startswith(CODEC)]:
            raise ValueError(f"{folder} does not fit Csm: the model has no {unknown[0]}")

    @override
    def get_loss_weights(self, config: CsmSettings) -> tuple[float, float]:
        return 1.0, 1.0

    @override
    def encode_text(self, tokenizer: Any, text: str, config: CsmSettings, speaker: Voice | None) -> list[int]:
        text = text.strip()
        if not text:
            raise ValueError("text: empty: expected a word or more")
        ids: list[int] = tokenizer(f"[{0 if speaker is None else speaker}]{text}", add_special_tokens=False)[
            "input_ids"
        ]
        end = tokenizer.get_vocab().get(_END_OF_TEXT, tokenizer.eos_token_id)
        ids = [i for i in (tokenizer.bos_token_id, *ids, end) if i is not None]
        if max(ids) >= config.model.text_vocab_size:
            raise ValueError(
                f"tokenizer: got id {max(ids)}: expected below text_vocab_size {config.model.text_vocab_size}: take "
                "that of the model"
            )
        return ids

    @override
    def assign_voices(self, rows: Sequence[PreparedRow], known: Mapping[str, Voice]) -> dict[str, Voice]:
        # Who has a number keeps it; names that are numbers have theirs; the others get those that are left, in order.
        names = sorted({row.speaker for row in rows} - known.keys())
        voices: dict[str, Voice] = {**known, **{name: int(name) for name in names if name.isdecimal()}}
        owners: dict[Voice, str] = {}
        for name, number in voices.items():
            other = owners.setdefault(number, name)
            if other != name:
                raise ValueError(f"speaker: got {other!r} and {name!r}, both number {number}: rename one of them")
        free = (i for i in range(len(voices) + len(names)) if i not in owners)
        return voices | {name: next(free) for name in names if name not in voices}

    @override
    def collate(self, utterances: Sequence[Utterance], config: CsmSettings, *, is_streaming: bool = False) -> Batch:
        contexts = [_take_context(u, config) for u in utterances]
        begins = [len(u.context_ids) + len(c) for u, c in zip(utterances, contexts, strict=True)]  # of the texts
        length = max(b + len(u.text_ids) + len(get_codes(u)) for b, u in zip(begins, utterances, strict=True))
        shape = len(utterances), length
        batch = {
            "text_ids": torch.zeros(shape, dtype=torch.int64),
            "codes": torch.zeros(*shape, config.num_codebooks, dtype=torch.int64),
            "frame_mask": torch.zeros(shape, dtype=torch.bool),
        }
        state_index = []
        for row, (utterance, context, text) in enumerate(zip(utterances, contexts, begins, strict=True)):
            codes = torch.from_numpy(get_codes(utterance))
            begin, num_frames = text + len(utterance.text_ids), len(codes)
            first = len(utterance.context_ids)
            batch["text_ids"][row, :first] = torch.tensor(utterance.context_ids, dtype=torch.int64)
            batch["codes"][row, first:text] = context
            batch["frame_mask"][row, first:text] = True
            batch["text_ids"][row, text:begin] = torch.tensor(utterance.text_ids)
            batch["codes"][row, begin : begin + num_frames] = codes
            batch["frame_mask"][row, begin : begin + num_frames] = True
            state_index.append(row * length + torch.arange(begin - 1, begin + num_frames))
        return {**batch, **collate_targets(utterances, state_index, config.model.codebook_eos_token_id)}

    @override
    def collate_prompts(
        self, utterances: Sequence[Utterance], config: CsmSettings, *, is_streaming: bool = False
    ) -> Batch:
        frames = [_take_context(u, config) for u in utterances]
        sizes = [len(u.context_ids) + len(f) + len(u.text_ids) for u, f in zip(utterances, frames, strict=True)]
        shape = len(utterances), max(sizes)
        batch = {
            "text_ids": torch.zeros(shape, dtype=torch.int64),
            "attention_mask": torch.zeros(shape, dtype=torch.int64),
            "codes": torch.zeros(*shape, config.num_codebooks, dtype=torch.int64),
            "frame_mask": torch.zeros(shape, dtype=torch.bool),
        }
        for row, (utterance, context, size) in enumerate(zip(utterances, frames, sizes, strict=True)):
            begin = shape[1] - size
            first = begin + len(utterance.context_ids)  # of the frames
            last = first + len(context)
            batch["attention_mask"][row, begin:] = 1
            batch["text_ids"][row, begin:first] = torch.tensor(utterance.context_ids, dtype=torch.int64)
            batch["codes"][row, first:last] = context
            batch["frame_mask"][row, first:last] = True
            batch["text_ids"][row, last:] = torch.tensor(utterance.text_ids)
        return batch

    @override
    def read_step(self, model: Csm, step: ModelReader) -> int:
        return read_csm(model, step)

    @override
    def generate(self, model: Csm, batch: Batch, sampling: SamplingValues) -> list[Speech]:
        return generate_csm(model, batch, sampling)

    @override
    def list_parts(self, model: nn.Module) -> dict[str, nn.Module | None]:
        assert isinstance(model, Csm)
        return {
            "talker layers": model.backbone_model.layers,
            "text_embedding": model.embed_text_tokens,
            "audio_embedding": model.backbone_model.embed_tokens,
            "norm": model.backbone_model.norm,
            "lm_head": model.lm_head,
            "code_predictor": model.depth_decoder,
        }

    @override
    def read_extra(self, folder: Path) -> dict[str, Tensor]:
        with TensorFiles(folder) as files:
            names = [name for name in files.tensors if name.startswith(CODEC)]
            return {name: files.read_rows(name, 0, files.tensors[name].num_rows) for name in names}


def _take_context(utterance: Utterance, config: CsmSettings) -> Tensor:
    """Return the frames that were said before, with their end [frames, codebooks], or none."""
    end = torch.full((1, config.num_codebooks), int(config.model.codebook_eos_token_id))
    if utterance.context_codes is None:
        return end[:0]
    return torch.cat([torch.from_numpy(get_context(utterance)), end])
