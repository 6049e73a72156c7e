"""What ``config.json`` of a Qwen3-TTS checkpoint says: the sizes of its parts, and the ids of all special tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import Qwen3Config

MODEL_TYPE = "qwen3_tts"
CONFIG = "config.json"
_TOKENIZER = "qwen3_tts_tokenizer_12hz"
FRAMES_PER_S = 12.5
# What Transformers' Qwen3 takes of the settings of a talker or code predictor.
_TRANSFORMER = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps"),
    *("attention_bias", "attention_dropout", "use_sliding_window", "sliding_window"),
)
_CODEC_IDS = ("pad", "bos", "eos", "think", "nothink", "think_bos", "think_eos")
_TEXT_IDS = ("im_start", "im_end", "tts_pad", "tts_bos", "tts_eos")


@dataclass(frozen=True, kw_only=True)
class SpecialIds:
    """Ids of special tokens: those before ``pad`` in the text vocabulary, the others in that of codebook 0."""

    im_start: int
    im_end: int
    tts_pad: int
    tts_bos: int
    tts_eos: int
    pad: int
    bos: int
    eos: int
    think: int
    nothink: int
    think_bos: int
    think_eos: int


@dataclass(frozen=True, kw_only=True)
class SpeakerEncoderConfig:
    """Sizes of the speaker encoder, under the names that they have in ``config.json``."""

    mel_dim: int = 128
    enc_dim: int = 1024
    enc_channels: tuple[int, ...] = (512, 512, 512, 512, 1536)
    enc_kernel_sizes: tuple[int, ...] = (5, 3, 3, 3, 1)
    enc_dilations: tuple[int, ...] = (1, 2, 3, 4, 1)
    enc_attention_channels: int = 128
    enc_res2net_scale: int = 8
    enc_se_channels: int = 128
    sample_rate: int = 24000

    def __post_init__(self) -> None:
        if not len(self.enc_channels) == len(self.enc_kernel_sizes) == len(self.enc_dilations):
            raise ValueError(
                f"speaker_encoder_config: got {len(self.enc_channels)} enc_channels, {len(self.enc_kernel_sizes)} "
                f"enc_kernel_sizes, {len(self.enc_dilations)} enc_dilations: expected as many of each"
            )


@dataclass(frozen=True, kw_only=True)
class SpeechConfig:
    """A Qwen3-TTS model: sizes of its parts and ids of its special tokens.

    Args:
        raw: ``config.json`` as it is, from which an export starts.
        talker: Of the transformer that writes codebook 0.
        predictor: Of the one that writes the other codebooks.
        speaker_encoder: ``None`` in a checkpoint with built-in voices, which has none.
        text_vocab_size: Rows of the text embedding.
        text_hidden_size: Its columns.
        num_codebooks: Codes in a frame.
        ids: Special tokens.
        languages: Ids by lower-cased name.
        speakers: Rows of the codec embedding that hold built-in voices, by lower-cased name.
        dialects: The language that a built-in voice speaks where none is asked for.
    """

    raw: dict[str, Any]
    talker: Qwen3Config
    predictor: Qwen3Config
    speaker_encoder: SpeakerEncoderConfig | None
    text_vocab_size: int
    text_hidden_size: int
    num_codebooks: int
    ids: SpecialIds
    languages: dict[str, int]
    speakers: dict[str, int]
    dialects: dict[str, str]

    def get_language_id(self, name: str | None, speaker: str | None = None) -> int | None:
        """Return the id of a language, ``None`` where the model shall find out itself.

        Args:
            name: In any case; ``auto`` and ``None`` ask for none.
            speaker: A built-in voice, which may speak a dialect.

        Raises:
            ValueError: The model does not know it.
        """
        language = (name or "auto").lower()
        dialect = self.dialects.get((speaker or "").lower())
        if dialect is not None and language in ("auto", "chinese"):
            return self.languages[dialect]
        if language == "auto":
            return None
        if language not in self.languages:
            raise ValueError(f"language: got {name!r}: expected auto or one of {', '.join(sorted(self.languages))}")
        return self.languages[language]

    @property
    def codebook_size(self) -> int:
        """Codes of speech are below it."""
        return min(int(self.predictor.vocab_size), self.ids.pad)

    @property
    def frames_per_s(self) -> float:
        """Of the codec."""
        return FRAMES_PER_S

    @property
    def voice_size(self) -> int:
        """Numbers in the embedding of a speaker."""
        return int(self.talker.hidden_size)

    @property
    def designs_voices(self) -> bool:
        """Whether the voice is made of an instruction."""
        return bool(self.raw.get("tts_model_type") == "voice_design")

    @property
    def suppressed_ids(self) -> list[int]:
        """What generation must not write into codebook 0: all that the codec has no sound for, but the end.

        Of published models these are the last 1024 ids, which the official code names by their number.
        """
        return [i for i in range(self.codebook_size, self.talker.vocab_size) if i != self.ids.eos]


def read_config(folder: Path) -> SpeechConfig:
    """Return the configuration in a folder.

    Raises:
        ValueError: There is none, or it is of another model.
    """
    return parse_config(read_raw_config(folder), where=str(folder / CONFIG))


def read_raw_config(folder: Path) -> dict[str, Any]:
    """Return the contents of ``config.json`` in a folder, of whatever model.

    Raises:
        ValueError: There is none, or it holds something else.
    """
    path = folder / CONFIG
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot read it: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: got {type(raw).__name__}: expected a JSON object")  # noqa: TRY004
    return raw


def parse_config(raw: Mapping[str, Any], *, where: str = "config") -> SpeechConfig:
    """Return what a dictionary with the contents of ``config.json`` says.

    Args:
        raw: Left as it is.
        where: Names it in errors.

    Raises:
        ValueError: A setting is missing, or the model is another one.
    """
    if raw.get("model_type") != MODEL_TYPE:
        raise ValueError(f"{where}: model_type: got {raw.get('model_type')!r}: expected {MODEL_TYPE!r}")
    if (kind := raw.get("tokenizer_type", _TOKENIZER)) != _TOKENIZER:
        raise ValueError(f"{where}: tokenizer_type: got {kind!r}: expected {_TOKENIZER!r}")
    try:
        return _parse(dict(raw))
    except KeyError as error:
        raise ValueError(f"{where}: {error.args[0]}: missing") from error


def _parse(raw: dict[str, Any]) -> SpeechConfig:
    talker = raw["talker_config"]
    predictor = talker["code_predictor_config"]
    ids = {name: raw[f"{name}_token_id"] for name in _TEXT_IDS}
    # The end is the only one whose name has "token" in it.
    ids |= {name: talker[f"codec_{name}_token_id" if name == "eos" else f"codec_{name}_id"] for name in _CODEC_IDS}
    dialects = {name.lower(): d for name, d in (talker.get("spk_is_dialect") or {}).items() if d}
    is_base = raw.get("tts_model_type", "base") == "base"
    return SpeechConfig(
        raw=raw,
        talker=_build_transformer(talker),
        predictor=_build_transformer(predictor),
        speaker_encoder=_parse_speaker_encoder(raw.get("speaker_encoder_config") or {}) if is_base else None,
        text_vocab_size=talker["text_vocab_size"],
        text_hidden_size=talker["text_hidden_size"],
        num_codebooks=talker["num_code_groups"],
        ids=SpecialIds(**ids),
        languages={name.lower(): i for name, i in (talker.get("codec_language_id") or {}).items()},
        speakers={name.lower(): i for name, i in (talker.get("spk_id") or {}).items()},
        dialects=dialects,
    )


def _build_transformer(settings: Mapping[str, Any]) -> Qwen3Config:
    scaling = settings.get("rope_scaling") or {}
    if (kind := scaling.get("rope_type", scaling.get("type", "default"))) != "default":
        raise ValueError(f"config: rope_scaling: got {kind!r}: expected default, as all published models have it")
    # The three position grids of a talker are always equal, so its multimodal RoPE is the plain one.
    rope = {"rope_type": "default", "rope_theta": settings["rope_theta"]}
    return Qwen3Config(rope_parameters=rope, **{name: settings[name] for name in _TRANSFORMER if name in settings})


def _parse_speaker_encoder(settings: Mapping[str, Any]) -> SpeakerEncoderConfig:
    known = SpeakerEncoderConfig.__dataclass_fields__
    values: dict[str, Any] = {name: value for name, value in settings.items() if name in known}
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return SpeakerEncoderConfig(**values)
