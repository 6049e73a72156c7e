"""A few sentences of two synthetic voices, made of formulas: data for tests and for a first run without a download.

Letters become resonances of a pulse train (vowels and voiced consonants) or of noise (the others); a speaker is a
pitch and the length of a throat. It sounds like speech through a wall, and is the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lit_fsdp.tasks.tts.codec.codec_12hz import Codec
from lit_fsdp.tasks.tts.config import SpeakerEncoderConfig
from lit_fsdp.tasks.tts.families.family import FamilyConfig
from lit_fsdp.tasks.tts.families.speaker_encoder import compute_mels
from lit_fsdp.tasks.tts.preparation.prepared import PreparedRow

SPOKEN = "formants"
SAMPLE_RATE = 24000
SENTENCES = ("open the door", "a red boat", "seven stones", "rain at noon")
_LETTER_S, _PAUSE_S = 0.085, 0.06
_BANDS = (90.0, 110.0, 170.0)  # widths of the resonances in Hz
_VOWELS = {
    "a": (730, 1090, 2440), "e": (530, 1840, 2480), "i": (270, 2290, 3010), "o": (570, 840, 2410), "u": (300, 870, 2240)
}  # fmt: skip
_VOICELESS = frozenset("cfhkpqstx")


@dataclass(frozen=True, kw_only=True)
class Voice:
    """Who speaks.

    Args:
        pitch_hz: Of the pulse train.
        throat: Resonances are divided by it: above 1 for a longer throat.
    """

    pitch_hz: float
    throat: float


VOICES = {"ada": Voice(pitch_hz=208.0, throat=0.88), "bruno": Voice(pitch_hz=112.0, throat=1.08)}


def synthesize(text: str, voice: Voice) -> NDArray[np.float32]:
    """Return a text as audio at 24 kHz, between -1 and 1."""
    parts = [_make_sound(letter, voice, place) for place, letter in enumerate(text.lower())]
    audio = np.concatenate(parts) if parts else np.zeros(0)
    peak = np.abs(audio).max(initial=1e-9)
    return np.asarray(0.7 * audio / peak, dtype=np.float32)


def _make_sound(letter: str, voice: Voice, place: int) -> NDArray[np.float64]:
    if not letter.isalpha():
        return np.zeros(round(_PAUSE_S * SAMPLE_RATE))
    num_samples = round(_LETTER_S * SAMPLE_RATE)
    times = np.arange(num_samples) / SAMPLE_RATE
    code = ord(letter) - ord("a")
    given = _VOWELS.get(letter, (260 + 17 * (code % 26), 1000 + 53 * (code % 26), 2300 + 29 * (code % 26)))
    formants = np.array(given) / voice.throat
    if letter in _VOICELESS:
        frequencies = 1500.0 + 97.0 * np.arange(48)
        phases = 2.399963 * np.arange(48) ** 2 + place  # spread like noise, without a random number
        formants = formants + 2200
    else:
        pitch = voice.pitch_hz * (1 + 0.04 * np.sin(0.9 * place))
        frequencies = pitch * np.arange(1, int(4500 / pitch))
        phases = np.zeros(len(frequencies))
    gains = np.sum([1 / (1 + ((frequencies - f) / b) ** 2) for f, b in zip(formants, _BANDS, strict=True)], axis=0)
    sound = (gains[:, None] * np.sin(2 * np.pi * frequencies[:, None] * times + phases[:, None])).sum(0)
    edge = np.minimum(1.0, np.minimum(times, times[::-1]) / 0.012)
    level = 0.25 if letter in _VOICELESS else 1.0 if letter in _VOWELS else 0.6
    return np.asarray(level * edge * sound / gains.sum())


@lru_cache(maxsize=1)
def _encode_corpus() -> list[tuple[str, str, NDArray[np.int64], NDArray[np.float32]]]:
    """Return name, text, codes and audio of each clip; a few seconds of work."""
    clips = [(name, text, synthesize(text, voice)) for name, voice in VOICES.items() for text in SENTENCES]
    codes = build_small_codec().encode([torch.from_numpy(audio) for _, _, audio in clips])
    return [(name, text, c.numpy(), audio) for (name, text, audio), c in zip(clips, codes, strict=True)]


def make_corpus(config: FamilyConfig) -> list[PreparedRow]:
    """Return the sentences by each voice, with codes of the small codec, as if they had been prepared.

    Args:
        config: Of the model that they are for, which says how wide embeddings of speakers are.

    Raises:
        ValueError: The model's codebooks are smaller than the codec's.
    """
    codec = build_codec_config()
    size, num_codebooks = codec["decoder_config"]["codebook_size"], codec["encoder_valid_num_quantizers"]
    if config.codebook_size < size or config.num_codebooks > num_codebooks:
        raise ValueError(
            f"train: got {SPOKEN!r}: its codes go up to {size - 1}, in {num_codebooks} codebooks: expected a model of "
            f"up to {num_codebooks} codebooks of {size} codes or more, not {config.num_codebooks} of "
            f"{config.codebook_size}"
        )
    rows = []
    for name, text, codes, audio in _encode_corpus():
        embedding = describe_voice(audio, config.voice_size or 0)
        rows.append(
            PreparedRow(
                audio=f"{SPOKEN}/{name}/{text}",
                text=text,
                codes=codes[:, : config.num_codebooks],
                seconds=len(audio) / SAMPLE_RATE,
                speaker=name,
                speaker_embedding=embedding,
            )
        )
    return rows


def describe_voice(audio: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """Return what tells these voices apart, without a trained encoder: the mean spectrum, spread over ``size``."""
    mels = compute_mels(torch.from_numpy(audio)[None], SpeakerEncoderConfig())[0].mean(0).double().numpy()
    mels = (mels - mels.mean()) / mels.std()
    mix = np.cos(np.outer(np.arange(1, size + 1) * 0.37, np.arange(1, len(mels) + 1)))
    return np.asarray(mix @ mels / len(mels) ** 0.5, dtype=np.float32)


def build_codec_config() -> dict[str, Any]:
    """Return the contents of ``config.json`` of the small codec."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64}
    shared = {**sizes, "hidden_size": 32, "num_hidden_layers": 1, "codebook_size": 64, "num_quantizers": 16}
    encoder = {"num_filters": 4, "codebook_dim": 16, "vector_quantization_hidden_dimension": 16}
    decoder = {"codebook_dim": 32, "latent_dim": 32, "max_position_embeddings": 8000, "rope_theta": 10000.0}
    decoder |= {"sliding_window": 72, "rms_norm_eps": 1e-5, "decoder_dim": 32, "layer_scale_initial_scale": 0.01}
    upsampling = {"upsample_rates": [8, 5, 4, 3], "upsampling_ratios": [2, 2], "hidden_act": "silu"}
    return {
        "model_type": "qwen3_tts_tokenizer_12hz",
        "encoder_valid_num_quantizers": 16,
        "input_sample_rate": SAMPLE_RATE,
        "output_sample_rate": SAMPLE_RATE,
        "encode_downsample_rate": 1920,
        "decode_upsample_rate": 1920,
        "encoder_config": {**shared, **encoder, "upsample_groups": 32, "sliding_window": 250},
        "decoder_config": {**shared, **decoder, **upsampling},
    }


@lru_cache(maxsize=1)
def build_small_codec() -> Codec:
    """Return a codec of the real architecture with random weights: its codes tell sounds apart, its audio is noise."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        codec = Codec(build_codec_config())
        for name, tensor in codec.state_dict().items():
            if name.endswith(("embed_sum", "embedding_sum")):
                tensor.copy_(torch.randn(tensor.shape) * 0.5)
            elif tensor.dim() == 3:
                tensor.mul_(1.6)  # torch's initialization lets sound fade from layer to layer
    return codec.eval()
