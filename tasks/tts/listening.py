"""What generated speech sounds like: decoded, its voice compared with the one asked for, its words with the text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_fsdp.tasks.tts.formants import SPOKEN, build_small_codec
from lit_fsdp.tasks.tts.model import Qwen3TTS
from lit_fsdp.tasks.tts.pretrained import fetch_speech_model, find_speech_model
from lit_fsdp.tasks.tts.speaker_encoder import compute_mels
from lit_fsdp.tasks.tts.speaking import Spoken

if TYPE_CHECKING:  # it takes an eighth of a second, and most runs have no use for it
    from lit_fsdp.tasks.tts.codec import AnyCodec

_MIN_SAMPLES = 4800  # shorter audio has too few frames to tell a voice


@dataclass(frozen=True, kw_only=True)
class Listening:
    """How speech that is generated in validation is listened to.

    Args:
        codec: Model, by name or folder, whose codec decodes it; ``formants`` is that of the quickstart.
        transcriber: A Whisper model of Transformers that writes it down, for the word error rate; ``null`` has none.
    """

    codec: str
    transcriber: str | None = None


@dataclass(frozen=True, kw_only=True)
class Heard:
    """Audio [samples] of a text, and what an ASR understood of it."""

    audio: Tensor
    text: str | None


def fetch_listening(settings: Listening) -> None:
    """Download what is needed, on one process per node."""
    if settings.codec != SPOKEN:
        fetch_speech_model(settings.codec)


def open_codec(name: str) -> AnyCodec:
    """Return a codec by the name or folder of its model."""
    from lit_fsdp.tasks.tts.codec import load_codec

    return build_small_codec() if name == SPOKEN else load_codec(find_speech_model(name))


def listen(rows: Sequence[Spoken], codec: AnyCodec, transcribe: Callable[..., list[str]] | None = None) -> list[Heard]:
    """Return the audio of generated speech, with what was understood of it."""
    heard = []
    for row in rows:
        (audio,) = codec.decode([row.speech.codes])
        text = None
        if transcribe is not None:
            text = transcribe([audio.numpy()], codec.sample_rate, ["auto"])[0] if len(audio) else ""
        heard.append(Heard(audio=audio, text=text))
    return heard


def compute_word_errors(rows: Sequence[Spoken], heard: Sequence[Heard]) -> dict[str, float]:
    """Return word and character error rates over all rows, or nothing where no ASR has listened."""
    pairs = [(_simplify(h.text), _simplify(row.text)) for row, h in zip(rows, heard, strict=True) if h.text is not None]
    if not pairs:
        return {}
    from torchmetrics.functional.text import char_error_rate, word_error_rate

    own, wanted = [list(part) for part in zip(*pairs, strict=True)]
    rates = {"wer_pct": word_error_rate(own, wanted), "cer_pct": char_error_rate(own, wanted)}
    return {name: 100 * float(rate) for name, rate in rates.items()}


@torch.no_grad()
def compute_similarity(
    model: Qwen3TTS, heard: Sequence[Heard], voices: Iterable[Tensor | None], device: torch.device
) -> dict[str, float]:
    """Return the mean cosine between the voice of each clip and the one it was asked for.

    Under a sharding strategy all ranks must call it, inside a method that gathers, with the same clips.

    Args:
        model: With its speaker encoder.
        heard: Clips.
        voices: The embeddings that they were generated with.
        device: Where the model is.
    """
    config = model.config.speaker_encoder
    if model.speaker_encoder is None or config is None:
        return {}
    found = []
    for clip, voice in zip(heard, voices, strict=True):
        if voice is None or len(clip.audio) < _MIN_SAMPLES:
            continue
        mels = compute_mels(clip.audio[None].to(device), config)
        own = model.speaker_encoder(mels.to(next(model.speaker_encoder.parameters()).dtype))[0].float().cpu()
        found.append(float(F.cosine_similarity(own, voice.float(), dim=0)))
    return {"speaker_similarity": sum(found) / len(found)} if found else {}


def write_audio(
    heard: Sequence[Heard], rows: Sequence[Spoken], sample_rate: int, loggers: Iterable[Any], step: int
) -> None:
    """Give clips to those loggers that take audio, and write them into the folders of the others."""
    for logger in loggers:
        add = getattr(getattr(logger, "experiment", None), "add_audio", None)
        folder = getattr(logger, "log_dir", None)
        for i, clip in enumerate(heard):
            if not len(clip.audio):
                continue
            name = f"spoken/{i:02}_{rows[i].speaker}"
            if add is not None:
                add(name, clip.audio[None], step, sample_rate=sample_rate)
            elif folder is not None:
                _write_file(Path(folder) / f"{name}_step{step}.wav", clip.audio, sample_rate)


def _write_file(path: Path, audio: Tensor, sample_rate: int) -> None:
    import wave

    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes((audio.clamp(-1, 1) * 32767).to(torch.int16).numpy().tobytes())


def _simplify(text: str | None) -> str:
    """Drop case and punctuation, which no voice has."""
    kept = (letter if letter.isalnum() or letter in " '" else " " for letter in (text or "").lower())
    return " ".join("".join(kept).split())
